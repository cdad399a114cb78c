"""Which rule for ρ needs no tuning: each has one constant, and is judged on settings it was not fitted to.

    python -m benchmarks.rho_rule     after fastclip compare --study studies/rho.yaml

A rule maps what is known before training (B, γ_min) to ρ. For each setting of the study (batch, epochs) the
recall between the trained values of ρ is interpolated. A rule's constant is the one with the best mean over
the other settings, and its score is what it reaches on the one left out, relative to the best ρ there.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.record import save
from fastclip.run.folder import read_run
from fastclip.tools.study.learning_curves import points
from fastclip.tools.study.study_state import read_study

STUDY, MEASURE = Path("studies/rho"), "mean_recall@1"


class Setting:
    """The runs of one batch size and length, by ρ."""

    def __init__(self, batch: int, epochs: int, gamma_min: float):
        self.batch, self.epochs, self.gamma_min = batch, epochs, gamma_min
        self.runs: list[tuple[float, float, float]] = []  # ρ, recall, τ at the end

    def at(self, rho: float) -> float:
        """Recall at this ρ relative to the best; beyond the trained values, that of the nearest."""
        rhos, recalls, _ = zip(*sorted(self.runs), strict=True)
        return float(np.interp(rho, rhos, recalls)) / max(recalls)

    def rho_of(self, tau: float) -> float:
        """The ρ that makes τ end here."""
        taus, rhos = zip(*sorted((tau, rho) for rho, _, tau in self.runs), strict=True)
        return float(np.interp(tau, taus, rhos))


Rule = Callable[[Setting, float], float]
# Each with the constants to try. An average with rate γ is over (2−γ)/γ batches.
RULES: dict[str, tuple[Rule, np.ndarray]] = {
    "c·log(B−1)": (lambda s, c: c * log(s.batch - 1), np.arange(0.4, 1.41, 0.05)),
    "c·log((B−1)·(2−γ_min)/γ_min), the negatives that u remembers": (
        lambda s, c: c * log((s.batch - 1) * (2 - s.gamma_min) / s.gamma_min),
        np.arange(0.4, 1.41, 0.05),
    ),
    "log((B−1)/c), c negatives that count": (lambda s, c: log((s.batch - 1) / c), np.arange(1, 16.1, 0.5)),
    "c": (lambda s, c: c, np.arange(1, 7.1, 0.1)),
    "the ρ at which τ ends at c": (lambda s, c: s.rho_of(c), np.arange(0.02, 0.2, 0.005)),
}


def settings_of(study: Path) -> list[Setting]:
    """The finished runs of the study by setting."""
    found: dict[tuple[int, int], Setting] = {}
    for planned in read_study(study).runs:
        if planned.state != "done":
            raise SystemExit(f"{planned.name} is not done.")
        run = read_run(planned.folder)
        assert run.config is not None
        loss, batch, epochs = run.config.loss, run.config.batch.size, int(run.config.epochs)
        setting = found.setdefault((batch, epochs), Setting(batch, epochs, loss.gamma))
        setting.runs.append((loss.rho_for(batch), points(run, MEASURE)[-1].score, run.records[-1]["tau"]))
    return list(found.values())


def best_constant(rule: Rule, constants: np.ndarray, settings: list[Setting]) -> float:
    """The constant with the best mean over these settings."""
    return float(max(constants, key=lambda c: fmean(s.at(rule(s, c)) for s in settings)))


def judge(rule: Rule, constants: np.ndarray, settings: list[Setting]) -> dict:
    """The rule's constant, and how near it comes to the best ρ of each setting, left out in turn."""
    reached = []
    for left_out in settings:
        others = [s for s in settings if s is not left_out]
        reached.append(left_out.at(rule(left_out, best_constant(rule, constants, others))))
    return {
        "constant": round(best_constant(rule, constants, settings), 3),
        "mean": round(fmean(reached), 4),
        "worst": round(min(reached), 4),
    }


def main() -> None:
    settings = settings_of(STUDY)
    rules = {name: judge(rule, constants, settings) for name, (rule, constants) in RULES.items()}
    for name, figure in rules.items():
        print(f"{name:64s}", figure)
    runs = {
        f"batch {s.batch}, {s.epochs} epochs": [
            {"rho": round(rho, 3), "share": round(rho / log(s.batch - 1), 2)}
            | {"recall": round(recall, 4), "tau": round(tau, 4)}
            for rho, recall, tau in sorted(s.runs)
        ]
        for s in settings
    }
    command = "fastclip compare --study studies/rho.yaml; python -m benchmarks.rho_rule"
    save("rho_rule", read_study(STUDY).study.seeds, {"rules": rules, "runs": runs}, command)


if __name__ == "__main__":
    main()
