"""Memory and time of retrieval with 200,000 images, as many texts and 64 features."""

from __future__ import annotations

import argparse
import resource
from time import perf_counter

import torch
from torch.nn.functional import normalize

from benchmarks.record import save
from fastclip.evaluation.retrieval import recalls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    rows = parser.parse_args().rows
    generator = torch.Generator().manual_seed(0)
    image = normalize(torch.randn(rows, 64, generator=generator), dim=-1)
    text = normalize(image + 0.3 * torch.randn(rows, 64, generator=generator), dim=-1)
    before = _peak()
    start = perf_counter()
    scores = recalls(image, text, torch.arange(rows))
    figures = {
        "rows": rows,
        "seconds": round(perf_counter() - start, 1),
        "peak_memory_gb": round(_peak(), 2),
        "before_gb": round(before, 2),
        "mean_recall@1": round(scores["mean_recall@1"], 4),
    }
    print(figures)
    save("retrieval", 0, figures)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
