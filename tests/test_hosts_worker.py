"""The test bed's OpenCLIP that sends gradients of features at once computes what the real one computes."""

import torch
from benchmarks.hosts_worker import gradients_at_once
from torch.distributed.nn.functional import all_gather

from tests.workers import run_workers


def gradients(rank, size):
    """Of what every worker makes of all workers' features: as gloo sends them, and at once."""
    found = []
    for at_once in (False, True):
        features = (torch.arange(6.0).reshape(3, 2) + 10 * rank).requires_grad_()
        gathered = torch.cat(all_gather(features))
        loss = (gathered**2 * torch.linspace(1, 2 + rank, len(gathered))[:, None]).sum()
        if at_once:
            with gradients_at_once():
                loss.backward()
        else:
            loss.backward()
        found.append(features.grad)
    return found


def test_gradients_sent_at_once_are_those_that_gloo_sends_one_by_one():
    for one_by_one, at_once in run_workers(gradients, 3):
        assert one_by_one.any()
        assert torch.equal(one_by_one, at_once)
