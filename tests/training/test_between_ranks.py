import torch
from torch import nn

from fastclip.distributed.world import World
from fastclip.optim import Stepper, build_optimizer
from fastclip.training.between_ranks import agree_on_tau
from tests.ranks import run_ranks


def test_ranks_save_one_tau_with_one_optimizer_state():
    """τ is outside DDP: were it different on another rank, a resumed run would not equal a continued one."""
    expected = {"tau": 2.0, "step": 0.0, "exp_avg": 5.0, "exp_avg_sq": 0.0}
    assert run_ranks(_tau_of_a_rank, 2) == [(expected, 0.0), (expected, 1.0)]  # weights are DDP's own


def _tau_of_a_rank(rank, size):
    tau, weight = nn.Parameter(torch.tensor(2.0 + rank)), nn.Parameter(torch.tensor([float(rank)]))
    groups = [{"params": [tau], "lr": 0.1, "weight_decay": 0.0}]
    optimizer = build_optimizer(
        "adamw", [("weight", weight)], groups, lr=0.1, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-6
    )
    optimizer.state[tau]["exp_avg"].fill_(5.0 + rank)
    agree_on_tau(World(rank, size, rank, torch.device("cpu"), None), Stepper(optimizer))
    state = {name: value.item() for name, value in optimizer.state[tau].items()}
    return {"tau": tau.item(), **state}, weight.item()
