"""Training without padding in the text tower is training with it: the same weights and estimators."""

import json
from functools import partial
from random import Random

import pytest
import torch

from fastclip import unpadded_text
from fastclip.config.options import BatchConfig, ModelConfig, OptimOptions, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.data.tokenize import TextEnds
from fastclip.distributed.world import World
from fastclip.training.build import build_step, build_towers
from fastclip.training.compiling import compile_towers
from tests.ranks import run_ranks
from tests.text_models import captions, write_config
from tests.training.runs import MODEL, Lab, assert_same_run, collection

N, B, STEPS = 40, 12, 20
ENDS = {"bert": TextEnds("padding", 0, 21)}
CAUSAL_ENDS = TextEnds("highest", 199, 21)
CASES = [(name, micro) for name in ("clip", "custom", "bert") for micro in (None, 4)]


def build(path, padding, micro, world, precision="float64", optimizer="adamw"):
    config = resolve(
        TrainConfig(
            optimizer=optimizer,
            precision=precision,
            model=ModelConfig(path, text_padding=padding),
            batch=BatchConfig(B, micro),
            optim=OptimOptions(lr=1e-3 if optimizer == "adamw" else 0.02),
        )
    )
    return build_step(config, build_towers(config, world), N, world)


def trained(path, ends, padding, micro, world, **options):
    """All tensors after 20 steps of captions with many lengths."""
    train_step = build(path, padding, micro, world, **options)
    assert (train_step.towers.unpadded is None) == (padding == "keep")
    rows = slice(world.rank * B // world.size, (world.rank + 1) * B // world.size)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        images, index = torch.randn(B, 3, 16, 16, generator=draw), torch.randperm(N, generator=draw)[:B]
        tokens = captions(ends, torch.randint(2, 22, (B,), generator=draw).tolist(), seed=step)[rows]
        lengths = ends.lengths(tokens)
        inputs = (tokens, None) if padding == "keep" else (ends.cut(tokens, lengths), lengths)
        train_step.update(step, images[rows], inputs[0], index[rows], lengths=inputs[1])
    own = train_step.tensors()
    return {name: getattr(tensor, "to_local", lambda t=tensor: t)().clone() for name, tensor in own.items()}


def trained_on_ranks(rank, world_size, path, ends, padding, micro):
    unpadded_text.CHUNK_COST["cpu"] = 1  # several chunks
    return trained(path, ends, padding, micro, World(rank, world_size, rank, torch.device("cpu"), None))


def assert_close(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        finite = theirs[name].isfinite()
        assert torch.equal(finite, tensor.isfinite()), name  # log u is −inf before a sample's first visit
        assert ((tensor - theirs[name])[finite].abs() < tolerance).all(), name


@pytest.mark.parametrize(("name", "micro"), CASES)
def test_twenty_steps_give_the_weights_of_the_padded_tower(name, micro, tmp_path, monkeypatch):
    monkeypatch.setitem(unpadded_text.CHUNK_COST, "cpu", 1)
    ends = ENDS.get(name, CAUSAL_ENDS)
    run = partial(trained, write_config(tmp_path, name), ends, micro=micro, world=World.alone())
    assert_close(run(padding="auto"), run(padding="keep"), 1e-10)


def test_twenty_steps_in_float32(tmp_path, monkeypatch):
    monkeypatch.setitem(unpadded_text.CHUNK_COST, "cpu", 1)
    path = write_config(tmp_path, "clip")
    options = {"micro": None, "world": World.alone(), "precision": "float32", "optimizer": "sgd"}
    run = partial(trained, path, CAUSAL_ENDS, **options)
    assert_close(run(padding="auto"), run(padding="keep"), 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("micro", [None, 4])
def test_two_ranks_give_the_weights_of_the_padded_tower(micro, tmp_path):
    path = write_config(tmp_path, "clip")
    ours, theirs = (
        run_ranks(trained_on_ranks, 2, path, CAUSAL_ENDS, padding, micro) for padding in ("auto", "keep")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, 1e-10)


@pytest.mark.slow
def test_a_killed_run_with_several_chunks_in_a_batch_resumes_to_the_same_bits(tmp_path):
    lab, random = Lab(tmp_path / "lab", epochs=3), Random(0)
    lab.model.write_text(json.dumps(MODEL | {"text_cfg": MODEL["text_cfg"] | {"context_length": 48}}))
    lab.train = collection(tmp_path / "captions", longer=30)  # half have about 10 tokens, half 40
    chunks = unpadded_text.plan_chunks([16] * 8 + [40] * 8, unpadded_text.CHUNK_COST["cpu"]).chunks
    assert [chunk.length for chunk in chunks] == [16, 40]
    for moment in ("step", "save"):
        lab.start(tmp_path / "run").kill_during(moment, random)
    lab.start(tmp_path / "run").finish()
    assert_same_run(tmp_path / "run", lab.reference(1))


@pytest.mark.parametrize(("name", "most"), [("clip", 4), ("custom", 4)])
def test_the_number_of_graphs_does_not_grow_with_the_lengths(name, most, tmp_path, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setitem(unpadded_text.CHUNK_COST, "cpu", 1)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    train_step = build(write_config(tmp_path, name), "auto", None, World.alone())
    compile_towers(train_step.towers)
    ends, counts = train_step.towers.unpadded.ends, []
    for step in range(24):
        draw = torch.Generator().manual_seed(step)
        lengths = torch.randint(2, 22, (B,), generator=draw).tolist()
        tokens = captions(ends, lengths, seed=step)
        images = torch.randn(B, 3, 16, 16, generator=draw)
        cut = ends.cut(tokens, lengths)
        train_step.update(step, images, cut, torch.randperm(N, generator=draw)[:B], lengths=lengths)
        counts.append(len(graphs))
    assert counts[-1] == counts[8] <= most  # one is the image tower's
