"""Evaluation during training: retrieval among held-out pairs, and a folder of tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastclip.config.options import split_formats
from fastclip.config.resolved import Resolved
from fastclip.data.batch_parts import Tokenizer
from fastclip.distributed.agreement import require_same
from fastclip.distributed.world import World
from fastclip.errors import OptionError
from fastclip.evaluation.features import Encoder
from fastclip.evaluation.retrieval import recalls
from fastclip.evaluation.suites import measure_of
from fastclip.evaluation.task_layout import Task, find_tasks, open_task
from fastclip.evaluation.zero_shot import score
from fastclip.model import TwoTowers
from fastclip.training.compiling import uncompiled
from fastclip.training.training_pairs import open_manifest_of, require_same_pairs


def open_evaluator(
    config: Resolved, towers: TwoTowers, tokenizer: Tokenizer, world: World, workers: int
) -> Evaluator | None:
    """None if there is nothing to evaluate. `workers`: loader workers."""
    if config.evaluate.pairs is None and config.evaluate.tasks is None:
        return None
    return Evaluator(config, towers, tokenizer, world, workers)


class EvaluationStopped(Exception):
    """All ranks were asked to stop between two tasks."""


class Evaluator:
    """Scores the towers in their current state; all ranks must take part, and get the same scores."""

    def __init__(self, config: Resolved, towers: TwoTowers, tokenizer: Tokenizer, world: World, workers: int):
        self.best = config.evaluate.best or ("mean_recall@1" if config.evaluate.pairs else "tasks_mean")
        self.encoder = Encoder(
            towers,
            world,
            tokenizer=tokenizer,
            workers=workers,
            precision=config.precision,
            formats=split_formats("data.formats", config.data.formats),
        )
        pairs = config.evaluate.pairs
        self.pairs = None if pairs is None else open_manifest_of(pairs, config.data, world)
        if self.pairs is not None:
            require_same_pairs("evaluate.pairs", self.pairs, world)
        self.tasks_path = config.evaluate.tasks
        self.tasks = [] if self.tasks_path is None else _open_tasks(self.tasks_path)
        require_same(world, {"evaluate.tasks (names)": [task.name for task in self.tasks]})

    def measure(self, stop_requested: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """The measure for `best` first; recalls of the pairs; TASK/measure of each task, and tasks_mean.

        Before each task, EvaluationStopped is raised if `stop_requested`, which must agree on all ranks.
        """
        with uncompiled(self.encoder.model):
            scores = self._measure(stop_requested)
        # Rank 0's, as last bits may differ between GPUs: a new best leads to a save, which all ranks join.
        scores = self.encoder.world.agree(scores)
        return {self.best: scores[self.best], **scores}  # first, for displays that show only some

    def _measure(self, stop_requested: Callable[[], bool]) -> dict[str, float]:
        scores: dict[str, float] = {}
        if self.pairs is not None:
            features = self.encoder.pairs(self.pairs)
            scores |= recalls(features.image_bd, features.text_md, features.image_of_text)
        main_scores = []
        for task in self.tasks:
            if stop_requested():
                raise EvaluationStopped
            of_task = score(task, self.encoder, self.encoder.images(task))
            scores |= {f"{task.name}/{name}": value for name, value in of_task.items()}
            measure = measure_of(task.name, task.kind)
            if measure not in of_task:
                rule = f"cannot be scored: {task.name} is measured by {measure}, which needs groups"
                raise OptionError("evaluate.tasks", self.tasks_path, rule)
            main_scores.append(of_task[measure])
        if main_scores:
            scores["tasks_mean"] = sum(main_scores) / len(main_scores)
        if self.best not in scores:
            raise OptionError.unknown("evaluate.best", self.best, scores)
        return scores


def _open_tasks(path: str) -> list[Task]:
    folders = find_tasks(Path(path)) if Path(path).is_dir() else {}
    if not folders:
        rule = "must be a folder with task folders in it"
        raise OptionError("evaluate.tasks", path, rule, advice="See docs/evaluation.md.")
    return [open_task(name, folder) for name, folder in folders.items()]
