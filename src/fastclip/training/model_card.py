"""The model card: README.md of an exported folder, for readers and for the Hugging Face Hub.

The template is model_card.md; the values are computed here. They describe exactly the exported checkpoint and
never name folders of the machine: the card is meant to be published.
"""

from __future__ import annotations

import logging
import math
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from fastclip.config.resolved import resolve_again
from fastclip.evaluation.feature_cache import model_key
from fastclip.evaluation.suites import DEFAULT_MEASURE, measure_of
from fastclip.lora import is_adapter
from fastclip.model import TwoTowers
from fastclip.model_config import LOCAL_DIR
from fastclip.run.folder import METRICS, RESULTS, read_metadata
from fastclip.run.metrics_file import read_metrics
from fastclip.run.results import read_results
from fastclip.text import code_span, duration, markdown, one_line

log = logging.getLogger(__name__)
_PRECISIONS = {None: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # of `fastclip eval`


class Score(NamedTuple):
    """A score in the card."""

    dataset: str
    kind: str  # of the task, as in evaluation.task_layout
    measure: str
    value: float
    note: str = ""


def model_card(
    run: Path, checkpoint: Path, model: TwoTowers, tau: float | None, blend: float | None = None
) -> str:
    """The text of the card for the model of one checkpoint.

    Args:
        run: the run's folder, which has the scores.
        checkpoint: the folder of the model's checkpoint.
        tau: the temperature; None if it is a parameter of the model.
        blend: the share of the trained weights, if the model is a blend with the initial ones.
    """
    metadata = read_metadata(checkpoint)
    name = run.expanduser().resolve().name
    measured = _scores_of_tasks(run, model)
    trained = _scores_in_training(run, metadata) if blend is None else []  # those are of the trained weights
    card = ModelCard.from_template(
        _head(name, metadata["config"], measured + trained),
        template_path=str(Path(__file__).with_name("model_card.md")),
        name=markdown(name),
        metadata=metadata,
        config=metadata["config"],
        towers=model,
        parameters=_parameters(model) / 1e6,
        blend=blend,
        measured=[_for_table(score) for score in measured],
        trained=[_for_table(score) for score in trained],
        tau=math.exp(-float(model.clip.logit_scale.detach())) if tau is None else tau,
        **_training(metadata),
    )
    return f"{card}\n"


def _parameters(model: TwoTowers) -> int:
    return sum(parameter.numel() for name, parameter in model.clip.named_parameters() if not is_adapter(name))


def _head(name: str, config: dict, scores: list[Score]) -> ModelCardData:
    """The metadata for the Hub: library, kind of model, and scores in its schema."""
    results: dict[tuple[str, str], EvalResult] = {}
    for score in scores:
        dataset, measure = one_line(score.dataset), one_line(score.measure)
        task = "image-text-retrieval" if score.kind == "retrieval" else "zero-shot-image-classification"
        result = EvalResult(
            task_type=task,
            task_name=task.replace("-", " "),
            dataset_type=re.sub(r"[^\w.-]+", "-", dataset),  # a slash would name a dataset on the Hub
            dataset_name=dataset,
            metric_type="accuracy" if measure == "acc1" else measure,
            metric_name=measure,
            metric_value=round(score.value, 4),
        )
        results.setdefault((score.dataset, score.measure), result)
    return ModelCardData(
        library_name="open_clip",
        pipeline_tag="zero-shot-image-classification",
        tags=["clip", "fastclip", config["algorithm"]],
        datasets=[one_line(path) for path in map(_hub_id, _paths(config["data"]["train"])) if path] or None,
        model_name=one_line(name) if results else None,
        eval_results=list(results.values()) or None,
    )


def _for_table(score: Score) -> Score:
    """With names, which come from folders and files, that cannot break the table or the document."""
    dataset, measure = markdown(score.dataset), code_span(score.measure)
    return score._replace(dataset=dataset, measure=measure)


def _scores_of_tasks(run: Path, model: TwoTowers) -> list[Score]:
    """Scores by `fastclip eval` of exactly these weights; results of other checkpoints are skipped."""
    results = list(read_results(run / RESULTS).values())
    if not results:
        return []
    keys = {model_key(model, autocast): name for autocast, name in _PRECISIONS.items()}
    scores: dict[str, Score] = {}
    for result in results:  # float32 has priority, whenever it was measured
        precision = keys.get(result.model)
        note = "" if precision == "float32" else f"measured in {precision}"
        if result.value is None or precision is None or (note and result.task in scores):
            continue
        unusable = f"{result.unusable:,} of {result.images:,} images could not be used"
        notes = [note] * bool(note) + [unusable] * bool(result.unusable)
        scores[result.task] = Score(result.task, result.kind, result.measure, result.value, "; ".join(notes))
    if not scores:
        log.info("%s only has scores of other checkpoints: the model card omits them.", run / RESULTS)
    return sorted(scores.values())


def _scores_in_training(run: Path, metadata: dict) -> list[Score]:
    """The evaluation at the checkpoint's step: recalls of the pairs, and the main measure of each task."""
    file = run / METRICS
    records = read_metrics(file) if file.exists() else []
    at_step = [r["evaluation"] for r in records if r.get("step") == metadata["step"] and "evaluation" in r]
    scores = {name: value for name, value in (at_step[-1] if at_step else {}).items() if value is not None}
    pairs = ", ".join(_names(metadata["config"]["evaluate"].get("pairs"))) or "held-out pairs"
    of_pairs = [name for name in scores if "/" not in name and name != "tasks_mean"]
    found = [Score(pairs, "retrieval", name, scores[name]) for name in of_pairs]
    for task in dict.fromkeys(name.rpartition("/")[0] for name in scores if "/" in name):
        kind = next((kind for kind in DEFAULT_MEASURE if f"{task}/{DEFAULT_MEASURE[kind]}" in scores), None)
        if kind is not None and (value := scores.get(f"{task}/{measure_of(task, kind)}")) is not None:
            found.append(Score(task, kind, measure_of(task, kind), value))
    return found


def _training(metadata: dict) -> dict[str, Any]:
    """Values of the template that are derived from the checkpoint's metadata."""
    config, train = metadata["config"], metadata["config"]["data"]["train"]
    resolved = resolve_again(config)
    versions = metadata["versions"] | {"open_clip": version("open_clip_torch")}
    weights = _initial_weights(config["model"])
    return {
        "architecture": markdown(_architecture(config["model"])),
        "pretrained": code_span(weights) if weights else None,
        "best": code_span((metadata.get("best") or {}).get("measure")),
        "fingerprint": code_span(metadata["fingerprint"]),
        "loss": resolved.loss,
        "optim": resolved.optim,
        "time": duration(metadata["elapsed"]),
        "versions": [markdown(f"{package} {number}") for package, number in versions.items()],
        "trained_on": " and ".join(map(code_span, _names(train))),
        "licenses": any((folder / "LICENSES.md").is_file() for folder in _folders(train)),
    }


def _architecture(model: dict) -> str:
    """The model, and the towers that replace its own; a folder by its last name alone."""
    name = model["name"].removeprefix(LOCAL_DIR)
    shown = Path(name).stem if name.endswith(".json") else Path(name).name
    image, text = _tower_name(model.get("image")), _tower_name(model.get("text"))
    if image and text:
        return f"{image} and {text}"
    other = f"{image} as image tower" if image else f"{text} as text tower" if text else ""
    return f"{shown} with {other}" if other else shown


def _tower_name(tower: str | None) -> str | None:
    if tower is None:
        return None
    name = tower.partition(":")[2]
    return Path(name).name if Path(name).expanduser().is_absolute() or name.startswith(".") else name


def _initial_weights(model: dict) -> str | None:
    """What the weights of the towers were at first; None if all were new."""
    whole = model.get("pretrained")
    names = [Path(whole).name] if whole else []
    for side in ("image", "text"):
        weights = model.get(f"{side}_weights", "own")
        if model.get(side) and weights != "none":
            names.append(str(_tower_name(model[side])) if weights == "own" else Path(weights).name)
    return ", ".join(names) or None


def _folders(paths: list[str] | str) -> list[Path]:
    """Folders that may have a collection's LICENSES.md: that of the pairs, and its parent."""
    plain = [Path(re.split(r"[^/]*[*?\[{]", path)[0]) for path in _paths(paths)]
    return [folder for path in plain for folder in (path, path.parent)]


def _names(paths: list[str] | str | None) -> list[str]:
    """Readable names of the data: a dataset on the Hub, or the last meaningful part of a path."""
    home = os.path.basename(os.path.expanduser("~"))
    generic = {"", "train", "test", "val", "validation", "data", "images", "shards", home}
    names = []
    for path in _paths(paths):
        parts = re.sub(r"^\w+://[^/]*/", "", path).split("?")[0].split("/")  # without host and credentials
        plain = [part for part in parts if part not in generic and not any(sign in part for sign in "*[{")]
        names.append(_hub_id(path) or (plain[-1] if plain else parts[-1] or "unnamed data"))
    return list(dict.fromkeys(names))


def _hub_id(path: str) -> str | None:
    """OWNER/NAME of hf://datasets/OWNER/NAME/…"""
    match = re.match(r"hf://datasets/([^/@]+/[^/@]+)", path)
    return match[1] if match else None


def _paths(paths: list[str] | str | None) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths or [])
