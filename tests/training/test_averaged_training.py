"""Training with `model.ema`: exact over ranks, unmoved by skipped steps; evaluations and exports use it."""

import json

import open_clip
import pytest
import torch
from PIL import Image

import fastclip
from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.run.verify import verify_run
from fastclip.training.evaluator import Evaluator
from fastclip.training.trainer import train as train_run
from fastclip.weight_average import WeightAverage
from tests.data.collections import png
from tests.ranks import run_ranks
from tests.training.runs import Lab, final_state, metrics
from tests.training.test_step import (
    Case,
    _poisoned,
    _step_without_reads,
    assert_equal_to_1e10,
    assert_same_bits,
    batch,
    build,
    changed,
    everything,
    train,
    write_models,
)

ALONE = World(0, 1, 0, torch.device("cpu"), None)
DECAY = 0.6
TRAINED = [
    Case("fastclip-v3"),
    Case("fastclip-v2", 3),
    Case("openclip", 2),
    Case("fastclip-v3", freeze="image"),
]
POISONED = [Case("fastclip-v3", 3, precision="float32"), Case("openclip", precision="float32")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def averaged(models, case, world=ALONE):
    train_step = build(models, case, world)
    train_step.average = WeightAverage(train_step.towers.named_parameters(), DECAY)
    return train_step


# A step


@pytest.fixture(scope="module")
def two_ranks(models):
    return run_ranks(_two_ranks, 2, models, timeout=240)


def _two_ranks(rank, size, models):
    world = World(rank, size, rank, torch.device("cpu"), None)
    return {
        "trained": {case: train(averaged(models, case, world), world) for case in TRAINED},
        "poisoned": {case: _poisoned(averaged(models, case, world), 1, world) for case in POISONED},
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_two_ranks_with_micro_batches_have_the_average_of_one_without(case, models, two_ranks):
    alone = averaged(models, case._replace(micro=None))
    start = everything(alone)
    expected = train(alone)
    first, second = (rank["trained"][case] for rank in two_ranks)
    assert_equal_to_1e10(first, expected)
    assert_same_bits(first, second)
    averages = {name for name in expected if name.startswith("ema.")}
    trained = {f"ema.{name}" for name, p in alone.towers.named_parameters() if p.requires_grad}
    assert averages == trained
    assert any("visual" in name for name in averages) == (case.freeze == "none")
    assert len(changed(start, expected, "ema.")) > 10


@pytest.mark.slow
@pytest.mark.parametrize("case", POISONED, ids=str)
def test_a_step_with_a_nan_does_not_move_the_average_on_any_rank(case, two_ranks):
    for rank in two_ranks:
        found = rank["poisoned"][case]
        assert found["finite"] == [False, True]
        assert found["changed"] == []
        assert any(name.startswith("ema.") for name in found["end"])
    assert_same_bits(*(rank["poisoned"][case]["end"] for rank in two_ranks))


def test_averages_are_saved_and_restored_with_the_rest(models):
    case = Case("fastclip-v3", precision="float32")
    saved, other = averaged(models, case), averaged(models, case)
    train(saved, steps=range(2))
    train(other, steps=[7])
    tensors = {name: tensor.clone() for name, tensor in saved.tensors().items()}
    other.load_state(tensors, json.loads(json.dumps(saved.metadata())))
    assert_same_bits(train(saved, steps=[2]), train(other, steps=[2]))
    assert changed(tensors, everything(saved), "ema.")


def test_weights_are_trained_as_without_an_average(models):
    case = Case("fastclip-v3", precision="float32")
    plain = train(build(models, case))
    found = train(averaged(models, case))
    assert_same_bits({name: found[name] for name in plain}, plain)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_step_with_an_average_reads_nothing_from_the_device(optimizer, models, monkeypatch):
    train_step = averaged(models, Case("fastclip-v3", 4, optimizer=optimizer, precision="float32"))
    before = everything(train_step)
    with monkeypatch.context() as patch:
        _step_without_reads(train_step, patch)
    assert changed(before, everything(train_step), "ema.")


def test_inside_averaged_the_towers_encode_with_the_averages(models):
    train_step = averaged(models, Case("fastclip-v3", precision="float32"))
    train(train_step)
    images, tokens, _ = batch(0)
    with torch.no_grad():
        raw = train_step.towers(images, tokens)[0]
        with train_step.averaged():
            mean = train_step.towers(images, tokens)[0]
        again = train_step.towers(images, tokens)[0]
    assert torch.equal(raw, again)
    assert not torch.allclose(raw, mean, atol=1e-4)


# A run


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), epochs=2)


@pytest.fixture(scope="module")
def runs(lab):
    """One run with an average that is evaluated, one without evaluations, and one without an average."""

    def run(name, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])
            patch.setattr(Evaluator, "measure", measure)
            options = {"evaluate__pairs": "null", "optim__lr": 0.01} | options
            train_run(resolve(parse(lab.options(lab.folder / name, "fastclip-v3", **options))), ALONE)
        return lab.folder / name

    measured, unwrapped = [], Evaluator.measure

    def measure(evaluator, *args):
        weights = {f"ema.{name}": p.clone() for name, p in evaluator.encoder.model.named_parameters()}
        measured.append(weights)
        return unwrapped(evaluator, *args)

    folders = {
        "averaged": run("averaged", model__ema=0.9, evaluate__pairs=lab.held_out, evaluate__every_epochs=1),
        "unseen": run("unseen", model__ema=0.9),
        "plain": run("plain"),
    }
    return folders | {"measured": measured}


@pytest.mark.slow
def test_evaluations_use_the_average_and_change_no_bit_of_the_run(runs):
    found = final_state(runs["averaged"])
    assert_same_bits(found, final_state(runs["unseen"]))
    plain = final_state(runs["plain"])
    assert_same_bits({name: found[name] for name in plain}, plain)
    assert [r for r in metrics(runs["averaged"]) if "evaluation" not in r] == metrics(runs["plain"])
    averages = {name: tensor for name, tensor in found.items() if name.startswith("ema.")}
    assert len(runs["measured"]) == 3
    last = runs["measured"][-1]
    assert_same_bits({name: last[name] for name in averages}, averages)


@pytest.mark.slow
def test_the_averages_are_loaded_and_exported(runs, tmp_path):
    run, state = runs["averaged"], final_state(runs["averaged"])
    loaded, exported = fastclip.load(run), fastclip.load(run / "model")
    weights = loaded.towers.state_dict()
    averages = {name.removeprefix("ema."): t for name, t in state.items() if name.startswith("ema.")}
    assert_same_bits({name: weights[name] for name in averages}, averages)
    assert all(torch.equal(exported.towers.state_dict()[name], averages[name]) for name in averages)
    assert not torch.equal(averages["clip.text_projection"], state["model.clip.text_projection"])

    assert main(["export", str(run), str(tmp_path / "again")]) == 0
    file = tmp_path / "image.png"
    file.write_bytes(png(3))
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'again'}")
    with torch.no_grad():
        image = theirs.eval().encode_image(preprocess(Image.open(file))[None], normalize=True)
    torch.testing.assert_close(loaded.encode_image(file), image)
    assert "moving average, decay 0.9 " in (run / "model" / "README.md").read_text()
    assert {finding.state for finding in verify_run(run)} == {"fine"}
