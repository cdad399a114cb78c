"""A training step without padding in the text tower, compared with the padded one: both towers, loss, update.

Captions have random words, and lengths like CC3M's (15 tokens on average, at most 26) or CC12M's (28, at most
77).
Times are medians of interleaved rounds, each of one step of every case; a step has its own lengths.

    python -m benchmarks.unpadded_text --chunk_cost     what one more chunk costs, in tokens
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.record import save
from fastclip.config.options import BatchConfig, ModelConfig, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.data.tokenize import TextEnds
from fastclip.distributed.world import World
from fastclip.training.build import build_step, build_towers
from fastclip.training.step import TrainStep
from fastclip.unpadded_text import Chunk

SEED, SAMPLES = 0, 4096
CASES = (("ViT-B-32", 64, "CC3M"), ("ViT-B-32", 64, "CC12M"), ("RN50", 32, "CC3M"))


def lengths_like(name: str, count: int, generator: torch.Generator) -> list[int]:
    """Tokens of captions, with the first and the last."""
    normal = torch.randn(count, generator=generator)
    drawn = 15 + 4 * normal if name == "CC3M" else (3.15 + 0.6 * normal).exp() + 1.5
    return drawn.round().clamp(4, 26 if name == "CC3M" else 77).int().tolist()


def captions(lengths: list[int]) -> Tensor:
    """Tokens of random words, padded to 77."""
    tokens = torch.randint(1, 49_000, (len(lengths), 77))
    for row, length in enumerate(lengths):
        tokens[row, 0], tokens[row, length - 1], tokens[row, length:] = 49_406, 49_407, 0
    return tokens


def make_step(model: str, batch: int, padding: str) -> TrainStep:
    config = resolve(
        TrainConfig(model=ModelConfig(model, text_padding=padding), batch=BatchConfig(batch), seed=SEED)
    )
    return build_step(config, build_towers(config, World.alone()), SAMPLES, World.alone())


def compare(model: str, batch: int, like: str, rounds: int) -> dict:
    """Seconds of a step with and without padding, and the share of the tokens that are computed."""
    steps = {padding: make_step(model, batch, padding) for padding in ("keep", "auto")}
    unpadded = steps["auto"].towers.unpadded
    assert unpadded is not None
    generator, seconds = torch.Generator().manual_seed(SEED), {padding: [] for padding in steps}
    image, kept = torch.randn(batch, 3, steps["keep"].towers.image_size, steps["keep"].towers.image_size), []
    for number in range(rounds + 1):
        lengths = lengths_like(like, batch, generator)
        tokens, index = captions(lengths), torch.randperm(SAMPLES, generator=generator)[:batch]
        kept.append(sum(lengths) / tokens.numel())
        inputs = {"keep": (tokens, None), "auto": (unpadded.ends.cut(tokens, lengths), lengths)}
        for padding, step in steps.items():
            start = perf_counter()
            step.update(number, image, inputs[padding][0], index, lengths=inputs[padding][1])
            if number:  # the first step is slower
                seconds[padding].append(perf_counter() - start)
    padded, ours = (median(seconds[padding]) for padding in ("keep", "auto"))
    return {
        "padded_seconds": round(padded, 3),
        "unpadded_seconds": round(ours, 3),
        "time_ratio": round(median(a / b for a, b in zip(seconds["auto"], seconds["keep"], strict=True)), 3),
        "mean_tokens": round(77 * sum(kept) / len(kept), 1),
    }


def chunk_cost(rounds: int) -> dict:
    """The cost of one more chunk of ViT-B-32's text tower in tokens: 1 and 8 chunks of equal captions."""
    towers = make_step("ViT-B-32", 64, "auto").towers
    assert towers.unpadded is not None
    tower, ends = towers.unpadded.tower, TextEnds("highest", 49_407, 77)
    tokens, last = captions([16] * 64)[:, :16], torch.full((64,), 15)
    assert ends.lengths(tokens) == [16] * 64
    seconds: dict[int, list[float]] = {1: [], 8: []}
    for number in range(rounds + 1):
        for chunks, times in seconds.items():
            size = 64 // chunks
            plan = [Chunk(start, start + size, 16) for start in range(0, 64, size)]
            start = perf_counter()
            tower.encode(tokens, plan, last).sum().backward()
            if number:
                times.append(perf_counter() - start)
    one, eight = (median(times) for times in seconds.values())
    return {"one_chunk_ms": round(1e3 * one, 1), "eight_chunks_ms": round(1e3 * eight, 1),
            "cost_in_tokens": round((eight - one) / 7 / (one / (64 * 16)), 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunk_cost", action="store_true", help="measure only the cost of a chunk")
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    figures: dict = {"chunk": chunk_cost(options.rounds)}
    print(figures["chunk"], flush=True)
    if options.chunk_cost:
        return
    for model, batch, like in CASES:
        figures[f"{model}, b={batch}, {like}-like"] = figure = compare(model, batch, like, options.rounds)
        print(f"{model} {like}", figure, flush=True)
    save("unpadded_text", SEED, figures)


if __name__ == "__main__":
    main()
