"""A run that leaves its own history is suspect; one that learns, or is noisy, is not."""

import json
from math import exp, inf, nan
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastclip.cli import main
from fastclip.optim import Stepper
from fastclip.run.state_file import read_metadata
from fastclip.training.divergence import History, weight_norm
from tests.training.runs import Lab, metrics


def history(losses, norm=10.0):
    """The history of a run, in which nothing must be suspect."""
    made = History()
    made.add(0, None, norm)
    for step, loss in enumerate(losses, start=1):
        assert made.judge(loss, norm, 0) is None, (step, loss)
        made.add(step, loss, norm)
    return made


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-3, 1.0, 100.0]), rising=st.booleans())
def test_a_loss_that_falls_rises_slowly_or_is_noise_is_not_suspect(seed, scale, rising):
    random = Random(seed)
    falling = [scale * (5 * exp(-t / 20) - 3 + random.gauss(0, 0.05)) for t in range(100)]
    robust = [scale * (t / 100 if rising else -t / 100) + random.gauss(0, 0.02 * scale) for t in range(100)]
    for losses in (falling, robust, [scale * random.gauss(0, 1) for _ in range(100)]):
        history(losses)


def test_a_loss_that_returns_to_its_start_is_suspect_until_it_is_back():
    made = history([5 * exp(-t / 10) for t in range(40)])
    assert "4.9" in made.judge(4.9, 10.0, 0)
    made.suspect = made.judge(4.9, 10.0, 0)
    assert made.judge(nan, 10.0, 1) == made.suspect  # all steps were skipped: nothing new is known
    assert made.judge(None, 10.0, 0) == made.suspect  # at a save
    assert made.judge(0.2, 10.0, 0) is None


def test_the_loss_is_not_judged_before_ten_records():
    assert history([3, 2, 1]).judge(1e9, 10.0, 0) is None


@pytest.mark.parametrize(("norm", "suspect"), [(39.0, False), (41.0, True), (inf, True), (nan, True)])
def test_weights_that_grow_fast_are_suspect_from_the_first_step_on(norm, suspect):
    assert bool(history([]).judge(1.0, norm, 0)) == suspect


def test_weights_may_drift_over_a_run_but_not_a_hundredfold():
    made, norm = history([]), 10.0
    for step in range(1, 100):
        norm *= 1.1
        if made.judge(1.0, norm, 0):
            break
        made.add(step, 1.0, norm)
    assert norm == pytest.approx(1000, rel=0.1)


def test_three_skipped_steps_in_a_row_are_suspect():
    made = history([])
    assert made.judge(nan, 10.0, 2) is None
    assert made.judge(nan, 10.0, 3) is not None


def test_the_history_is_saved_as_json():
    made, loaded = history([5 * exp(-t / 10) for t in range(70)]), History()
    loaded.load_state(json.loads(json.dumps(made.state())), None)
    assert vars(loaded) == vars(made)
    empty = History()
    empty.load_state(json.loads(json.dumps(History().state())), None)
    assert vars(empty) == vars(History())


def test_the_norm_is_that_of_the_trained_weights():
    model = torch.nn.Linear(2, 1)
    model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    model.bias.requires_grad_(False)
    assert weight_norm(model).item() == 5.0


# Runs


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def train(lab, monkeypatch, capsys):
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])

    def run(*words):
        code = main(["train", *map(str, words)])
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def spoil(monkeypatch):
    """Multiply the weights by this factor after a step, counted from 1."""
    factors, step, done = {}, Stepper.step, []

    def step_and_spoil(self, value):
        update = step(self, value)
        done.append(None)
        if factor := factors.get(len(done)):
            for parameter in self._model:
                parameter.data.mul_(factor)
        return update

    monkeypatch.setattr(Stepper, "step", step_and_spoil)
    return factors


@pytest.mark.slow
def test_a_checkpoint_from_before_the_trouble_is_kept_and_the_advice_starts_from_it(
    lab, train, spoil, tmp_path
):
    spoil[13] = 1e9
    out, changed = tmp_path / "run", {"evaluate__pairs": "null", "data__workers": 0, "checkpoint__keep": 1}
    _, lines = train(*lab.options(out, "fastclip-v3", **changed))
    records = metrics(out)
    assert [record["step"] for record in records if record.get("suspect")] == list(
        range(13, len(records) + 1)
    )
    assert records[-1]["weight_norm"] > 1e6 * records[11]["weight_norm"]
    saved = sorted((out / "checkpoints").glob("step-*"))
    assert saved[0].name == "step-00000012"
    assert [bool(read_metadata(path)["suspect"]) for path in saved] == [False, True]
    assert "Step 13: the norm of the weights is" in lines
    spoil.clear()
    lr = ["--optim.lr", "1e-4", "--optim.clip", "1"]
    assert train("--from", out, *lr, "--out", tmp_path / "second")[0] == 0
    second = metrics(tmp_path / "second")
    assert [record["step"] for record in second] == list(range(13, 37))
    assert not any("suspect" in record for record in second)


@pytest.mark.slow
def test_weights_that_are_not_finite_are_saved_as_suspect_and_never_exported(lab, train, spoil, tmp_path):
    spoil[35] = inf
    out, changed = tmp_path / "run", {"evaluate__pairs": "null", "data__workers": 0}
    command = lab.options(out, "fastclip-v3", **changed)
    code, lines = train(*command)
    trusted = out / "checkpoints" / "step-00000032"
    advice = f"fastclip train --from {trusted} --optim.lr 0.0005 --out {out}-2"
    assert code == 1
    assert lines.splitlines()[-1].startswith("fastclip train: After step 36 the model ")
    assert advice in lines.splitlines()[-1]
    assert not (out / "model").exists()
    code, lines = train(*command)  # the same command: the weights are named, not the rate
    assert code == 1
    assert f"{out / 'checkpoints' / 'step-00000036'} has weights that are not finite" in lines
    assert advice in lines
    assert main(["export", str(out), str(tmp_path / "model")]) == 1
    assert not (tmp_path / "model").exists()
    spoil.clear()
    assert train(*advice.split()[2:])[0] == 0
    assert (tmp_path / "run-2" / "model").is_dir()
