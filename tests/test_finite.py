"""NaN and infinities are found in tensors of every kind."""

import pytest
import torch

from fastclip.finite import first_non_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_tensor_with_a_value_that_is_not_finite_is_named(dtype, value):
    fine = torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype)
    broken = torch.linspace(-1, 1, 12).index_fill(0, torch.tensor([7]), value).reshape(3, 4).to(dtype)
    assert first_non_finite({"a": fine, "b": broken, "c": broken}) == "b"
    assert first_non_finite({"a": fine}) is None


def test_tensors_without_such_values_are_finite():
    largest = torch.tensor([torch.finfo(torch.float32).max] * 2)  # whose sum is not
    tensors = [largest, torch.tensor([2**62]), torch.tensor([True]), torch.empty(0, 3), torch.tensor(1.0)]
    assert first_non_finite({str(i): tensor for i, tensor in enumerate(tensors)}) is None
    assert first_non_finite({"meta": torch.empty(3, device="meta")}) is None
    assert first_non_finite({"trained": torch.nn.Parameter(torch.tensor([float("nan")]))}) == "trained"
