"""Memory counted on the meta device, against real tensors."""

import json
from dataclasses import replace

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip.config.options import BatchConfig, DataConfig, LossOptions, ModelConfig, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.errors import OptionError
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
from tests.towers.encoders import write_encoder

ALONE = World(0, 1, 0, torch.device("cpu"), None)
NUM_PAIRS = 1000


@pytest.fixture
def tiny(tmp_path):
    """Makes a config of a tiny model."""
    (tmp_path / "tiny-plan.json").write_text(json.dumps(MODEL))

    def config(algorithm="fastclip-v3", optimizer="adamw", **options):
        model = ModelConfig(str(tmp_path / "tiny-plan.json"), **options.pop("model", {}))
        return resolve(TrainConfig(algorithm=algorithm, optimizer=optimizer, model=model, **options))

    return config


def counted(config, ranks=1, local_batch=8, num_pairs=NUM_PAIRS, activations=None):
    size = model_size(towers_on_meta(config))
    return memory(config, size, ranks, local_batch, num_pairs, activations)


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lion", "sgd"])
@pytest.mark.parametrize(
    "algorithm", ["openclip", "siglip", "mbcl", "fastclip-v1", "fastclip-v2", "fastclip-v3"]
)
def test_weights_gradients_optimizer_and_state_are_exactly_those_of_a_run(algorithm, optimizer, tiny):
    config = tiny(algorithm, optimizer)
    towers = build_towers(config, ALONE)
    train_step = build_step(config, towers, NUM_PAIRS, ALONE)
    estimate = counted(config)
    own = [] if algorithm in ("openclip", "siglip") else list(train_step.loss.parameters())
    assert estimate.weights == nbytes([*towers.parameters(), *towers.buffers(), *own])
    assert estimate.gradients == nbytes(p for p in [*towers.parameters(), *own] if p.requires_grad)
    states = train_step.stepper.optimizer.state.values()
    assert estimate.optimizer == nbytes(v for s in states for v in s.values() if isinstance(v, torch.Tensor))
    state = getattr(train_step.loss, "sample_state", None)
    assert estimate.state == (0 if state is None else nbytes([*state.columns.values(), state.visited]))


@pytest.mark.parametrize(("decoder", "size"), [("fast", 1), ("exact", 4)])
def test_the_next_batch_is_on_the_device_too_and_images_are_normalised_in_micro_batches(decoder, size, tiny):
    data = DataConfig(decoder=decoder)
    values, tokens = 3 * MODEL["vision_cfg"]["image_size"] ** 2, 8 * MODEL["text_cfg"]["context_length"]
    two_batches = 2 * 8 * (values * size + tokens)
    normalised = 4 * values if decoder == "fast" else 0
    assert counted(tiny(data=data)).batch == two_batches + 8 * normalised
    assert counted(tiny(data=data, batch=BatchConfig(8, micro=2))).batch == two_batches + 2 * normalised


@pytest.mark.parametrize("freeze", ["image", "text"])
def test_a_frozen_tower_has_weights_and_no_gradients(freeze, tiny):
    config = tiny(model={"freeze": freeze})
    towers = build_towers(config, ALONE)
    estimate = counted(config)
    assert estimate.gradients == nbytes(p for p in towers.parameters() if p.requires_grad) + 4  # τ
    assert estimate.weights == counted(tiny()).weights


@pytest.mark.parametrize("freeze", ["none", "image"])
def test_an_average_takes_the_memory_of_the_trained_weights(freeze, tiny):
    config = tiny(model={"ema": 0.999, "freeze": freeze})
    train_step = build_step(config, build_towers(config, ALONE), NUM_PAIRS, ALONE)
    without = counted(tiny(model={"freeze": freeze}))
    assert counted(config).weights - without.weights == nbytes(train_step.average.tensors().values())
    assert counted(config)[1:] == without[1:]


def test_float64_takes_twice_the_memory(tiny):
    single, double = counted(tiny()), counted(tiny(precision="float64"))
    for part in ("weights", "gradients", "features", "loss"):
        assert getattr(double, part) == 2 * getattr(single, part)


def test_sgd_without_momentum_has_no_state(tiny):
    config = tiny(optimizer="sgd")
    without = replace(config.optim, options={"momentum": 0.0})
    assert counted(replace(config, optim=without)).optimizer == 0


def test_the_sample_state_is_divided_among_ranks(tiny):
    v3, v2 = tiny(), tiny("fastclip-v2")
    assert state_bytes(v3, NUM_PAIRS, 4) == 8 * (250 + 1) + 8  # a spare row, and the count of visited pairs
    assert state_bytes(v2, NUM_PAIRS, 4) == 36 * (250 + 1) + 8
    assert state_bytes(v3, None, 4) is None
    assert state_bytes(tiny("openclip"), None, 4) == 0


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("budget", [1 << 12, 1 << 16, 1 << 24])
def test_tile_bytes_are_those_allocated_by_a_pass_over_the_tiles(budget, ranks):
    local, gathered = torch.randn(64, 8), torch.randn(64 * ranks, 8)
    sims = similarities(Features(local, local, gathered, gathered, 0), budget)
    peak = 0
    cached = {sim._scratch.untyped_storage()._cdata: sim._scratch for sim in sims}
    for sim in sims:
        allocated = dict(cached)
        for tile in sim.tiles():
            allocated[tile.s.untyped_storage()._cdata] = tile.s
        peak = max(peak, sum(t.untyped_storage().nbytes() for t in allocated.values()))
        if sim.keeps:
            cached = allocated
    assert tile_bytes(sims) == peak


def test_a_smaller_budget_holds_fewer_similarities(tiny):
    config = tiny(loss=LossOptions(tile_mib=1))
    assert counted(config, ranks=4, local_batch=1024).loss < counted(tiny(), ranks=4, local_batch=1024).loss


def test_a_half_precision_wire_adds_rounded_copies(tiny):
    plain, short = (
        counted(tiny(), ranks=4),
        counted(tiny(loss=LossOptions(wire_dtype="float16")), ranks=4),
    )
    b, B, d = 8, 32, 16
    assert plain.features == 4 * (2 * 2 * b * d + 2 * B * d)
    assert short.features == plain.features + 2 * (2 * b * d + 2 * B * d)


class Outputs(TorchDispatchMode):
    """The tensors of one shape that operators returned."""

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
    saved = {}

    def save(tensor):
        if tensor.shape == (8, 8):
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        SigLipLoss()(image, text, torch.tensor(10.0), torch.tensor(-10.0))
    estimate = counted(tiny("siglip")).loss
    # on a CPU logsigmoid saves a buffer too, unlike on a GPU
    assert nbytes(saved.values()) in (estimate, estimate + 8 * 8 * 4)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_activations_are_those_saved_by_a_real_pass_with_and_without_fused_attention(backend, tiny):
    towers = build_towers(tiny(), ALONE)
    own = {p.untyped_storage()._cdata for p in towers.parameters()}
    saved = {}

    def save(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    images, tokens = torch.randn(4, 3, 32, 32), torch.ones(4, 16, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), sdpa_kernel(backend):
        towers(images, tokens)
    real = sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in own) / 4
    low, high = activation_bytes(towers_on_meta(tiny()))
    assert (high if backend is SDPBackend.MATH else low) == pytest.approx(real, rel=0.05)
    assert low < 0.95 * high


def test_activations_are_those_of_a_micro_batch(tiny):
    assert counted(tiny(), activations=Range(900, 1000)).activations == Range(7200, 8000)
    micro = tiny(batch=BatchConfig(size=8, micro=2))
    assert counted(micro, activations=Range(900, 1000)).activations == Range(1800, 2000)
    auto = tiny(batch=BatchConfig(size=8, micro="auto"))
    assert counted(auto, activations=Range(900, 1000)).activations == Range(7200, 8000)


def test_half_precision_saves_half_to_all_and_copies_of_the_weights_except_embeddings(tiny):
    config = tiny(precision="bfloat16")
    size = model_size(towers_on_meta(config))
    assert size.embeddings == 100 * 16 * 4
    copies = (size.weights - size.embeddings) // 2
    estimate = counted(config, activations=Range(900, 1000)).activations
    assert estimate == Range(3600 + copies, 8000 + copies)


def test_activations_are_unknown_with_gradient_checkpointing(tiny):
    config = tiny(model={"gradient_checkpointing": True})
    assert counted(config, activations=Range(900, 1000)).activations is None


def test_the_papers_settings_have_the_weights_and_features_of_the_model():
    setting = SETTINGS["cc12m-large"]
    size = model_size(towers_on_meta(resolve(TrainConfig(model=ModelConfig(setting.model)))))
    assert (size.weights, size.features) == (4 * setting.weights, setting.features)


def test_a_model_that_cannot_be_built_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "invalid-plan.json"
    path.write_text(json.dumps(MODEL | {"vision_cfg": {"unknown": 2}}))
    config = resolve(TrainConfig(model=ModelConfig(str(path))))
    with pytest.raises(OptionError) as caught:
        towers_on_meta(config)
    assert (caught.value.option, caught.value.value) == ("model.name", str(path))


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 64])
def test_towers_of_others_are_counted_as_a_run_builds_them(tiny, tmp_path, size):
    encoder = write_encoder(tmp_path / "encoder", {"pooling_mode_mean_tokens": True})
    model = {"text": f"hf:{encoder}", "image": "timm:test_vit", "image_weights": "none", "image_size": size}
    config = tiny(model=model)
    on_meta, real = towers_on_meta(config), build_towers(config, ALONE)
    shapes = {name: tensor.shape for name, tensor in real.state_dict().items()}
    assert {name: tensor.shape for name, tensor in on_meta.state_dict().items()} == shapes
    assert model_size(on_meta).image_size == (size or 160)
    assert min(activation_bytes(on_meta)) > 0
