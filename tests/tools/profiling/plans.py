"""Plans of a tiny model."""

import json

from fastclip.cli import call
from fastclip.tools.profiling.advice import advise
from fastclip.tools.profiling.plan import make_plan
from fastclip.tools.profiling.plan_command import make_job

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 100, "width": 16, "heads": 1, "layers": 2},
}


def write_recipe(folder, monkeypatch):
    """Write a recipe to the folder, make it the current one, and return the options that name it."""
    monkeypatch.chdir(folder)
    (folder / "tiny-plan.json").write_text(json.dumps(MODEL))
    (folder / "mine.yaml").write_text("model: {name: tiny-plan.json}\nbatch: {size: 256}\n")
    return ["--config", "mine.yaml"]


def job_of(*train_options, config="mine.yaml", **options):
    """The job of `fastclip plan` with these options."""
    defaults = {
        "network": "ib",
        "nodes": "1,2,4,8",
        "gpus_per_node": 4,
        "batch_per_gpu": None,
        "algorithm": None,
        "compute_ms": None,
        "profile": None,
        "num_pairs": None,
    }
    job, _ = make_job(list(train_options), [config], **defaults | options)
    return job


def advice_on(*train_options, **options):
    """The notes of a plan by kind; each kind occurs once."""
    notes = advise(make_plan(job_of(*train_options, **options)))
    by_kind = {note.kind: note for note in notes}
    assert len(by_kind) == len(notes)
    return by_kind


def as_json(options, capsys):
    """The output of `fastclip plan --json`."""
    call("plan", [*options, "--json"])
    return json.loads(capsys.readouterr().out)
