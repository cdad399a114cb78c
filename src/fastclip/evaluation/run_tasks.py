"""Score tasks in turn: features are cached, results come as they finish, a failure affects one task only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fastclip.data.manifest import digest
from fastclip.errors import CommandError
from fastclip.evaluation.feature_cache import cached_features
from fastclip.evaluation.features import Encoder, Progress
from fastclip.evaluation.suites import measure_of
from fastclip.evaluation.task_layout import Task, open_pairs_task, open_task
from fastclip.evaluation.zero_shot import score
from fastclip.files import cache_path
from fastclip.run.results import Result

log = logging.getLogger(__name__)
VERSION = "1"  # of how features become scores; change it to score everything again


def evaluate(
    folders: dict[str, Path | str],
    encoder: Encoder,
    model_key: str,
    *,
    done: dict[str, Result] | None = None,
    progress: Callable[[str], Progress] | None = None,
) -> Iterator[Result]:
    """Score each task in turn; a task that fails gives a result with its error, and the rest continue.

    Args:
        folders: task folders by name; a string is a source of pairs.
        model_key: changes when the model does; see `feature_cache.model_key`.
        done: earlier results by key; they are not computed again.
        progress: returns, for a task's name, a callback that takes (done, total) images.
    """
    for name, folder in folders.items():
        try:
            task = _open_together(name, folder, encoder)
            key = digest([VERSION, model_key, task.fingerprint, *encoder.formats])
            known = (done or {}).get(key)
            if encoder.all_agree(known is not None) and known is not None:
                yield replace(known, model=model_key)
            else:
                yield _score(task, encoder, model_key, key, progress(name) if progress else None)
        except (OSError, ValueError, RuntimeError) as error:
            yield Result(name, error=str(error))


def _open_together(name: str, folder: Path | str, encoder: Encoder) -> Task:
    """Raise on all ranks if one cannot open the task; otherwise they would wait for its features."""
    try:
        task = open_pairs_task(folder) if isinstance(folder, str) else open_task(name, folder)
        task.name = name
    except (OSError, ValueError, RuntimeError) as error:
        if not encoder.world.is_main:
            log.error("%s: %s", name, error)
        encoder.all_agree(False)
        raise
    if not encoder.all_agree(True):
        raise CommandError("another rank failed to open the task; see its log.")
    return task


def _score(task: Task, encoder: Encoder, model_key: str, key: str, progress: Progress | None) -> Result:
    features_key = digest([model_key, task.images_fingerprint])
    file = cache_path("features") / f"{features_key}.safetensors"
    images = cached_features(task, encoder, file, features_key, progress)
    measure, scores = measure_of(task.name, task.kind), score(task, encoder, images)
    result = Result(task.name, key, task.kind, measure, scores, len(task), len(images.bad), model=model_key)
    if result.value is None:  # it has the name of a DataComp task, but lacks data
        result.error = (
            f"{task.name} is scored by {measure}, but this {task.kind} task only has "
            f"{', '.join(result.scores)}. Its folder lacks groups (.npy) or cues with 10 or more candidates, "
            "or holds another task: download it again, or rename it."
        )
    return result
