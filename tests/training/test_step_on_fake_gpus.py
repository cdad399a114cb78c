"""A step as 8 GPUs would run it: fake CUDA tensors raise if the host reads one or devices are mixed.

The collectives are those of a fake process group. Backward on fake CUDA tensors needs a driver, so gradients
are filled in; DDP, which is part of backward, is left out.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip.config.optimizers import OPTIMIZERS as TABLE
from fastclip.config.options import BatchConfig, LoraOptions, ModelConfig, OptimOptions, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.model import build_model
from fastclip.objective.loss import GlobalContrastiveLoss
from fastclip.optim import build_optimizer
from fastclip.training import build as build_module
from fastclip.weight_average import WeightAverage
from tests.training.test_step import PEERS, SEED, B, N, write_models

K = 8
CUDA = torch.device("cuda", 0)
CASES = [
    *(("fastclip-v3", name, precision, None) for name in TABLE for precision in ("bfloat16", "float16")),
    *((name, "adamw", "bfloat16", None) for name in ("fastclip-v2", "scent", "mbcl", *PEERS)),
    *((name, "adamw", "float16", 4) for name in ("fastclip-v2", "fastclip-v3", *PEERS)),
    ("fastclip-v3", "adamw", "bfloat16", 4),
    ("fastclip-v3", "adamw", "tf32", None),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))["dropout"]


@pytest.fixture
def eight_gpus(monkeypatch):
    """A process group of 8 whose collectives do nothing, and a torch that believes in CUDA."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)  # GradScaler
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # fake ones cannot be pinned
    monkeypatch.setattr(torch, "_fused_sgd_", _fused_sgd)
    monkeypatch.setattr(build_module, "_wrapped", lambda towers, *_: towers)
    dist.init_process_group("fake", rank=3, world_size=K, store=FakeStore())
    yield World(3, K, 3, CUDA, None)
    dist.destroy_process_group()


def _fused_sgd(params, grads, buffers, *, found_inf, **_):
    """torch has no fake form of it: only the devices are compared."""
    assert {tensor.device for tensor in (*params, *grads, *buffers, found_inf)} == {CUDA}


def build(model, algorithm, optimizer, precision, micro=None, lora=0, ema=None):
    """A step with fake weights on CUDA; the towers are built before, as building reads values."""
    asked = ModelConfig(model, "x.pt", compile=False, lora=LoraOptions(lora), ema=ema)
    config = resolve(
        TrainConfig(
            algorithm=algorithm,
            optimizer=optimizer,
            precision=precision,
            seed=SEED,
            model=asked,
            batch=BatchConfig(K * B, micro),
            optim=OptimOptions(clip=1.0),
        )
    )
    row = config.loss.algorithm
    options = {"logit_bias": row.logit_bias, "tau": config.loss.tau, "lora": asked.lora}
    towers = build_model(model, device="cpu", **options)
    if not row.peer:
        towers.freeze_logit_scale()
    return config, towers


def make_fake(towers):
    for module in towers.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fake = torch.empty(parameter.shape, dtype=parameter.dtype, device=CUDA)
            setattr(module, name, nn.Parameter(fake, parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA))


def after_the_first_step(loss, local_batch):
    """The checks of the first step may wait for the device."""
    if isinstance(loss, GlobalContrastiveLoss):
        loss._checks.first_step_done, loss._checks.local_batch = True, {True: local_batch}
        loss._checks.index = lambda index: index  # ids on the host are read there
        loss.rho = 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "optimizer", "precision", "micro", "lora"),
    [*((*case, 0) for case in CASES), ("fastclip-v3", "adamw", "bfloat16", None, 4)],
)
def test_forward_loss_update_and_skip_never_wait(
    algorithm, optimizer, precision, micro, lora, model, eight_gpus, monkeypatch
):
    config, towers = build(model, algorithm, optimizer, precision, micro, lora, ema=0.999)
    with FakeTensorMode():
        make_fake(towers)
        train_step = build_module.build_step(config, towers, N, eight_gpus)
        after_the_first_step(train_step.loss, B)
        trained = [p for p in {*towers.parameters(), *train_step.loss.parameters()} if p.requires_grad]

        def backward(*_):
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        monkeypatch.setattr(torch.autograd, "backward", backward)
        monkeypatch.setattr(torch.autograd, "grad", lambda out, inputs: [torch.empty_like(t) for t in inputs])
        images = torch.empty(B, 3, 16, 16, device=CUDA)
        tokens = torch.empty(B, 8, dtype=torch.int64, device=CUDA)
        index = torch.empty(B, dtype=torch.int64)  # on the host, as the loader gives it
        result = train_step.update(1, images, tokens, index)
        assert {tensor.device for tensor in (result.finite, *result.stats.values())} == {CUDA}
        state = [value for of_one in train_step.stepper.optimizer.state.values() for value in of_one.values()]
        state += train_step.average.tensors().values()
        assert {tensor.device for tensor in state} == {CUDA}
        assert (train_step.stepper.scaler is not None) == (precision == "float16")


def test_an_average_is_one_operation_for_all_weights_which_the_device_may_skip(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **options: calls.append((args, options)))
    with FakeTensorMode():
        named = [(str(i), nn.Parameter(torch.empty(4, 4, device=CUDA))) for i in range(20)]
        average = WeightAverage(named, 0.999)
        with Kernels() as kernels:
            average.update(7, torch.empty((), dtype=torch.bool, device=CUDA))
    (((averages, weights, _), options),) = calls
    assert len(averages) == len(weights) == 20
    assert options["found_inf"].device == CUDA
    assert kernels.counts.total() <= 3  # the flag


# Budgets


NO_KERNEL = {"device", "view", "_unsafe_view", "slice", "select", "detach", "expand", "unsqueeze", "squeeze"}
NO_KERNEL |= {"as_strided", "split", "t", "transpose", "permute", "alias", "diagonal", "unbind"}
NO_KERNEL |= {"empty", "empty_like", "new_empty", "_record_function_enter_new", "_record_function_exit"}


class Kernels(TorchDispatchMode):
    """Counts operations that run kernels: views, allocations and questions do not."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] += name not in NO_KERNEL
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("algorithm", "most"),
    [("fastclip-v1", 210), ("fastclip-v2", 240), ("fastclip-v3", 215), ("scent", 235), ("mbcl", 175)],
)
def test_the_loss_of_a_step_takes_at_most_so_many_kernels(algorithm, most, eight_gpus):
    """A tenth more than today: launching a small kernel costs a GPU more than the kernel."""
    with FakeTensorMode():
        loss = GlobalContrastiveLoss(algorithm, N, device=CUDA)
        after_the_first_step(loss, 128)
        image, text = (torch.empty(128, 512, device=CUDA, requires_grad=True) for _ in range(2))
        index = torch.empty(128, dtype=torch.int64, device=CUDA)
        with Kernels() as kernels:
            step = loss.begin(index)
            step.images(image)
            step.forward(image, text)
    assert 100 < kernels.counts.total() <= most, kernels.counts.most_common()


@pytest.mark.parametrize(("optimizer", "per_weight"), [("adamw", 0), ("sgd", 0), ("lamb", 1), ("lion", 1)])
def test_the_number_of_operations_of_an_update_hardly_grows_with_the_weights(
    optimizer, per_weight, eight_gpus
):
    """LAMB and Lion clear each gradient on its own in a skipped step; the rest is for lists of tensors."""
    row = TABLE[optimizer]

    def count(weights):
        with FakeTensorMode():
            named = [(str(i), nn.Parameter(torch.empty(4, 4, device=CUDA))) for i in range(weights)]
            options = {"lr": 0.1, "weight_decay": 0.1, **row.options}
            built = build_optimizer(optimizer, named, [], **options)
            for _, parameter in named:
                parameter.grad = torch.empty_like(parameter)
            built.found_inf = torch.zeros((), device=CUDA)
            with Kernels() as kernels:
                built.step()
            return kernels.counts.total()

    assert count(60) - count(20) == 40 * per_weight
