"""The training loop: algorithms and optimizers learn, records are correct, evaluations change nothing."""

import re
import shutil
from itertools import pairwise
from math import cos, log, pi

import pytest
import torch

from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.datasets import get
from fastclip.distributed.world import World
from fastclip.optim import learning_rate
from fastclip.run.folder import is_trained, read_metadata
from fastclip.run.metrics_file import read_metrics
from fastclip.run.state_file import read_state, write_state
from fastclip.training.evaluator import Evaluator
from fastclip.training.trainer import train as train_run
from tests.training.runs import Lab, final_state, metrics

ALONE = World(0, 1, 0, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Runs of 12 steps, 6 per epoch."""
    return Lab(tmp_path_factory.mktemp("lab"), epochs=2)


@pytest.fixture(scope="module")
def train(lab):
    """Train in this process and return the run's folder; the same options are trained only once.

    By default every step is recorded, the last is saved, and nothing is evaluated.
    """
    done = {}

    def run(algorithm="fastclip-v3", **changed):
        key = (algorithm, *sorted(changed.items()))
        if key not in done:
            out = lab.folder / f"run-{len(done)}"
            defaults = {"evaluate__pairs": "null", "checkpoint__every_steps": "null"}
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
                train_run(resolve(parse(lab.options(out, algorithm, **defaults | changed))), ALONE)
            done[key] = out
        return done[key]

    return run


def records(folder):
    return [record for record in metrics(folder) if "evaluation" not in record]


def evaluations(folder):
    return [record for record in metrics(folder) if "evaluation" in record]


# Every algorithm and optimizer learns.


@pytest.fixture(scope="module")
def scenes_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCLIP_CACHE", str(folder / "cache"))
        return get("scenes", folder / "scenes", progress=False)


@pytest.fixture
def scenes(scenes_once, monkeypatch):
    """The collection of this name; its index and decoded images are cached for all tests."""
    monkeypatch.setenv("FASTCLIP_CACHE", str(scenes_once.parent / "cache"))
    return scenes_once


def mean_recall_at_10(scores):
    return (scores["image_retrieval_recall@10"] + scores["text_retrieval_recall@10"]) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "optimizer", "epochs"),
    [
        ("openclip", "adamw", 1.5),
        ("siglip", "adamw", 5),  # its bias starts at −10 and has to rise first
        ("mbcl", "adamw", 1.5),
        ("sogclr", "adamw", 1.25),
        ("isogclr", "adamw", 1.25),
        ("fastclip-v0", "adamw", 1.25),
        ("fastclip-v1", "adamw", 1.25),
        ("fastclip-v2", "adamw", 1.25),
        ("fastclip-v3", "adamw", 1.25),
        ("scent", "adamw", 1.25),
        ("fastclip-v3", "lamb", 1.5),
        ("fastclip-v3", "lion", 1.5),
        ("fastclip-v3", "sgd", 1.5),
    ],
)
def test_scenes_are_learned_with_the_values_of_the_recipe(algorithm, optimizer, epochs, scenes, tmp_path):
    """3,750 pairs, some seen twice, so that the global losses use their estimators."""
    options = {
        "config": "scenes",
        "algorithm": algorithm,
        "optimizer": optimizer,
        "epochs": epochs,
        "optim.warmup": 3,  # so few steps
        "data.train": scenes / "train" / "0000[0-2].tar",
        "evaluate.pairs": scenes / "tasks" / "scenes_retrieval" / "test" / "*.tar",
        "evaluate.every_epochs": 100,
        "out": tmp_path / "run",
    }
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    train_run(resolve(parse(arguments)), ALONE)
    untrained, trained = (record["evaluation"] for record in evaluations(tmp_path / "run"))
    assert 0.003 < mean_recall_at_10(untrained) < 0.02  # chance is 10 of 1,000
    assert mean_recall_at_10(trained) >= 5 * mean_recall_at_10(untrained)
    assert trained["mean_recall@1"] >= 0.004


# The number of steps.


@pytest.mark.slow
def test_every_pair_is_seen_in_one_epoch(train):
    folder = train(epochs=1, batch__size=40)  # of 96 pairs
    assert [record["step"] for record in records(folder)] == [1, 2, 3]
    assert records(folder)[-1]["unvisited"] == 0
    assert read_metadata(folder / "checkpoints" / "last")["total_steps"] == 3


@pytest.mark.slow
def test_a_run_of_an_earlier_version_keeps_its_number_of_steps(lab, tmp_path, monkeypatch):
    """It had complete batches only: 2 epochs of 96 pairs in batches of 40 were 4 steps, not 5."""
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
    out = tmp_path / "run"
    config = resolve(
        parse(lab.options(out, "fastclip-v3", batch__size=40, checkpoint__every_steps=2, checkpoint__keep=9))
    )
    train_run(config, ALONE)
    assert read_metadata(out / "checkpoints" / "last")["step"] == 5
    for step in (4, 5):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    state = read_state(out / "checkpoints" / "step-00000002")
    assert state.metadata.pop("total_steps") == 5
    write_state(out / "checkpoints" / "step-00000002", state.metadata, state.sizes, state.digests)
    assert train_run(config, ALONE).step == 4
    assert read_metadata(out / "checkpoints" / "last")["total_steps"] == 4
    assert is_trained(out)
    lr = learning_rate(3, peak=config.optim.lr, warmup=1, total=4, min_lr=0.0)
    assert records(out)[-1]["lr"] == pytest.approx(lr)  # the schedule ends with it


# metrics.jsonl.

COMMON = [
    "step",
    "epoch",
    "samples",
    "loss",
    "tau",
    "grad_norm",
    "skipped",
    "weight_norm",
    "lr",
    "bad",
    "time",
]
ROBUST = ["radius", "log_u_q05", "log_u_q50", "log_u_q95", "max_weight", "unvisited", "gamma", "tau_lr"]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "keys"), [("openclip", COMMON), ("fastclip-v3", COMMON + ROBUST)])
def test_a_record_has_all_values_of_the_algorithm(algorithm, keys, train):
    logged = read_metrics(train(algorithm, log__every_steps=5) / "metrics.jsonl")
    assert [record["step"] for record in logged] == [5, 10, 12]  # the last step is always logged
    for record in logged:
        assert sorted(record) == sorted(keys)
        assert sorted(record["time"]) == ["data_wait", "elapsed", "samples_per_second", "step"]
        assert record["samples"] == 16 * record["step"]
        assert record["epoch"] == pytest.approx(record["step"] / 6)
        assert record["skipped"] == record["bad"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["openclip", "fastclip-v3"])
def test_the_loss_of_a_record_is_the_mean_since_the_last_one(algorithm, train):
    single = [record["loss"] for record in records(train(algorithm))]
    joined = [record["loss"] for record in records(train(algorithm, log__every_steps=5))]
    assert len(set(single)) == 12
    means = [sum(single[:5]) / 5, sum(single[5:10]) / 5, sum(single[10:]) / 2]
    assert joined == pytest.approx(means, rel=1e-12)


SCHEDULED = {
    "optim__lr": 0.01,
    "optim__warmup": 4,
    "optim__min_lr": 0.001,
    "batch__reference": 16,
    "epochs": 3,
    "loss__gamma": 0.3,
    "loss__gamma_decay_epochs": 2,
}


@pytest.mark.slow
def test_the_learning_rate_warms_up_linearly_and_decays_by_a_cosine_to_min_lr(train):
    falling = [0.001 + 0.009 * (1 + cos(pi * step / 14)) / 2 for step in range(14)]
    rates = [record["lr"] for record in records(train("fastclip-v1", **SCHEDULED))]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, *falling])


def test_gamma_decays_by_a_cosine_per_epoch_and_then_stays(train):
    gammas = [record["gamma"] for record in records(train("fastclip-v1", **SCHEDULED))]
    assert gammas == pytest.approx([1.0] * 6 + [0.65] * 6 + [0.3] * 6)


@pytest.mark.slow
def test_below_0_03_the_learning_rate_of_v3s_tau_is_a_third(train):
    """SGD without momentum moves log(1/τ) by the learning rate times the gradient; the records have both."""
    rate, rho = 0.01, 4.0  # more than the radius can reach: τ falls
    folder = train(
        optimizer="sgd", optim__momentum=0, optim__lr=0, batch__reference=16,
        loss__tau=0.0302, loss__tau_lr=rate, loss__rho=rho,
    )  # fmt: skip
    found = records(folder)
    assert found[0]["tau"] == pytest.approx(0.0302)
    assert found[-1]["tau"] < 0.03 < found[1]["tau"]
    for record, following in pairwise(found):
        assert record["tau_lr"] == pytest.approx(rate / 3 if record["tau"] < 0.03 else rate)
        gradient = record["tau"] * 2 * (rho - record["radius"])  # of log τ; the radius is mean(q − ℓ)
        moved = log(record["tau"] / following["tau"])
        assert moved == pytest.approx(record["tau_lr"] * gradient, rel=1e-2)


@pytest.mark.slow
def test_other_algorithms_keep_the_learning_rate_of_tau_below_0_03(train):
    found = records(train("fastclip-v0", loss__tau=0.02, batch__reference=16, epochs=0.5))
    assert {record["tau_lr"] for record in found} == {1e-3}
    assert all(record["tau"] < 0.03 for record in found)


# Evaluations.


@pytest.mark.slow
def test_evaluations_are_at_the_start_after_each_interval_and_at_the_end(train, lab):
    found = evaluations(train(evaluate__pairs=lab.held_out, evaluate__every_epochs=0.75))
    assert [record["step"] for record in found] == [0, 5, 9, 12]
    assert [record["epoch"] for record in found] == pytest.approx([0, 5 / 6, 1.5, 2])
    assert list(found[0]) == ["step", "epoch", "evaluation", "best"]
    assert "mean_recall@1" in found[0]["evaluation"]


@pytest.fixture
def scores(monkeypatch):
    """The scores of the next evaluations, whatever the model."""
    upcoming = []
    monkeypatch.setattr(
        Evaluator, "measure", lambda self, *_: {"mean_recall@1": 0.5, "other": upcoming.pop(0)}
    )
    return upcoming


@pytest.mark.slow
def test_the_highest_score_of_the_chosen_measure_is_best_and_its_checkpoint_is_kept(train, lab, scores):
    values = [0.9, 0.1, 0.4, 0.4, 0.3]  # the untrained model is never the best; of equal ones the first is
    scores += values
    folder = train(
        evaluate__pairs=lab.held_out, evaluate__every_epochs=0.5, evaluate__best="other", checkpoint__keep=1
    )
    found = evaluations(folder)
    assert [record["evaluation"]["other"] for record in found] == values
    assert [record["best"] for record in found] == [False, True, True, False, False]
    checkpoints = folder / "checkpoints"
    assert (checkpoints / "best").resolve().name == "step-00000006"
    assert (checkpoints / "last").resolve().name == "step-00000012"
    assert read_metadata(checkpoints / "last")["best"] == {"score": 0.4, "step": 6, "measure": "other"}
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000006", "step-00000012"]


@pytest.mark.slow
def test_an_unknown_measure_is_refused_before_the_first_step(lab, tmp_path, capsys):
    options = lab.options(tmp_path / "run", "fastclip-v3", evaluate__best="recall@1")
    assert main(["train", *options]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "evaluate.best=recall@1 " in last
    assert {"image_retrieval_recall@1", "mean_recall@1"} <= set(re.findall(r"[\w@]+", last))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["openclip", "fastclip-v3"])
def test_evaluations_do_not_change_a_single_bit_of_the_run(algorithm, train, lab):
    with_it = train(algorithm, evaluate__pairs=lab.held_out, evaluate__every_epochs=0.75)
    without = train(algorithm)
    assert len(evaluations(with_it)) == 4
    assert not evaluations(without)
    one, other = final_state(with_it), final_state(without)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert records(with_it) == records(without)


# Models and precisions.


def weights(folder, tower):
    """A tower's weights at the end of the run."""
    found = {name: value for name, value in final_state(folder).items() if name.startswith("model.clip.")}
    chosen = {name: "image" if ".visual." in name else "text" for name in found if ".logit_" not in name}
    return {name: found[name] for name, of in chosen.items() if of == tower}


@pytest.mark.slow
def test_lit_starts_from_an_exported_folder_and_keeps_its_image_tower(train, lab):
    evaluated = {"evaluate__pairs": lab.held_out, "evaluate__every_epochs": 0.75}
    first = train(**evaluated)
    lit = train(**evaluated, model__pretrained=first / "model", model__freeze="image", seed=1, epochs=0.5)
    start, end = evaluations(first)[0], evaluations(first)[-1]
    assert evaluations(lit)[0]["evaluation"] == end["evaluation"] != start["evaluation"]
    before, after = weights(first, "image"), weights(lit, "image")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any("visual" in name for name in final_state(lit) if name.startswith("optimizer."))
    before, after = weights(first, "text"), weights(lit, "text")
    assert len(before) > 10
    assert not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "tolerance"),
    [
        ({"model__gradient_checkpointing": "true"}, 1e-6),
        ({"model__channels_last": "true"}, 1e-5),
        ({"precision": "float64"}, 1e-4),
        ({"precision": "bfloat16"}, 0.02),
        ({"precision": "float16"}, 0.005),
    ],
)
def test_model_options_and_precisions_give_nearly_the_same_run(changed, tolerance, train):
    plain, other = records(train()), records(train(**changed))
    for before, after in zip(plain, other, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], abs=tolerance)
        assert after["skipped"] == 0
    if "precision" in changed:
        assert plain[-1]["loss"] != other[-1]["loss"]  # it had an effect
    kinds = {
        tensor.dtype for name, tensor in final_state(train(**changed)).items() if name.startswith("model.")
    }
    assert kinds == {torch.float64 if changed.get("precision") == "float64" else torch.float32}
