"""In the test bed, OpenCLIP with simultaneous feature gradients computes what the real one computes."""

import torch
from benchmarks.hosts_worker import gradients_at_once
from torch.distributed.nn.functional import all_gather

from tests.ranks import run_ranks


def gradients(rank, size):
    """Gradients of a loss of all ranks' features: one by one as gloo sends them, and all at once."""
    results = []
    for at_once in (False, True):
        features = (torch.arange(6.0).reshape(3, 2) + 10 * rank).requires_grad_()
        gathered = torch.cat(all_gather(features))
        loss = (gathered**2 * torch.linspace(1, 2 + rank, len(gathered))[:, None]).sum()
        if at_once:
            with gradients_at_once():
                loss.backward()
        else:
            loss.backward()
        results.append(features.grad)
    return results


def test_gradients_sent_at_once_equal_those_that_gloo_sends_one_by_one():
    for one_by_one, at_once in run_ranks(gradients, 3):
        assert one_by_one.any()
        assert torch.equal(one_by_one, at_once)
