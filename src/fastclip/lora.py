"""Low-rank adapters (LoRA): a frozen weight W acts as W + (α/rank)·B·A, and only A and B train.

Linear layers get peft's adapters. nn.MultiheadAttention reads its weights without calling a layer: there the
sum is a parametrization of the weight. (peft's own for that module writes to the frozen weight in every
forward, so that it drifts.) B starts at zero: the adapted model starts as the pretrained one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from fastclip.config.options import LoraOptions
from fastclip.errors import CommandError, OptionError
from fastclip.layers import Side, block_modules

_ADAPTER = re.compile(r"\.lora_[AB]\.|\.parametrizations\.\w+\.0\.[ab]$")


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter's parameter."""
    return _ADAPTER.search(name) is not None


def add_adapters(clip: nn.Module, sides: Sequence[Side], lora: LoraOptions, seed: int) -> None:
    """Add adapters to the blocks of these towers, the same on every rank, from the seed alone.

    OptionError if a target matches no layer, or a tower has none.
    """
    layers = {side: _layers(clip, side) for side in sides}
    chosen = {
        side: {name: layer for name, layer in found.items() if _is_target(name, lora.targets)}
        for side, found in layers.items()
    }
    _check(chosen, layers, lora)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        every = {name: layer for found in chosen.values() for name, layer in found.items()}
        for layer in every.values():
            if isinstance(layer, nn.MultiheadAttention):
                for owner, weight in ((layer, "in_proj_weight"), (layer.out_proj, "weight")):
                    low_rank = _LowRank(getattr(owner, weight), lora.rank, lora.scale)
                    register_parametrization(owner, weight, low_rank)
        _add_to_linear(clip, [name for name, layer in every.items() if isinstance(layer, nn.Linear)], lora)


def merged_state(clip: nn.Module, *, merge: bool = True) -> dict[str, Tensor]:
    """The model's tensors under open_clip's own names, adapters merged into their weights, or left out."""
    state = {}
    with torch.no_grad():
        for name, tensor in clip.state_dict().items():
            if is_adapter(name):
                continue
            if ".base_layer." in name:
                owner, _, part = name.rpartition(".base_layer.")
                if part == "weight" and merge:
                    layer: Any = clip.get_submodule(owner)
                    tensor = tensor + layer.get_delta_weight("default")
                name = f"{owner}.{part}"
            elif ".parametrizations." in name:
                owner, _, part = name.removesuffix(".original").rpartition(".parametrizations.")
                if merge:
                    tensor = getattr(clip.get_submodule(owner), part)
                name = f"{owner}.{part}"
            state[name] = tensor
    return state


class _LowRank(nn.Module):
    """weight → weight + scale·b·a, as a parametrization."""

    def __init__(self, weight: Tensor, rank: int, scale: float):
        super().__init__()
        self.scale = scale
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.empty(rank, columns, device=weight.device, dtype=weight.dtype))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device, dtype=weight.dtype))
        nn.init.kaiming_uniform_(self.a, a=sqrt(5))  # as peft's

    def forward(self, weight: Tensor) -> Tensor:
        with _without_autocast(weight):  # a small update survives the sum
            return torch.addmm(weight, self.b, self.a, alpha=self.scale)


def _without_autocast(tensor: Tensor) -> AbstractContextManager:
    kind = tensor.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def _add_to_linear(clip: nn.Module, names: list[str], lora: LoraOptions) -> None:
    if not names:
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise CommandError(f"model.lora needs peft ({error}): pip install 'fastclip[lora]'") from None
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.rank * lora.scale,  # type: ignore[arg-type]
        target_modules="|".join(re.escape(name) for name in names),  # names alone match endings too
    )
    trained = {name: parameter.requires_grad for name, parameter in clip.named_parameters()}
    inject_adapter_in_model(config, clip)
    for name, parameter in clip.named_parameters():  # peft freezes the whole model
        parameter.requires_grad_(trained.get(name.replace(".base_layer.", "."), True))


def _layers(clip: nn.Module, side: Side) -> dict[str, nn.Module]:
    """What can be adapted in the blocks of a tower: attention, and linear layers outside it."""
    found: dict[str, nn.Module] = {}
    for root, module in block_modules(clip, side).items():
        for name, layer in module.named_modules(prefix=root):
            attention = isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None
            if attention or type(layer) is nn.Linear:  # inside MultiheadAttention is a subclass of it
                found[name] = layer
    return found


def _is_target(name: str, targets: Sequence[str] | None) -> bool:
    return targets is None or any(f".{target}." in f".{name}." for target in targets)


def _check(chosen: dict[Side, dict], layers: dict[Side, dict], lora: LoraOptions) -> None:
    known = sorted({re.sub(r"^.*\.\d+\.", "", name) for found in layers.values() for name in found})
    for target in lora.targets or ():
        if not any(_is_target(name, [target]) for found in layers.values() for name in found):
            rule = f"has {target!r}, which matches no layer"
            advice = f"Layers: {', '.join(known) or 'none'}."
            raise OptionError("model.lora.targets", lora.targets, rule, advice=advice)
    for side, found in chosen.items():
        if not found:
            rule = f"finds no attention or linear layer to adapt in the {side} tower"
            advice = f"Freeze that tower with --model.freeze {side}, or train it whole without LoRA."
            raise OptionError("model.lora", lora.rank, rule, advice=advice)
