"""A training step is exact: in micro-batches, over several ranks, with dropout, skipped, in any precision."""

import json
from functools import partial
from typing import NamedTuple

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip.config.options import BatchConfig, LossOptions, ModelConfig, OptimOptions, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.data.decode import Augment, FastDecoder
from fastclip.data.joining import Batch
from fastclip.data.order import seed_of
from fastclip.distributed.world import World
from fastclip.model import build_model
from fastclip.objective.loss import GlobalContrastiveLoss
from fastclip.objective.loss_step import LossStep
from fastclip.optim import set_learning_rate
from fastclip.training.build import build_step, build_towers
from fastclip.training.compiling import compile_towers
from fastclip.training.step import OpenClipLoss
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)  # the first test with several ranks pays for their start

N, B, STEPS, SEED = 41, 16, 3, 5
LR, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.98), 1e-6
ALONE = World(0, 1, 0, torch.device("cpu"), None)
VISION = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 16}
TEXT = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
COCA = {  # its decoder of captions has no part in the features
    "vision_cfg": VISION | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
    "text_cfg": TEXT | {"embed_cls": True, "output_tokens": True},
    "multimodal_cfg": TEXT | {"attn_pooler_heads": 2},
    "custom_text": True,
}
PEERS = ["openclip", "siglip"]
ALGORITHMS = ["fastclip-v1", "fastclip-v2", "fastclip-v3", "mbcl", *PEERS]


class Case(NamedTuple):
    """The settings of a run."""

    algorithm: str
    micro: int | None = None
    model: str = "plain"
    freeze: str = "none"
    optimizer: str = "adamw"
    precision: str = "float64"
    wire: str | None = None

    def __str__(self):
        return "-".join(str(value) for value in self)


# All cases of two ranks run in one pair of processes; each rank has 8 of the 16 pairs
PLAIN = [
    Case(algorithm, micro) for algorithm in ALGORITHMS for micro in (None, 2, 3)
]  # 3 leaves a remainder of 2
PLAIN += [Case("fastclip-v3", micro, "coca") for micro in (None, 2)]
DROPOUT = [Case(name, 2, "dropout") for name in ("fastclip-v1", "fastclip-v2", "fastclip-v3", "openclip")]
DROPOUT.append(Case("fastclip-v3", None, "dropout"))
FROZEN = [
    Case(name, micro, freeze=side)
    for name, side in (("fastclip-v3", "image"), ("fastclip-v2", "text"), ("openclip", "image"))
    for micro in (None, 3)
]
POISONED = [
    (Case(name, micro, optimizer=optimizer, precision="float32"), at)
    for name, micro, optimizer, at in (
        ("fastclip-v2", None, "adamw", 1),
        ("fastclip-v2", 3, "lion", 1),
        ("fastclip-v3", None, "lion", 1),
        ("fastclip-v3", 2, "adamw", 1),
        ("fastclip-v3", None, "adamw", 0),  # before the first update
        ("openclip", None, "adamw", 1),
        ("openclip", 2, "lion", 1),
        ("siglip", 3, "adamw", 1),
    )
]
COMPRESSED = [
    Case("fastclip-v3", micro, precision="float32", wire=wire)
    for micro in (None, 2)
    for wire in (None, "bfloat16")
]
OF_FOUR = [Case(name) for name in ("fastclip-v2", "fastclip-v3", *PEERS)] + [Case("fastclip-v3", 3)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def write_models(folder):
    """open_clip configs by name: without and with dropout, and CoCa's."""
    configs = {
        "plain": {"vision_cfg": VISION, "text_cfg": TEXT},
        "dropout": {"vision_cfg": VISION | {"patch_dropout": 0.5}, "text_cfg": TEXT},
        "coca": COCA,
    }
    for name, config in configs.items():
        (folder / f"step-{name}.json").write_text(json.dumps({"embed_dim": 16} | config))
    return {name: str(folder / f"step-{name}.json") for name in configs}


def build(models, case, world=ALONE):
    """A training step as a run builds it; γ < 1, so that the estimators matter."""
    has_state = case.algorithm not in ("mbcl", *PEERS)
    loss = {"gamma_schedule": "constant", "gamma": 0.6} if has_state else {}
    if case.algorithm in ("fastclip-v3", "mbcl"):
        loss["tau_lr"] = 1e-2
    eps = {"eps": EPS} if case.optimizer in ("adamw", "lamb") else {}
    rate = {"lr": 1e-3} if case.optimizer == "lion" else {"lr": LR}
    betas = {} if case.optimizer == "sgd" else {"betas": BETAS}
    config = resolve(
        TrainConfig(
            algorithm=case.algorithm,
            optimizer=case.optimizer,
            precision=case.precision,
            seed=SEED,
            model=ModelConfig(models[case.model], freeze=case.freeze),
            batch=BatchConfig(B, case.micro),
            loss=LossOptions(**loss),
            optim=OptimOptions(weight_decay=DECAY, wire_dtype=case.wire, **rate, **betas, **eps),
        )
    )
    towers = build_towers(config, world)
    if case.model == "dropout":  # open_clip's text towers have none
        for block in towers.clip.transformer.resblocks:
            block.attn.dropout = 0.2
    return build_step(config, towers, N, world)


def batch(step, world=ALONE):
    """This rank's part of a global batch; the first and the last pair have the same id."""
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(B, 3, 16, 16, generator=draw)
    tokens = torch.randint(1, 63, (B, 8), generator=draw)
    tokens[:, -1] = 63  # the highest token ends a caption
    index = torch.randperm(N, generator=draw)[:B]
    index[-1] = index[0]
    b = B // world.size
    rows = slice(world.rank * b, (world.rank + 1) * b)
    return images[rows].clone(), tokens[rows], index[rows].clone()


def train(train_step, world=ALONE, steps=range(STEPS)):
    for step in steps:
        result = train_step.update(step, *batch(step, world))
    return everything(train_step) | {
        f"stats.{name}": value for name, value in global_stats(train_step, result.stats)
    }


def train_in_one_graph(train_step, parts):
    """The definition: `parts` of the global batch encoded in one graph, the loss of them all, one update.

    A part is (rank, number of the micro-batch, rows); its randomness derives from the first two.
    """
    optimizer = train_step.stepper.optimizer
    for step in range(STEPS):
        images, tokens, index = batch(step)
        encoded = []
        for rank, number, rows in parts:
            torch.manual_seed(seed_of(SEED, step, rank, number))
            encoded.append(train_step.towers(images[rows], tokens[rows]))
        image_Bd, text_Bd = (torch.cat(side) for side in zip(*encoded, strict=True))
        out = train_step.loss.begin(index).forward(image_Bd, text_Bd)
        optimizer.zero_grad()
        out.value.backward()
        update = train_step.stepper.step(out.value.detach())
    stats = out.stats | {"grad_norm": update.grad_norm}
    return everything(train_step) | {
        f"stats.{name}": value for name, value in global_stats(train_step, stats)
    }


def parts(ranks, micro):
    """The global batch as `ranks` ranks split it."""
    b = B // ranks
    micro = micro or b
    return [
        (rank, number, slice(rank * b + start, rank * b + min(start + micro, b)))
        for rank in range(ranks)
        for number, start in enumerate(range(0, b, micro))
    ]


def everything(train_step):
    """Copies of all full tensors of a checkpoint, and of the gradients."""
    tensors = dict(train_step.tensors())
    named = {f"model.{name}": p for name, p in train_step.towers.named_parameters()}
    if not isinstance(train_step.loss, OpenClipLoss):
        named |= {f"loss.{name}": p for name, p in train_step.loss.named_parameters()}
    tensors |= {f"gradient.{name}": p.grad for name, p in named.items() if p.grad is not None}
    full = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def global_stats(train_step, stats):
    """Statistics of the global batch; the losses of open_clip's algorithms are each rank's own."""
    return [
        (k, v.detach())
        for k, v in stats.items()
        if k != "loss" or not isinstance(train_step.loss, OpenClipLoss)
    ]


def assert_equal_to_1e10(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def changed(before, after, prefix=""):
    return [n for n in before if n.startswith(prefix) and not torch.equal(before[n], after[n])]


@pytest.fixture(scope="module")
def in_one_graph(models):
    """The result of the definition, computed once for each way to split the batch."""
    cache = {}

    def result(case, ranks=1):
        # without dropout the split does not matter
        cut = parts(ranks, case.micro) if case.model == "dropout" else parts(1, None)
        key = (case._replace(micro=None), str(cut))
        if key not in cache:
            cache[key] = train_in_one_graph(build(models, case), cut)
        return cache[key]

    return result


@pytest.fixture(scope="module")
def two_ranks(models):
    return run_ranks(_two_ranks, 2, models, timeout=240)


@pytest.fixture(scope="module")
def four_ranks(models):
    return run_ranks(_four_ranks, 4, models, timeout=240)


def _two_ranks(rank, size, models):
    world = World(rank, size, rank, torch.device("cpu"), None)
    return {
        "trained": {case: train(build(models, case, world), world) for case in PLAIN + DROPOUT + FROZEN},
        "compressed": {case: train(build(models, case, world), world, [0]) for case in COMPRESSED},
        "poisoned": {(case, at): _poisoned(build(models, case, world), at, world) for case, at in POISONED},
        "reductions": {micro: _reductions(build(models, Case("fastclip-v3", micro), world), world)
                       for micro in (None, 2)},
    }  # fmt: skip


def _four_ranks(rank, size, models):
    world = World(rank, size, rank, torch.device("cpu"), None)
    return {case: train(build(models, case, world), world) for case in OF_FOUR}


# Exact accumulation, at any world size


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(name, micro) for name in ALGORITHMS for micro in (None, 4, 6)], ids=str
)
def test_micro_batches_give_the_update_of_the_whole_batch(case, models, in_one_graph):
    train_step = build(models, case)
    start = everything(train_step)
    found = train(train_step)
    assert_equal_to_1e10(found, in_one_graph(case))
    assert max((found[name] - start[name]).abs().max() for name in changed(start, found, "model.")) > 0.01


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.slow
def test_two_ranks_give_the_update_of_one_with_and_without_micro_batches(case, two_ranks, in_one_graph):
    first, second = (rank["trained"][case] for rank in two_ranks)
    assert_equal_to_1e10(first, in_one_graph(case))
    assert_same_bits(first, second)


@pytest.mark.parametrize("case", OF_FOUR, ids=str)
@pytest.mark.slow
def test_four_ranks_give_the_update_of_one(case, four_ranks, in_one_graph):
    assert_equal_to_1e10(four_ranks[0][case], in_one_graph(case))
    for other in four_ranks[1:]:
        assert_same_bits(four_ranks[0][case], other[case])


@pytest.mark.slow
@pytest.mark.parametrize("micro", [None, 3])
def test_the_state_is_written_once_per_step(micro, models, two_ranks):
    visits = torch.zeros(N, 1, dtype=torch.float64)
    for step in range(STEPS):
        visits[batch(step)[2].unique()] += 1
    assert visits.max() > 1
    alone = train(build(models, Case("fastclip-v2", micro)))
    assert torch.equal(alone["loss.tau_visits"], visits)
    assert torch.equal(two_ranks[1]["trained"][Case("fastclip-v2", micro)]["loss.tau_visits"], visits)
    assert torch.equal(alone["loss.log_u"].isfinite(), (visits > 0).expand(N, 2))


def test_gradients_of_micro_batches_are_reduced_once_per_step(two_ranks):
    counts = two_ranks[0]["reductions"]
    assert counts[2] == counts[None] > 0


@pytest.mark.parametrize("micro", [None, 2])
def test_gradients_may_be_averaged_in_bfloat16_and_are_the_same_on_all_ranks(micro, two_ranks):
    cases = [Case("fastclip-v3", micro, precision="float32", wire=wire) for wire in (None, "bfloat16")]
    exact, rounded = (two_ranks[0]["compressed"][case] for case in cases)
    assert_same_bits(rounded, two_ranks[1]["compressed"][cases[1]])
    names = [name for name in exact if name.startswith("gradient.model.")]
    largest = max(exact[name].abs().max() for name in names)
    for name in names:
        assert rounded[name].dtype == torch.float32
        assert (rounded[name] - exact[name]).abs().max() < 0.02 * largest, name
    assert changed(exact, rounded, "gradient.model.")
    assert torch.equal(exact["gradient.loss.log_scale"], rounded["gradient.loss.log_scale"])  # outside DDP


def _reductions(train_step, world):
    """How often DDP reduces gradients in three steps."""
    sent = []

    def counting(group, bucket):
        sent.append(bucket.index())
        return allreduce_hook(group, bucket)

    train_step.model.register_comm_hook(None, counting)
    train(train_step, world)
    return len(sent)


# Dropout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fastclip-v1", "fastclip-v2", "fastclip-v3", "openclip"])
@pytest.mark.parametrize("micro", [4, 6, None])
def test_with_dropout_micro_batches_equal_one_graph(name, micro, models, in_one_graph):
    case = Case(name, micro, "dropout")
    assert_equal_to_1e10(train(build(models, case)), in_one_graph(case))


@pytest.mark.parametrize("case", DROPOUT, ids=str)
def test_with_dropout_two_ranks_equal_one_graph(case, two_ranks, in_one_graph):
    first, second = (rank["trained"][case] for rank in two_ranks)
    assert_equal_to_1e10(first, in_one_graph(case, ranks=2))
    assert_same_bits(first, second)


def test_both_passes_have_the_same_dropout_and_micro_batches_have_different_ones(models, monkeypatch):
    def features_of_both_passes():
        train_step, seen = build(models, Case("fastclip-v3", 4, "dropout")), []
        train_step.towers.register_forward_hook(lambda module, inputs, out: seen.append(out))
        images, tokens, index = batch(0)
        # the same four pairs four times: only dropout differs
        train_step.update(0, images[:4].repeat(4, 1, 1, 1), tokens[:4].repeat(4, 1), index)
        assert [out[0].requires_grad for out in seen] == [False] * 4 + [True] * 4
        return seen[:4], seen[4:]

    first, second = features_of_both_passes()
    for side in (0, 1):  # images, texts
        assert all(torch.equal(a[side], b[side]) for a, b in zip(first, second, strict=True))
        assert not any(torch.equal(first[0][side], other[side]) for other in first[1:])
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    first, second = features_of_both_passes()
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


# open_clip's own losses


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("micro", [None, 2])
def test_open_clips_losses_train_as_on_the_global_batch(name, micro, models, two_ranks):
    expected = _trained_by_hand(models, name)
    found = two_ranks[0]["trained"][Case(name, micro)]
    assert_equal_to_1e10({key: found[key] for key in expected}, expected)
    alone = train(build(models, Case(name, micro)))
    assert_equal_to_1e10({key: alone[key] for key in expected}, expected)
    for scalar in ["logit_scale", "logit_bias"][: 1 + (name == "siglip")]:
        assert found[f"gradient.model.clip.{scalar}"].abs() > 1e-4


def _trained_by_hand(models, name):
    towers = build_model(
        models["plain"],
        device="cpu",
        dtype=torch.float64,
        seed=SEED,
        logit_bias=name == "siglip",
        tau=0.07 if name == "openclip" else None,
    )
    loss, clip = ClipLoss() if name == "openclip" else SigLipLoss(), towers.clip
    if name == "siglip":
        torch.testing.assert_close(clip.logit_scale.exp().item(), 10.0)
        assert clip.logit_bias.item() == -10.0
    groups = [{"params": [p for p in towers.parameters() if p.ndim >= 2], "weight_decay": DECAY},
              {"params": [p for p in towers.parameters() if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    for step in range(STEPS):
        images, tokens, _ = batch(step)
        bias = {} if clip.logit_bias is None else {"logit_bias": clip.logit_bias}
        optimizer.zero_grad()
        loss(*towers(images, tokens), logit_scale=clip.logit_scale.exp(), **bias).backward()
        optimizer.step()
    weights = {f"model.{key}": tensor for key, tensor in towers.state_dict().items()}
    gradients = {f"gradient.model.{key}": p.grad for key, p in towers.named_parameters()}
    return {key: tensor.detach() for key, tensor in (weights | gradients).items()}


def test_siglip_starts_with_the_scale_and_bias_of_its_paper(models):
    clip = build(models, Case("siglip")).towers.clip
    torch.testing.assert_close(clip.logit_scale.exp().item(), 10.0)
    assert clip.logit_bias.item() == -10.0
    assert build(models, Case("openclip")).towers.clip.logit_bias is None


@pytest.mark.parametrize("name", PEERS)
def test_the_scale_of_open_clips_losses_is_limited_to_100(name, models):
    train_step = build(models, Case(name))
    nn.init.constant_(train_step.towers.clip.logit_scale, 6.0)
    result = train_step.update(0, *batch(0))
    torch.testing.assert_close(result.stats["tau"].item(), 0.01)
    assert train_step.towers.clip.logit_scale < 4.7  # log 100 and one step of the optimizer


# Skipped steps


@pytest.mark.parametrize(("case", "at"), POISONED, ids=lambda value: str(value))
def test_a_nan_on_one_rank_changes_nothing_on_any_and_the_next_step_works(case, at, two_ranks):
    for rank in two_ranks:
        found = rank["poisoned"][case, at]
        assert found["changed"] == []
        assert found["finite"] == [False, True]
        assert found["visited"][0] == found["visited"][1]
        assert len(found["moved"]) > 10
    first, second = (rank["poisoned"][case, at]["end"] for rank in two_ranks)
    assert_same_bits(first, second)
    assert all(not tensor.isnan().any() for tensor in first.values())


def _poisoned(train_step, at, world):
    """Steps before `at`, then one with a NaN in the last rank's images, then one more."""
    state = getattr(train_step.loss, "sample_state", None)

    def count():
        return 0 if state is None else int(state.visited)

    for step in range(at):
        train_step.update(step, *batch(step, world))
    before, visited = everything(train_step), [count()]
    images, tokens, index = batch(at, world)
    if world.rank == world.size - 1:
        images[-1, 0, 0, 0] = torch.nan
    skipped = train_step.update(at, images, tokens, index)
    between = everything(train_step)
    visited.append(count())
    following = train_step.update(at + 1, *batch(at + 1, world))
    end = everything(train_step)
    kept = {name for name in before if not name.startswith("gradient.")}
    return {
        "finite": [bool(skipped.finite), bool(following.finite)],
        "changed": [name for name in changed(before, between) if name in kept],
        "visited": visited,
        "moved": changed(between, end, "model."),
        "end": end,
    }


# Precisions


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("name", ["fastclip-v2", "fastclip-v3", "openclip"])
def test_towers_compute_in_low_precision_and_learn(precision, micro, name, models):
    train_step, seen = build(models, Case(name, micro, precision=precision)), set()
    train_step.towers.clip.visual.transformer.resblocks[0].mlp.c_fc.register_forward_hook(
        lambda module, inputs, out: seen.add(out.dtype)
    )
    before = everything(train_step)
    assert all(train_step.update(step, *batch(step)).finite for step in range(STEPS))
    assert seen == {getattr(torch, precision)}
    after = everything(train_step)
    trained = {f"model.{key}" for key, p in train_step.towers.named_parameters() if p.requires_grad}
    assert trained <= set(changed(before, after))
    assert {t.dtype for key, t in after.items() if t.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_micro_batches_have_the_gradients_of_the_whole_batch_in_low_precision_too(precision, models):
    whole, cut = (
        train(build(models, Case("fastclip-v3", micro, precision=precision)), steps=[0])
        for micro in (None, 4)
    )
    names = [name for name in whole if name.startswith("gradient.")]
    assert names == [name for name in cut if name.startswith("gradient.")]
    largest = max(whole[name].abs().max() for name in names)
    for name in names:  # bfloat16 has 8 bits
        assert (whole[name] - cut[name]).abs().max() < 0.02 * largest, name


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_an_overflow_of_float16_is_skipped_and_undone_and_the_scale_backs_off(micro, optimizer, models):
    train_step = build(models, Case("fastclip-v2", micro, optimizer=optimizer, precision="float16"))
    train_step.update(0, *batch(0))
    before, visited = everything(train_step), int(train_step.loss.sample_state.visited)
    train_step.stepper.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-32)
    result = train_step.update(1, *batch(1))
    assert result.stats["loss"].isfinite()  # so the state was written before the overflow appeared
    assert not result.finite
    kept = {name: tensor for name, tensor in before.items() if not name.startswith("gradient.")}
    assert changed(kept, everything(train_step)) == []
    assert int(train_step.loss.sample_state.visited) == visited
    assert train_step.stepper.scaler.get_scale() == 256
    assert train_step.update(1, *batch(1)).finite
    assert changed(kept, everything(train_step), "loss.log_u")


# Frozen towers


def assert_frozen(models, found, case):
    start = everything(build(models, case))
    frozen = "model.clip.visual." if case.freeze == "image" else "model.clip.t"  # transformer, token_, text_
    assert not changed(start, found, frozen)
    assert not any(name.startswith(f"gradient.{frozen}") for name in found)
    assert changed(start, found, "model.clip.t" if case.freeze == "image" else "model.clip.visual.")


@pytest.mark.parametrize("case", FROZEN, ids=str)
def test_a_frozen_tower_does_not_change_and_the_other_learns_as_in_one_graph(case, models, in_one_graph):
    found = train(build(models, case))
    assert_equal_to_1e10(found, in_one_graph(case))
    assert_frozen(models, found, case)


@pytest.mark.parametrize("case", FROZEN, ids=str)
def test_a_frozen_tower_does_not_change_on_two_ranks(case, models, two_ranks, in_one_graph):
    found = two_ranks[0]["trained"][case]
    assert_equal_to_1e10(found, in_one_graph(case))
    assert_frozen(models, found, case)


# The order of events


def _events(train_step, monkeypatch):
    """The order of a step's parts."""
    events, clip = [], train_step.towers.clip

    def spy(owner, name):
        original = getattr(owner, name)

        def spied(*given):
            events.append(name)
            return original(*given)

        monkeypatch.setattr(owner, name, spied)

    spy(GlobalContrastiveLoss, "begin")
    spy(GlobalContrastiveLoss, "_send")
    spy(LossStep, "images")
    spy(LossStep, "forward")
    clip.visual.register_forward_hook(lambda *_: events.append("image tower"))
    clip.transformer.register_forward_hook(lambda *_: events.append("text tower"))
    train_step.update(0, *batch(0))
    return events


def test_state_is_fetched_before_the_towers_and_images_are_sent_while_texts_are_encoded(models, monkeypatch):
    events = _events(build(models, Case("fastclip-v3")), monkeypatch)
    # `_send` starts a gather: of images early, and of texts alone in the loss
    assert events == ["begin", "image tower", "images", "_send", "text tower", "forward", "_send"]


def test_micro_batches_are_all_encoded_before_the_loss_and_again_after_it(models, monkeypatch):
    events = _events(build(models, Case("fastclip-v3", 8)), monkeypatch)
    encoded = ["image tower", "text tower"] * 2
    assert events == ["begin", *encoded, "forward", "_send", "_send", *encoded]


# Images are normalised one micro-batch at a time


class Recording(FastDecoder):
    """Records the sizes of what it normalises."""

    def __init__(self, augment):
        super().__init__(augment)
        self.finished = []

    def finish(self, batch, device):
        self.finished.append(len(batch))
        return super().finish(batch, device)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("micro", "sizes"), [(None, [B]), (6, [6, 6, 4] * 2)])
def test_images_are_normalised_one_micro_batch_at_a_time_with_the_same_update(
    micro, sizes, precision, models
):
    case = Case("fastclip-v3", micro, precision=precision)
    pixels = torch.randint(0, 256, (B, 16, 16, 3), generator=torch.Generator().manual_seed(1)).byte()
    _, tokens, index = batch(0)
    raw, normalised = build(models, case), build(models, case)
    raw.decoder = Recording(Augment(image_size=16))
    raw.update(0, pixels, tokens, index)
    assert raw.decoder.finished == sizes
    normalised.update(0, FastDecoder(Augment(image_size=16)).finish(pixels, "cpu"), tokens, index)
    assert_same_bits(everything(raw), everything(normalised))


def test_a_batch_from_the_host_is_moved_and_trained_on_as_it_is(models):
    case = Case("fastclip-v3", 6, precision="float32")
    called, updated = build(models, case), build(models, case)
    images, tokens, index = batch(0)
    called(Batch(0, 0, images, tokens, None, index, torch.arange(B), []))
    set_learning_rate(updated.stepper.optimizer, updated.lr(0))
    updated.loss.set_epoch(0)
    updated.update(0, images, tokens, index)
    assert_same_bits(everything(called), everything(updated))


# The host does not wait for the device


class _HostRead(AssertionError):
    """The host read a value from the device."""


class _NoReads(TorchDispatchMode):
    """Refuses operations that copy a value to the host, or whose shape depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            raise _HostRead(func)
        return func(*args, **(kwargs or {}))


def _step_without_reads(train_step, monkeypatch):
    train_step.update(0, *batch(0))  # the checks of the first step may wait
    if hasattr(train_step.loss, "_checks"):  # ids on the host are checked there
        monkeypatch.setattr(train_step.loss._checks, "index", lambda index: index)
    for name in ("tolist", "numpy", "item", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, partial(_refuse, name))
    given = batch(1)
    with _NoReads():
        return train_step.update(1, *given)


def _refuse(name, *_):
    raise _HostRead(name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb", "lion"])
@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("name", ["fastclip-v2", "fastclip-v3", "mbcl", *PEERS])
def test_a_step_reads_nothing_from_the_device(name, micro, optimizer, models, monkeypatch):
    train_step = build(models, Case(name, micro, optimizer=optimizer, precision="float32"))
    before = everything(train_step)
    with monkeypatch.context() as patch:
        result = _step_without_reads(train_step, patch)
    assert result.finite
    assert changed(before, everything(train_step), "model.")


# torch.compile


@pytest.mark.slow
def test_compiled_towers_have_the_same_weight_names_and_give_the_same_update(models, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    case = Case("fastclip-v3")
    expected = train(build(models, case), steps=[0])
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))  # quicker than inductor
    train_step = build(models, case)
    names = list(train_step.towers.state_dict())
    compile_towers(train_step.towers)
    assert list(train_step.towers.state_dict()) == names
    assert_equal_to_1e10(train(train_step, steps=[0]), expected)
    assert len(graphs) >= 2  # both towers
