"""The loss's state in the hands of Accelerate, Lightning, torch.save and safetensors, at 1, 2 and 4 ranks.

Two ranks save it once in each way; two, one and four ranks load it. All of this happens in four processes,
which form a new process group for each world size: importing Lightning takes longer than everything else.
"""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, load_model, save_file, save_model

from fastclip import GlobalContrastiveLoss
from tests.objective.features import pair
from tests.ranks import run_ranks

N, B, D = 37, 8, 6  # n is not divisible by 2 or 4
SEEN = [0, 36, 9, 10, 19, 20, 30, 5]
ALGORITHMS = ["fastclip-v2", "fastclip-v3"]
OPTIONS = {"negatives": "distinct", "gamma": "auto", "epochs": 20}


def features(rank, world_size):
    """This rank's part of a batch of B pairs, their ids, and the groups of their captions."""
    b = B // world_size
    local = slice(rank * b, (rank + 1) * b)
    image, text = (x.detach()[local] for x in pair(B, D, seed=0, dtype=torch.float32))
    return image, text, torch.tensor(SEEN)[local], torch.tensor([0, 1, 2, 2, 3, 4, 5, 0])[local]


def trained(name, rank, world_size):
    """A loss that has seen one batch, with a τ of its own."""
    loss = GlobalContrastiveLoss(name, N, **OPTIONS)
    loss(*features(rank, world_size))
    if loss.log_scale is not None:
        loss.log_scale.data.fill_(2.5)
    return loss


def own_rows(loss):
    """This rank's rows of each column, τ, and the number of visited samples."""
    state = loss.sample_state
    rows = {name: column[: state.held].clone() for name, column in state.columns.items()}
    tau = None if loss.log_scale is None else float(loss.log_scale.detach())
    return rows, tau, int(state.visited)


# Each way to save and to load. All ranks call these.


def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True)


def save_with_accelerate(loss, path):
    tool = accelerator()
    tool.register_for_checkpointing(loss)
    tool.save_state(str(path))


def load_with_accelerate(loss, path):
    tool = accelerator()
    tool.register_for_checkpointing(loss)
    tool.load_state(str(path))


def save_with_torch(loss, path):
    state = loss.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def load_with_torch(loss, path):
    loss.load_state_dict(torch.load(path, weights_only=True))


def save_with_safetensors(loss, path):
    state = loss.state_dict()
    if dist.get_rank() == 0:
        save_file(state, path)
    dist.barrier()


def load_with_safetensors(loss, path):
    loss.load_state_dict(load_file(path))


SAVES = {
    "accelerate": save_with_accelerate,
    "torch": save_with_torch,
    "safetensors": save_with_safetensors,
}
LOADS = {
    "accelerate": load_with_accelerate,
    "torch": load_with_torch,
    "safetensors": load_with_safetensors,
}


def lightning_module(name):
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.tower = torch.nn.Linear(D, D)

        def setup(self, stage):  # the process group exists from here on
            if not hasattr(self, "loss"):
                self.loss = GlobalContrastiveLoss(name, N, **OPTIONS)

        def training_step(self, batch, _):
            image, text, index, group = batch
            normalize = torch.nn.functional.normalize
            return self.loss(normalize(self.tower(image), dim=-1), text, index, group).value

        def configure_optimizers(self):
            groups = [{"params": self.tower.parameters()}, *self.loss.parameter_groups()]
            return torch.optim.AdamW(groups, lr=1e-3)

    return Module()


def fit(name, rank, world_size, path, steps, resume=None):
    """Train a Lightning module for a number of steps in all, and save its checkpoint; returns its loss."""
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    environment = TorchElasticEnvironment()
    strategy = DDPStrategy(cluster_environment=environment, process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy if world_size > 1 else "auto",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        default_root_dir=path.parent,
    )
    batches = torch.utils.data.DataLoader([features(rank, world_size)] * steps, batch_size=None)
    module = lightning_module(name)
    trainer.fit(module, batches, ckpt_path=resume)
    trainer.save_checkpoint(path)
    return module.loss


@contextmanager
def regrouped(rank, world_size, store):
    """Put the first ranks in a process group of their own; yields whether this rank is among them."""
    if rank < world_size:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), GROUP_RANK="0")
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # required, but not used
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    yield rank < world_size
    if rank < world_size:
        dist.barrier()
        dist.destroy_process_group()


def save_and_load_everywhere(rank, world_size, folder):
    """What was saved by two ranks, and what every world size loaded: {(world size, name, tool): own_rows}."""
    folder, results = Path(folder), {}
    dist.destroy_process_group()
    with regrouped(rank, 2, folder / "store-save") as mine:
        for name in ALGORITHMS if mine else []:
            loss = trained(name, rank, 2)
            results["saved", name] = own_rows(loss)
            for tool, save in SAVES.items():
                save(loss, folder / f"{name}-{tool}")
            results["saved", name, "lightning"] = own_rows(fit(name, rank, 2, folder / f"{name}-1.ckpt", 1))
    for K in (2, 1, 4):
        with regrouped(rank, K, folder / f"store-{K}") as mine:
            for name in ALGORITHMS if mine else []:
                for tool, load in LOADS.items():
                    loss = GlobalContrastiveLoss(name, N, **OPTIONS)
                    load(loss, folder / f"{name}-{tool}")
                    results[K, name, tool] = own_rows(loss)
                if K < 4:
                    path = folder / f"{name}-1.ckpt"
                    loss = fit(name, rank, K, folder / f"{name}-again-{K}.ckpt", 1, resume=path)
                    results[K, name, "lightning"] = own_rows(loss)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-end", rank=rank, world_size=4)
    return results


def joined(results, key):
    """Columns of all ranks together, τ and the visited count, which must be equal on all."""
    parts = [result[key] for result in results if key in result]
    assert len({(tau, visited) for _, tau, visited in parts}) == 1
    columns = {name: torch.cat([rows[name] for rows, _, _ in parts]) for name in parts[0][0]}
    return columns, parts[0][1], parts[0][2]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_state_saved_by_two_ranks_with_any_tool_loads_right_at_two_one_and_four_ranks(tmp_path):
    results = run_ranks(save_and_load_everywhere, 4, str(tmp_path), timeout=150)
    loaded = [key for key in results[0] if key[0] != "saved"]
    assert len(loaded) == 2 * (3 * 3 + 2)
    for key in loaded:
        _, name, tool = key
        source = ("saved", name, tool) if tool == "lightning" else ("saved", name)
        expected, tau, visited = joined(results, source)
        columns, loaded_tau, loaded_visited = joined(results, key)
        assert (loaded_tau, loaded_visited, visited) == (tau, visited, len(SEEN)), key
        for column, rows in expected.items():
            assert rows.shape[0] == N
            assert torch.equal(columns[column], rows), (key, column)


@pytest.mark.parametrize("name", [*ALGORITHMS, "mbcl"])
def test_safetensors_and_a_prepared_loss_work_with_one_rank(name, tmp_path):
    options = {"negatives": "distinct"} if name == "mbcl" else OPTIONS
    loss = GlobalContrastiveLoss(name, N, **options)
    loss(*features(0, 1))
    save_model(loss, tmp_path / "loss.safetensors")
    other = GlobalContrastiveLoss(name, N, **options)
    load_model(other, tmp_path / "loss.safetensors")
    assert_equal(other, loss)

    tool = accelerator()
    prepared = tool.prepare(loss)
    tool.save_state(str(tmp_path / "state"))
    saved = {key: column.clone() for key, column in loss.state_dict().items()}
    prepared(*features(0, 1))
    tool.load_state(str(tmp_path / "state"))
    assert_equal(loss, other)
    assert all(torch.equal(column, saved[key]) for key, column in loss.state_dict().items())


def assert_equal(loss, other):
    mine, theirs = loss.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    if loss.sample_state is not None:
        assert int(loss.sample_state.visited) == int(other.sample_state.visited) == len(SEEN)
