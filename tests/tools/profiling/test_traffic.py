"""The formulas against bytes counted at the calls."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_clip.loss import SigLipLoss
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastclip import ALGORITHMS, GlobalContrastiveLoss
from fastclip.errors import InputError
from fastclip.tools.profiling.collectives import bytes_sent
from fastclip.tools.profiling.traffic import all_gather, all_reduce, buckets, step_traffic

COUNTED = Path(__file__).parents[3] / "results" / "bytes_on_the_wire.json"
CASES = {
    "ClipLoss": ("openclip", None),
    "fastclip-v3": ("fastclip-v3", None),
    "fastclip-v2": ("fastclip-v2", None),
    "fastclip-v3, float16 wire": ("fastclip-v3", 2),
}
OURS = [name for name, row in ALGORITHMS.items() if not row.peer]


def sent(algorithm, ranks=4, local_batch=8, features=16, trained_bytes=0, **options):
    sizes = {"workers": ranks, "local_batch": local_batch, "features": features}
    return step_traffic(algorithm, **sizes, trained_bytes=trained_bytes, **options)


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def unit_features(b, d):
    return tuple(F.normalize(torch.randn(b, d), dim=-1).requires_grad_() for _ in range(2))


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("label", CASES)
def test_formulas_give_the_counted_bytes(label, ranks):
    figures = json.loads(COUNTED.read_text())["figures"]
    algorithm, wire = CASES[label]
    traffic = sent(algorithm, ranks, figures["local_batch"], figures["features"], wire_bytes=wire)
    assert traffic.exchange == figures["cases"][f"K={ranks}, {label}"]["bytes_sent"]


@pytest.mark.parametrize("algorithm", OURS)
@pytest.mark.usefixtures("four_ranks")
def test_formulas_hold_for_each_of_our_algorithms(algorithm):
    loss, (image, text), index = GlobalContrastiveLoss(algorithm, 100), unit_features(8, 16), torch.arange(8)
    loss(image, text, index)  # the first step also compares batches
    counted = sum(bytes_sent(lambda: loss(image, text, index).value.backward()).values())
    assert sent(algorithm).exchange == counted


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_siglip_sends_texts_around_the_ring_and_their_gradients_back(ranks, monkeypatch):
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        posted = []

        def post(operations):
            posted.extend(o.tensor.nbytes for o in operations if o.op is dist.isend)
            return []

        monkeypatch.setattr(dist, "batch_isend_irecv", post)
        image, text = unit_features(8, 16)
        scale, bias = (torch.tensor(x, requires_grad=True) for x in (10.0, -10.0))
        SigLipLoss(rank=0, world_size=ranks)(image, text, scale, bias).backward()
    finally:
        dist.destroy_process_group()
    traffic = sent("siglip", ranks)
    assert traffic.features + traffic.feature_gradients == sum(posted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_single_rank_sends_nothing(algorithm):
    assert sent(algorithm, ranks=1, trained_bytes=1000).total == 0


def test_weights_travel_twice_around_the_ring():
    assert sent("openclip", trained_bytes=1000).weights == all_reduce(4, 1000) == 1500
    assert all_gather(4, 10) == 30


def test_only_the_peers_send_gradients_of_features():
    for name, row in ALGORITHMS.items():
        assert bool(sent(name).feature_gradients) == bool(row.peer)


def test_a_half_precision_wire_halves_the_features_of_our_losses_only():
    assert 2 * sent("fastclip-v3", wire_bytes=2).features == sent("fastclip-v3").features
    assert sent("openclip", wire_bytes=2) == sent("openclip")


def test_gradients_are_sent_in_a_small_bucket_and_then_in_larger_ones():
    assert [buckets(mib << 20) for mib in (0, 1, 2, 26, 27)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "argument"), [({"ranks": 0}, "workers"), ({"local_batch": 0}, "local_batch")]
)
def test_sizes_below_one_are_refused(sizes, argument):
    with pytest.raises(InputError) as caught:
        sent("openclip", **sizes)
    assert caught.value.argument == argument
