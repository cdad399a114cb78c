"""Invalid input is refused, and the error names the argument."""

from functools import partial

import pytest
import torch

from fastclip import GlobalContrastiveLoss
from fastclip.errors import InputError, OptionError
from tests.objective.features import pair, unit


def call(image_shape=(4, 3), text_shape=(4, 3), ids=(0, 1, 2, 3), image=None, text=None):
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    image = unit(*image_shape, 0, torch.float32) if image is None else image
    text = unit(*text_shape, 1, torch.float32) if text is None else text
    return loss(image, text, torch.tensor(ids) if isinstance(ids, tuple) else ids)


@pytest.mark.parametrize(
    ("change", "error", "argument", "values"),
    [
        ({"image_shape": (1, 3), "text_shape": (1, 3), "ids": (0,)}, InputError, "image_features", ["2"]),
        ({"image_shape": (0, 3), "text_shape": (0, 3), "ids": ()}, InputError, "index", ["empty"]),
        ({"text_shape": (4, 2)}, InputError, "image_features", ["(4, 3)", "(4, 2)"]),
        ({"image": torch.ones(4)}, InputError, "image_features", ["(4,)", "(batch, d)"]),
        ({"text": unit(4, 3, 0)}, TypeError, "image_features", ["torch.float32", "torch.float64"]),
        (
            {"text": torch.empty(4, 3, device="meta")},
            InputError,
            "image_features",
            ["meta", "loss.to('cpu')"],
        ),
        ({"ids": (0, 1, 2, 10)}, IndexError, "index", ["from 0 to 10", "num_samples=10", "[0, 9]"]),
        ({"ids": (0, 1, -2, 3)}, IndexError, "index", ["from -2 to 3"]),
        ({"ids": (0, 1, 2)}, InputError, "index", ["3 ids", "4 pairs"]),
        ({"ids": (0.0, 1.0, 2.0, 3.0)}, TypeError, "index", ["(4,)", "torch.float32"]),
        ({"ids": None}, InputError, "index", ["NoneType", "fastclip-v3"]),
        ({"ids": [0, 1, 2, 3]}, InputError, "index", ["list"]),
        ({"image": 2 * unit(4, 3, 0, torch.float32)}, InputError, "image_features", ["2", "normalize"]),
        ({"text": 3 * unit(4, 3, 0, torch.float32)}, InputError, "text_features", ["3", "normalize"]),
    ],
)
def test_an_invalid_batch_is_refused(change, error, argument, values):
    with pytest.raises(error) as caught:
        call(**change)
    assert caught.value.argument == argument
    assert all(value in caught.value.problem for value in values)


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("algorithm", "fastclip-v4", "fastclip-v"),
        ("algorithm", "openclip", "mbcl"),
        ("tile_mib", 0, "256"),
        ("wire_dtype", torch.int8, "torch.float16"),
    ],
)
def test_the_constructor_refuses_invalid_options(option, value, remedy):
    with pytest.raises(OptionError) as caught:
        GlobalContrastiveLoss(**({"algorithm": "fastclip-v3", "num_samples": 10} | {option: value}))
    assert (caught.value.option, caught.value.value) == (option, value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("num_samples", [1, 1e6])
def test_num_samples_must_be_an_integer_of_at_least_two(num_samples):
    with pytest.raises(InputError) as caught:
        GlobalContrastiveLoss("fastclip-v3", num_samples)
    assert caught.value.argument == "num_samples"
    assert str(num_samples) in caught.value.problem


def test_ids_on_the_host_are_checked_at_every_step():
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    batch = pair(4, 3, seed=0, dtype=torch.float32)
    loss(*batch, torch.arange(4))
    for call_with in (partial(loss, *batch), loss.begin):
        with pytest.raises(IndexError) as caught:
            call_with(torch.arange(4) + 7)
        assert caught.value.argument == "index"
        assert "from 7 to 10" in caught.value.problem


def test_ids_out_of_range_on_a_gpu_give_nan_after_the_first_step_and_write_nothing():
    """Simulates a GPU, whose ids are not read on the host, by disabling the host's check."""
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
    spoilt = image.clone()
    spoilt[0, 0] = torch.nan
    loss(spoilt, text, torch.arange(4))
    with pytest.raises(InputError) as caught:
        loss(5 * image, text, torch.arange(4))
    assert (caught.value.argument, "length 5" in caught.value.problem) == ("image_features", True)
    spoilt[1] *= 5
    with pytest.raises(InputError) as caught:
        GlobalContrastiveLoss("fastclip-v3", 10)(spoilt, text, torch.arange(4))
    assert (caught.value.argument, "length 5" in caught.value.problem) == ("image_features", True)


def test_one_process_may_change_its_batch_size():
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    for b in (4, 3, 6):
        loss(*pair(b, 3, seed=0, dtype=torch.float32), torch.arange(b))
