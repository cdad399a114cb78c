"""Groups of equal captions: their sizes, and what a batch without negatives does."""

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastclip import ALGORITHMS, GlobalContrastiveLoss
from fastclip.errors import InputError, OptionError
from fastclip.objective.groups import groups_of
from fastclip.tools.profiling.collectives import bytes_sent
from tests.objective.features import pair

OURS = [name for name, row in ALGORITHMS.items() if not row.peer]
FAR = -(2**63)


def test_a_group_is_all_samples_with_the_same_number():
    groups = groups_of(torch.tensor([5, FAR, 5, 2**63 - 1, FAR, 5]), torch.float64)
    codes = groups.code_B.tolist()
    assert codes[0] == codes[2] == codes[5] != codes[1] == codes[4] != codes[3]
    assert groups.log_negatives_B.exp().tolist() == pytest.approx([3, 4, 3, 5, 4, 3])
    assert bool(groups.has_negatives)
    assert float(groups.left_out) == pytest.approx((2 + 1 + 2 + 0 + 1 + 2) / 6)


def test_one_group_has_no_negatives():
    groups = groups_of(torch.full((4,), 9), torch.float32)
    assert not groups.has_negatives
    assert groups.log_negatives_B.tolist() == [0.0] * 4


def batch(B=6):
    image, text = (x.detach().float().requires_grad_() for x in pair(B, 5, seed=2))
    return image, text, torch.arange(B)


@pytest.mark.parametrize("name", OURS)
def test_a_batch_without_negatives_changes_nothing(name):
    loss = GlobalContrastiveLoss(name, 8, negatives="distinct")
    loss(*batch(), torch.arange(6))
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    loss.zero_grad()
    image, text, index = batch()
    out = loss(image, text, index + 2, torch.full((6,), 3))
    out.value.backward()
    assert float(out.value.detach()) == 0
    assert not image.grad.any()
    assert not text.grad.any()
    if loss.log_scale is not None and loss.log_scale.requires_grad:
        assert float(loss.log_scale.grad) == 0
    assert float(out.stats["left_out"]) == 5
    assert all(value.isfinite() for value in out.stats.values())
    for key, value in loss.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", OURS)
def test_groups_of_one_are_all_negatives(name):
    image, text, index = batch()
    plain = GlobalContrastiveLoss(name, 8)(image, text, index)
    distinct = GlobalContrastiveLoss(name, 8, negatives="distinct")(image, text, index, 7 * index)
    assert float(distinct.value.detach()) == pytest.approx(float(plain.value.detach()), rel=1e-6)
    assert float(distinct.stats["left_out"]) == 0
    gradients = [torch.autograd.grad(out.value, (image, text)) for out in (plain, distinct)]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def test_a_radius_that_so_few_negatives_cannot_have_is_reported(caplog):
    """Nine tenths of the captions are equal: log n_i is 2.8 on average, and ρ by rule is 3.4."""
    image, text, index = batch(128)
    group = torch.where(index < 115, 0, index)
    GlobalContrastiveLoss("fastclip-v3", 128, negatives="distinct")(image, text, index, group)
    (record,) = caplog.records
    assert record.args[0] == pytest.approx(3.39, abs=0.01)
    assert record.args[2] == pytest.approx(2.80, abs=0.05)


def test_mbcl_with_groups_is_cross_entropy_over_the_remaining_texts():
    image, text, _ = batch()
    group = torch.tensor([0, 1, 0, 2, 1, 0])
    out = GlobalContrastiveLoss("mbcl", 8, tau=0.1, negatives="distinct")(image, text, group=group)
    logits = image @ text.T / 0.1
    same = group[:, None] == group
    kept = logits.masked_fill(same & ~torch.eye(6, dtype=torch.bool), -torch.inf)
    labels, negatives = torch.arange(6), (~same).sum(1)
    both = [torch.nn.functional.cross_entropy(x, labels, reduction="none") for x in (kept, kept.T)]
    expected = torch.stack([x - negatives.log() for x in both]).mean()  # ours is without the constant log n_i
    assert float(out.value.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_evaluation_takes_groups_too_and_needs_none():
    image, text, _ = batch()
    loss = GlobalContrastiveLoss("fastclip-v3", 8, negatives="distinct")
    assert "left_out" not in loss.evaluate(image, text).stats
    assert float(loss.evaluate(image, text, torch.arange(6) // 2).stats["left_out"]) == 1


@pytest.mark.parametrize(
    ("negatives", "group"),
    [
        ("distinct", None),
        ("all", torch.arange(6)),
        ("distinct", torch.rand(6)),
        ("distinct", torch.arange(5)),
        ("distinct", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_wrong_groups_are_refused(negatives, group):
    loss = GlobalContrastiveLoss("fastclip-v3", 8, negatives=negatives)
    for call in (lambda: loss(*batch(), group), lambda: loss.begin(torch.arange(6), group)):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.argument == "group"


def test_unknown_negatives_are_refused():
    with pytest.raises(OptionError) as caught:
        GlobalContrastiveLoss("fastclip-v3", 8, negatives="some")
    assert caught.value.option == "negatives"


@pytest.mark.parametrize("name", ["fastclip-v3", "mbcl"])
def test_groups_add_8_bytes_per_sample_to_what_is_sent(name):
    K, b = 4, 6
    torch.distributed.init_process_group("fake", rank=0, world_size=K, store=FakeStore())
    try:
        sent = {}
        for negatives in ("all", "distinct"):
            loss = GlobalContrastiveLoss(name, 24, negatives=negatives)
            given = (*batch(), torch.arange(b)) if negatives == "distinct" else batch()
            loss(*given)  # the checks of the first step
            sent[negatives] = sum(bytes_sent(lambda f=loss, x=given: f(*x).value.backward()).values())
        assert sent["distinct"] - sent["all"] == (K - 1) * b * 8
    finally:
        torch.distributed.destroy_process_group()


def test_an_estimator_is_the_mean_over_the_negatives_that_are_left():
    """All similarities are equal, so each exp(a_ij) is 1, and so is their mean over n_i of them."""
    feature = torch.nn.functional.normalize(torch.ones(6, 3), dim=1)
    loss = GlobalContrastiveLoss("fastclip-v1", 8, negatives="distinct")
    loss(feature, feature, torch.arange(6), torch.tensor([0, 0, 1, 1, 1, 2]))
    assert loss.sample_state.columns["log_u"][:6].abs().max() < 1e-6
