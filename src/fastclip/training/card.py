"""The model card: README.md of an exported folder, for people and for the Hugging Face hub.

It says what is known of the very checkpoint that was exported, and names what is not known. Folders of the
machine are left out of it: the card is made to be published.
"""

from __future__ import annotations

import logging
import os
import re
from importlib.metadata import version
from math import exp
from math import log as ln
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import EvalResult, ModelCardData

from fastclip.evaluation.kept import model_key
from fastclip.evaluation.tasks import DEFAULT_MEASURE, measure_of
from fastclip.model import LOCAL_DIR, TwoTowers
from fastclip.objective.algorithms import find_algorithm
from fastclip.run.folder import read_facts
from fastclip.run.metrics import read_metrics
from fastclip.run.results import read_results

log = logging.getLogger(__name__)
_PRECISIONS = {None: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # of `fastclip eval`


class Score(NamedTuple):
    """One number of the card."""

    dataset: str
    kind: str
    """Of the task, as in evaluation.layout."""
    measure: str
    value: float
    note: str = ""


def model_card(run: Path, checkpoint: Path, model: TwoTowers, tau: float | None) -> str:
    """The card of the model of one checkpoint.

    Args:
        run: the run's folder, where its scores are.
        checkpoint: the folder of the checkpoint that the model is of.
        tau: the temperature; None where the model learned it itself.
    """
    facts = read_facts(checkpoint)
    name = run.expanduser().resolve().name
    tau = exp(-float(model.clip.logit_scale.detach())) if tau is None else tau
    measured, trained = _scores_of_tasks(run, model), _scores_in_training(run, facts)
    parts = [
        _front_matter(name, facts["config"], measured + trained),
        f"# {name}\n\n{_what_it_is(model, facts)}",
        _use(model),
        _scores(measured, trained, facts),
        _training(facts, tau),
        _data(facts),
        _not_known(facts),
    ]
    return "\n\n".join(parts) + "\n"


def _scores_of_tasks(run: Path, model: TwoTowers) -> list[Score]:
    """What `fastclip eval` found of these very weights; those of another checkpoint are passed over."""
    results = list(read_results(run / "evaluation" / "results.jsonl").values())
    if not results:
        return []
    keys = {model_key(model, autocast): name for autocast, name in _PRECISIONS.items()}
    found = {}
    for result in results:  # float32 is the number that counts, whenever it was measured
        precision = keys.get(result.model)
        note = "" if precision == "float32" else f"measured in {precision}"
        if result.value is None or precision is None or (note and result.task in found):
            continue
        left_out = f"{result.unusable:,} of {result.images:,} images could not be used"
        notes = [note] * bool(note) + [left_out] * bool(result.unusable)
        found[result.task] = Score(result.task, result.kind, result.measure, result.value, "; ".join(notes))
    if not found:
        log.info("%s/evaluation has scores of other weights only: they stay out of the card.", run)
    return sorted(found.values())


def _scores_in_training(run: Path, facts: dict) -> list[Score]:
    """The evaluation at the checkpoint's own step: recalls of the pairs, and each task's own measure."""
    file = run / "metrics.jsonl"
    records = read_metrics(file) if file.exists() else []
    at_step = [r for r in records if r.get("step") == facts["step"] and "evaluation" in r]
    if not at_step:
        return []
    tasks: dict[str, dict[str, float]] = {}
    found = []
    for name, value in at_step[-1]["evaluation"].items():
        if value is None:  # it was not finite
            continue
        task, _, measure = name.rpartition("/")
        if task:
            tasks.setdefault(task, {})[measure] = value
        elif name != "tasks_mean":
            pairs = _names(facts["config"]["evaluate"].get("pairs"))
            found.append(Score(", ".join(pairs) or "held-out pairs", "retrieval", name, value))
    for task, scores in tasks.items():
        kind = next((kind for kind, measure in DEFAULT_MEASURE.items() if measure in scores), None)
        if kind is not None and measure_of(task, kind) in scores:
            found.append(Score(task, kind, measure_of(task, kind), scores[measure_of(task, kind)]))
    return found


def _front_matter(name: str, config: dict, scores: list[Score]) -> str:
    """What the hub reads: the library, the kind of model, and the scores in its own schema."""
    results: dict[tuple[str, str], EvalResult] = {}
    for score in scores:
        retrieval = score.kind == "retrieval"
        task = "image-text-retrieval" if retrieval else "zero-shot-image-classification"
        results.setdefault(
            (score.dataset, score.measure),
            EvalResult(
                task_type=task,
                task_name=task.replace("-", " "),
                dataset_type=re.sub(r"[^\w.-]+", "-", score.dataset),  # a slash would name a set of the hub
                dataset_name=score.dataset,
                metric_type="accuracy" if score.measure == "acc1" else score.measure,
                metric_name=score.measure,
                metric_value=round(score.value, 4),
            ),
        )
    data = ModelCardData(
        library_name="open_clip",
        pipeline_tag="zero-shot-image-classification",
        tags=["clip", "fastclip", config["algorithm"]],
        datasets=[path for path in map(_hub_id, _paths(config["data"]["train"])) if path] or None,
        model_name=name if results else None,
        eval_results=list(results.values()) or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _what_it_is(model: TwoTowers, facts: dict) -> str:
    parameters = sum(parameter.numel() for parameter in model.clip.parameters()) / 1e6
    return (
        f"A CLIP model: it turns pictures and texts into vectors of {model.model_cfg['embed_dim']} numbers, "
        "and a picture's is close to those of the texts that fit it.\n"
        f"It is a {_model_name(facts['config'])} with {parameters:.3g} million parameters, for pictures of "
        f"{model.image_size} × {model.image_size} pixels and texts of up to {model.context_length} tokens, "
        f"trained by fastclip on {_and(_names(facts['config']['data']['train']))}."
    )


def _use(model: TwoTowers) -> str:
    bias = model.clip.logit_bias is not None
    scores = "scale * image @ text.T" + (" + model.logit_bias" if bias else "")
    means = "sigmoid()" if bias else "softmax(dim=-1)"
    return f"""## Use

With [open_clip](https://github.com/mlfoundations/open_clip), from the hub or from a folder:

```python
import open_clip
import torch
from PIL import Image

name = "hf-hub:OWNER/NAME"  # or "local-dir:FOLDER"
model, preprocess = open_clip.create_model_from_pretrained(name)
tokenizer = open_clip.get_tokenizer(name)
model.eval()

picture = preprocess(Image.open("picture.png").convert("RGB"))
with torch.no_grad():
    image = model.encode_image(picture[None], normalize=True)
    text = model.encode_text(tokenizer(["a red heart", "a cat"]), normalize=True)
    scale = model.logit_scale.exp()
    print(({scores}).{means})
```

With fastclip, from a folder:

```python
import fastclip

model = fastclip.load("FOLDER")
print(model.similarity("picture.png", ["a red heart", "a cat"]))
```

fastclip turns photos upright and lays transparent pictures on white, as in training. With open_clip alone, do
so before `convert`."""


def _scores(measured: list[Score], trained: list[Score], facts: dict) -> str:
    """Only of this checkpoint; that there are none is said too."""
    parts = ["## Scores"]
    if measured:
        parts.append("By `fastclip eval`, each task's own measure:\n\n" + _table(measured))
    if trained:
        parts.append(f"While it trained, after step {facts['step']:,}:\n\n" + _table(trained))
    if not measured and not trained:
        parts.append("This model has not been evaluated.")
    if any(score.kind == "retrieval" for score in measured + trained):
        parts.append(
            "Recall is among the pictures and texts of the data set itself, so sets of other sizes do not "
            "compare. `mean_recall@1` is the mean of finding the picture of a text and a text of a picture."
        )
    return "\n\n".join(parts)


def _table(scores: list[Score]) -> str:
    rows = [
        f"| {score.dataset.replace('|', '')} | `{score.measure}` | {100 * score.value:.2f} | {score.note} |"
        for score in scores
    ]
    return "\n".join(["| data set | measure | % | |", "|---|---|---:|---|", *rows])


def _training(facts: dict, tau: float) -> str:
    config = facts["config"]
    row, loss = find_algorithm(config["algorithm"]), config["algorithms"][config["algorithm"]]
    optim, batch = config["optimizers"][config["optimizer"]], config["batch"]
    scale = batch["size"] / batch.get("reference", batch["size"])
    seen = facts["step"] * batch["size"] / facts["num_samples"]
    mean = "the mean of individual ones, " if row.temperature == "individual" else ""
    known = {
        "algorithm": f"{config['algorithm']} (loss {row.loss})",
        "model": _model_name(config),
        "started from": _start(config),
        "batch": f"{batch['size']:,} pairs a step, over all workers",
        "checkpoint": f"step {facts['step']:,}{_if_best(facts)}",
        "epochs": f"{seen:.4g} of {config['epochs']:.4g}",
        "seed": config["seed"],
        "optimizer": config["optimizer"],
        "learning rate": f"{optim['lr'] * scale:.4g} at its peak",
        "weight decay": f"{optim['weight_decay']:.4g}",
        "precision": config["precision"],
        "τ": f"{tau:.4g} ({mean}from {loss['tau']:.4g} at the start)",
    }
    if row.rho is not None:
        rho = loss["rho"] if "rho" in loss else loss["rho_share"] * ln(batch["size"] - 1)
        known["ρ"] = f"{rho:.4g}"
    if row.fcco and loss["gamma_schedule"] == "cosine":
        known["γ"] = f"from 1 to {loss['gamma']:.4g} by a cosine, E = {loss['gamma_decay_epochs']}"
    elif row.fcco:
        known["γ"] = f"{loss['gamma']:.4g}"
    known["time"] = f"{_duration(facts['elapsed'])}, workers: {facts['workers']}"
    versions = facts["versions"] | {"open_clip": version("open_clip_torch")}
    known["versions"] = ", ".join(f"{package} {number}" for package, number in versions.items())
    return "## Training\n\n| | |\n|---|---|\n" + "\n".join(f"| {k} | {v} |" for k, v in known.items())


def _if_best(facts: dict) -> str:
    best = facts["best"]
    return f", the best of the run by `{best['measure']}`" if best.get("step") == facts["step"] else ""


def _duration(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _data(facts: dict) -> str:
    train = facts["config"]["data"]["train"]
    lines = [
        f"## Data\n\nTrained on {_and(_names(train))}: {facts['num_samples']:,} pairs, with the fingerprint "
        f"`{facts['fingerprint']}`; the same pairs in the same order have the same one."
    ]
    if facts["bad"]:
        lines.append(f"Of these, {len(facts['bad']):,} could not be used, and others took their place.")
    if any((folder / "LICENSES.md").is_file() for folder in _folders(train)):
        lines.append("The licences of the pictures are listed in LICENSES.md of the collection.")
    return "\n".join(lines)


def _folders(paths: list[str] | str) -> list[Path]:
    """Where a collection may keep its papers: in the folder of the pairs, or beside it."""
    plain = [Path(re.split(r"[^/]*[*?\[{]", path)[0]) for path in _paths(paths)]
    return [folder for path in plain for folder in (path, path.parent)]


def _not_known(facts: dict) -> str:
    started = facts["config"]["model"].get("pretrained")
    weights = ", those of the weights it started from" if started else ""
    return f"""## Not known

- The licence: the owner has to choose one, and to write it as `license:` into the head of this file. The
  licences of the data{weights} and the law of the place set limits to that choice.
- Whatever is not under Scores. How it treats people of different groups, other languages, and pictures unlike
  those it was trained on was not looked at. Measure it on your own data before you rely on it.

Written by `fastclip export`, which writes this file anew each time."""


def _model_name(config: dict) -> str:
    name = config["model"]["name"].removeprefix(LOCAL_DIR)
    return Path(name).stem if name.endswith(".json") else Path(name).name


def _start(config: dict) -> str:
    given = config["model"].get("pretrained")
    frozen = config["model"]["freeze"]
    start = "new weights" if given is None else f"the weights `{Path(given).name}`"
    return start if frozen == "none" else f"{start}; the {frozen} tower stayed as it was"


def _names(paths: list[str] | str | None) -> list[str]:
    """What people call these data: a set of the hub, or the last part of a path that says something."""
    home = os.path.basename(os.path.expanduser("~"))
    dull = {"", "train", "test", "val", "validation", "data", "images", "shards", home}
    found = []
    for path in _paths(paths):
        parts = re.sub(r"^\w+://[^/]*/", "", path).split("?")[0].split("/")  # without a host, or who logs in
        telling = [part for part in parts if part not in dull and not any(sign in part for sign in "*[{")]
        found.append(_hub_id(path) or (telling[-1] if telling else parts[-1] or "unnamed data"))
    return list(dict.fromkeys(found))


def _and(names: list[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _hub_id(path: str) -> str | None:
    """OWNER/NAME of hf://datasets/OWNER/NAME/…"""
    match = re.match(r"hf://datasets/([^/@]+/[^/@]+)", path)
    return match[1] if match else None


def _paths(paths: list[str] | str | None) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths or [])
