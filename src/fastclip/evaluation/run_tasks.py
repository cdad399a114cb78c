"""Many tasks one after another: features kept for the next time, results kept as they come, failures told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fastclip.data.manifest import digest
from fastclip.evaluation.feature_cache import cached_features
from fastclip.evaluation.features import Encoder, Progress
from fastclip.evaluation.suites import measure_of
from fastclip.evaluation.task_layout import Task, open_pairs_task, open_task
from fastclip.evaluation.zero_shot import score
from fastclip.files import cache_folder
from fastclip.run.results import Result

log = logging.getLogger(__name__)
VERSION = "1"  # of how scores come from features; another one scores all anew


def evaluate(
    folders: dict[str, Path | str],
    encoder: Encoder,
    model_key: str,
    *,
    done: dict[str, Result] | None = None,
    progress: Callable[[str], Progress] | None = None,
) -> Iterator[Result]:
    """Score each task in turn; one that cannot be scored gives its error, and the rest go on.

    Args:
        folders: task folders by name; a string is a source of pairs.
        model_key: changes when the model does; see `kept.model_key`.
        done: earlier results by key, which are not computed again.
        progress: gives, for a task's name, what is told (done, total) of its images.
    """
    for name, folder in folders.items():
        try:
            task = _open_together(name, folder, encoder)
            key = digest([VERSION, model_key, task.fingerprint])
            known = (done or {}).get(key)
            if encoder.all_agree(known is not None) and known is not None:
                yield replace(known, model=model_key)
            else:
                yield _score(task, encoder, model_key, key, progress(name) if progress else None)
        except (OSError, ValueError, RuntimeError) as error:
            yield Result(name, error=str(error))


def _open_together(name: str, folder: Path | str, encoder: Encoder) -> Task:
    """Raises on all workers if one cannot open it; or they would wait for its features."""
    try:
        task = open_pairs_task(folder) if isinstance(folder, str) else open_task(name, folder)
        task.name = name
    except (OSError, ValueError, RuntimeError) as error:
        if not encoder.world.is_main:
            log.error("%s: %s", name, error)
        encoder.all_agree(False)
        raise
    if not encoder.all_agree(True):
        raise RuntimeError("another worker could not open it, and says why.")
    return task


def _score(task: Task, encoder: Encoder, model_key: str, key: str, progress: Progress | None) -> Result:
    features_key = digest([model_key, task.images_fingerprint])
    file = cache_folder("features") / f"{features_key}.safetensors"
    images = cached_features(task, encoder, file, features_key, progress)
    measure, scores = measure_of(task.name, task.kind), score(task, encoder, images)
    result = Result(task.name, key, task.kind, measure, scores, len(task), len(images.bad), model=model_key)
    if result.value is None:  # a task of DataComp by its name, but without what it takes
        result.error = (
            f"{task.name} is judged by {measure}, and a {task.kind} task like this gives "
            f"{', '.join(result.scores)}. Its folder lacks groups (.npy) or cues of 10 and more candidates, "
            "or is another task: get it again, or rename it."
        )
    return result
