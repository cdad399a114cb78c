"""The average of the weights: its formula, skipped steps, frozen parameters, and weights that come back."""

import pytest
import torch
from torch import nn

from fastclip.errors import InputError
from fastclip.weight_average import WeightAverage

DONE, SKIPPED = torch.tensor(True), torch.tensor(False)


class Small(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, dtype=dtype).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(5, 7, dtype=dtype)
        self.norm = nn.BatchNorm1d(7, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))
        self.linear.bias.requires_grad_(False)

    def move(self, step):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_it_is_the_moving_average_with_a_warm_up(decay):
    model = Small()
    average = WeightAverage(model.named_parameters(), decay)
    expected = values(model)
    for step in range(40):
        model.move(step)
        average.update(step, DONE)
        kept = min(decay, (1 + step) / (10 + step))
        expected = {name: kept * expected[name] + (1 - kept) * now for name, now in values(model).items()}
    for name, tensor in average.tensors().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-13, atol=1e-13)


def test_frozen_parameters_and_buffers_have_no_average():
    model = Small()
    names = WeightAverage(model.named_parameters(), 0.9).tensors().keys()
    assert names == {name for name, p in model.named_parameters() if p.requires_grad}
    assert "linear.bias" not in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_skipped_step_changes_no_bit_and_no_update_changes_the_weights(dtype):
    model = Small(dtype)
    average = WeightAverage(model.named_parameters(), 0.9)
    for step, finite in enumerate([DONE, SKIPPED, DONE, SKIPPED]):
        model.move(step)
        weights = values(model)
        before = {name: tensor.clone() for name, tensor in average.tensors().items()}
        average.update(step, finite)
        same = [torch.equal(before[name], tensor) for name, tensor in average.tensors().items()]
        assert all(same) if finite is SKIPPED else not any(same)
        assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    assert {tensor.dtype for tensor in average.tensors().values()} == {dtype}


def test_the_model_has_the_averages_inside_and_its_weights_again_afterwards():
    model = Small(torch.float32)
    average = WeightAverage(model.named_parameters(), 0.9)
    model.move(0)
    average.update(0, DONE)
    weights, averages = values(model), {name: t.clone() for name, t in average.tensors().items()}
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    with average.in_place():
        inside = values(model)
    with pytest.raises(KeyError), average.in_place():
        raise KeyError  # an evaluation may fail
    assert all(torch.equal(inside[name], averages.get(name, weights[name])) for name in weights)
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    assert all(torch.equal(averages[name], t) for name, t in average.tensors().items())
    assert addresses == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_it_is_restored_and_averages_of_another_model_are_refused():
    model, other = Small(), Small()
    average, restored = (WeightAverage(one.named_parameters(), 0.9) for one in (model, other))
    model.move(0)
    average.update(0, DONE)
    restored.load(average.tensors())
    assert all(torch.equal(t, restored.tensors()[name]) for name, t in average.tensors().items())
    with pytest.raises(InputError) as caught:
        restored.load({"linear.weight": torch.zeros(7, 5)})
    assert caught.value.argument == "tensors"


def test_without_trained_weights_there_is_nothing_to_do():
    model = Small().requires_grad_(False)
    average = WeightAverage(model.named_parameters(), 0.9)
    average.update(0, DONE)
    assert average.tensors() == {}
