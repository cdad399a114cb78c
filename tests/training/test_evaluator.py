"""Evaluation during training: tasks are scored, and any of their measures can select the best."""

import json
import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fastclip.cli import main
from fastclip.distributed.world import World
from fastclip.model import build_model
from fastclip.run.folder import read_metadata
from fastclip.run.metrics_file import read_metrics
from fastclip.training import evaluator
from tests.evaluation.test_task_layout import labelled, write_task
from tests.ranks import run_ranks
from tests.training.runs import Lab, Run, assert_same_run


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"), epochs=2)
    write_task(lab.folder / "tasks" / "animals", [labelled(0, 1, 2, 0, 1, 2, 0)])
    write_task(lab.folder / "tasks" / "more", [labelled(2, 1, 0, 0, start=50)])
    return lab


def evaluations(out):
    return [record for record in read_metrics(out / "metrics.jsonl") if "evaluation" in record]


@pytest.mark.slow
def test_tasks_are_scored_and_the_scores_are_those_of_fastclip_eval(lab, tmp_path, capsys):
    options = lab.options(tmp_path / "run", "fastclip-v3", evaluate__tasks=lab.folder / "tasks")
    assert main(["train", *options, "--evaluate.best", "animals/acc5"]) == 0
    records = evaluations(tmp_path / "run")
    assert [record["step"] for record in records] == [0, 12]
    last = records[-1]["evaluation"]
    assert last["tasks_mean"] == pytest.approx((last["animals/acc1"] + last["more/acc1"]) / 2)
    assert "mean_recall@1" in last  # of the pairs
    assert next(iter(last)) == "animals/acc5"  # the measure that selects the best comes first
    metadata = read_metadata((tmp_path / "run" / "checkpoints" / "best").resolve())
    assert metadata["best"] == {"score": last["animals/acc5"], "step": 12, "measure": "animals/acc5"}
    capsys.readouterr()
    tasks = str(lab.folder / "tasks")
    assert main(["eval", str(tmp_path / "run"), "--tasks", tasks, "--json", "--workers", "0"]) == 0
    scored = {r["task"]: r["scores"] for r in json.loads(capsys.readouterr().out)["results"]}
    for task, scores in scored.items():
        for name, value in scores.items():
            assert last[f"{task}/{name}"] == value


@pytest.mark.slow
def test_without_pairs_the_mean_of_the_tasks_selects_the_best(lab, tmp_path):
    options = lab.options(tmp_path / "run", "openclip", evaluate__tasks=lab.folder / "tasks")
    at = options.index("--evaluate.pairs")
    without_pairs = [*options[:at], *options[at + 2 :], "--evaluate.pairs", "null"]
    assert main(["train", *without_pairs]) == 0
    assert "mean_recall@1" not in evaluations(tmp_path / "run")[-1]["evaluation"]
    metadata = read_metadata((tmp_path / "run" / "checkpoints" / "best").resolve())
    assert metadata["best"]["measure"] == "tasks_mean"


@pytest.mark.slow
def test_two_ranks_give_the_scores_of_one(lab, tmp_path):
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}"
        run = lab.start(out, ranks, "fastclip-v1", evaluate__tasks=lab.folder / "tasks", epochs=0.5)
        run.finish()
    one, two = (evaluations(tmp_path / name)[0]["evaluation"] for name in ("1", "2"))
    assert one == two  # before the first step, when the weights are identical


@pytest.mark.slow
def test_a_folder_without_tasks_and_an_invalid_task_are_refused_before_training(lab, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["train", *lab.options(tmp_path / "a", "mbcl", evaluate__tasks=tmp_path / "empty")]) == 1
    assert f"evaluate.tasks={tmp_path / 'empty'} " in capsys.readouterr().err.splitlines()[-1]
    write_task(tmp_path / "tasks" / "bad", [labelled(7)])
    assert main(["train", *lab.options(tmp_path / "b", "mbcl", evaluate__tasks=tmp_path / "tasks")]) == 1
    assert "bad" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_ranks_that_compute_other_last_bits_agree_on_the_scores():
    """Otherwise one rank would see a new best and wait alone in the save of its checkpoint."""
    assert run_ranks(_scores_of_a_rank, 2) == [{"mean_recall@1": 0.5}] * 2


def _scores_of_a_rank(rank, size):
    world = World(rank, size, rank, torch.device("cpu"), None)
    evaluator.recalls = lambda *_: {"mean_recall@1": 0.5 + rank * 1e-9}
    without_data = object.__new__(evaluator.Evaluator)
    features = SimpleNamespace(image_bd=None, text_md=None, image_of_text=None)
    model = build_model("vit-scenes", device="cpu")
    without_data.encoder = SimpleNamespace(model=model, world=world, pairs=lambda pairs: features)
    without_data.best, without_data.pairs, without_data.tasks = "mean_recall@1", "held out", []
    return without_data.measure()


def _signal_in_task(number, rank):
    """Send SIGTERM to rank 1 while it scores this task, counted from the start of the process."""
    score, scored = evaluator.score, []

    def score_and_signal(task, *features):
        scored.append(task)
        if rank == 1 and len(scored) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return score(task, *features)

    evaluator.score = score_and_signal


@pytest.mark.slow
def test_a_signal_during_an_evaluation_is_answered_before_the_next_task_and_the_evaluation_repeated(
    lab, tmp_path
):
    """Stopped in the evaluations before, in the middle and at the end of training, each with two tasks."""
    changed = {"evaluate__tasks": lab.folder / "tasks", "evaluate__every_epochs": 1}
    lab.start(tmp_path / "reference", 2, **changed).finish()
    options = lab.options(tmp_path / "run", "fastclip-v2", **changed)
    for step, number in ((0, 1), (6, 3), (12, 3)):
        run = Run(options, 2, lab.environment, prepare=partial(_signal_in_task, number))
        assert run.wait() == [75, 75], run.output()
        metadata = read_metadata(tmp_path / "run" / "checkpoints" / "last")
        assert (metadata["step"], metadata["evaluation_due"]) == (step, True)
        assert main(["verify", str(run.folder)]) == 0
        if step:  # before that there is no record of any kind
            assert [record["step"] for record in evaluations(run.folder)] == [*range(0, step, 6)]
    Run(options, 2, lab.environment).finish()
    assert_same_run(tmp_path / "run", tmp_path / "reference")
    for link in ("best", "last"):
        saved = read_metadata((tmp_path / "run" / "checkpoints" / link).resolve())
        expected = read_metadata((tmp_path / "reference" / "checkpoints" / link).resolve())
        assert [saved[name] for name in ("step", "best", "evaluation_due")] == [
            expected[name] for name in ("step", "best", "evaluation_due")
        ]
