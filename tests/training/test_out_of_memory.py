"""A lack of memory becomes one line with advice and exit code 1, wherever it happens, and all ranks end."""

import pytest
import torch

from fastclip.cli import main
from fastclip.config.options import BatchConfig, ModelConfig, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.evaluation.features import Encoder
from fastclip.model import TwoTowers
from fastclip.training import build
from fastclip.training.out_of_memory import (
    OutOfMemory,
    evaluation_too_large,
    explained,
    model_too_large,
    step_too_large,
)
from tests.training.runs import Lab, Run, metrics

TORCH_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB."


class A40(World):
    device_bytes = 48 << 30


def world(size=1):
    return A40(0, size, 0, torch.device("cuda", 0), None)


class Step:
    """The parts of a TrainStep that are looked at."""

    def __init__(self, micro, batch_norm=False):
        self.micro, self.towers = micro, self
        self.has_batch_norm_statistics = batch_norm


def advice(config, *, found=None, ranks=1, batch_norm=False):
    micro = found if config.batch.micro == "auto" else config.batch.micro
    return step_too_large(config, Step(micro, batch_norm), world(ranks), TORCH_SAYS).advice


def settings(micro=None, precision="float32", **model):
    return resolve(
        TrainConfig(
            precision=precision, batch=BatchConfig(256, micro), model=ModelConfig("ViT-B-32", **model)
        )
    )


# The advice


def test_the_advice_has_the_most_effective_option_first():
    assert advice(settings()) == [
        "--batch.micro auto",
        "--precision bfloat16",
        "--model.gradient_checkpointing true",
        "more ranks",
        "a smaller --batch.size",
    ]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_what_is_used_already_is_not_advised(precision):
    config = settings(precision=precision, gradient_checkpointing=True)
    assert advice(config) == ["--batch.micro auto", "more ranks", "a smaller --batch.size"]


@pytest.mark.parametrize(
    ("micro", "found", "ranks", "expected"),
    [
        (None, None, 4, "auto"),
        (256, None, 4, "auto"),  # the whole local batch of 64
        (64, None, 1, "32"),
        ("auto", 256, 1, "128"),  # a trial fitted, training did not
        ("auto", 16, 1, "8"),
        (3, None, 1, "1"),
    ],
)
def test_a_batch_that_is_split_already_is_to_be_split_in_half(micro, found, ranks, expected):
    assert advice(settings(micro), found=found, ranks=ranks)[0] == f"--batch.micro {expected}"


def test_where_a_batch_cannot_be_split_this_is_not_advised():
    assert advice(settings(), batch_norm=True)[0] == "--precision bfloat16"
    assert advice(settings(1))[0] == "--precision bfloat16"
    assert advice(settings(1))[-1] == "a smaller --model.name"


def test_the_error_names_what_was_tried_and_the_memory_of_the_device():
    error = step_too_large(settings(64), Step(64), world(2), TORCH_SAYS)
    for part in ("ViT-B-32", "float32", "128 pairs per rank", "64 at a time"):
        assert part in error.tried
    for part in ("cuda:0", "48.0 GiB", error.tried, *error.advice, TORCH_SAYS):
        assert part in str(error)
    assert len(str(error).splitlines()) == 1


def test_before_the_first_step_no_option_of_the_batch_is_advised():
    error = model_too_large(settings(), world(), TORCH_SAYS)
    assert not any("--batch" in one for one in error.advice)
    assert "ViT-B-32" in error.tried


def test_in_an_evaluation_no_option_of_the_batch_is_advised_either():
    error = evaluation_too_large(settings(), world(), TORCH_SAYS)
    assert not any("--batch" in one for one in error.advice)
    assert "fastclip eval" in error.advice[-1]


def test_only_torchs_error_is_explained():
    with pytest.raises(ZeroDivisionError), explained(lambda reason: pytest.fail(reason)):
        raise ZeroDivisionError
    with (
        pytest.raises(OutOfMemory) as caught,
        explained(lambda reason: OutOfMemory(world(), "x", [], reason)),
    ):
        raise torch.OutOfMemoryError(TORCH_SAYS)
    assert caught.value.reason == TORCH_SAYS


# Runs


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Runs with 6 steps."""
    return Lab(tmp_path_factory.mktemp("lab"), epochs=1)


@pytest.fixture
def train(lab, tmp_path, monkeypatch, capsys):
    """Run `fastclip train` in this process; return its exit code and the last line on stderr."""
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])

    def run(**changed):
        options = {"evaluate__pairs": "null", "checkpoint__every_steps": "null"} | changed
        code = main(["train", *lab.options(tmp_path / "run", "fastclip-v3", **options)])
        return code, capsys.readouterr().err.splitlines()[-1]

    return run


def fail_in_step(number):
    """Make the towers run out of memory in this training step, counted from 1."""
    forward, steps = TwoTowers.forward, []

    def fails(self, images, *args, **kwargs):
        steps.append(None)
        if len(steps) == number:
            raise torch.OutOfMemoryError(TORCH_SAYS)
        return forward(self, images, *args, **kwargs)

    return fails


@pytest.mark.parametrize("step", [2, 4])
def test_in_a_step_the_run_ends_with_advice_and_exit_code_1(step, train, monkeypatch, tmp_path):
    monkeypatch.setattr(TwoTowers, "forward", fail_in_step(step))
    code, line = train()
    assert code == 1
    for part in ("tiny-run", "16 pairs", "float32", "--batch.micro auto", TORCH_SAYS):
        assert part in line
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, step))


def test_the_advice_works(train, monkeypatch):
    forward = TwoTowers.forward

    def fails(self, images, *args, **kwargs):
        if torch.is_grad_enabled() and len(images) > 4:
            raise torch.OutOfMemoryError(TORCH_SAYS)
        return forward(self, images, *args, **kwargs)

    monkeypatch.setattr(TwoTowers, "forward", fails)
    code, line = train(batch__micro=8)
    assert code == 1
    assert "--batch.micro 4;" in line
    assert train(batch__micro=4)[0] == 0


def test_while_the_run_is_built_the_model_is_named(train, monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError(TORCH_SAYS)

    monkeypatch.setattr(build, "build_optimizer", fails)
    code, line = train()
    assert code == 1
    assert "tiny-run" in line
    assert "--model.name" in line


def test_in_an_evaluation_the_evaluation_is_named(train, lab, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError(TORCH_SAYS)

    monkeypatch.setattr(Encoder, "pairs", fails)
    code, line = train(evaluate__pairs=lab.held_out)
    assert code == 1
    assert "--evaluate.pairs" in line


def little_memory_on_rank_1(rank):
    if rank == 1:
        TwoTowers.forward = fail_in_step(2)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_if_one_rank_runs_out_of_memory_all_end(lab, tmp_path):
    options = lab.options(tmp_path / "run", "fastclip-v3", evaluate__pairs="null")
    run = Run(options, 2, lab.environment, prepare=little_memory_on_rank_1)
    assert run.wait(timeout=60) == [1, 1]
    assert "8 pairs per rank" in run.output()
