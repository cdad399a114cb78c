import pytest
import torch

from fastclip.finite import first_non_finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_tensor_with_a_non_finite_number_is_named(value):
    tensors = {"a": torch.ones(3), "ids": torch.arange(3), "b": torch.ones(2, 2), "c": torch.ones(1)}
    assert first_non_finite(tensors) is None
    tensors["b"][1, 0] = tensors["c"][0] = value
    assert first_non_finite(tensors) == "b"


def test_there_may_be_nothing_to_check():
    assert first_non_finite({}) is None
    assert first_non_finite({"ids": torch.arange(3)}) is None
