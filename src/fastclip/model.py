"""The model: open_clip's two towers, found by name, with new weights from a seed or weights from a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import log as ln
from pathlib import Path
from typing import Any, Literal, Self, get_args

import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from timm.layers import convert_sync_batchnorm  # torch's own drops the activation inside timm's BatchNormAct
from torch import Tensor, nn
from torch.nn.functional import normalize

from fastclip.config.options import LoraOptions
from fastclip.errors import OptionError, PathError
from fastclip.layers import EVERYTHING, NOTHING, SIDES, Freeze, Layers, Side, side_of, trained_blocks
from fastclip.lora import add_adapters, is_adapter
from fastclip.model_config import LOCAL_DIR, MOST_PARAMETERS, is_local, read_config, reason, registered
from fastclip.patch_dropout import KeepPatches, drop_patches
from fastclip.text import nearest
from fastclip.towers.design import Design, Parts, design
from fastclip.towers.sizes import resize_positions
from fastclip.unpadded_text import UnpaddedText
from fastclip.unpadded_text import find as find_unpadded
from fastclip.weights import CONFIG_FILE, find_weights, load_weights

log = logging.getLogger(__name__)

BatchNorm = Literal["local", "sync", "frozen"]
TextPadding = Literal["auto", "keep"]

OWN_MODELS = Path(__file__).parent / "models"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SIGLIP_START = {"init_logit_scale": ln(10), "init_logit_bias": -10.0}  # as in the SigLIP paper

open_clip.add_model_config(OWN_MODELS)  # makes open_clip find our tiny models by name


def find_model(name: str) -> str:
    """Return the name under which open_clip builds a model.

    `name` is an open_clip model ("ViT-B-32"), one of ours ("vit-emoji"), or the path of an open_clip JSON
    config or of an exported folder.
    """
    name = name.removeprefix(LOCAL_DIR)
    if name in open_clip.list_models():
        return name
    path = Path(name).expanduser()
    if path.is_dir():
        path /= CONFIG_FILE
    if not path.is_file():
        raise _unknown_model(name, path)
    config = read_config(path)
    if "model_cfg" not in config:
        return _register(path.resolve(), config)
    if path.name != CONFIG_FILE:
        raise PathError(path, f"is the config of an exported folder. Rename it to {CONFIG_FILE}.")
    return f"{LOCAL_DIR}{path.resolve().parent}"


def build_model(
    name: str,
    *,
    device: torch.device | str,
    pretrained: str | Path | None = None,
    parts: Parts = Parts(),  # noqa: B008 - immutable
    freeze: Freeze = "none",
    lora: LoraOptions | None = None,
    gradient_checkpointing: bool = False,
    channels_last: bool = False,
    batch_norm: BatchNorm = "local",
    text_padding: TextPadding = "auto",
    patch_dropout: float = 0.0,
    logit_bias: bool = False,
    tau: float | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> TwoTowers:
    """Build a model in training mode, the same on every rank, without touching the process's random state.

    Args:
        name: see `find_model`.
        pretrained: an open_clip tag ("laion2b_s34b_b79k"), a file (.safetensors, or .pt and .bin with only
            tensors), or an exported folder. A tag or folder also sets the image mean and deviation.
        parts: other towers and sizes than those of `name`; `pretrained` is for the tower that stays.
        freeze: what is not trained, and stays in eval mode: a tower ("image" is LiT), the "trunks" of both,
            or all but the last blocks of a tower and its projection: {"image": 6}.
        lora: adapters for the towers that `freeze` does not name; of these, only the projection trains too.
        gradient_checkpointing: recompute activations in the backward pass, to save memory.
        channels_last: memory layout of images and convolutions; faster for some models on a GPU.
        batch_norm: statistics of each rank's own batch ("local"), of all ranks ("sync", on a GPU), or those
            of the pretrained weights ("frozen").
        text_padding: leave padding out of the text tower where that is exact ("auto"), or "keep" it.
        patch_dropout: share of its patches that an image loses when `forward` is given those to keep.
        logit_bias: add SigLIP's bias, and start at its scale.
        tau: sets logit_scale to log(1/τ).
        dtype: float32, or float64 to compare results.
        seed: determines new weights, alone.
    """
    for option, value, choices in (
        ("batch_norm", batch_norm, BatchNorm),
        ("text_padding", text_padding, TextPadding),
    ):
        if value not in get_args(choices):
            raise OptionError.unknown(f"model.{option}", value, get_args(choices))
    if tau is not None and not tau > 0:
        raise OptionError("loss.tau", tau, "must be above 0", example=0.07)
    name = find_model(name)
    file, preprocess_cfg = (None, {}) if pretrained is None else find_weights(name, str(pretrained))
    plan = design(name, parts)
    _check_parameters(plan, file)
    clip, model_cfg = _create(plan, logit_bias, seed, preprocess_cfg | plan.preprocess)
    if file is not None:
        _load_whole(clip, file, plan)
    plan.finish(clip)
    if tau is not None:
        nn.init.constant_(clip.logit_scale, -ln(tau))
    if batch_norm == "sync":
        clip = convert_sync_batchnorm(clip)
    model = TwoTowers(clip, plan, model_cfg, freeze, batch_norm, channels_last, lora, seed)
    if batch_norm == "sync" and torch.device(device).type == "cpu":
        rule = "requires a GPU: torch's SyncBatchNorm does not run on a CPU"
        raise OptionError("model.batch_norm", batch_norm, rule)
    if gradient_checkpointing:
        _checkpoint_gradients(model, freeze)
    model.to(device, dtype)
    if patch_dropout:
        model.keep_patches = drop_patches(clip, patch_dropout, plan.shown)
    if text_padding == "auto":
        model.unpadded = find_unpadded(clip, model.context_length)
    return (model.to(memory_format=torch.channels_last) if channels_last else model).train()


class TwoTowers(nn.Module):
    """An open_clip model for training: one forward for both towers, which DDP can wrap.

    Built by `build_model`; `clip` is open_clip's own module. A frozen tower, and BatchNorm with frozen
    statistics, stay in eval mode even after `train()`.
    """

    def __init__(
        self,
        clip: Any,
        plan: Design,
        model_cfg: dict,
        freeze: Freeze = "none",
        batch_norm: BatchNorm = "local",
        channels_last: bool = False,
        lora: LoraOptions | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.clip = clip
        self.unpadded: UnpaddedText | None = None  # the text tower without padding, where that is exact
        self.adapted: list[Side] = []  # the towers with LoRA
        self.keep_patches: KeepPatches | None = None  # inside the image tower, with patch dropout
        self.design, self.name = plan, plan.name
        self.model_cfg, self.channels_last = model_cfg, channels_last
        size, shown = clip.visual.preprocess_cfg["size"], plan.shown
        self.image_size: int = size if isinstance(size, int) else size[0]
        if not isinstance(size, int) and len(set(size)) > 1:
            rule = f"takes images of {size[0]}×{size[1]} pixels, but they must be square"
            raise OptionError("model.name", shown, rule)

        blocks = trained_blocks(freeze)
        if lora is not None and lora.rank:
            self.adapted = [side for side in SIDES if blocks[side] is EVERYTHING]
            if not self.adapted:
                rule = f"has no tower to adapt: model.freeze={freeze} names both"
                raise OptionError("model.lora", lora.rank, rule, advice="Omit one of them.")
            add_adapters(clip, self.adapted, lora, seed)
            blocks |= dict.fromkeys(self.adapted, 0)
        self._freeze(freeze, blocks)
        if batch_norm != "local" and not self.has_batch_norm_statistics:
            raise OptionError(
                "model.batch_norm",
                batch_norm,
                f"has no effect: {shown} trains no BatchNorm",
                advice="Omit it.",
            )
        if batch_norm == "frozen":
            self._always_eval += [module for module in clip.modules() if isinstance(module, _BATCH_NORMS)]

    def _freeze(self, freeze: Freeze, blocks: dict) -> None:
        """Freeze all but so many of each tower's last blocks, and what follows them; keep it in eval mode."""
        layers = Layers(self.clip)
        layers.check(blocks, freeze)
        for name, parameter in self.clip.named_parameters():
            if not is_adapter(name) and not layers.is_trained(name, blocks):
                parameter.requires_grad_(False)
        self._always_eval = [] if set(blocks.values()) == {EVERYTHING} else _frozen_modules(self.clip)

    def forward(
        self,
        images: Tensor,
        tokens: Tensor,
        on_image_features: Callable[[Tensor], None] | None = None,
        lengths: Sequence[int] | None = None,
        patches: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Image and text features of unit length; `on_image_features` is called before the text tower.

        With the captions' `lengths` (`TextEnds.lengths`), their padding is not computed; with the `patches`
        to keep of each image (`PatchChoice.draw`), the others are not.
        """
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        images = images.to(self.clip.logit_scale.dtype, memory_format=layout)
        with nullcontext() if self.keep_patches is None else self.keep_patches.keeping(patches):
            image_features = self.clip.encode_image(images, normalize=True)
        if on_image_features is not None:
            on_image_features(image_features)
        return image_features, self._encode_tokens(tokens, lengths)

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Text features of unit length, from tokens on the host."""
        device = self.clip.logit_scale.device
        if self.unpadded is None:
            return self._encode_tokens(tokens.to(device, non_blocking=True), None)
        lengths = self.unpadded.ends.lengths(tokens)
        return self._encode_tokens(
            self.unpadded.ends.cut(tokens, lengths).to(device, non_blocking=True), lengths
        )

    def _encode_tokens(self, tokens: Tensor, lengths: Sequence[int] | None) -> Tensor:
        if self.unpadded is None or lengths is None:
            return self.clip.encode_text(tokens, normalize=True)
        return normalize(self.unpadded.encode(tokens, lengths), dim=-1)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self._always_eval:
            module.eval()
        return self

    def freeze_logit_scale(self) -> None:
        """Exclude open_clip's scale and bias from training: our own losses have their own τ."""
        self.clip.logit_scale.requires_grad_(False)
        if self.clip.logit_bias is not None:
            self.clip.logit_bias.requires_grad_(False)

    def checkpoint_state(self) -> dict[str, Tensor]:
        """The tensors, not copied, that a checkpoint holds: all; with LoRA, what training may change."""
        state = self.state_dict()
        if not self.adapted:
            return state
        frozen = {name for name, parameter in self.clip.named_parameters() if not parameter.requires_grad}
        kept = {f"clip.{name}" for name in frozen if side_of(name) is None}  # τ may be the loss's
        return {
            name: tensor
            for name, tensor in state.items()
            if name in kept or name.removeprefix("clip.") not in frozen
        }

    @property
    def has_batch_norm_statistics(self) -> bool:
        """Whether training uses batch statistics, which makes results depend on how the batch is split."""
        fixed = {id(module) for root in self._always_eval for module in root.modules()}
        return any(isinstance(module, _BATCH_NORMS) and id(module) not in fixed for module in self.modules())

    @property
    def preprocess_cfg(self) -> dict[str, Any]:
        """Preprocessing of images: the fields of open_clip's `PreprocessCfg`."""
        return self.clip.visual.preprocess_cfg | {"size": self.image_size, "mean": self.mean, "std": self.std}

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(self.clip.visual.preprocess_cfg["mean"])

    @property
    def std(self) -> tuple[float, ...]:
        return tuple(self.clip.visual.preprocess_cfg["std"])

    @property
    def context_length(self) -> int:
        """The number of tokens per caption, including the first and the last."""
        return self.model_cfg["text_cfg"].get("context_length", open_clip.CLIPTextCfg.context_length)

    def eval_transform(self) -> Callable:
        """PIL image → tensor, without augmentation."""
        return image_transform_v2(PreprocessCfg(**self.preprocess_cfg), is_train=False)

    def tokenizer(self) -> Any:
        """Captions → token ids: open_clip's tokenizer of this model."""
        return self.design.tokenizer()


def _unknown_model(name: str, path: Path) -> ValueError:
    if path.suffix == ".json":
        return PathError(path, "does not exist.")
    models = {known.lower(): known for known in open_clip.list_models()}
    near = models[str(nearest(name.lower(), models, cutoff=0))]
    advice = (
        f"Did you mean {near}? "
        'List all with: python -c "import fastclip.model, open_clip; print(open_clip.list_models())"'
    )
    return OptionError("model.name", name, "is neither a model nor a JSON config", advice=advice)


def _register(path: Path, config: dict[str, Any]) -> str:
    """Register a config with open_clip, under the stem of its file."""
    if "siglip" in path.stem.lower() and not config["text_cfg"].get("hf_tokenizer_name"):
        problem = "would get SigLIP's tokenizer, which open_clip chooses for names with 'siglip'. Rename it."
        raise PathError(path, problem)
    known = open_clip.get_model_config(path.stem)
    if known is None:
        open_clip.add_model_config(path)
        registered.add(path.stem)
    elif known != config:
        raise PathError(path, f"has the name of another model, {path.stem}. Rename it.")
    return path.stem


def _check_parameters(plan: Design, file: Path | None) -> None:
    """Count the parameters that a local config describes, before there is memory for them."""
    if not is_local(plan.name):
        return
    try:
        with _building(plan, "meta") as other:
            clip = open_clip.create_model(
                plan.name, device="meta", load_weights=False, pretrained_text=False, **other
            )
    except Exception:  # some of timm's models need values; what is wrong with the config, _create says
        return
    count, shown = sum(parameter.numel() for parameter in clip.parameters()), plan.shown
    if count > MOST_PARAMETERS:
        rule = f"has {count:,} parameters; {MOST_PARAMETERS:,} are possible"
        raise OptionError("model.name", shown, rule)
    if file is not None and plan.parts.kept_side is None and count > 100_000_000:
        size = file.stat().st_size  # of smaller models, load_weights says which tensors differ
        if count > size:
            raise PathError(file, f"has {size:,} bytes, too few for the {count:,} parameters of {shown}.")


@contextmanager
def _building(plan: Design, device: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of open_clip's create_model; the process's random state stays as it is."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device(device),
        _without_open_clips_warning(),
        plan.network(),
        plan.arguments() as other,
    ):
        yield other


def _create(plan: Design, logit_bias: bool, seed: int, preprocess_cfg: dict) -> tuple[Any, dict]:
    """An open_clip model with new weights, and the config to rebuild it.

    Weights are always drawn on the CPU; torch.manual_seed would seed the GPUs too.
    """
    bias: dict[str, Any] = _SIGLIP_START if logit_bias else {"init_logit_bias": None}
    start = bias | {"load_weights": False, "pretrained_text": False, "force_preprocess_cfg": preprocess_cfg}
    try:
        with _building(plan, "cpu") as other:
            torch.default_generator.manual_seed(seed)
            clip = open_clip.create_model(plan.name, **start, **other)
            if (decoder := getattr(clip, "text_decoder", None)) is not None:  # CoCa's: open_clip leaves its
                nn.init.normal_(decoder.text_projection, std=decoder.width**-0.5)  # output uninitialized
    except Exception as error:  # each tower's library raises its own
        rule = f"cannot be built: {reason(error)}"
        raise OptionError("model.name", plan.shown, rule) from error
    model_cfg = plan.config | bias
    return clip, {key: value for key, value in model_cfg.items() if value is not None}


def _load_whole(clip: Any, file: Path, plan: Design) -> None:
    """Load the weights of `model.pretrained`: of both towers, or of the one that stays."""
    parts, side = plan.parts, plan.parts.kept_side
    other_size = parts.image_size is not None or parts.context_length is not None
    load_weights(
        clip,
        plan.shown,
        file,
        only=None if side is None else (lambda key: side_of(key) == side),
        resize=partial(
            resize_positions,
            clip=clip,
            image=parts.image_size is not None,
            text=parts.context_length is not None,
        )
        if other_size
        else None,
    )


@contextmanager
def _without_open_clips_warning() -> Iterator[None]:
    """open_clip warns that weights are random; here this is intended, or weights are loaded right after."""

    def is_other(record: logging.LogRecord) -> bool:
        return not any(part in record.getMessage() for part in ("weights loaded", "weights found"))

    root = logging.getLogger()
    root.addFilter(is_other)
    try:
        yield
    finally:
        root.removeFilter(is_other)


def _checkpoint_gradients(model: TwoTowers, freeze: Freeze) -> None:
    """Enable it in open_clip, which silently ignores towers that do not support it."""
    model.clip.set_grad_checkpointing(True)
    for side, blocks in trained_blocks(freeze).items():
        switches = ("grad_checkpointing", "gradient_checkpointing")  # of open_clip and timm; of transformers
        modules = [module for root in _tower(model.clip, side) for module in root.modules()]
        on = any(getattr(module, switch, False) for module in modules for switch in switches)
        if blocks != NOTHING and not on:
            rule = f"is not supported by the {side} tower of {model.name}"
            raise OptionError("model.gradient_checkpointing", True, rule, advice="Set it to False.")


def _tower(clip: nn.Module, side: str) -> list[nn.Module]:
    return [child for name, child in clip.named_children() if side_of(name) == side]


def _frozen_modules(module: nn.Module) -> list[nn.Module]:
    """The largest modules that have parameters, all of them frozen."""
    own = [parameter.requires_grad for parameter in module.parameters()]
    if own and not any(own):
        return [module]
    return [frozen for child in module.children() for frozen in _frozen_modules(child)]
