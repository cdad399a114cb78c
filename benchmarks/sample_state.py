"""Time and memory of fetching and writing back a batch's rows, at the size of the paper's largest dataset."""

from __future__ import annotations

import torch

from benchmarks.record import interleaved, save
from fastclip.objective.exchange import Exchange
from fastclip.objective.sample_state import SampleState


def main() -> None:
    rows, seed = 5120, 0  # the global batch of the paper's xLarge setting
    torch.set_num_threads(2)
    torch.manual_seed(seed)
    cases, sizes = {}, {}
    for n in (100_000, 315_000_000):
        state = SampleState(n, Exchange(), None, torch.device("cpu"), torch.float32)
        sizes[n] = sum(column.numel() * column.element_size() for column in state.columns.values()) / n
        log_u, finite = torch.randn(rows, 2), torch.tensor(True)

        def step(n=n, state=state, log_u=log_u, finite=finite):
            for _ in range(64):
                fetch = state.fetch(torch.randint(0, n, (rows,)))  # new rows each time, as in training
                fetch.wait()
                state.write(fetch, lambda old: {"log_u": log_u}, finite)

        cases[n] = step
    seconds = interleaved(cases, rounds=9)
    figures = {
        f"n={n}": {"milliseconds": round(1e3 * seconds[n] / 64, 3), "bytes_per_sample": round(sizes[n], 4)}
        for n in cases
    }
    for name, figure in figures.items():
        print(
            f"{name:14s} fetch + write-back of {rows} rows {figure['milliseconds']} ms, "
            f"{figure['bytes_per_sample']} bytes per sample"
        )
    save("sample_state", seed, figures)


if __name__ == "__main__":
    main()
