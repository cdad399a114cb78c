"""The loss against the paper's equations, and its contract with a training loop."""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from open_clip.loss import ClipLoss
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip import ALGORITHMS, GlobalContrastiveLoss
from fastclip.errors import InputError
from fastclip.objective.algorithms import LossOptions, resolve
from fastclip.objective.loss_step import UndoError
from fastclip.objective.saved_state import sharded
from tests.objective.features import pair, relative_error, unit
from tests.objective.reference import PaperRun

OURS = [name for name, row in ALGORITHMS.items() if not row.peer]
RELEASED = ["sogclr", "fastclip-v0", "fastclip-v1", "fastclip-v3"]
CASES = [(name, "paper") for name in OURS] + [(name, "released") for name in RELEASED]


def build(name, n=20, *, gamma=0.3, **options):
    """A loss in float64 with a constant γ."""
    if ALGORITHMS[name].fcco:
        options |= {"gamma": gamma} | ({} if name == "scent" else {"gamma_schedule": "constant"})
    torch.set_default_dtype(torch.float64)
    try:
        return GlobalContrastiveLoss(name, n, **options)
    finally:
        torch.set_default_dtype(torch.float32)


def logs_of_u(loss):
    return sharded(loss.sample_state)["log_u"]


@pytest.mark.parametrize(("name", "estimator"), CASES)
@given(data=st.data())
@pytest.mark.slow
def test_steps_equal_the_papers_equations(name, estimator, data):
    n = 30
    gamma = data.draw(st.sampled_from([1.0, 0.3, 0.85]), "gamma")
    tau = data.draw(st.sampled_from([0.05, 0.07, 0.2]), "tau")
    fcco = ALGORITHMS[name].fcco
    epsilon = data.draw(st.sampled_from([1e-14, 1e-3]), "epsilon") if fcco else None
    distinct = data.draw(st.booleans(), "distinct negatives")
    tile_bytes = data.draw(st.sampled_from([1, 8 * 6, 8 * 35, 1 << 20]), "tile bytes")
    individual = ALGORITHMS[name].temperature == "individual"
    options = {"tau_lr": 3e-3, "tau_betas": (0.8, 0.9)} if individual else {}
    rho = {} if not ALGORITHMS[name].robust else {"rho": 1.7}
    loss = build(
        name,
        n,
        gamma=gamma,
        tau=tau,
        epsilon=epsilon,
        estimator=estimator,
        tile_mib=tile_bytes / 2**20,
        negatives="distinct" if distinct else "all",
        **options,
        **rho,
    )
    paper = PaperRun(
        name,
        n,
        tau=tau,
        epsilon=epsilon or 1e-14,
        released=estimator == "released",
        betas=(0.8, 0.9),
        tau_lr=3e-3,
        **rho,
    )
    for step in range(3):
        B = data.draw(st.integers(2, 17), "B")
        d = data.draw(st.integers(2, 9), "d")
        ids = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), min_size=B, max_size=B), "ids"))
        image, text = pair(B, d, seed=data.draw(st.integers(0, 1000), "seed"))
        group = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), min_size=B, max_size=B)
        groups = torch.tensor(data.draw(group | st.just([7] * B), "groups")) if distinct else None
        loss.zero_grad()
        out = loss(image, text, ids, groups)
        out.value.backward()
        value, image_grad, text_grad, tau_grad = paper.step(image.detach(), text.detach(), ids, gamma, groups)
        # the reference's log(1 + u) is off by 1e-16 where it is almost 0
        assert float(out.value.detach()) == pytest.approx(float(value), rel=1e-10, abs=1e-14), step
        assert relative_error(image.grad, image_grad) < 1e-10, step
        assert relative_error(text.grad, text_grad) < 1e-10, step
        if tau_grad is not None:
            # log_scale = log(1/τ), so its gradient is −τ·G_τ
            assert float(loss.log_scale.grad) == pytest.approx(float(-tau * tau_grad), rel=1e-10, abs=1e-12)
        if loss.sample_state is not None:
            expected = torch.stack([paper.u1, paper.u2], dim=1).log().nan_to_num(nan=-torch.inf)
            assert torch.allclose(logs_of_u(loss), expected, rtol=1e-10, atol=1e-12)
        if individual:
            expected = torch.stack([paper.tau1, paper.tau2], dim=1)
            assert torch.allclose(sharded(loss.sample_state)["tau"], expected, rtol=1e-10)


def test_gradients_without_memory_are_those_of_the_value():
    """With γ = 1 the value is an ordinary function of the features: finite differences must agree."""
    for name in ("fastclip-v1", "fastclip-v0", "fastclip-v3", "mbcl"):
        loss = build(name, 8, gamma=1.0, tau=0.2)
        image, text = pair(5, 4, seed=3)
        ids = torch.arange(5)
        assert torch.autograd.gradcheck(lambda i, t, f=loss, ids=ids: f(i, t, ids).value, (image, text))
        loss(image, text, ids).value.backward()
        h = 1e-6
        with torch.no_grad():
            loss.log_scale += h
            above = loss(image, text, ids).value
            loss.log_scale -= 2 * h
            below = loss(image, text, ids).value
        if loss.log_scale.requires_grad:
            assert float(loss.log_scale.grad) == pytest.approx(float((above - below) / (2 * h)), rel=1e-6)


def test_mbcl_is_open_clips_loss():
    image, text = pair(13, 6, seed=1)
    scale = torch.tensor(1 / 0.07, dtype=torch.float64, requires_grad=True)
    theirs = ClipLoss()(image, text, scale)
    expected = torch.autograd.grad(theirs, (image, text, scale))
    loss = build("mbcl", 13, tau=0.07)
    out = loss(image, text)
    out.value.backward()
    assert float(out.value.detach()) + log(12) == pytest.approx(float(theirs.detach()), rel=1e-12)
    assert relative_error(image.grad, expected[0]) < 1e-12
    assert relative_error(text.grad, expected[1]) < 1e-12
    assert float(loss.log_scale.grad) == pytest.approx(float(expected[2]) / 0.07, rel=1e-12)


def cold_features(arrangement, seed, B=24, d=6):
    """Float32 features whose similarities span −1 to 1, in three arrangements of the positives."""
    if arrangement == "spread":  # every similarity occurs, positives are near 1
        image = unit(B, 3, seed, spread=0.0)
        text = torch.nn.functional.normalize(image + 0.3 * unit(B, 3, seed + 1, spread=0.0), dim=-1)
        return image.float(), text.float()
    pole = torch.zeros(B, d, dtype=torch.float64)
    pole[:, 0] = torch.linspace(-1, 1, B).sign()
    flip = torch.ones(B, 1, dtype=torch.float64)
    flip[:: 1 if arrangement == "opposite" else 2] = -1  # positives near −1: all, or every other one
    image = torch.nn.functional.normalize(pole + 0.05 * unit(B, d, seed), dim=-1)
    text = torch.nn.functional.normalize(pole * flip + 0.05 * unit(B, d, seed + 1), dim=-1)
    return image.float(), text.float()


@pytest.mark.parametrize("arrangement", ["spread", "opposite", "mixed"])
@pytest.mark.parametrize("name", OURS)
def test_float32_stays_exact_at_the_coldest_temperature(name, arrangement):
    """τ = 0.01 and similarities from −1 to 1: exponents reach ±200, far beyond float32's range."""
    features = cold_features(arrangement, seed=5)
    similarity = features[0] @ features[1].T
    assert similarity.min() < -0.98
    assert similarity.max() > 0.98
    ids, results = torch.arange(24), []
    for dtype in (torch.float32, torch.float64):
        loss = build(name, 24, gamma=0.5, tau=0.01).to(dtype)
        for _ in range(2):
            loss.zero_grad()
            image, text = (x.to(dtype, copy=True).requires_grad_() for x in features)
            out = loss(image, text, ids)
            out.value.backward()
        numbers = [out.value.detach(), image.grad, text.grad]
        if loss.log_scale is not None and loss.log_scale.requires_grad:
            numbers.append(loss.log_scale.grad)
        if loss.sample_state is not None:
            numbers.append(logs_of_u(loss))
        results.append(numbers)
    for single, double in zip(*results, strict=True):
        assert torch.isfinite(single).all()
        assert relative_error(single.double(), double) < 1e-4


def test_the_loss_is_as_exact_as_open_clips_where_float32_similarities_are_the_limit():
    """Two tight clusters: a gradient is a small difference of large terms, whatever computes it."""
    worst = {"ours": 0.0, "theirs": 0.0}
    for seed in range(6):
        image, _ = cold_features("mixed", seed)
        text, _ = cold_features("mixed", seed + 100)  # the same poles: every positive is near 1
        gradients = {}
        for dtype in (torch.float32, torch.float64):
            for loss in worst:
                i, t = (x.to(dtype, copy=True).requires_grad_() for x in (image, text))
                if loss == "ours":
                    build("mbcl", 24, tau=0.01).to(dtype)(i, t).value.backward()
                else:
                    ClipLoss()(i, t, torch.tensor(100.0, dtype=dtype)).backward()
                gradients[loss, dtype] = torch.cat([i.grad, t.grad])
        for loss in worst:
            error = relative_error(gradients[loss, torch.float32].double(), gradients[loss, torch.float64])
            worst[loss] = max(worst[loss], error)
    assert worst["ours"] < 2 * worst["theirs"]


@pytest.mark.parametrize("name", ["fastclip-v2", "fastclip-v3"])
def test_cached_and_recomputed_tiles_give_the_same_bits(name, monkeypatch):
    monkeypatch.setattr("fastclip.objective.kernel._TILE_BYTES_CPU", 4 * 50)
    image, text = pair(23, 8, seed=2, dtype=torch.float32)
    gradients = []
    for tile_bytes in (1 << 20, 4 * 50):
        image.grad = text.grad = None
        out = GlobalContrastiveLoss(name, 23, tile_mib=tile_bytes / 2**20)(image, text, torch.arange(23))
        out.value.backward()
        gradients.append((image.grad, text.grad, out.value.detach()))
    for cached, recomputed in zip(*gradients, strict=True):
        assert torch.equal(cached, recomputed)


def test_grad_scaler_and_autocast_change_nothing_beyond_the_inputs_rounding():
    image, text = pair(16, 8, seed=4, dtype=torch.float32)
    low = [x.detach().bfloat16().requires_grad_() for x in (image, text)]
    exact = [x.detach().float().requires_grad_() for x in low]  # the same rounded numbers in float32
    ids = torch.arange(16)
    GlobalContrastiveLoss("fastclip-v3", 16)(*exact, ids).value.backward()
    with torch.autocast("cpu", torch.bfloat16):
        out = GlobalContrastiveLoss("fastclip-v3", 16)(*low, ids)
    assert out.value.dtype == torch.float32
    (out.value * 65536).backward()
    for a, b in zip(low, exact, strict=True):
        assert a.grad.dtype == torch.bfloat16
        assert torch.equal(a.grad, (b.grad * 65536).bfloat16())

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", torch.bfloat16):
        out = GlobalContrastiveLoss("fastclip-v3", 16)(image, text, ids)
    scaler.scale(out.value).backward()
    plain = [x.detach().clone().requires_grad_() for x in (image, text)]
    GlobalContrastiveLoss("fastclip-v3", 16)(*plain, ids).value.backward()
    for a, b in zip((image, text), plain, strict=True):
        assert torch.equal(a.grad / 1024, b.grad)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_matmul_precision_is_off_inside_and_restored_outside(precision):
    image, text = pair(8, 4, seed=4, dtype=torch.float32)
    torch.set_float32_matmul_precision(precision)
    try:
        before = _precisions()
        with MatmulPrecisions() as seen:
            GlobalContrastiveLoss("fastclip-v3", 8)(image, text, torch.arange(8)).value.backward()
        assert _precisions() == before
        assert seen.precisions == {("ieee", "ieee")}
    finally:
        torch.set_float32_matmul_precision("highest")


class MatmulPrecisions(TorchDispatchMode):
    """Records the precision of every matrix product inside it."""

    def __init__(self):
        super().__init__()
        self.precisions = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.precisions.add(_precisions())
        return op(*args, **kwargs or {})


def _precisions():
    return (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)


@pytest.mark.slow
@pytest.mark.parametrize("negatives", ["all", "distinct"])
@pytest.mark.parametrize("name", OURS)
def test_a_step_on_a_gpu_never_waits_for_the_host(name, negatives, monkeypatch):
    """Fake CUDA tensors raise on `.item()`, `nonzero` and mixed devices. (Backward needs a real GPU.)"""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # fake ones cannot be pinned
    with FakeTensorMode():
        loss = GlobalContrastiveLoss(name, 64, device="cuda", tile_mib=4 * 100 / 2**20, negatives=negatives)
        loss._checks.first_step_done, loss._checks.local_batch = True, {True: 16}  # only the first may wait
        loss.rho = 1.0
        for index_device in ("cuda", "cpu"):
            image = torch.randn(16, 8, device="cuda", requires_grad=True)
            text = torch.randn(16, 8, device="cuda", requires_grad=True)
            index = torch.zeros(16, dtype=torch.int64, device=index_device)
            if index_device == "cpu":
                loss._checks.index = lambda index: index  # the host cannot read a fake index
            step = loss.begin(index, index if negatives == "distinct" else None)
            step.images(image)
            out = step.forward(image, text)
            assert out.value.requires_grad
            assert all(stat.device.type == "cuda" for stat in out.stats.values())
        out.undo(torch.zeros((), dtype=torch.bool, device="cuda"))


def test_first_visit_takes_the_batch_estimate_and_the_next_one_averages():
    loss = build("fastclip-v1", 10, gamma=0.25)
    image, text = pair(4, 5, seed=0)
    ids = torch.tensor([3, 1, 7, 8])
    loss(image, text, ids)
    first = logs_of_u(loss).clone()
    assert torch.isinf(first[[0, 2, 4, 5, 6, 9]]).all()
    loss(*pair(4, 5, seed=1), ids)
    fresh = build("fastclip-v1", 10, gamma=0.25)
    fresh(*pair(4, 5, seed=1), ids)
    expected = (0.75 * first[ids].exp() + 0.25 * logs_of_u(fresh)[ids].exp()).log()
    assert torch.allclose(logs_of_u(loss)[ids], expected, rtol=1e-12)


def test_the_first_of_equal_ids_writes():
    loss, alone = build("fastclip-v3", 10), build("fastclip-v3", 10)
    image, text = pair(5, 4, seed=7)
    loss(image, text, torch.tensor([2, 9, 2, 2, 4]))
    alone(image, text, torch.tensor([2, 9, 0, 1, 4]))
    assert torch.equal(logs_of_u(loss)[[2, 9, 4]], logs_of_u(alone)[[2, 9, 4]])
    assert int(loss.sample_state.visited) == 3


@pytest.mark.parametrize("name", ["fastclip-v2", "fastclip-v3"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_feature_never_writes_into_the_state(name, bad):
    loss = build(name, 6)
    ids = torch.arange(4)
    loss(*pair(4, 5, seed=0), ids)
    before = {key: value.clone() for key, value in sharded(loss.sample_state).items()}
    image, text = (x.detach() for x in pair(4, 5, seed=1))
    image[2, 3] = bad
    out = loss(image.requires_grad_(), text, ids)
    assert not torch.isfinite(out.value)
    for key, value in sharded(loss.sample_state).items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["fastclip-v2", "fastclip-v3"])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_undo_restores_the_state_only_if_the_step_was_skipped(name, as_tensor):
    loss = build(name, 6)
    ids = torch.tensor([0, 5, 2])
    loss(*pair(3, 5, seed=0), torch.tensor([0, 1, 2]))
    before = {key: value.clone() for key, value in sharded(loss.sample_state).items()}
    out = loss(*pair(3, 5, seed=1), ids)
    after = {key: value.clone() for key, value in sharded(loss.sample_state).items()}
    out.undo(torch.tensor(False) if as_tensor else False)
    assert all(torch.equal(v, after[k]) for k, v in sharded(loss.sample_state).items())
    loss.load_state_dict(loss.state_dict() | before)
    out = loss(*pair(3, 5, seed=1), ids)
    out.undo(torch.tensor(1.0) if as_tensor else True)  # a GradScaler's found_inf is a float
    assert all(torch.equal(v, before[k]) for k, v in sharded(loss.sample_state).items())
    assert int(loss.sample_state.visited) == 3
    with pytest.raises(UndoError):
        out.undo(True)
    out.undo(False)


@pytest.mark.parametrize(("name", "estimator"), CASES)
def test_evaluation_is_the_papers_objective_of_the_batch_alone(name, estimator):
    """With u = g, and the mean of individual temperatures; today's memory has no part in it."""
    options = {} if not ALGORITHMS[name].robust else {"rho": 0.8}
    loss = build(name, 20, gamma=0.3, tau=0.2, estimator=estimator, **options)
    for step in range(2):
        loss(*pair(6, 5, seed=step), torch.arange(6))
    image, text = pair(9, 5, seed=7)
    tau = loss.mean_tau()
    paper = PaperRun(name, 20, tau=tau, released=estimator == "released", **options)
    expected = paper.step(image.detach(), text.detach(), torch.arange(9), gamma=1.0)
    if ALGORITHMS[name].temperature == "individual":
        assert tau != 0.2
    before = {key: column.clone() for key, column in loss.state_dict().items()}
    out = loss.evaluate(image, text)
    assert float(out.value.detach()) == pytest.approx(float(expected[0]), rel=1e-10, abs=1e-14)
    assert float(out.stats["tau"]) == pytest.approx(tau)
    assert "unvisited" not in out.stats
    out.value.backward()
    assert relative_error(image.grad, expected[1]) < 1e-10
    loss.eval()
    ids = torch.arange(9)
    for index in (None, ids, ids + 11, ids + 100):  # none of them is looked up
        assert torch.equal(loss(image, text, index).value, out.value)
        begun = loss.begin(index)
        begun.images(image)
        assert torch.equal(begun.forward(image, text).value, out.value)
    assert all(torch.equal(column, before[key]) for key, column in loss.state_dict().items())
    with torch.no_grad():
        assert not loss.evaluate(image, text).value.requires_grad


def test_evaluation_does_not_move_tau_into_its_range():
    loss = build("fastclip-v3", 6, tau_min=0.02)
    with torch.no_grad():
        loss.log_scale.fill_(9.0)
    assert float(loss.evaluate(*pair(3, 5, seed=0)).stats["tau"]) == pytest.approx(0.02)
    assert float(loss.log_scale.detach()) == 9.0


def test_a_validation_before_the_first_step_does_not_replace_its_checks():
    """Lightning validates before it trains."""
    loss = build("fastclip-v3", 6)
    with pytest.raises(InputError) as caught:
        loss.evaluate(*(2 * x.detach() for x in pair(3, 5, seed=0)))
    assert caught.value.argument == "image_features"
    loss.evaluate(*pair(3, 5, seed=0))
    assert not loss._checks.first_step_done
    with pytest.raises(IndexError):
        loss(*pair(3, 5, seed=0), torch.tensor([0, 1, 6]))
    with pytest.raises(InputError) as caught:
        loss(*pair(3, 5, seed=0))
    assert caught.value.argument == "index"


@pytest.mark.parametrize(
    ("name", "options", "B", "warns"),
    [
        ("fastclip-v3", {}, 64, False),  # by rule
        ("fastclip-v3", {"rho_share": 1.1}, 64, True),
        ("fastclip-v3", {"rho": 4.1}, 64, False),  # log 63 = 4.14
        ("fastclip-v3", {"rho": 4.2}, 64, True),
        ("fastclip-v2", {"rho": 4.2}, 64, True),
        ("isogclr", {"rho": 1.0}, 64, False),
        (
            "fastclip-v3",
            {"estimator": "released", "rho": 6.5},
            64,
            False,
        ),  # another radius, without this bound
        ("fastclip-v1", {}, 64, False),
        ("mbcl", {}, 2, False),
    ],
)
def test_a_rho_out_of_reach_is_reported_once(name, options, B, warns, caplog):
    loss = GlobalContrastiveLoss(name, 100, tau_min=0.013, **options)
    batch = (*pair(B, 5, seed=0, dtype=torch.float32), torch.arange(B))
    loss.evaluate(*batch[:2])
    assert not caplog.records  # only training moves τ
    for _ in range(2):
        loss(*batch)
    records = [record for record in caplog.records if record.name == "fastclip.objective.loss"]
    assert [record.levelname for record in records] == ["WARNING"] * warns
    for record in records:
        assert record.args[:2] == (loss.rho, str(B))
        assert record.args[2] == pytest.approx(log(B - 1))
        assert record.args[3] == 0.013


def test_rho_is_bound_by_the_first_training_step():
    loss = GlobalContrastiveLoss("fastclip-v3", 100, rho_share=0.5)
    large, small = ((*pair(B, 5, seed=0, dtype=torch.float32), torch.arange(B)) for B in (64, 16))
    value = float(loss.evaluate(*small[:2]).value.detach())
    assert loss.rho is None  # a validation batch does not decide
    expected = GlobalContrastiveLoss("fastclip-v3", 100, rho=0.5 * log(15)).evaluate(*small[:2])
    assert value == float(expected.value.detach())
    loss(*large)
    assert loss.rho == 0.5 * log(63)
    loss(*small)  # e.g. the last batch of an epoch
    assert loss.rho == 0.5 * log(63)
    assert f"rho={loss.rho}" in repr(loss)


@pytest.mark.parametrize("form", ["state_dict", "sharded_state_dict"])
def test_a_bound_rho_is_saved(form):
    batch = (*pair(64, 5, seed=0, dtype=torch.float32), torch.arange(64))
    loss = GlobalContrastiveLoss("fastclip-v3", 100)
    unbound = {name: value.clone() for name, value in getattr(loss, form)().items()}
    loss(*batch)
    again = GlobalContrastiveLoss("fastclip-v3", 100)
    again.load_state_dict(getattr(loss, form)())
    assert again.rho == loss.rho == 0.7 * log(63)
    again = GlobalContrastiveLoss("fastclip-v3", 100)
    again.load_state_dict(unbound)
    assert again.rho is None
    given = GlobalContrastiveLoss("fastclip-v3", 100, rho=2.0)
    assert "rho" not in getattr(given, form)()


def test_epochs_are_part_of_settings():
    with pytest.raises(TypeError, match="epochs"):
        GlobalContrastiveLoss(resolve("fastclip-v3", batch=64), 10, epochs=3)


def test_backward_may_run_again_if_the_graph_is_retained():
    image, text = pair(4, 5, seed=0)
    out = build("fastclip-v3", 6)(image, text, torch.arange(4))
    out.value.backward(retain_graph=True)
    once = image.grad.clone()
    (3 * out.value).backward()
    assert torch.allclose(image.grad, 4 * once, rtol=1e-14)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        out.value.backward()


def test_a_frozen_tower_gets_no_gradient_and_the_other_is_unaffected():
    ids = torch.arange(6)
    image, text = pair(6, 5, seed=0)
    build("fastclip-v3", 6)(image, text, ids).value.backward()
    expected = text.grad.clone()
    text.grad = None
    build("fastclip-v3", 6)(image.detach(), text, ids).value.backward()
    assert torch.equal(text.grad, expected)


def test_stats_match_their_definitions():
    loss = build("fastclip-v3", 40, gamma=0.5, rho=1.0)
    image, text = pair(10, 5, seed=0)
    ids = torch.arange(10)
    out = loss(image, text, ids)
    out.value.backward()
    stats = {key: float(value) for key, value in out.stats.items()}
    assert stats["loss"] == float(out.value.detach())
    assert stats["unvisited"] == 0.75
    assert stats["tau"] == pytest.approx(0.07)
    # the radius is compared with ρ: G_τ = 2·(ρ − radius)
    assert float(loss.log_scale.grad) == pytest.approx(-0.07 * 2 * (1.0 - stats["radius"]))
    assert stats["max_weight"] == pytest.approx(1.0)  # first visits: u = g
    log_u = logs_of_u(loss)[:10].flatten()
    assert stats["log_u_q50"] in log_u.tolist()
    assert stats["log_u_q05"] <= stats["log_u_q50"] <= stats["log_u_q95"]
    again = loss(*pair(10, 5, seed=1), ids)
    assert float(again.stats["max_weight"]) <= 1 / 0.5 + 1e-9
    assert float(again.stats["unvisited"]) == 0.75


def test_tau_is_clamped_before_it_is_used():
    loss = build("fastclip-v3", 6, tau_min=0.02)
    with torch.no_grad():
        loss.log_scale.fill_(9.0)
    assert float(loss(*pair(3, 5, seed=0), torch.arange(3)).stats["tau"]) == pytest.approx(0.02)
    with torch.no_grad():
        loss.log_scale.fill_(-1.0)
    assert float(loss(*pair(3, 5, seed=0), torch.arange(3)).stats["tau"]) == 1.0


def test_float16_wire_rounds_the_local_features_too():
    image, text = pair(6, 5, seed=0)
    rounded = [x.detach().half().double().requires_grad_() for x in (image, text)]
    ids = torch.arange(6)
    build("fastclip-v3", 6, wire_dtype=torch.float16)(image, text, ids).value.backward()
    build("fastclip-v3", 6)(*rounded, ids).value.backward()
    assert torch.equal(image.grad, rounded[0].grad)


def test_set_epoch_moves_gamma():
    loss = GlobalContrastiveLoss("fastclip-v3", 10, gamma=0.2, gamma_decay_epochs=4)
    gammas = []
    for epoch in range(7):
        loss.set_epoch(epoch)
        gammas.append(loss.gamma)
    assert gammas[0] == 1.0
    assert gammas[2] == pytest.approx(0.6)
    assert gammas[4:] == [0.2, 0.2, 0.2]
    with pytest.raises(InputError) as caught:
        loss.set_epoch(-1)
    assert (caught.value.argument, "-1" in caught.value.problem) == ("epoch", True)


def test_parameter_groups_hold_a_learnable_tau_and_nothing_else():
    group = GlobalContrastiveLoss("fastclip-v3", 10).parameter_groups()[0]
    assert group["lr"] == 2e-4
    assert group["weight_decay"] == 0
    for name in ("sogclr", "fastclip-v1", "fastclip-v2", "isogclr"):
        assert GlobalContrastiveLoss(name, 10).parameter_groups() == []
        assert not any(p.requires_grad for p in GlobalContrastiveLoss(name, 10).parameters())


def test_conversions_move_the_state_and_never_lower_its_precision():
    loss = GlobalContrastiveLoss("fastclip-v2", 10)
    for convert, dtype in (("half", torch.float32), ("double", torch.float64), ("float", torch.float32)):
        getattr(loss, convert)()
        assert all(column.dtype == dtype for column in loss.sample_state.columns.values())
    scale = GlobalContrastiveLoss("fastclip-v3", 10).bfloat16().log_scale
    assert scale.dtype == torch.float32
    moved = GlobalContrastiveLoss("fastclip-v3", 10).to("meta")
    assert moved.device.type == moved.log_scale.device.type == "meta"


def test_a_step_that_begins_before_the_encoders_gives_the_same_numbers():
    features = pair(4, 5, seed=0)
    ids = torch.arange(4)
    plain, ahead = build("fastclip-v2", 10), build("fastclip-v2", 10)
    for step in range(3):
        ids = (ids + step) % 10
        begun = ahead.begin(ids)
        begun.images(features[0])
        # DDP may hand out clones of what the wrapped forward returned
        out = begun.forward(features[0].clone(), features[1])
        assert torch.equal(out.value, plain(*features, ids).value)
    assert torch.equal(logs_of_u(ahead), logs_of_u(plain))


def test_an_abandoned_step_has_no_effect():
    """For example after an encoder ran out of memory: the next batch starts anew."""
    loss, plain = build("fastclip-v3", 10), build("fastclip-v3", 10)
    first, second = pair(4, 5, seed=0), pair(4, 5, seed=1)
    ids = torch.arange(4)
    for each in (loss, plain):
        each(*first, ids)
    loss.begin(torch.tensor([5, 6, 7, 8])).images(first[0])  # and then the encoder fails
    assert torch.equal(loss.begin(ids).forward(*second).value, plain(*second, ids).value)
    assert torch.equal(logs_of_u(loss), logs_of_u(plain))


def test_image_features_other_than_those_sent_are_noticed():
    loss = build("fastclip-v3", 10)
    step = loss.begin(torch.arange(4))
    step.images(pair(4, 5, seed=0)[0])
    out = step.forward(*pair(4, 5, seed=1))
    assert torch.isnan(out.value)
    assert torch.isinf(logs_of_u(loss)).all()
    step = loss.begin(torch.arange(3))
    step.images(pair(4, 5, seed=0)[0])
    with pytest.raises(RuntimeError, match=r"\b4\b.*\b3\b"):
        step.forward(*pair(3, 5, seed=1))


def test_a_step_cannot_be_undone_after_the_next_one_has_begun():
    loss = build("fastclip-v3", 10)
    ids = torch.arange(4)
    out = loss(*pair(4, 5, seed=0), ids)
    loss.begin(ids)
    with pytest.raises(UndoError):
        out.undo(True)


def test_validation_between_a_step_and_its_undo_changes_nothing():
    loss = build("fastclip-v3", 10)
    ids = torch.arange(4)
    out = loss(*pair(4, 5, seed=0), ids)
    loss.eval()(*pair(4, 5, seed=1), ids)
    out.undo(True)
    assert torch.isinf(logs_of_u(loss)).all()


def test_images_are_not_sent_during_inference():
    loss = build("fastclip-v3", 10)
    step = loss.begin(torch.arange(4))
    with torch.no_grad():
        step.images(torch.randn(7, 5))
    step.forward(*pair(4, 5, seed=0))


def test_a_loss_can_be_built_from_settings():
    settings = resolve("fastclip-v3", LossOptions(rho=3.0, gamma=0.5, wire_dtype="float16", tile_mib=2))
    loss = GlobalContrastiveLoss(settings, 10)
    assert (loss.settings, loss.wire_dtype, loss.tile_mib) == (settings, torch.float16, 2)
    with pytest.raises(TypeError, match="rho"):
        GlobalContrastiveLoss(settings, 10, rho=2.0)


def test_an_unknown_option_is_refused_with_a_suggestion():
    with pytest.raises(TypeError, match=r"gama.*gamma"):
        GlobalContrastiveLoss("fastclip-v3", 10, gama=0.5)


def test_the_state_is_precise_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss = GlobalContrastiveLoss("fastclip-v3", 10)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.log_scale.dtype == loss.sample_state.columns["log_u"].dtype == torch.float32
