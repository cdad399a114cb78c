"""torch.compile: on by default only where it works; an evaluation leaves training's graphs as they are."""

import json
from functools import partial

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from fastclip.config.options import BatchConfig, ModelConfig, TrainConfig
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.evaluation.features import Encoder
from fastclip.training import compiling
from fastclip.training.build import build_step, build_towers
from fastclip.training.compiling import is_compiled, uncompiled
from tests.ranks import run_ranks

CPU, N, B = torch.device("cpu"), 24, 8
TEXT = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
VISION = {
    "vit": {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16},
    "resnet": {"layers": [1, 1, 1, 1], "width": 8, "head_width": 64, "image_size": 64},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("models"), {}
    for name, vision in VISION.items():
        paths[name] = str(folder / f"compiled-{name}.json")
        config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": TEXT}
        (folder / f"compiled-{name}.json").write_text(json.dumps(config))
    return paths


class Backend:
    """aot_eager, which remembers the inputs of every graph; may fail."""

    def __init__(self, fails=False):
        self.graphs, self.fails = [], fails

    def __call__(self, graph, inputs):
        if self.fails:
            raise RuntimeError("no Triton here\nsecond line")
        self.graphs.append(inputs)
        return lookup_backend("aot_eager")(graph, inputs)

    @property
    def dynamic(self):
        """The graphs with a symbolic size."""
        return [inputs for inputs in self.graphs if any(isinstance(i, torch.SymInt) for i in inputs)]


@pytest.fixture
def backend(monkeypatch):
    backend = Backend()
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    yield backend
    torch.compiler.reset()


@pytest.fixture
def automatic(monkeypatch):
    """`auto` compiles on a CPU too."""
    monkeypatch.setattr(compiling, "AUTOMATIC", {"cpu"})


def build(model, compile="auto", world=None, **options):
    asked = ModelConfig(model, compile=compile, **{"text_padding": "keep"} | options)
    config = resolve(TrainConfig(model=asked, batch=BatchConfig(B)))
    world = world or World.alone()
    return build_step(config, build_towers(config, world), N, world)


def train(train_step, steps):
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        side = train_step.towers.image_size
        images = torch.randn(B, 3, side, side, generator=draw)
        tokens = torch.randint(1, 64, (B, 8), generator=draw)
        train_step.update(step, images, tokens, torch.randperm(N, generator=draw)[:B])
    return {name: tensor.clone() for name, tensor in train_step.tensors().items()}


def evaluate(towers):
    """As an evaluation does: other batch sizes, and a last one that is smaller."""
    encoder = Encoder(towers, World.alone(), tokenizer=lambda texts: torch.ones(len(texts), 8).long())
    with encoder._evaluating():
        for size in (16, 5):
            encoder._encode_images(torch.zeros(size, 3, 16, 16))
            towers.encode_text(torch.ones(size, 8, dtype=torch.int64))


# An evaluation


@pytest.mark.slow
def test_an_evaluation_compiles_nothing_and_keeps_training_graphs_static(models, backend):
    train_step = build(models["vit"], compile=True)
    with uncompiled(train_step.towers):
        evaluate(train_step.towers)
    assert backend.graphs == []
    train(train_step, range(2))
    compiled = len(backend.graphs)
    assert compiled >= 2  # both towers
    with uncompiled(train_step.towers):
        evaluate(train_step.towers)
    train(train_step, range(2, 4))
    assert len(backend.graphs) == compiled
    assert backend.dynamic == []


@pytest.mark.slow
def test_without_it_training_graphs_would_be_dynamic(models, backend):
    train_step = build(models["vit"], compile=True)
    evaluate(train_step.towers)
    backend.graphs.clear()
    train(train_step, range(2))
    assert backend.dynamic


def test_towers_that_are_not_compiled_need_no_compiler(models):
    towers = build(models["vit"]).towers
    assert not is_compiled(towers)
    assert not hasattr(uncompiled(towers), "stance")


# The default


@pytest.mark.parametrize(("asked", "compiled"), [(False, False), ("auto", False), (True, True)])
def test_on_a_cpu_only_an_explicit_true_compiles(asked, compiled, models, backend):
    assert is_compiled(build(models["vit"], asked).towers) == compiled
    assert backend.graphs == []  # nothing has run yet


@pytest.mark.slow
@pytest.mark.parametrize(("model", "padding"), [("vit", "auto"), ("resnet", "keep")])
def test_auto_compiles_after_a_trial_that_changes_nothing(model, padding, models, backend, automatic):
    expected = train(build(models[model], False, text_padding=padding), range(2))
    torch.manual_seed(5)
    random = torch.get_rng_state()
    train_step = build(models[model], text_padding=padding)
    assert torch.equal(torch.get_rng_state(), random)
    assert is_compiled(train_step.towers)
    assert len(backend.graphs) >= 2  # the trial's
    assert all(parameter.grad is None for parameter in train_step.towers.parameters())
    backend.graphs.clear()
    found = train(train_step, range(2))
    assert len(backend.graphs) >= 2
    assert backend.dynamic == []
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_trial_that_fails_is_reported_in_one_line_and_training_works(models, backend, automatic, caplog):
    expected = train(build(models["vit"], False), range(2))
    backend.fails = True
    train_step = build(models["vit"])
    (record,) = [record for record in caplog.records if record.name == compiling.__name__]
    assert record.levelname == "WARNING"
    assert "no Triton here" in record.args[0]
    assert "\n" not in record.args[0]
    assert not is_compiled(train_step.towers)
    found = train(train_step, range(2))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_an_explicit_true_fails_with_the_compilers_error(models, backend):
    backend.fails = True
    with pytest.raises(RuntimeError, match="no Triton here"):
        train(build(models["vit"], True), range(1))


@pytest.mark.slow
def test_ranks_compile_together_or_not_at_all(models):
    assert run_ranks(_compiled_on_a_rank, 2, models["vit"]) == [False, False]


def _compiled_on_a_rank(rank, size, model):
    compiling.AUTOMATIC = {"cpu"}
    torch.compile = partial(torch.compile, backend=Backend(fails=rank == 1))
    return is_compiled(build(model, world=World(rank, size, rank, CPU, None)).towers)


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("true", True), ("false", False)])
def test_all_three_can_be_asked_for(word, value):
    assert parse(["--model.compile", word]).model.compile == value
