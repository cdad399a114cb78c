"""batch.micro=auto finds what fits on every rank, changes nothing, and is kept when the run resumes."""

import json
import logging
from dataclasses import replace
from itertools import accumulate, chain
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip.config.options import BatchConfig, LossOptions, ModelConfig, PatchDropout, TrainConfig
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.data.decode import Augment, FastDecoder
from fastclip.data.patches import PatchChoice
from fastclip.distributed.world import World
from fastclip.run.folder import read_metadata
from fastclip.training import micro_batch, trainer
from fastclip.training.build import build_step, build_towers
from fastclip.training.micro_batch import MARGIN, find_micro_batch
from fastclip.training.out_of_memory import OutOfMemory
from fastclip.training.step import TrainStep
from fastclip.training.trainer import train as train_run
from tests.ranks import run_ranks
from tests.training.runs import Lab, assert_same_run, final_state, metrics

N, B, STEPS = 40, 16, 3
CPU = torch.device("cpu")
VISION = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16, "patch_dropout": 0.5}
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 64, "image_size": 64}
TEXT = {"context_length": 12, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
ALGORITHMS = ["fastclip-v2", "fastclip-v3", "scent", "mbcl", "openclip", "siglip"]


class SmallDevice(World):
    """A world whose device has this much memory, although it is a CPU."""

    device_bytes = 1 << 20


SMALL = SmallDevice(0, 1, 0, CPU, None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def write_models(folder):
    for name, vision in (("vit", VISION), ("resnet", RESNET)):
        config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": TEXT}
        (folder / f"micro-{name}.json").write_text(json.dumps(config))
    return {name: str(folder / f"micro-{name}.json") for name in ("vit", "resnet")}


def settings(models, micro="auto", model="vit", batch=B, loss=None, freeze="none", **others):
    others = {"algorithm": "fastclip-v3"} | others
    return resolve(
        TrainConfig(
            model=ModelConfig(models[model], freeze=freeze),
            batch=BatchConfig(batch, micro),
            loss=LossOptions(**loss or {}),
            **others,
        )
    )


def limited(towers, most):
    """The towers on a device that holds the graph of `most` pairs; no graph takes no memory."""
    forward = towers.forward

    def forward_if_it_fits(images, *args, **kwargs):
        if torch.is_grad_enabled() and len(images) > most:
            raise torch.OutOfMemoryError("Tried to allocate 3.14 GiB.")
        return forward(images, *args, **kwargs)

    towers.forward = forward_if_it_fits
    return towers


def build(config, most, world=SMALL):
    return build_step(config, limited(build_towers(config, world), most), N, world)


def train(train_step, world=SMALL):
    b = B // world.size
    rows = slice(world.rank * b, (world.rank + 1) * b)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        images = torch.randn(B, 3, 16, 16, generator=draw)
        tokens = torch.randint(1, 63, (B, 12), generator=draw)
        index = torch.randperm(N, generator=draw)[:B]
        train_step.update(step, images[rows], tokens[rows], index[rows], None, [12] * b)
    return train_step.tensors() if world.size == 1 else train_step.towers.state_dict()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# The size


@pytest.mark.parametrize(
    ("batch", "most", "expected"),
    [(16, 99, 16), (16, 16, 16), (16, 15, 8), (16, 7, 4), (16, 3, 2), (16, 1, 1), (6, 5, 3), (6, 2, 2)],
)
def test_the_batch_is_halved_until_it_fits(batch, most, expected, models, caplog):
    caplog.set_level(logging.INFO, logger="fastclip")
    assert build(settings(models, batch=batch), most).micro == expected
    [line] = [record.message for record in caplog.records if "batch.micro=auto" in record.message]
    assert f"{expected} of {batch} pairs" in line


@pytest.mark.parametrize(
    ("algorithm", "freeze"), [("fastclip-v3", "image"), ("fastclip-v2", "text"), ("openclip", "image")]
)
def test_it_is_found_with_a_frozen_tower_too(algorithm, freeze, models):
    assert build(settings(models, algorithm=algorithm, freeze=freeze), 5).micro == 4


def test_if_not_even_one_pair_fits_the_error_says_what_was_tried_and_what_is_left(models):
    with pytest.raises(OutOfMemory) as caught:
        build(settings(models), 0)
    error = caught.value
    assert "1 at a time" in error.tried
    assert "16 pairs" in error.tried
    assert not any("--batch.micro" in advice for advice in error.advice)
    assert error.advice[0] == "--precision bfloat16"
    assert error.reason == "Tried to allocate 3.14 GiB."


def test_other_errors_are_not_taken_for_a_lack_of_memory(models):
    towers = build_towers(settings(models), SMALL)
    towers.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        build_step(settings(models), towers, N, SMALL)


def test_on_a_cpu_it_is_the_whole_batch(models, caplog):
    caplog.set_level(logging.INFO, logger="fastclip")
    assert build(settings(models), most=1, world=World.alone()).micro == B
    assert any("CPU" in record.message for record in caplog.records)


def test_with_batch_norm_it_is_the_whole_batch_without_a_trial(models):
    train_step = build(settings(models, model="resnet"), most=0)
    assert train_step.micro == B
    assert all(buffer == 0 for name, buffer in train_step.towers.named_buffers() if "num_batches" in name)


# The trial


class Imagined(SmallDevice):
    """Ranks that do not exist: a collective would fail."""

    def gather(self, value):
        return [value] * self.size


@pytest.mark.parametrize("algorithm", ["fastclip-v3", "fastclip-v2"])
@pytest.mark.parametrize("negatives", ["all", "distinct"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_loss_of_a_trial_is_that_of_the_global_batch(algorithm, negatives, ranks, models, monkeypatch):
    config = settings(models, algorithm=algorithm, loss={"negatives": negatives})
    seen, one_step = [], micro_batch.one_step

    def recorded(settings, features, *others):
        seen.append((len(features.image_bd), len(features.text_Bd)))
        return one_step(settings, features, *others)

    monkeypatch.setattr(micro_batch, "one_step", recorded)
    train_step = build(settings(models, None, algorithm=algorithm), most=2)
    assert find_micro_batch(train_step, config, Imagined(1, ranks, 1, CPU, None)) == 2
    assert set(seen) == {(B // ranks, B)}


@pytest.mark.parametrize(
    ("algorithm", "function", "logits"),
    [
        ("openclip", (micro_batch, "cross_entropy"), [(B // 4, B)] * 2),
        ("siglip", (torch.nn.functional, "logsigmoid"), [(B // 4, B // 4)] * 4),
    ],
)
def test_the_logits_of_open_clips_losses_are_those_of_the_global_batch(
    algorithm, function, logits, models, monkeypatch
):
    seen, compute = [], getattr(*function)

    def recorded(logits, *others):
        seen.append(tuple(logits.shape))
        return compute(logits, *others)

    config = settings(models, algorithm=algorithm)
    train_step = build(settings(models, None, algorithm=algorithm), most=99)
    monkeypatch.setattr(*function, recorded)
    assert find_micro_batch(train_step, config, Imagined(1, 4, 1, CPU, None)) == B // 4
    assert seen == logits


def test_images_have_the_size_of_the_model_and_captions_its_whole_context(models):
    towers = build_towers(settings(models), SMALL)
    seen, forward = [], towers.forward

    def recorded(images, tokens, on_image_features=None, lengths=None, patches=None):
        seen.append((images.shape, tokens.shape, lengths, patches))
        return forward(images, tokens, on_image_features, lengths, patches)

    towers.forward = recorded
    build_step(settings(models), towers, N, SMALL)
    assert seen == [((B, 3, 16, 16), (B, 12), [12] * B, None)]


def test_a_trial_has_the_images_of_the_loader(models, monkeypatch):
    """As they come from the decoder: they stay on the device while micro-batches of them are normalised."""
    given, backward = [], TrainStep.backward
    monkeypatch.setattr(
        TrainStep,
        "backward",
        lambda self, step, inputs, begun: given.append(inputs.images) or backward(self, step, inputs, begun),
    )
    towers = limited(build_towers(settings(models), SMALL), 4)
    build_step(settings(models), towers, N, SMALL, FastDecoder(Augment(image_size=16)))
    assert [(images.shape, images.dtype) for images in given] == [((B, 16, 16, 3), torch.uint8)] * 3


@pytest.mark.parametrize(("until", "kept"), [(0.9, None), (1.0, 2)])
def test_images_are_whole_unless_every_step_drops_patches(until, kept, models):
    towers = SimpleNamespace(image_size=16, context_length=12, unpadded=None)
    towers.keep_patches = SimpleNamespace(choice=PatchChoice(4, 2))
    config = settings(models)
    config = replace(config, model=replace(config.model, patch_dropout=PatchDropout(0.5, until)))
    train_step = SimpleNamespace(towers=towers, decoder=None, world=World.alone())
    patches = micro_batch.largest_inputs(train_step, config, B).patches
    assert (None if patches is None else patches.shape) == (None if kept is None else (B, kept))


def peak_bytes(run):
    """The most memory that tensors hold at a time, besides those that exist before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [None, 16])
@pytest.mark.parametrize("algorithm", ["fastclip-v2", "fastclip-v3", "openclip", "siglip"])
def test_a_trial_needs_as_much_memory_as_a_step(algorithm, micro, models, monkeypatch):
    monkeypatch.setattr(micro_batch, "MARGIN", 0)
    config = settings(models, micro, batch=128, algorithm=algorithm)
    train_step = build_step(config, build_towers(config, SMALL), 128, SMALL)

    def step():
        images, tokens = torch.randn(128, 3, 16, 16), torch.ones(128, 12, dtype=torch.int64)
        train_step.update(0, images, tokens, torch.arange(128), None, [12] * 128)
        train_step.stepper.optimizer.zero_grad(set_to_none=True)

    step()
    trial = peak_bytes(lambda: micro_batch._try(train_step, config, 128, SMALL))
    micro_batch.free(train_step)
    assert trial == pytest.approx(peak_bytes(step), rel=0.02)


class Allocations(TorchDispatchMode):
    """Records the bytes of uninitialized tensors."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func is torch.ops.aten.empty.memory_format:
            self.sizes.append(out.nbytes)
        return out


def test_a_trial_occupies_the_margin_too(models):
    with Allocations() as allocations:
        build(settings(models), most=B)
    assert int(MARGIN * SMALL.device_bytes) in allocations.sizes


def everything(train_step):
    """Every tensor of a run and its random state, copied."""
    tensors = {
        **train_step.tensors(),
        **dict(train_step.towers.named_buffers()),
        "random": torch.get_rng_state(),
    }
    parameters = chain(train_step.towers.parameters(), train_step.loss.parameters())
    assert all(parameter.grad is None for parameter in parameters)
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("algorithm", "precision"),
    [(name, "float32") for name in ALGORITHMS]
    + [("fastclip-v3", name) for name in ("bfloat16", "float16", "float64")],
)
def test_the_trials_change_no_tensor_and_no_random_state(algorithm, precision, models):
    config = settings(models, algorithm=algorithm, precision=precision)
    train_step = build(settings(models, None, algorithm=algorithm, precision=precision), most=5)
    torch.rand(1)  # the state is not one that a seed has
    before, metadata = everything(train_step), train_step.metadata()
    assert find_micro_batch(train_step, config, SMALL) == 4
    assert_equal(before, everything(train_step))
    assert metadata == train_step.metadata()


@pytest.mark.parametrize(("most", "micro"), [(99, None), (5, 4)])
@pytest.mark.parametrize("algorithm", ["fastclip-v2", "fastclip-v3", "openclip"])
def test_a_run_with_auto_equals_one_with_the_size_that_it_finds(algorithm, most, micro, models):
    found, given = (train(build(settings(models, m, algorithm=algorithm), most)) for m in ("auto", micro))
    assert_equal(found, given)


# Several ranks


def train_on_ranks(rank, size, models):
    """The sizes found, and the weights after training with them and with given ones."""
    world = SmallDevice(rank, size, rank, CPU, dist.group.WORLD)
    most = [6, 2][rank]
    sizes, weights = {}, {}
    for algorithm in ("fastclip-v2", "openclip"):
        train_step = build(settings(models, algorithm=algorithm), most, world)
        sizes[algorithm] = train_step.micro
        given = build(settings(models, 2, algorithm=algorithm), most, world)
        weights[algorithm] = train(train_step, world), train(given, world)
    with pytest.raises(OutOfMemory):
        build(settings(models), [8, 0][rank], world)
    return sizes, weights


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_with_different_limits_agree_on_the_smaller_size_and_train_as_with_it(tmp_path):
    for sizes, weights in run_ranks(train_on_ranks, 2, write_models(tmp_path)):
        assert sizes == {"fastclip-v2": 2, "openclip": 2}
        for found, given in weights.values():
            assert_equal(found, given)


# Runs


class Interrupted(Exception):
    """What ends a run in the middle."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train runs of 6 steps, saved every 2; `most` pairs fit, and `stop` is the step that fails."""
    lab = Lab(tmp_path / "lab", epochs=1)
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])

    def train(out, most, stop=None, world=SMALL, **changed):
        changed = {"evaluate__pairs": "null", "checkpoint__every_steps": 2, "batch__micro": "auto"} | changed
        config = resolve(parse(lab.options(tmp_path / out, "fastclip-v3", **changed)))

        def build_limited(config, world, resumed):
            return limited(build_towers(config, world, resumed), most)

        def stop_at(self, result, *others):
            if self.step == stop:
                raise Interrupted
            return record(self, result, *others)

        with monkeypatch.context() as patch:
            record = trainer.Trainer._record
            patch.setattr(trainer, "build_towers", build_limited)
            patch.setattr(trainer.Trainer, "_record", stop_at)
            if stop is None:
                return train_run(config, world)
            with pytest.raises(Interrupted):
                train_run(config, world)

    return train


@pytest.mark.slow
def test_a_run_that_fits_equals_one_without_the_option(run, tmp_path):
    run("auto", most=99)
    run("whole", most=99, batch__micro="null")
    assert_equal(final_state(tmp_path / "auto"), final_state(tmp_path / "whole"))
    assert metrics(tmp_path / "auto") == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_a_resumed_run_uses_the_size_in_its_checkpoint_and_ends_with_the_same_bits(run, tmp_path):
    run("resumed", most=5, stop=3)
    saved = read_metadata(tmp_path / "resumed" / "checkpoints" / "last")
    assert (saved["micro"]["size"], saved["micro"]["ranks"]) == (4, 1)
    assert run("resumed", most=99).train_step.micro == 4  # a search would find 16
    run("whole", most=5)
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


class LargerDevice(World):
    """As SmallDevice, with twice the memory."""

    device_bytes = 1 << 21


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"world": LargerDevice.alone()}, {"model__gradient_checkpointing": "true"}],
    ids=["device", "checkpointing"],
)
def test_a_run_resumed_with_other_memory_searches_again(changed, run):
    run("resumed", most=5, stop=3)
    assert run("resumed", most=9, **changed).train_step.micro == 8


@pytest.mark.slow
def test_a_size_that_was_given_is_not_taken_for_one_that_was_found(run):
    run("resumed", most=16, stop=3, batch__micro="2")
    assert run("resumed", most=5).train_step.micro == 4
