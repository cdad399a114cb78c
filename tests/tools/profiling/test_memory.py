"""What is counted without memory, against tensors that are really there."""

import json
from dataclasses import replace

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip.config.options import BatchConfig, LossOptions, ModelConfig, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.objective.kernel import Features, similarities
from fastclip.tools.profiling.job import SETTINGS
from fastclip.tools.profiling.memory import (
    Range,
    activation_bytes,
    memory,
    model_size,
    state_bytes,
    tile_bytes,
    towers_on_meta,
)
from fastclip.training.build import build_step, build_towers
from tests.tools.profiling.plans import MODEL

ALONE = World(0, 1, 0, torch.device("cpu"), None)
PAIRS = 1000


@pytest.fixture
def tiny(tmp_path):
    """A config of a tiny model, with such options."""
    (tmp_path / "tiny-plan.json").write_text(json.dumps(MODEL))

    def config(algorithm="fastclip-v3", optimizer="adamw", **options):
        model = ModelConfig(str(tmp_path / "tiny-plan.json"), **options.pop("model", {}))
        return resolve(TrainConfig(algorithm=algorithm, optimizer=optimizer, model=model, **options))

    return config


def counted(config, workers=1, local_batch=8, pairs=PAIRS, activations=None):
    size = model_size(towers_on_meta(config))
    return memory(config, size, workers, local_batch, pairs, activations)


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lion", "sgd"])
@pytest.mark.parametrize(
    "algorithm", ["openclip", "siglip", "mbcl", "fastclip-v1", "fastclip-v2", "fastclip-v3"]
)
def test_a_run_has_exactly_these_bytes(algorithm, optimizer, tiny):
    config = tiny(algorithm, optimizer)
    towers = build_towers(config, ALONE)
    train_step = build_step(config, towers, PAIRS, ALONE)
    found = counted(config)
    own = [] if algorithm in ("openclip", "siglip") else list(train_step.loss.parameters())
    assert found.weights == nbytes([*towers.parameters(), *towers.buffers(), *own])
    assert found.gradients == nbytes(p for p in [*towers.parameters(), *own] if p.requires_grad)
    states = train_step.stepper.optimizer.state.values()
    assert found.optimizer == nbytes(v for s in states for v in s.values() if isinstance(v, torch.Tensor))
    state = getattr(train_step.loss, "sample_state", None)
    assert found.state == (0 if state is None else nbytes([*state.columns.values(), state.visited]))


@pytest.mark.parametrize("freeze", ["image", "text"])
def test_a_frozen_tower_has_weights_and_no_gradients(freeze, tiny):
    config = tiny(model={"freeze": freeze})
    towers = build_towers(config, ALONE)
    found = counted(config)
    assert found.gradients == nbytes(p for p in towers.parameters() if p.requires_grad) + 4  # τ
    assert found.weights == counted(tiny()).weights


def test_float64_takes_twice_the_memory(tiny):
    single, double = counted(tiny()), counted(tiny(precision="float64"))
    for part in ("weights", "gradients", "features", "loss"):
        assert getattr(double, part) == 2 * getattr(single, part)


def test_momentum_of_zero_keeps_no_state(tiny):
    config = tiny(optimizer="sgd")
    without = replace(config.optim, options={"momentum": 0.0})
    assert counted(replace(config, optim=without)).optimizer == 0


def test_the_samples_state_is_cut_among_workers(tiny):
    v3, v2 = tiny(), tiny("fastclip-v2")
    assert state_bytes(v3, PAIRS, 4) == 8 * (250 + 1) + 8  # a spare row, and the count of visited pairs
    assert state_bytes(v2, PAIRS, 4) == 36 * (250 + 1) + 8
    assert state_bytes(v3, None, 4) is None
    assert state_bytes(tiny("openclip"), None, 4) == 0


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("budget", [1 << 12, 1 << 16, 1 << 24])
def test_tiles_take_what_walking_over_them_allocates(budget, workers):
    local, everyone = torch.randn(64, 8), torch.randn(64 * workers, 8)
    sims = similarities(Features(local, local, everyone, everyone, 0), budget)
    most = 0
    kept = {sim._scratch.untyped_storage()._cdata: sim._scratch for sim in sims}
    for sim in sims:
        walked = dict(kept)
        for tile in sim.tiles():
            walked[tile.s.untyped_storage()._cdata] = tile.s
        most = max(most, sum(t.untyped_storage().nbytes() for t in walked.values()))
        if sim.keeps:
            kept = walked
    assert tile_bytes(sims) == most


def test_a_smaller_budget_holds_fewer_similarities(tiny):
    config = tiny(loss=LossOptions(tile_mib=1))
    assert (
        counted(config, workers=4, local_batch=1024).loss < counted(tiny(), workers=4, local_batch=1024).loss
    )


def test_a_short_wire_adds_the_rounded_copies(tiny):
    plain, short = (
        counted(tiny(), workers=4),
        counted(tiny(loss=LossOptions(wire_dtype="float16")), workers=4),
    )
    b, B, d = 8, 32, 16
    assert plain.features == 4 * (2 * 2 * b * d + 2 * B * d)
    assert short.features == plain.features + 2 * (2 * b * d + 2 * B * d)


class Outputs(TorchDispatchMode):
    """The tensors of one shape that operators made."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.made = shape, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape:
            self.made[out.untyped_storage()._cdata] = out
        return out


def test_openclips_logits_and_their_log_softmax_are_counted(tiny):
    image, text = torch.randn(2, 8, 16).requires_grad_()
    with Outputs((8, 8)) as outputs:
        ClipLoss(local_loss=True)(image, text, torch.tensor(10.0))
    assert counted(tiny("openclip")).loss == nbytes(outputs.made.values())


def test_siglips_labels_and_signed_logits_are_counted(tiny):
    image, text = torch.randn(2, 8, 16).requires_grad_()
    kept = {}

    def keep(tensor):
        if tensor.shape == (8, 8):
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        SigLipLoss()(image, text, torch.tensor(10.0), torch.tensor(-10.0))
    found = counted(tiny("siglip")).loss
    # on a CPU logsigmoid keeps a buffer too, which it does not on a GPU
    assert nbytes(kept.values()) in (found, found + 8 * 8 * 4)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_activations_are_what_a_real_pass_keeps_with_fused_attention_and_without(backend, tiny):
    towers = build_towers(tiny(), ALONE)
    own = {p.untyped_storage()._cdata for p in towers.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    images, tokens = torch.randn(4, 3, 32, 32), torch.ones(4, 16, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), sdpa_kernel(backend):
        towers(images, tokens)
    real = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own) / 4
    low, high = activation_bytes(towers_on_meta(tiny()))
    assert (high if backend is SDPBackend.MATH else low) == pytest.approx(real, rel=0.05)
    assert low < 0.95 * high


def test_activations_are_of_what_is_encoded_at_a_time(tiny):
    assert counted(tiny(), activations=Range(900, 1000)).activations == Range(7200, 8000)
    micro = tiny(batch=BatchConfig(size=8, micro=2))
    assert counted(micro, activations=Range(900, 1000)).activations == Range(1800, 2000)


def test_half_precision_keeps_between_half_and_all_and_copies_of_the_weights_but_the_tokens(tiny):
    config = tiny(precision="bfloat16")
    size = model_size(towers_on_meta(config))
    assert size.embeddings == 100 * 16 * 4
    copies = (size.weights - size.embeddings) // 2
    found = counted(config, activations=Range(900, 1000)).activations
    assert found == Range(3600 + copies, 8000 + copies)


def test_with_checkpointing_nobody_knows(tiny):
    config = tiny(model={"gradient_checkpointing": True})
    assert counted(config, activations=Range(900, 1000)).activations is None


def test_models_of_the_paper_have_the_weights_that_the_fit_takes():
    setting = SETTINGS["cc12m-large"]
    size = model_size(towers_on_meta(resolve(TrainConfig(model=ModelConfig(setting.model)))))
    assert (size.weights, size.features) == (4 * setting.weights, setting.features)


def test_a_model_that_cannot_be_built_is_told(tmp_path):
    (tmp_path / "broken-plan.json").write_text(json.dumps(MODEL | {"vision_cfg": {"layers": "two"}}))
    config = resolve(TrainConfig(model=ModelConfig(str(tmp_path / "broken-plan.json"))))
    with pytest.raises(ValueError, match=r"broken-plan.json' cannot be built without weights"):
        towers_on_meta(config)
