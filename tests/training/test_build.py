"""Building the parts of a run from a config; combinations that do not work are refused with advice."""

import json
import re
from math import ceil

import pytest
import torch

from fastclip.config.options import (
    BatchConfig,
    DataConfig,
    LossOptions,
    ModelConfig,
    OptimOptions,
    PatchDropout,
    TrainConfig,
)
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.data.pairs import ExtraCaptions, SourceError
from fastclip.distributed.agreement import RanksDiffer
from fastclip.distributed.world import World
from fastclip.errors import OptionError, UnknownOption
from fastclip.rate_schedule import RateSchedule
from fastclip.training import build as build_module
from fastclip.training import training_pairs as pairs_module
from fastclip.training.build import (
    build_step,
    build_towers,
    rank_0_first,
    rate_schedule,
    warmup_steps,
)
from fastclip.training.step import OpenClipLoss
from fastclip.training.training_pairs import open_training_pairs
from tests.data.collections import png
from tests.ranks import run_ranks
from tests.text_models import write_config
from tests.towers.encoders import WORDS, write_encoder
from tests.training.runs import collection
from tests.training.test_step import COCA

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, CPU, None)
TEXT = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
VIT = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 64, "image_size": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, vision in (("vit", VIT), ("resnet", RESNET)):
        config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": TEXT}
        (folder / f"build-{name}.json").write_text(json.dumps(config))
    return {name: str(folder / f"build-{name}.json") for name in ("vit", "resnet")}


@pytest.fixture(scope="module")
def towers(models):
    return build_towers(config(model=ModelConfig(models["vit"])), ALONE)


@pytest.fixture(scope="module")
def pairs_24(tmp_path_factory):
    return str(collection(tmp_path_factory.mktemp("pairs"), 24))


def config(train=None, size=8, micro=None, augment=None, **others):
    data = DataConfig(train=train, augment=augment or {}, workers=0)
    return resolve(TrainConfig(data=data, batch=BatchConfig(size, micro), **others))


# The pairs


@pytest.mark.parametrize(("size", "ranks", "works"), [(10, 4, 8), (9, 2, 8), (7, 3, 6), (2, 4, 4)])
def test_a_batch_that_is_not_divisible_by_the_ranks_is_refused_with_one_that_is(size, ranks, works, towers):
    with pytest.raises(OptionError) as caught:
        open_training_pairs(config("never-opened.tar", size), towers, World(0, ranks, 0, CPU, None))
    error = caught.value
    assert (error.option, error.value, error.example) == ("batch.size", size, works)
    assert str(ranks) in error.rule


@pytest.mark.slow
def test_a_collection_smaller_than_a_batch_is_refused_and_the_advice_works(tmp_path, pairs_24, towers):
    with pytest.raises(OptionError) as caught:
        open_training_pairs(config(pairs_24, 25), towers, ALONE)
    assert (caught.value.option, caught.value.value, caught.value.example) == ("batch.size", 25, 6)
    assert "24" in caught.value.rule
    for size in (24, 6):
        assert open_training_pairs(config(pairs_24, size), towers, ALONE).order.batch == size
    few = str(collection(tmp_path, 3))
    with pytest.raises(OptionError) as caught:
        open_training_pairs(config(few), towers, ALONE)
    assert (caught.value.option, caught.value.value, caught.value.example) == ("batch.size", 8, 2)


@pytest.mark.parametrize(("rank", "warnings"), [(0, [ExtraCaptions(2, 3)]), (1, [])])
def test_several_captions_are_announced_once_by_rank_0(rank, warnings, towers, tmp_path, caplog):
    for i, caption in enumerate(("a cat\na pet\nan animal", "a dog", "a bird\na crow")):
        (tmp_path / f"{i}.png").write_bytes(png(i))
        (tmp_path / f"{i}.txt").write_text(caption)

    open_training_pairs(config(str(tmp_path), 2), towers, World(rank, 2, rank, CPU, None))
    mine = [record for record in caplog.records if record.name == pairs_module.__name__]
    assert [record.args[0] for record in mine if record.levelname == "WARNING"] == warnings


def test_training_data_is_required(towers):
    with pytest.raises(OptionError) as caught:
        open_training_pairs(config(), towers, ALONE)
    assert (caught.value.option, caught.value.value) == ("data.train", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scenes", "emoji", "icons"])
def test_missing_data_of_a_recipe_can_be_downloaded(name, towers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as caught:
        open_training_pairs(resolve(parse(["--config", name])), towers, ALONE)
    assert caught.value.path.startswith(f"data/{name}/train")
    assert f"`fastclip data get {name}`" in caught.value.problem


def test_existing_data_that_cannot_be_read_is_not_downloaded_again(towers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/scenes/train").mkdir(parents=True)
    with pytest.raises(SourceError) as caught:
        open_training_pairs(resolve(parse(["--config", "scenes"])), towers, ALONE)
    assert "data get" not in str(caught.value)


@pytest.mark.parametrize("path", ["data/mine/train", "elsewhere/scenes/x.tar", "scenes"])
def test_downloads_are_only_suggested_for_data_of_recipes(path, towers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as caught:
        open_training_pairs(config(path), towers, ALONE)
    assert caught.value.path == path
    assert "data get" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suggestions"),
    [
        ("scal", ["data.augment.scale"]),
        ("colour_jitter", ["data.augment.color_jitter"]),
        ("qqq", []),
        ("image_size", []),  # the model's, as are mean and std
        ("std", []),
    ],
)
def test_an_unknown_augmentation_suggests_the_nearest_or_lists_all(name, suggestions, pairs_24, towers):
    with pytest.raises(UnknownOption) as caught:
        open_training_pairs(config(pairs_24, augment={name: 1}), towers, ALONE)
    assert (caught.value.option, caught.value.suggestions) == (f"data.augment.{name}", suggestions)
    assert {"scale", "use_timm"} <= set(re.findall(r"\w+", caught.value.otherwise))


def test_augmentation_follows_the_model_and_the_config(pairs_24, towers):
    augment = open_training_pairs(
        config(pairs_24, augment={"scale": [0.5, 1.0]}), towers, ALONE
    ).decoder.augment
    assert (augment.image_size, augment.mean, augment.std) == (16, towers.mean, towers.std)
    assert augment.scale == (0.5, 1.0)


def test_the_batches_of_the_ranks_are_slices_of_the_global_batch(pairs_24, models):
    # a model of the package, whose vocabulary is the tokenizer's
    settings = config(pairs_24, model=ModelConfig("vit-scenes"))
    pairs = open_training_pairs(settings, build_towers(settings, ALONE), ALONE)
    whole = list(pairs.loader(settings.data, ALONE, 1, 3))
    halves = [list(pairs.loader(settings.data, World(r, 2, r, CPU, None), 1, 3)) for r in (0, 1)]
    assert [batch.step for batch in whole] == [1, 2]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert torch.equal(batch.index, torch.cat([first.index, second.index]))
        assert torch.equal(batch.images, torch.cat([first.images, second.images]))
        assert torch.equal(batch.tokens, torch.cat([first.tokens, second.tokens]))


# BatchNorm and micro-batches


def test_micro_batches_are_refused_if_they_change_batch_norm_statistics(models, pairs_24):
    settings = config(pairs_24, micro=4, model=ModelConfig(models["resnet"]))
    with pytest.raises(OptionError) as caught:
        open_training_pairs(settings, build_towers(settings, ALONE), ALONE)
    assert (caught.value.option, caught.value.value) == ("batch.micro", 4)
    assert "--model.batch_norm frozen" in caught.value.advice


@pytest.mark.parametrize(
    ("micro", "model"),
    [(None, {}), (8, {}), (4, {"batch_norm": "frozen"}), (4, {"freeze": "image"})],
)
def test_whole_batches_and_frozen_statistics_work_with_batch_norm(micro, model, models, pairs_24):
    settings = config(pairs_24, micro=micro, model=ModelConfig(models["resnet"], **model))
    assert len(open_training_pairs(settings, build_towers(settings, ALONE), ALONE).manifest) == 24


@pytest.mark.slow
def test_frozen_statistics_make_accumulation_exact_for_a_resnet(models):
    weights = {}
    for micro in (None, 3):
        frozen = ModelConfig(models["resnet"], batch_norm="frozen")
        settings = config(micro=micro, precision="float64", model=frozen)
        towers = build_towers(settings, ALONE)
        train_step = build_step(settings, towers, 24, ALONE)
        draw = torch.Generator().manual_seed(0)
        images, tokens = torch.randn(8, 3, 64, 64, generator=draw), torch.arange(1, 65).reshape(8, 8) % 64
        for step in range(2):
            train_step.update(step, images, tokens, torch.arange(8))
        weights[micro] = towers.state_dict()
    for name, tensor in weights[None].items():
        torch.testing.assert_close(weights[3][name], tensor, rtol=1e-10, atol=1e-10)


# The training step


def train_step_of(models, **others):
    settings = config(model=ModelConfig(models["vit"]), **others)
    return build_step(settings, build_towers(settings, ALONE), 24, ALONE)


def test_tf32_needs_a_gpu(models):
    with pytest.raises(OptionError) as caught:
        train_step_of(models, precision="tf32")
    assert (caught.value.option, caught.value.value) == ("precision", "tf32")


def rates(train_step):
    return {group["role"]: group["lr"] for group in train_step.stepper.optimizer.param_groups}


@pytest.mark.parametrize(("reference", "scale"), [(None, 1.0), (8, 1.0), (2, 4.0), (32, 0.25)])
def test_rates_grow_in_proportion_to_the_batch(reference, scale, models):
    def build_with(algorithm):
        settings = TrainConfig(
            algorithm=algorithm,
            model=ModelConfig(models["vit"]),
            batch=BatchConfig(8, reference=reference),
            loss=LossOptions(tau_lr=1e-3) if algorithm != "openclip" else LossOptions(),
            optim=OptimOptions(lr=1e-2),
        )
        settings = resolve(settings)
        return build_step(settings, build_towers(settings, ALONE), 24, ALONE)

    model, tau = pytest.approx(1e-2 * scale), pytest.approx(1e-3 * scale)
    assert rates(build_with("fastclip-v3")) == {"decayed": model, "plain": model, "tau": tau}
    assert rates(build_with("openclip")) == {"decayed": model, "plain": model, "scalar": model}
    individual = build_with("fastclip-v2")
    assert rates(individual) == {"decayed": model, "plain": model}
    assert individual.loss.settings.tau_lr == tau


@pytest.mark.parametrize("algorithm", ["fastclip-v0", "fastclip-v3", "openclip", "siglip"])
def test_the_temperature_is_a_parameter_of_the_loss_or_the_model(algorithm, models):
    train_step = train_step_of(models, algorithm=algorithm)
    peer = algorithm in ("openclip", "siglip")
    assert isinstance(train_step.loss, OpenClipLoss) == peer
    assert train_step.towers.clip.logit_scale.requires_grad == peer
    assert (train_step.towers.clip.logit_bias is not None) == (algorithm == "siglip")
    assert (train_step.stepper.slow_tau is not None) == (algorithm == "fastclip-v3")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "float64"])
def test_precision_determines_weights_autocast_and_scaler(precision, models):
    train_step = train_step_of(models, algorithm="fastclip-v2", precision=precision)
    dtype = torch.float64 if precision == "float64" else torch.float32
    assert {p.dtype for p in train_step.towers.parameters()} == {dtype}
    assert train_step.loss.sample_state.columns["tau"].dtype == dtype
    low = precision if precision in ("bfloat16", "float16") else None
    assert train_step.autocast == (getattr(torch, low) if low else None)
    assert (train_step.stepper.scaler is not None) == (precision == "float16")
    assert torch.get_default_dtype() == torch.float32


def test_initial_weights_depend_on_the_seed_alone(models):
    def weights(**others):
        return build_towers(config(model=ModelConfig(models["vit"]), **others), ALONE).state_dict()

    def same(one, other):
        return all(torch.equal(one[name], other[name]) for name in one if name != "clip.logit_scale")

    first = weights(seed=1)
    assert same(first, weights(seed=1, size=16, algorithm="openclip"))
    assert not same(first, weights(seed=2))


# Parameters that no feature depends on


def test_cocas_decoder_is_frozen_with_one_line_and_nothing_else_changes(tmp_path, caplog):
    path = tmp_path / "build-coca.json"
    path.write_text(json.dumps({"embed_dim": 16} | COCA))
    caplog.set_level("INFO", "fastclip.training.build")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    towers = build_towers(config(model=ModelConfig(str(path))), ALONE)
    assert torch.equal(torch.get_rng_state(), before)
    frozen = {name for name, p in towers.named_parameters() if not p.requires_grad}
    decoder = {name for name, _ in towers.named_parameters() if name.startswith("clip.text_decoder.")}
    assert len(decoder) > 20
    assert frozen == decoder | {"clip.logit_scale"}
    assert all(p.grad is None for p in towers.parameters())
    assert towers.training
    (record,) = [record for record in caplog.records if record.name == build_module.__name__]
    assert "text_decoder.resblocks" in record.args[1]


@pytest.mark.parametrize("model", ["vit", "resnet"])
@pytest.mark.parametrize("algorithm", ["fastclip-v3", "openclip"])
def test_models_that_use_all_parameters_train_all(model, algorithm, models, caplog):
    caplog.set_level("INFO", "fastclip.training.build")
    towers = build_towers(config(model=ModelConfig(models[model]), algorithm=algorithm), ALONE)
    frozen = {name for name, p in towers.named_parameters() if not p.requires_grad}
    assert frozen == (set() if algorithm == "openclip" else {"clip.logit_scale"})
    assert [record for record in caplog.records if record.name == build_module.__name__] == []
    statistics = [buffer for name, buffer in towers.named_buffers() if name.endswith("running_mean")]
    assert not any(mean.any() for mean in statistics)  # as they started


def test_a_hugging_face_tower_and_gradient_checkpointing_work_too(tmp_path):
    settings = ModelConfig(write_config(tmp_path, "bert"), gradient_checkpointing=True)
    towers = build_towers(config(model=settings), ALONE)
    assert {name for name, p in towers.named_parameters() if not p.requires_grad} == {"clip.logit_scale"}


# Steps


@pytest.mark.parametrize(
    ("epochs", "pairs", "batch", "steps"),
    [
        (1, 64, 8, 8),
        (3, 65, 8, 25),
        (2, 67, 8, 17),
        (0.5, 64, 8, 4),
        (2.5, 100, 8, 32),
        (0.01, 64, 8, 1),
        (1, 300, 256, 2),
        (0.1, 30, 3, 1),  # 0.1 · 30 is a little more than 3 in floating point
        (20, 14_606, 32, 9129),
    ],
)
def test_a_run_sees_every_pair_in_each_epoch(epochs, pairs, batch, steps):
    assert config(size=batch, epochs=epochs).total_steps(pairs) == steps


@pytest.mark.parametrize("steps", [1, 9, 11, 250, 99_999, 1_000_000])
def test_warm_up_is_a_tenth_of_the_run_and_at_most_10000(steps):
    assert warmup_steps(None, steps) == min(10_000, ceil(steps / 10))


@pytest.mark.parametrize("warmup", [0, 1, 25])
def test_a_given_warm_up_is_used(warmup):
    assert warmup_steps(warmup, 50) == warmup


@pytest.mark.parametrize("warmup", [26, 50, 10_000])
def test_a_warm_up_meant_for_more_data_is_shortened_with_a_warning(warmup, caplog):
    assert warmup_steps(warmup, 50) == 5
    (warning,) = caplog.records
    assert warning.args == (f"{warmup:,}", "50", "5")


# Towers of several ranks


def build_on_a_rank(rank, world_size, folder):
    world = World(rank, world_size, rank, CPU, None)
    downloaded = folder / "downloaded"

    def build():
        existed = downloaded.exists()
        downloaded.touch()
        return existed

    def fail():
        raise OptionError("model.image", "timm:nothing", "is not a model of timm")

    found = rank_0_first(world, build)
    with pytest.raises(OptionError) as caught:
        rank_0_first(world, fail)
    model = ModelConfig("vit-scenes", text=f"hf:{folder / str(rank)}")
    with pytest.raises(RanksDiffer) as differ:
        build_towers(config(model=model), world)
    return found, caught.value.option, differ.value.name


@pytest.mark.slow
def test_rank_0_builds_first_and_all_ranks_need_the_same_tokenizer(tmp_path):
    write_encoder(tmp_path / "0")
    write_encoder(tmp_path / "1", words=[*WORDS[:-1], "other"])
    expected = ("model.image", "files of model.text")
    assert run_ranks(build_on_a_rank, 2, tmp_path) == [(False, *expected), (True, *expected)]


# The learning rates


def scheduled(models, until=1.0, warmup=None, **others):
    model = ModelConfig(models["vit"], patch_dropout=PatchDropout(0.5, until=until))
    return config(model=model, optim=OptimOptions(schedule="wsd", warmup=warmup), **others)


def test_a_prolonged_run_keeps_the_warm_up_and_the_whole_images_of_its_first_plan(models):
    """100 steps, of which 10 warm up; then 300. Images that are never whole stay so."""
    first, longer = scheduled(models, epochs=1), scheduled(models, epochs=3, planned_epochs=1)
    assert rate_schedule(first, 800, 100) == RateSchedule(4e-4, 10, 100, "wsd", 0.2)
    assert rate_schedule(longer, 800, 300) == RateSchedule(4e-4, 10, 300, "wsd", 0.2)
    for until, whole_from in ((1.0, 300), (0.9, 90)):
        prolonged = scheduled(models, until, epochs=3, planned_epochs=1)
        step = build_step(prolonged, build_towers(prolonged, ALONE), 800, ALONE)
        assert (step.whole_images_from, step.lr.total) == (whole_from, 300)


def test_a_warm_up_that_was_shortened_stays_shortened_and_is_reported_once(models, caplog):
    longer = scheduled(models, warmup=60, epochs=3, planned_epochs=1)
    step = build_step(longer, build_towers(longer, ALONE), 800, ALONE)
    assert step.lr.warmup == 10
    assert [record.args for record in caplog.records if "warmup" in record.msg] == [("60", "100", "10")]


def test_an_average_has_the_decay_that_was_asked_for_and_none_is_the_default(models, towers):
    asked = config(model=ModelConfig(models["vit"], ema=0.99))
    assert build_step(asked, build_towers(asked, ALONE), 800, ALONE).average.decay == 0.99
    assert build_step(config(model=ModelConfig(models["vit"])), towers, 800, ALONE).average is None
