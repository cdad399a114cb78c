"""The state of a training step is saved and restored bit for bit, and training continues identically."""

import json
from math import exp, log

import pytest
import torch
from torch import nn

from fastclip.errors import InputError
from tests.training.test_step import Case, N, batch, build, everything, write_models

ROUND_TRIPS = [
    Case(algorithm, optimizer=optimizer, precision="float32")
    for algorithm in ("fastclip-v2", "fastclip-v3", "openclip")
    for optimizer in ("adamw", "lamb", "sgd", "lion")
]
ROUND_TRIPS += [Case(algorithm, precision="float16") for algorithm in ("fastclip-v2", "openclip")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def make(models, case):
    train_step = build(models, case)
    if train_step.stepper.scaler is not None:  # one whose scale moves within this test
        train_step.stepper.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return train_step


def update(train_step, steps):
    for step in steps:
        assert train_step.update(step, *batch(step)).finite


def state(train_step):
    """Everything to restore: tensors and metadata, without gradients, which each step computes anew."""
    tensors = {name: t for name, t in everything(train_step).items() if not name.startswith("gradient.")}
    if train_step.loss.mean_tau() is not None:
        tensors["visited"] = train_step.loss.sample_state.visited.clone()
    return tensors, train_step.metadata()


def assert_same_state(one, other):
    (first, metadata), (second, other_metadata) = state(one), state(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert metadata == other_metadata


@pytest.mark.parametrize("case", ROUND_TRIPS, ids=str)
@pytest.mark.slow
def test_restored_state_is_identical_and_training_continues_bit_for_bit(case, models):
    saved, other = make(models, case), make(models, case)
    update(saved, range(2))
    update(other, [7])  # the overwritten state is not all zero
    tensors = {name: tensor.detach().clone() for name, tensor in saved.tensors().items()}
    metadata = json.loads(json.dumps(saved.metadata()))
    other.load_state(tensors, metadata)
    assert_same_state(saved, other)
    for step in (2, 3):
        update(saved, [step])
        update(other, [step])
        assert_same_state(saved, other)
    moved = [name for name, tensor in saved.tensors().items() if not torch.equal(tensor, tensors[name])]
    assert len(moved) > 10  # while the saved copies do not change


def test_the_scaler_is_in_the_metadata_and_its_count_continues(models):
    saved, other = (make(models, Case("fastclip-v3", precision="float16")) for _ in range(2))
    update(saved, range(2))
    assert saved.metadata()["scaler"]["scale"] == 1024
    other.load_state(dict(saved.tensors()), json.loads(json.dumps(saved.metadata())))
    update(other, [2])  # the third step in a row without an overflow
    assert other.metadata()["scaler"]["scale"] == 2048


def test_tensors_are_named_after_their_place_and_not_copied(models):
    train_step = build(models, Case("fastclip-v2", precision="float32"))
    tensors = train_step.tensors()
    weight = train_step.towers.clip.visual.conv1.weight
    assert tensors["model.clip.visual.conv1.weight"].data_ptr() == weight.data_ptr()
    moment = train_step.stepper.optimizer.state[weight]["exp_avg"]
    assert tensors["optimizer.model.clip.visual.conv1.weight.exp_avg"] is moment
    column = train_step.loss.sample_state.columns["tau"]
    assert tensors["loss.tau"].data_ptr() == column.data_ptr()
    assert tensors["loss.tau"].shape == (N, 2)


@pytest.mark.parametrize(("name", "own"), [("fastclip-v3", True), ("mbcl", True), ("openclip", False)])
def test_a_temperature_is_saved_once_with_its_moments(name, own, models):
    tensors = build(models, Case(name, precision="float32")).tensors()
    trained = "loss.log_scale" if own else "model.clip.logit_scale"
    assert f"optimizer.{trained}.exp_avg" in tensors
    scales = [key for key in tensors if key.startswith("optimizer.") and key.endswith("_scale.exp_avg")]
    assert scales == [f"optimizer.{trained}.exp_avg"]
    assert ("loss.log_scale" in tensors) == own


def test_the_state_of_another_optimizer_is_refused(models):
    saved = build(models, Case("fastclip-v3", optimizer="lion", precision="float32"))
    other = build(models, Case("fastclip-v3", optimizer="adamw", precision="float32"))
    with pytest.raises(InputError) as caught:
        other.load_state(dict(saved.tensors()), saved.metadata())
    assert caught.value.argument == "tensors"
    assert "exp_avg_sq" in caught.value.problem


# The temperature as one number


@pytest.mark.parametrize("name", ["fastclip-v1", "fastclip-v3", "mbcl"])
@pytest.mark.parametrize(("log_scale", "tau"), [(3.0, exp(-3.0)), (log(1e4), 0.01), (-0.5, 1.0)])
def test_a_global_temperature_is_clamped_to_its_limits(name, log_scale, tau, models):
    train_step = build(models, Case(name, precision="float64"))
    nn.init.constant_(train_step.loss.log_scale, log_scale)
    assert train_step.loss.mean_tau() == pytest.approx(tau, rel=1e-12)


def test_individual_temperatures_are_reported_as_their_mean(models):
    train_step = build(models, Case("fastclip-v2", precision="float64"))
    assert train_step.loss.mean_tau() == pytest.approx(0.03, rel=1e-12)
    column = train_step.loss.sample_state.columns["tau"]
    column[:N] = torch.linspace(0.02, 0.04, 2 * N, dtype=torch.float64).reshape(N, 2)
    column[N:] = 7.0  # the spare row belongs to no sample
    assert train_step.loss.mean_tau() == pytest.approx(0.03, rel=1e-12)
    column[0] += 0.01 * N
    assert train_step.loss.mean_tau() == pytest.approx(0.04, rel=1e-12)


@pytest.mark.parametrize("name", ["openclip", "siglip"])
def test_open_clips_losses_have_their_temperature_in_the_model(name, models):
    assert build(models, Case(name)).loss.mean_tau() is None
