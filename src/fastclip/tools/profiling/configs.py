"""One config per algorithm from one command line, some of whose options may not apply to all."""

from __future__ import annotations

from dataclasses import replace

from fastclip.config.options import LossOptions, TrainConfig
from fastclip.config.resolved import Resolved, resolve
from fastclip.objective.algorithms import Algorithm, find_algorithm, inapplicable_options


def configs_for(algorithms: list[str], config: TrainConfig) -> tuple[list[Resolved], dict[str, list[str]]]:
    """Resolved configs that differ only in the algorithm and in the loss options that it ignores.

    The second result names the options dropped for each algorithm. An option that no algorithm takes is an
    error, as in `fastclip train`.
    """
    rows = [find_algorithm(name) for name in dict.fromkeys(algorithms)]
    given = [name for name, value in vars(config.loss).items() if value is not None]
    effective = {row.name: {name for name in given if _has_effect(name, config.loss, row)} for row in rows}
    effective_somewhere = set().union(*effective.values())
    dropped = {
        row.name: [name for name in given if name in effective_somewhere - effective[row.name]]
        for row in rows
    }
    resolved = []
    for row in rows:
        loss = replace(config.loss, **dict.fromkeys(dropped[row.name]))
        resolved.append(resolve(replace(config, algorithm=row.name, loss=loss)))
    return resolved, {
        name: [f"loss.{option}" for option in options] for name, options in dropped.items() if options
    }


def dropped_notes(dropped: dict[str, list[str]]) -> list[str]:
    """One line to print per algorithm."""
    return [
        f"{', '.join(options)}: no effect with {name}, ignored there." for name, options in dropped.items()
    ]


def _has_effect(option: str, loss: LossOptions, row: Algorithm) -> bool:
    return option not in inapplicable_options(row, loss.gamma_schedule or row.inner_schedule)
