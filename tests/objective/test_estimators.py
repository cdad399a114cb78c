"""How estimators move, against the same in linear space and against SCENT's own formula."""

from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastclip import GlobalContrastiveLoss
from fastclip.objective import estimators
from tests.objective.features import pair

TINY = 1e-300  # a floor of γ without effect


def scalar(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


@given(log_u=st.floats(-60, 60), log_g=st.floats(-60, 60))
def test_scent_without_a_floor_is_its_published_closed_form(log_u, log_g):
    """ν' = ν + log(1 + α·g) − log(1 + α·e^ν), α = e^10."""
    new = estimators.moved_adaptively(scalar(log_u), scalar(log_g), TINY)
    alpha = exp(10)
    expected = log_u + torch.log1p(alpha * scalar(log_g).exp()) - torch.log1p(alpha * scalar(log_u).exp())
    assert float(new) == pytest.approx(float(expected), rel=1e-12, abs=1e-12)


def test_scents_gamma_is_between_its_floor_and_one():
    log_u = torch.tensor([-torch.inf, -100.0, -10.0, 0.0, 50.0])
    gamma = estimators.adaptive_log_gamma(log_u, 0.1).exp()
    assert gamma.tolist() == pytest.approx([1.0, 0.1, 0.5, 1 / (1 + exp(-10)), 1.0])


@given(log_u=st.floats(-100, 100), log_g=st.floats(-100, 100), least=st.floats(0.01, 1))
def test_the_floor_bounds_the_weight_of_a_sample(log_u, log_g, least):
    new = estimators.moved_adaptively(scalar(log_u), scalar(log_g), least)
    assert log_g - float(new) <= -log(least) + 1e-9


def test_a_very_small_estimator_has_finite_weights_in_float32_at_the_lowest_temperature():
    loss = GlobalContrastiveLoss("scent", 8, tau=0.01)
    image, text = (x.detach().float().requires_grad_() for x in pair(8, 4, seed=0))
    loss.sample_state.columns["log_u"].fill_(-100.0)
    out = loss(image, text, torch.arange(8))
    out.value.backward()
    assert image.grad.isfinite().all()
    assert text.grad.isfinite().all()
    assert float(out.stats["gamma"]) == pytest.approx(0.1)
    assert float(out.stats["max_weight"]) <= 10.001


def test_the_first_visit_takes_the_batchs_estimate():
    log_g = torch.tensor([1.0, -3.0])
    unvisited = torch.full((2,), -torch.inf)
    assert torch.equal(estimators.moved(unvisited, log_g, 0.2), log_g)
    assert torch.equal(estimators.moved_adaptively(unvisited, log_g, 0.2), log_g)
