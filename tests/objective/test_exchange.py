"""The traffic of a step, and the world size that a loss was built for."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastclip import ALGORITHMS, GlobalContrastiveLoss
from fastclip.objective.exchange import Exchange
from fastclip.tools.profiling.collectives import bytes_sent


@pytest.fixture
def fake_group():
    """A process group of four whose collectives do nothing."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_single_rank_sends_nothing():
    x = torch.ones(3, 2)
    exchange = Exchange()
    assert exchange.gather(x).wait() is x
    assert exchange.sum(x).wait() is x


def test_a_loss_built_before_the_process_group_is_refused(request):
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    request.getfixturevalue("fake_group")
    features = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
    with pytest.raises(RuntimeError, match="init_process_group"):
        loss(features, features, torch.arange(4))


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if not row.peer])
def test_a_step_of_several_gpus_never_waits_for_the_host(name, fake_group):
    with FakeTensorMode():
        loss = GlobalContrastiveLoss(name, 64, device="cuda")
        loss._checks.first_step_done, loss._checks.local_batch = True, {True: 16}
        image, text = (torch.randn(16, 8, device="cuda", requires_grad=True) for _ in range(2))
        index = torch.zeros(16, dtype=torch.int64, device="cuda")
        step = loss.begin(index)
        step.images(image)
        out = step.forward(image, text)
        assert out.value.requires_grad


@pytest.mark.parametrize(("name", "scalars", "state"), [("fastclip-v3", 4, 2), ("fastclip-v2", 6, 4)])
def test_only_features_and_a_few_scalars_are_sent(name, scalars, state, fake_group):
    b, d, K = 16, 32, 4
    loss = GlobalContrastiveLoss(name, 64)
    image, text = (
        torch.nn.functional.normalize(torch.randn(b, d), dim=-1).requires_grad_() for _ in range(2)
    )
    index = torch.arange(b)
    loss(image, text, index)  # the first step also compares batch sizes

    def step():
        loss(image, text, index).value.backward()

    features, ids = 2 * b * d * 4, b * 8
    expected = (K - 1) * (features + ids + (scalars * b + 2) * 4) + 2 * (K - 1) / K * (K * b * state * 4)
    assert sum(bytes_sent(step).values()) == expected
