"""Bad input: each mistake gets a message that says what to do."""

import pytest
import torch

from fastclip import GlobalContrastiveLoss
from tests.objective.features import pair, unit


def call(image_shape=(4, 3), text_shape=(4, 3), ids=(0, 1, 2, 3), image=None, text=None):
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    image = unit(*image_shape, 0, torch.float32) if image is None else image
    text = unit(*text_shape, 1, torch.float32) if text is None else text
    return loss(image, text, torch.tensor(ids) if isinstance(ids, tuple) else ids)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"image_shape": (1, 3), "text_shape": (1, 3), "ids": (0,)}, ValueError, "no negatives"),
        ({"image_shape": (0, 3), "text_shape": (0, 3), "ids": ()}, ValueError, "The batch is empty"),
        ({"text_shape": (4, 2)}, ValueError, r"image_features \(4, 3\) and text_features \(4, 2\)"),
        ({"image": torch.ones(4)}, ValueError, r"must both be \(batch, d\)"),
        ({"text": unit(4, 3, 0)}, TypeError, "text_features torch.float64: give one float type"),
        ({"text": torch.empty(4, 3, device="meta")}, ValueError, "text_features on meta, the loss on cpu"),
        ({"ids": (0, 1, 2, 10)}, IndexError, r"ids from 0 to 10, but num_samples=10.*\[0, 9\]"),
        ({"ids": (0, 1, -2, 3)}, IndexError, "ids from -2 to 3"),
        ({"ids": (0, 1, 2)}, ValueError, "index has 3 ids for 4 pairs"),
        ({"ids": (0.0, 1.0, 2.0, 3.0)}, TypeError, r"1-d integer tensor, not .* of torch.float32"),
        ({"ids": None}, ValueError, r"fastclip-v3 needs index.*got NoneType"),
        ({"ids": [0, 1, 2, 3]}, ValueError, "it got list"),
        (
            {"image": 2 * unit(4, 3, 0, torch.float32)},
            ValueError,
            r"unit length.*\(the farthest here has 2\)",
        ),
    ],
)
def test_a_batch_is_refused_with_what_to_do(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "fastclip-v4"}, "Did you mean fastclip-v"),
        ({"algorithm": "openclip"}, "'mbcl' for OpenCLIP's loss"),
        ({"num_samples": 1}, "at least 2"),
        ({"num_samples": 1e6}, "num_samples=1000000.0 must be a whole number"),
        ({"tile_bytes": 0}, "tile_bytes=0"),
        ({"wire_dtype": torch.int8}, "try torch.float16"),
    ],
)
def test_the_constructor_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        GlobalContrastiveLoss(**({"algorithm": "fastclip-v3", "num_samples": 10} | options))


def test_ids_on_the_host_are_checked_at_every_step():
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    batch = pair(4, 3, seed=0, dtype=torch.float32)
    loss(*batch, torch.arange(4))
    with pytest.raises(IndexError, match="ids from 7 to 10"):
        loss(*batch, torch.arange(4) + 7)
    with pytest.raises(IndexError, match="ids from 7 to 10"):
        loss.begin(torch.arange(4) + 7)


def test_ids_out_of_range_on_a_gpu_give_nan_after_the_first_step_and_write_nothing():
    """Stands in for a GPU, whose ids are not read on the host: the host's check is taken out."""
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    batch = pair(4, 3, seed=0, dtype=torch.float32)
    loss(*batch, torch.arange(4))
    before = loss.state_dict()["log_u"].clone()
    loss._checks.index = lambda index: index
    assert torch.isnan(loss(*batch, torch.tensor([0, 1, 2, 10])).value)
    assert torch.equal(loss.state_dict()["log_u"], before)


def test_a_nan_on_the_first_step_does_not_end_the_check_of_lengths():
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    image, text = (x.detach() for x in pair(4, 3, seed=0, dtype=torch.float32))
    broken = image.clone()
    broken[0, 0] = torch.nan
    loss(broken, text, torch.arange(4))
    with pytest.raises(ValueError, match="unit length"):
        loss(5 * image, text, torch.arange(4))
    broken[1] *= 5
    with pytest.raises(ValueError, match="unit length"):
        GlobalContrastiveLoss("fastclip-v3", 10)(broken, text, torch.arange(4))


def test_one_process_may_change_its_batch_size():
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    for b in (4, 3, 6):
        loss(*pair(b, 3, seed=0, dtype=torch.float32), torch.arange(b))
