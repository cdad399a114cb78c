"""A config for each of several algorithms from one command line, whose options may say nothing to some."""

from __future__ import annotations

from dataclasses import replace

from fastclip.config.options import LossOptions, TrainConfig
from fastclip.config.resolved import Resolved, resolve
from fastclip.objective.algorithms import Algorithm, find_algorithm, inapplicable_options


def configs_for(algorithms: list[str], config: TrainConfig) -> tuple[list[Resolved], list[str]]:
    """All alike, but for the algorithm and the options of the loss that have no effect with it.

    The sentences say what was left out. An option that has no effect with any of them is refused, as
    `fastclip train` does.
    """
    rows = [find_algorithm(name) for name in dict.fromkeys(algorithms)]
    given = [name for name, value in vars(config.loss).items() if value is not None]
    effective = {row.name: {name for name in given if _has_effect(name, config.loss, row)} for row in rows}
    somewhere = set().union(*effective.values())
    useless = {row.name: [name for name in given if name in somewhere - effective[row.name]] for row in rows}
    resolved = []
    for row in rows:
        loss = replace(config.loss, **dict.fromkeys(useless[row.name]))
        resolved.append(resolve(replace(config, algorithm=row.name, loss=loss)))
    left_out = [
        f"{', '.join(f'loss.{option}' for option in options)}: no effect with {name}, left out there."
        for name, options in useless.items()
        if options
    ]
    return resolved, left_out


def _has_effect(option: str, loss: LossOptions, row: Algorithm) -> bool:
    return option not in inapplicable_options(row, loss.gamma_schedule or row.inner_schedule)
