"""The loss over real gloo processes: the same global batches give the same run at every world size."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fastclip import ALGORITHMS, GlobalContrastiveLoss
from fastclip.errors import InputError
from tests.objective.features import pair, relative_error
from tests.ranks import run_ranks

OURS = [name for name, row in ALGORITHMS.items() if not row.peer]
VARIANTS = [(name, {}) for name in OURS] + [
    ("fastclip-v3", {"estimator": "released", "rho": 6.5}),
    ("fastclip-v3", {"wire_dtype": torch.float16}),
    ("fastclip-v2", {"tile_mib": 100 / 2**20}),
    ("fastclip-v1", {"features": torch.bfloat16}),
    *((name, {"negatives": "distinct"}) for name in OURS),
    ("fastclip-v3", {"negatives": "distinct", "tile_mib": 100 / 2**20}),
]
N, B, D, STEPS = 37, 16, 6, 10  # n is not divisible by the world size, and ids repeat within a batch
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def ten_steps(rank, world_size, dtype):
    """Every variant's gradients, τ gradients, values and final state on this rank."""
    torch.set_default_dtype(dtype)
    b = B // world_size
    local = slice(rank * b, (rank + 1) * b)
    results = []
    for name, options in VARIANTS:
        options = dict(options)
        features = options.pop("features", dtype)
        if features != dtype == torch.float64:
            continue  # lower features are computed in float32
        loss = GlobalContrastiveLoss(name, N, **options)
        loss.set_epoch(5)
        ids = torch.Generator().manual_seed(0)
        for step in range(STEPS):
            index = torch.randint(0, N, (B,), generator=ids)[local]
            group = None
            if options.get("negatives") == "distinct":  # of the last step, one group
                group = torch.randint(0, 5 if step < STEPS - 1 else 1, (B,), generator=ids)[local]
            image, text = (x.detach()[local].requires_grad_() for x in pair(B, D, seed=step, dtype=features))
            loss.zero_grad()
            if step % 2:  # every other step overlaps; the result is the same
                begun = loss.begin(index, group)
                begun.images(image)
                out = begun.forward(image, text)
            else:
                out = loss(image, text, index, group)
            out.value.backward()
            tau_grad = None if loss.log_scale is None else loss.log_scale.grad
            with torch.no_grad():
                if tau_grad is not None:
                    loss.log_scale -= 0.01 * tau_grad
            results.append(
                {
                    # averaging over ranks multiplies the local gradients by 1/K
                    "image": image.grad.to(dtype) / world_size,
                    "text": text.grad.to(dtype) / world_size,
                    "tau_grad": tau_grad,
                    "value": out.value.detach(),
                    "stats": torch.stack([v.to(dtype) for v in out.stats.values()]),
                }
            )
        if loss.sample_state is not None:
            rows = {k: column[: loss.sample_state.held] for k, column in loss.sample_state.columns.items()}
            results.append(rows)
        held_out = loss.evaluate(image.detach(), text.detach())
        stats = torch.stack([v.to(dtype) for v in held_out.stats.values()])
        results.append({"value": held_out.value.detach(), "stats": stats})
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_any_world_size_gives_the_same_run(dtype):
    tolerance = TOLERANCE[dtype]
    runs = {K: run_ranks(ten_steps, K, dtype, timeout=110) for K in (1, 2, 4)}
    (alone,) = runs[1]
    assert len(alone) > (len(VARIANTS) - 1) * STEPS
    for K in (2, 4):
        for position, expected in enumerate(alone):
            ranks = [run[position] for run in runs[K]]
            for key, wanted in expected.items():
                if wanted is None:
                    continue
                if key in ("tau_grad", "value", "stats"):  # the same on every rank
                    parts = [rank[key] for rank in ranks]
                    scale = wanted.abs().max().clamp(min=1)
                    assert all(float((part - wanted).abs().max() / scale) < tolerance for part in parts), key
                    assert all(torch.equal(part, parts[0]) for part in parts), key
                    continue
                joined = torch.cat([rank[key] for rank in ranks])
                assert joined.shape == wanted.shape
                if key == "log_u":
                    assert torch.equal(joined.isinf(), wanted.isinf())
                    joined, wanted = joined.nan_to_num(neginf=0), wanted.nan_to_num(neginf=0)
                assert relative_error(joined, wanted) < tolerance, (K, position, key)


RHO = {"fastclip-v2": {"rho": 7.0}}  # v3's, by rule, is a part of the state


def state_of(name, seen):
    """A loss whose samples `seen` have been visited."""
    loss = GlobalContrastiveLoss(name, N, **RHO.get(name, {}))
    K, rank = loss.exchange.world_size, loss.exchange.rank
    b = len(seen) // K
    local = slice(rank * b, (rank + 1) * b)
    image, text = (x.detach()[local] for x in pair(len(seen), D, seed=0, dtype=torch.float32))
    loss(image, text, torch.tensor(seen)[local])
    return loss


SEEN = [0, 36, 9, 10, 19, 20, 30, 5]


def save_state(rank, world_size, name, folder):
    loss = state_of(name, SEEN)
    dcp.save(
        loss.sharded_state_dict(), storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True)
    )
    return [(column.shape[0], key) for key, column in loss.sample_state.columns.items()]


def load_state(rank, world_size, name, folder):
    loss = GlobalContrastiveLoss(name, N, **RHO.get(name, {}))
    saved = loss.sharded_state_dict()
    dcp.load(saved, storage_reader=HuggingFaceStorageReader(folder))
    loss.load_state_dict(saved)
    state = loss.sample_state
    return {key: column[: state.held] for key, column in state.columns.items()}, int(state.visited)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fastclip-v2", "fastclip-v3"])
@pytest.mark.timeout(180)
def test_a_state_saved_by_four_ranks_loads_on_one_and_two_row_for_row(name, tmp_path):
    shapes = run_ranks(save_state, 4, name, str(tmp_path))
    assert all(rows <= 10 + 1 for rank in shapes for rows, _ in rank)  # n/K rows each, and the spare one
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".safetensors", ".json"}
    expected = state_of(name, SEEN).sample_state
    for K in (1, 2):
        loaded = run_ranks(load_state, K, name, str(tmp_path))
        for key, column in expected.columns.items():
            joined = torch.cat([rows[key] for rows, _ in loaded])
            assert torch.allclose(joined, column[:N], rtol=1e-5), key
            assert torch.equal(joined.isinf(), column[:N].isinf())
        assert [visited for _, visited in loaded] == [len(SEEN)] * K


def save_alone(rank, world_size, folder):
    loss = state_of("fastclip-v3", SEEN)
    dcp.save(
        loss.sharded_state_dict(), storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True)
    )
    return loss.state_dict()["log_u"]


@pytest.mark.timeout(120)
def test_a_state_saved_by_one_rank_loads_on_four(tmp_path):
    (expected,) = run_ranks(save_alone, 1, str(tmp_path))
    loaded = run_ranks(load_state, 4, "fastclip-v3", str(tmp_path))
    assert torch.equal(torch.cat([rows["log_u"] for rows, _ in loaded]), expected)


class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = torch.nn.Linear(D, 8), torch.nn.Linear(D, 8)

    def forward(self, image, text, on_image_features):
        image = torch.nn.functional.normalize(self.image(image), dim=-1)
        on_image_features(image)
        return image, torch.nn.functional.normalize(self.text(text), dim=-1)


def train_with_ddp(rank, world_size):
    """The weights' gradients after two steps, for DDP's common options."""
    b, gradients = B // world_size, []
    local = slice(rank * b, (rank + 1) * b)
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        torch.manual_seed(0)
        loss = GlobalContrastiveLoss("fastclip-v3", N)
        model = torch.nn.parallel.DistributedDataParallel(Towers().double(), **options)
        for step in range(2):
            model.zero_grad()
            image, text = (x.detach()[local] for x in pair(B, D, seed=step))
            index = torch.arange(B)[local]
            begun = loss.begin(index)
            begun.forward(*model(image, text, begun.images)).value.backward()
        gradients.append([p.grad for p in model.parameters()])
    return gradients


@pytest.mark.timeout(120)
def test_ddp_with_its_common_options_gives_the_gradients_of_one_process():
    (alone,) = run_ranks(train_with_ddp, 1)
    for rank in run_ranks(train_with_ddp, 2):
        for options in rank:
            for gradient, expected in zip(options, alone[0], strict=True):
                assert relative_error(gradient, expected) < 1e-6  # the state is float32


def more_ranks_than_blocks(rank, world_size):
    """More ranks than blocks of samples: the last one holds nothing."""
    loss = GlobalContrastiveLoss("fastclip-v3", 5)
    image, text = (x.detach()[rank : rank + 1] for x in pair(4, D, seed=0, dtype=torch.float32))
    for _ in range(2):
        out = loss(image, text, torch.tensor([rank + 1]))
    return loss.sample_state.held, float(out.value), float(out.stats["unvisited"])


@pytest.mark.timeout(120)
def test_ranks_without_a_block_of_samples_take_part():
    results = run_ranks(more_ranks_than_blocks, 4)
    assert [held for held, _, _ in results] == [2, 2, 1, 0]
    assert len({value for _, value, _ in results}) == 1
    assert results[0][2] == pytest.approx(0.2)


def errors(rank, world_size):
    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    image, text = pair(3 + rank, D, seed=0, dtype=torch.float32)
    with pytest.raises(InputError) as caught:
        loss(image, text, torch.arange(3 + rank))
    assert caught.value.argument == "image_features"
    assert "[3, 4]" in caught.value.problem

    image, text = pair(4, D, seed=0, dtype=torch.float32)
    with pytest.raises(InputError) as caught:
        GlobalContrastiveLoss("fastclip-v3", 10)(image * (1 + rank), text, torch.arange(4))
    assert caught.value.argument == "image_features"
    assert "rank 1" in caught.value.problem

    with pytest.raises(InputError) as caught:
        GlobalContrastiveLoss("fastclip-v3", 10 + rank)(image, text, torch.arange(4))
    assert caught.value.argument == "num_samples"
    assert "[10, 11]" in caught.value.problem

    with pytest.raises(IndexError) as caught:
        GlobalContrastiveLoss("fastclip-v3", 10)(image, text, torch.arange(4) + 8 * rank)
    assert caught.value.argument == "index"
    assert "rank 1" in caught.value.problem

    loss = GlobalContrastiveLoss("fastclip-v3", 10)
    loss(image, text, torch.arange(4))
    loss.eval()
    loss(image[:2], text[:2], torch.arange(2))  # validation may have batches of another size
    loss.train()
    with pytest.raises(InputError) as caught:
        loss(image[:3], text[:3], torch.arange(3))
    assert caught.value.argument == "image_features"
    assert f"from 4 to 3 rows on rank {rank}" in caught.value.problem
    assert "drop_last=True" in caught.value.problem

    loss = GlobalContrastiveLoss("fastclip-v2", 10)
    spoilt = image.detach().clone()
    spoilt[0, 0] = torch.nan if rank else spoilt[0, 0]
    out = loss(spoilt, text, torch.arange(4) + 4 * rank)
    assert torch.isnan(out.value)
    assert torch.isinf(loss.sample_state.columns["log_u"][: loss.sample_state.held]).all()
    return True


def test_an_error_on_one_rank_stops_all():
    assert run_ranks(errors, 2) == [True, True]
