"""Random unit features for the tests of the objective."""

import torch
import torch.nn.functional as F


def unit(rows, d, seed, dtype=torch.float64, spread=0.6):
    """Rows of unit length around a common direction, so that similarities are neither tiny nor alike."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, d, generator=generator, dtype=torch.float64)
    return F.normalize(noise + spread, dim=-1).to(dtype)


def pair(rows, d, seed, dtype=torch.float64):
    """Similar image and text features, as leaves that require gradients."""
    image = unit(rows, d, seed)
    text = F.normalize(image + 0.7 * unit(rows, d, seed + 10_000), dim=-1)
    return image.to(dtype).requires_grad_(), text.to(dtype).requires_grad_()


def relative_error(actual, expected):
    """The largest difference over the largest magnitude."""
    expected = torch.as_tensor(expected)
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
