"""How good the model is while it trains: retrieval among held-out pairs, and the tasks of a folder."""

from __future__ import annotations

from pathlib import Path

from fastclip.config.resolved import Resolved
from fastclip.data.loader import Tokenizer
from fastclip.distributed.world import World
from fastclip.evaluation.features import Encoder
from fastclip.evaluation.retrieval import recalls
from fastclip.evaluation.suites import measure_of
from fastclip.evaluation.task_layout import Task, find_tasks, open_task
from fastclip.evaluation.zero_shot import score
from fastclip.model import TwoTowers
from fastclip.training.build import AUTOCAST
from fastclip.training.training_pairs import open_manifest_of


def open_evaluator(
    config: Resolved, towers: TwoTowers, tokenizer: Tokenizer, world: World
) -> Evaluator | None:
    """None if there is nothing to evaluate."""
    if config.evaluate.pairs is None and config.evaluate.tasks is None:
        return None
    return Evaluator(config, towers, tokenizer, world)


class Evaluator:
    """Measures of the towers as they are now, the same on every worker; all of them have to call it."""

    def __init__(self, config: Resolved, towers: TwoTowers, tokenizer: Tokenizer, world: World):
        self.best = config.evaluate.best or ("mean_recall@1" if config.evaluate.pairs else "tasks_mean")
        self.encoder = Encoder(
            towers,
            world,
            tokenizer=tokenizer,
            workers=config.data.workers,
            autocast=AUTOCAST.get(config.precision),
        )
        pairs = config.evaluate.pairs
        self.pairs = None if pairs is None else open_manifest_of(pairs, config.data, world)
        self.tasks = [] if config.evaluate.tasks is None else _open_tasks(config.evaluate.tasks)

    def measure(self) -> dict[str, float]:
        """The one that `best` goes by; recalls of the pairs; TASK/measure of each task, and their mean."""
        found: dict[str, float] = {}
        if self.pairs is not None:
            features = self.encoder.pairs(self.pairs)
            found |= recalls(features.image_bd, features.text_md, features.image_of_text)
        own = []
        for task in self.tasks:
            scores = score(task, self.encoder, self.encoder.images(task))
            found |= {f"{task.name}/{name}": value for name, value in scores.items()}
            measure = measure_of(task.name, task.kind)
            if measure not in scores:
                raise ValueError(
                    f"evaluate.tasks: {task.name} is judged by {measure}, which needs its groups."
                )
            own.append(scores[measure])
        if own:
            found["tasks_mean"] = sum(own) / len(own)
        if self.best not in found:
            raise ValueError(f"evaluate.best={self.best!r} is not measured; choose from: {', '.join(found)}.")
        return {self.best: found[self.best], **found}  # first, wherever only some are shown


def _open_tasks(path: str) -> list[Task]:
    folders = find_tasks(Path(path)) if Path(path).is_dir() else {}
    if not folders:
        raise ValueError(f"evaluate.tasks={path} holds no task folders; see docs/evaluation.md.")
    return [open_task(name, folder) for name, folder in folders.items()]
