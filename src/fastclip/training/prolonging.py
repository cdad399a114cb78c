"""A constant or wsd run that resumes with another length, or is decayed later, as if it had been so planned.

The learning rates of two lengths are the same up to the first step that either of them decays. So a run may
change its course at a checkpoint before both decays; once its decay has begun, it goes back to the last
checkpoint before, which is never deleted. Everything else that depends on the length (warm-up, γ, E, the end
of patch dropout) stays as it was first resolved: `config.resolved.as_continued`.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from fastclip.config.resolved import Resolved, as_continued, may_be_prolonged, resolve_again
from fastclip.errors import OptionError, PathError
from fastclip.rate_schedule import RateSchedule
from fastclip.run.checkpoint import Checkpoints, check
from fastclip.run.folder import read_metadata, total_steps
from fastclip.run.metrics_file import last_record
from fastclip.training.build import rate_schedule

log = logging.getLogger(__name__)


class Course(NamedTuple):
    """The length of a run, and what follows from it."""

    total: int
    """Steps."""
    decay_from: int | None
    """The step that a run which may be prolonged is saved at, before its learning rate falls."""
    changes: dict[str, Any]
    """For the metadata of the checkpoint that the run continues from; empty if its course is the same."""
    decayed_from: int = 0
    """With changes: where the learning rate of the course before began to fall."""

    @classmethod
    def of(cls, config: Resolved, num_samples: int, saved: dict | None) -> Course:
        """`saved`: the metadata of the checkpoint that the run continues from."""
        if not may_be_prolonged(config):
            same = saved is not None and saved["config"]["epochs"] == config.epochs  # --from may change them
            return cls(total_steps(saved) if same and saved else config.total_steps(num_samples), None, {})
        now = _schedule(config, num_samples)
        before = now if saved is None else _schedule(resolve_again(saved["config"]), num_samples)
        if before == now:
            return cls(now.total, now.decay_from, {})
        changes = {"total_steps": now.total, "config": config.written}
        return cls(now.total, now.decay_from, changes, before.decay_from)


def continued(config: Resolved, newest: Path) -> tuple[Resolved, Path]:
    """The config with the values of the run's first plan, and the checkpoint to continue from.

    `newest` is the newest one, which the config may resume. All ranks must call it.
    """
    metadata = read_metadata(newest)
    saved = resolve_again(metadata["config"])
    if not may_be_prolonged(saved, config):
        return config, newest
    config = as_continued(config, saved)
    done, num_samples = metadata["step"], metadata["num_samples"]
    before, now = _schedule(saved, num_samples), _schedule(config, num_samples)
    if before == now:
        return config, newest
    if now.decay_from < min(done, before.decay_from):
        raise _too_short(config, now, min(done, before.decay_from), num_samples)
    if done <= before.decay_from:
        return config, newest
    stable = Checkpoints(newest.parent).newest(before.decay_from)
    if stable is None:
        problem = (
            f"cannot be prolonged: its learning rate has been falling since step {before.decay_from}, and no "
            "checkpoint from before it is left. Copy one back from a backup, or choose another --out."
        )
        raise PathError(newest.parent.parent, problem)
    check(stable)
    log.info(
        "The learning rate began to fall at step %d, so the run is prolonged from %s. Later checkpoints are "
        "kept as step-….decayed, and the records in metrics-….jsonl.",
        before.decay_from,
        stable.name,
    )
    return config, stable


def keep_records(metrics: Path, step: int) -> None:
    """Copy a file of records beyond this step, which are about to be dropped, as `metrics-STEP.jsonl`."""
    last = last_record(metrics)
    if last is not None and last["step"] > step:
        shutil.copyfile(metrics, metrics.with_name(f"{metrics.stem}-{last['step']:08d}{metrics.suffix}"))


def _schedule(config: Resolved, num_samples: int) -> RateSchedule:
    return rate_schedule(config, num_samples, config.total_steps(num_samples), warn=False)


def _too_short(config: Resolved, schedule: RateSchedule, done: int, num_samples: int) -> OptionError:
    """The shortest run that is still at its full rate after the steps that are done, as an example."""
    share, batch = schedule.decay_share if schedule.kind == "wsd" else 0, config.batch.size
    total = max(done, int(done / (1 - share)) - 2)
    while replace(schedule, total=total).decay_from < done:
        total += 1
    epochs = ceil(1000 * total * batch / num_samples) / 1000
    ends = "ends" if schedule.kind == "constant" else "lowers the learning rate"
    rule = f"{ends} from step {schedule.decay_from}, but the run has made {done} steps at its full rate"
    return OptionError("epochs", config.epochs, rule, example=epochs)
