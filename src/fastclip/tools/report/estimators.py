"""How old the estimators log u are, in words: a sample's is renewed only when the sample comes again."""

from __future__ import annotations

from math import log

from fastclip.config.resolved import loss_settings
from fastclip.run.folder import Run, number


def about_estimators(run: Run) -> list[str]:
    """Sentences on staleness, γ and what was never visited; none for algorithms without estimators."""
    if run.config is None or run.num_samples is None or not loss_settings(run.config).algorithm.fcco:
        return []
    steps = run.num_samples / run.config.batch.size
    told = [
        f"A pair is seen once an epoch: its estimator waits {_steps(steps)} for the next visit on average."
    ]
    if run.config.data.shuffle == "full":
        told.append(f"At most it waits {_steps(2 * steps)}: first in one epoch, last in the next.")
    gamma = _last(run, "gamma")
    if gamma is not None and gamma >= 1:
        told.append("At γ = 1 an estimator holds nothing but its last visit.")
    elif gamma is not None and gamma > 0:
        half = log(0.5) / log(1 - gamma)
        told.append(
            f"At γ = {gamma:.3g} each visit brings {100 * gamma:.3g} % of an estimator, and what it held "
            f"before halves in {half:.1f} visits, which are about {_steps(half * steps)}."
        )
    unvisited = _last(run, "unvisited")
    if unvisited is not None:
        told.append(
            "Every pair has been visited."
            if unvisited <= 0
            else f"{100 * unvisited:.3g} % of the pairs have not been visited yet, and have no estimator."
        )
    return told


def _last(run: Run, name: str) -> float | None:
    values = [value for record in run.records if (value := number(record.get(name))) is not None]
    return values[-1] if values else None


def _steps(count: float) -> str:
    return f"{round(count):,} step{'s' * (round(count) != 1)}"
