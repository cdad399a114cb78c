"""Hand-made studies: the files that `fastclip compare` would have written, without training."""

import json

from fastclip.tools.study.definition import Study, write_study
from fastclip.tools.study.folder import run_folder
from fastclip.tools.study.study_state import read_study

PAIRS, BATCH = 640, 64
SCORES = {  # one task per group of the emoji suite
    "twemoji_retrieval": ("retrieval", "mean_recall@1"),
    "twemoji_words": ("classification", "acc1"),
    "hard_twemoji_categories": ("classification", "acc1"),
}
GAIN = {"openclip": 0.0, "fastclip-v3": 0.1}


def value_of(arm, seed, task=0):
    """The score of a run: it depends on the algorithm, a little on the batch, and on the seed."""
    batch = arm.values.get("batch.size", BATCH)
    jitter = (0.0, 0.02, 0.01)[seed % 3]
    return 0.3 + GAIN.get(arm.values.get("algorithm"), 0.05) + batch / 10_000 + jitter + 0.05 * task


def make_study(folder, done=None, **settings):
    """A study in which all runs are done, or those with done(arm, seed); the settings go to study.yaml."""
    study = Study(
        **{
            "config": "scenes",
            "vary": {"algorithm": ["openclip", "fastclip-v3"], "batch.size": [32, 64]},
            "seeds": [0, 1, 2],
            "tasks": "data/emoji/tasks",
            "suite": "emoji",
            "baseline": {"algorithm": "openclip"},
            **settings,
        }
    )
    write_study(study, folder / "study.yaml")
    for arm in study.all_arms():
        for seed in study.seeds:
            if done is None or done(arm, seed):
                make_finished_run(run_folder(folder, arm, seed), arm, seed)
    return folder


def make_finished_run(folder, arm, seed, steps=40):
    """Logged and evaluated every 10 steps; each task is scored once."""
    checkpoint = folder / "checkpoints" / f"step-{steps:08d}"
    checkpoint.mkdir(parents=True)
    config = {"epochs": steps * BATCH / PAIRS, "batch": {"size": BATCH}}
    metadata = {"step": steps, "num_samples": PAIRS, "config": config, "best": {}, "bad": []}
    (checkpoint / "state.json").write_text(json.dumps({"facts": metadata, "files": {}}))
    (folder / "model").mkdir()
    options = {"algorithm": arm.values.get("algorithm", "fastclip-v3"), "seed": seed, "epochs": 4}
    (folder / "config.yaml").write_text(json.dumps(options))
    final, lines = value_of(arm, seed), []
    for step in range(0, steps + 1, 10):
        common = {"step": step, "epoch": step * BATCH / PAIRS}
        if step:
            lines.append(
                common | {"samples": step * BATCH, "loss": 4 / step, "time": {"elapsed": 3.0 * step}}
            )
        lines.append(common | {"evaluation": {"mean_recall@1": final * step / steps}, "best": step > 0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_results(folder, arm, seed)


def write_results(folder, arm, seed, tasks=tuple(SCORES)):
    """Scores as `fastclip eval` writes them."""
    (folder / "evaluation").mkdir(exist_ok=True)
    results = []
    for number, (task, (kind, measure)) in enumerate(SCORES.items()):
        if task in tasks:
            scores = {measure: value_of(arm, seed, number)}
            results.append({"task": task, "key": f"{task}", "kind": kind, "measure": measure,
                            "scores": scores, "images": 100})  # fmt: skip
    lines = "".join(json.dumps(result) + "\n" for result in results)
    (folder / "evaluation" / "results.jsonl").write_text(lines)
    (folder / "evaluation" / "scores.json").write_text(json.dumps({"results": results}))


def fail(folder, name, reason):
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / f"{name}.failed").write_text(reason)


__all__ = ["fail", "make_study", "read_study", "value_of", "write_results"]
