"""The command `fastclip eval`."""

from __future__ import annotations

import json as json_module
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastclip.errors import CommandError, InputError, OptionError
from fastclip.evaluation.suites import SUITES, Mean, Suite, find_suite
from fastclip.terminal import console, progress, say

if TYPE_CHECKING:
    import torch

    from fastclip.distributed.world import World
    from fastclip.model import TwoTowers
    from fastclip.run.results import Result


def evaluate(
    model: str | None = None,
    tasks: str = "data/emoji/tasks",
    select: str | None = None,
    suite: str | None = None,
    list: bool = False,
    pretrained: str | None = None,
    checkpoint: Literal["last", "best"] = "last",
    out: Path | None = None,
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    device: Literal["auto", "cuda", "cpu"] = "auto",
    batch_size: int = 256,
    workers: int = 2,
    formats: str | None = None,
    blend: str | None = None,
    tasks_before: str | None = None,
    start: str | None = None,
    json: bool = False,
) -> None:
    """Score a model on tasks it was not trained for.

      fastclip eval runs/emoji --tasks data/emoji/tasks --suite emoji
      fastclip eval runs/emoji --tasks my/photos      (my/photos/CLASS/*.jpg)
      fastclip eval runs/emoji --tasks held-out.csv   (pairs: retrieval)
      fastclip eval ViT-B-32 --pretrained laion2b_s34b_b79k --tasks data/datacomp \\
          --suite datacomp
      fastclip eval --tasks data/datacomp --suite datacomp --list
      fastclip eval runs/fine-tuned --blend 0,0.25,0.5,0.75,1 --tasks my/photos \
          --tasks_before data/datacomp        (what was learned against what was forgotten)

    Image features are cached, so scoring again is quick, and an interrupted evaluation resumes. Several GPUs
    share the work: `torchrun --nproc-per-node 8 -m fastclip eval …`. docs/evaluation.md explains the metrics
    and how to get the public tasks.

    Args:
        model: a run's folder, an exported folder, or an open_clip name with --pretrained.
        tasks: a folder of task folders (layout of CLIP_benchmark and DataComp), one task folder, a folder of
            CLASS/image files, or any pairs for retrieval.
        select: names of tasks, separated by commas; default: all.
        suite: SUITES: score only its tasks, and report its means (for datacomp the paper's three).
        list: only list the tasks that are present, and those of the suite that are missing.
        pretrained: weights for an open_clip name: a file, a folder or a tag.
        checkpoint: which checkpoint of a run.
        out: folder for results.jsonl; default: RUN/evaluation for a run, otherwise evaluations/NAME.
        precision: dtype of matrix products.
        device: default: a GPU per rank if torch can use one, else the CPU.
        batch_size: images, and texts, per batch.
        workers: loader workers per rank.
        formats: image formats to decode besides JPEG, PNG, WebP, GIF, BMP and TIFF, separated by commas:
            avif, jpeg2000, ppm. Those of a run's data.formats are included.
        blend: shares of the way from the weights at which a run started to those at its end: the new tasks
            against the old ones, as a table and as blend.png in the folder of results.
        tasks_before: with --blend, tasks that the model could do before, as --tasks.
        start: with --blend, the weights at which the run started, if their source is gone.
        json: print JSON instead of a table.
    """
    if model is None and not list:
        raise InputError(
            "model", "is required: a run's folder, an exported folder, or a name with --pretrained."
        )
    from fastclip.config.options import split_formats
    from fastclip.run.folder import formats_of

    chosen = find_suite(suite) if suite else None
    folders = _find_folders(tasks, chosen)
    missing = [row.folder for row in chosen.missing({*folders})] if chosen else []
    if list:
        _print_list(folders, missing, json)
        return
    assert model is not None
    if chosen is not None and not folders:
        raise OptionError(
            "tasks",
            tasks,
            f"holds none of the {len(chosen.rows)} tasks of {suite}",
            advice="--list names them; docs/evaluation.md explains how to get them.",
        )
    folders, out = _selected(folders, select), out or _results_folder(model)
    accepted = (*formats_of(model), *split_formats("formats", formats))
    scorer = Scorer(out, precision, device, batch_size, workers, accepted)
    if blend is not None:
        from fastclip.evaluation.blend_curve import blend_curve

        before = _find_folders(tasks_before, None) if tasks_before else {}
        blend_curve(Path(model), blend, start, checkpoint, folders, before, scorer, json)
        return
    for option, value in (("tasks_before", tasks_before), ("start", start)):
        if value is not None:
            raise OptionError(option, value, "has no effect without --blend", advice="Omit it.")

    def load(device: torch.device) -> Iterator[TwoTowers]:
        from fastclip.run.load import load_towers

        yield load_towers(model, pretrained=pretrained, checkpoint=checkpoint, device=device)

    results = scorer.score(load, model, folders)
    if results is not None:  # on rank 0
        _report(results[0], chosen, missing, json)


evaluate.__doc__ = str(evaluate.__doc__).replace("SUITES", " or ".join(SUITES))


def _find_folders(tasks: str, suite: Suite | None) -> dict[str, Path | str]:
    """Task folders by name, or the source of pairs; for a suite, the tasks that are present, in its order."""
    from fastclip.config.collections import how_to_get
    from fastclip.data.pairs import SourceError
    from fastclip.data.sources import find_files
    from fastclip.evaluation.task_layout import find_tasks

    folder = Path(os.path.abspath(Path(tasks).expanduser()))
    found: dict[str, Path | str] = {**find_tasks(folder)} if folder.is_dir() else {}
    if suite is not None:
        return {row.folder: found[row.folder] for row in suite.rows if row.folder in found}
    if not found and (folder / "tasks").is_dir():
        raise OptionError(
            "tasks", tasks, "holds no task folders", advice=f"Try --tasks {Path(tasks) / 'tasks'}."
        )
    if not found:
        try:
            find_files(tasks)
        except SourceError as error:
            advice = how_to_get(tasks) or " Pass --tasks with a folder of tasks, or any pairs."
            raise SourceError(error.path, f"{error.problem}{advice}") from None
        found[folder.name] = tasks
    return found


def _selected(folders: dict[str, Path | str], select: str | None) -> dict[str, Path | str]:
    if select is None:
        return folders
    names = [name.strip() for name in select.split(",") if name.strip()]
    if unknown := [name for name in names if name not in folders] if names else [select]:
        raise OptionError.unknown("select", unknown[0], folders)
    return {name: folders[name] for name in names}


def _results_folder(model: str) -> Path:
    from fastclip.run.folder import RESULTS, is_run

    folder = Path(model).expanduser()
    if is_run(folder):
        return (folder / RESULTS).parent
    return Path("evaluations") / Path(os.path.abspath(folder)).name


@dataclass(frozen=True)
class Scorer:
    """How tasks are scored, and the folder where results are kept."""

    out: Path
    precision: str
    device: Literal["auto", "cuda", "cpu"]
    batch_size: int
    workers: int
    formats: tuple[str, ...]

    def score(
        self,
        models: Callable[[torch.device], Iterator[TwoTowers]],
        name: str,
        folders: dict[str, Path | str],
        file: str = "results.jsonl",
    ) -> list[list[Result]] | None:
        """The results of each model in the order of the tasks, on rank 0.

        Args:
            models: from the device to the models in turn.
            name: of the models, for messages.
            file: where results are kept, in the folder.
        """
        from fastclip.distributed.agreement import require_same
        from fastclip.distributed.device import report_devices
        from fastclip.distributed.world import join_world, silence_other_ranks
        from fastclip.precision import check_precision

        with join_world(device=self.device) as world:
            silence_other_ranks(world)
            options = {name: value for name, value in vars(self).items() if name not in ("device", "workers")}
            require_same(
                world, options | {"out": str(self.out), "tasks": [*folders]}
            )  # before any collective
            report_devices(world)
            check_precision(self.precision, world.device)
            results = [
                self._score_one(towers, name, folders, self.out / file, world)
                for towers in models(world.device)
            ]
            return results if world.is_main else None

    def _score_one(
        self, towers: TwoTowers, name: str, folders: dict[str, Path | str], file: Path, world: World
    ) -> list[Result]:
        from fastclip.distributed.agreement import require_same
        from fastclip.evaluation.feature_cache import model_key
        from fastclip.evaluation.features import Encoder
        from fastclip.evaluation.run_tasks import evaluate
        from fastclip.precision import AUTOCAST
        from fastclip.run.results import append_result, read_results

        key = model_key(towers, AUTOCAST.get(self.precision))
        require_same(world, {"model": f"{name} with weights {key}"})  # a run may save while it is loaded
        encoder = Encoder(
            towers,
            world,
            batch_size=self.batch_size,
            workers=self.workers,
            precision=self.precision,
            formats=self.formats,
        )
        if world.is_main:
            file.parent.mkdir(parents=True, exist_ok=True)
        done, results = world.agree(read_results(file)), []
        with ExitStack() as bars:

            def bar(task: str) -> Callable[[int, int], None]:
                return bars.enter_context(progress(task, "images"))

            show = bar if world.is_main else None
            for result in evaluate(folders, encoder, key, done=done, progress=show):
                bars.close()
                results.append(result)
                if world.is_main and done.get(result.key) != result:
                    append_result(file, result)
        return results


def _report(results: list[Result], suite: Suite | None, missing: list[str], json: bool) -> None:
    """Print the results; raise at the end if a task could not be scored."""
    values = {result.task: result.value for result in results if result.value is not None}
    (_print_json if json else _print_table)(results, suite.means(values) if suite else None, missing)
    if failed := [result.task for result in results if result.error]:
        raise CommandError(f"{len(failed)} of {len(results)} tasks could not be scored: {', '.join(failed)}.")


def _print_json(results: list[Result], means: list[Mean] | None, missing: list[str]) -> None:
    output: dict = {"results": [asdict(result) for result in results]}
    if means is not None:
        output["means"] = [mean._asdict() | {"partial": mean.partial} for mean in means]
        output["missing"] = missing
    print(json_module.dumps(output, indent=2))


def _print_table(results: list[Result], means: list[Mean] | None, missing: list[str]) -> None:
    from rich.table import Column, Table

    images, percent = (Column(name, justify="right", no_wrap=True) for name in ("images", "%"))
    columns = Column("task", overflow="fold"), images, Column("metric", no_wrap=True), percent
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for result in results:
        used = f"{result.images - result.unusable:,}" if result.images else "–"
        value = "–" if result.value is None else f"{100 * result.value:.2f}"
        table.add_row(result.task, used, result.measure or "not scored", value)
    console().print(table)
    for result in results:
        if result.unusable:
            say(f"{result.task}: skipped {result.unusable:,} images that could not be used")
        if result.error:
            say(f"{result.task}: {result.error}")
    if means is not None:
        say("\n".join(["", *map(str, means)]))
    if missing:  # of a suite
        say(f"missing: {', '.join(missing)}")


def _print_list(folders: dict[str, Path | str], missing: list[str], json: bool) -> None:
    if json:
        print(json_module.dumps({"present": [*folders], "missing": missing}, indent=2))
        return
    for name, folder in folders.items():
        say(f"present  {name:43s}  {folder}")
    for name in missing:
        say(f"missing  {name}")
    if missing:
        say("docs/evaluation.md explains how to get them.")
