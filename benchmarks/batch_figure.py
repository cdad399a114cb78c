"""Draws the paper's batch figure from results/studies/batch-*: scores against the batch size.

python -m benchmarks.batch_figure     after make study NAME=batch-32, batch-128 and batch-512
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from benchmarks.record import RESULTS
from fastclip.tools.study.measures import interval_of, summarise

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "batch.png"
MEASURES = {
    "Retrieval": "recall@1, mean of 5 unseen sets, %",
    "Classification & Variants": "mean of 14 tasks, %",
}
LOSSES = {
    "fastclip-v3": ("FastCLIP-v3", "#c2410c"),
    "openclip": ("OpenCLIP", "#334155"),
    "siglip": ("SigLIP", "#64748b"),
}

SHIFT = {"fastclip-v3": 1.04, "openclip": 1 / 1.04, "siglip": 1.0}


def scores(measure: str) -> dict[str, dict[int, list[float]]]:
    """Scores in percent by loss and batch size, one per seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for path in RESULTS.glob("studies/batch-*/figures.json"):
        batch = int(re.sub(r"\D", "", path.parent.name))
        figures = json.loads(path.read_text())["figures"]
        algorithms = {arm["name"]: arm["values"]["algorithm"] for arm in figures["arms"]}
        (rows,) = (one["rows"] for one in figures["measures"] if one["name"] == measure)
        for row in rows:
            percent = [100 * value for value in row["values"].values()]
            found.setdefault(algorithms[row["arm"]], {})[batch] = percent
    return found


def draw(axes: plt.Axes, measure: str) -> None:
    """One panel: means with 95 % intervals over seeds, and each loss's name at its line."""
    for algorithm, by_batch in sorted(scores(measure).items()):
        label, color = LOSSES[algorithm]
        batches = sorted(by_batch)
        means = [summarise(by_batch[batch])["mean"] for batch in batches]
        ends = [interval_of(dict(enumerate(by_batch[batch]))) for batch in batches]
        errors = [[mean - low for mean, (low, _) in zip(means, ends, strict=True)],
                  [high - mean for mean, (_, high) in zip(means, ends, strict=True)]]  # fmt: skip
        beside = [batch * SHIFT[algorithm] for batch in batches]  # or intervals would cover each other
        axes.errorbar(beside, means, errors, color=color, marker="o", markersize=5, capsize=3, linewidth=2)
        axes.annotate(
            label, (batches[-1], means[-1]), (10, 0), textcoords="offset points", color=color, va="center",
            fontweight="bold",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    batches = sorted({batch for by_batch in scores(measure).values() for batch in by_batch})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlim(batches[0] / 1.4, batches[-1] * 2.6)
    axes.set_xlabel("batch size; the same samples at each, 95 % intervals over seeds")
    axes.set_title(measure, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(MEASURES[measure])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e8f0")


def main() -> None:
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axes, measure in zip(panels, MEASURES, strict=True):
        draw(axes, measure)
    figure.savefig(PICTURE, dpi=110)
    print(f"saved {PICTURE.name}")


if __name__ == "__main__":
    main()
