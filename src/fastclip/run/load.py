"""Load a trained model for inference: `fastclip.load` of a run, an exported folder, or an open_clip name.

model = fastclip.load("runs/emoji-fastclip-v3")
scores = model.similarity(["heart.png", "cat.png"], ["a red heart", "a cat"])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from typing import Any, Literal

import open_clip
import torch
from PIL import Image
from torch import Tensor

from fastclip.config.resolved import resolve_again
from fastclip.data.images import UnusableSample, turn_upright, upright_rgb
from fastclip.errors import InputError, PathError
from fastclip.finite import first_non_finite
from fastclip.model import TwoTowers, build_model, find_model
from fastclip.objective.temperature import clamped_tau
from fastclip.precision import float32_products
from fastclip.run.checkpoint import load as load_tensors
from fastclip.run.checkpoint import tensor_names
from fastclip.run.folder import Which, find_checkpoint, is_run, read_metadata
from fastclip.run.start import Start, build_first
from fastclip.weights import CONFIG_FILE

ImageInput = Image.Image | str | Path
_TAU = {"loss.log_scale", "loss.tau"}  # temperatures in a checkpoint, if they are not the model's
_AT_ONCE = 256  # default batch size for images and texts


class Model:
    """Encodes images and texts as unit-length features, and compares them.

    Args:
        batch: images, or texts, that are encoded at a time.
    """

    def __init__(self, towers: TwoTowers, *, batch: int = _AT_ONCE):
        self.towers, self.batch = towers, batch
        self._transform, self._tokenizer = towers.eval_transform(), towers.tokenizer()

    @property
    def device(self) -> torch.device:
        """The device of the model and its features."""
        return self.towers.clip.logit_scale.device

    def encode_image(self, images: Sequence[ImageInput] | ImageInput) -> Tensor:
        """Features of PIL images or image files, (images, d); transparent areas become white."""
        listed = [images] if isinstance(images, ImageInput) else list(images)
        if not listed:
            raise InputError("images", "is empty: pass at least one image.")
        return self._in_batches(listed, self._encode_images)

    def encode_text(self, texts: Sequence[str] | str) -> Tensor:
        """Features of texts, (texts, d)."""
        listed = [texts] if isinstance(texts, str) else list(texts)
        if not listed:
            raise InputError("texts", "is empty: pass at least one text.")
        return self._in_batches(listed, self._encode_texts)

    def similarity(self, images: Sequence[ImageInput] | ImageInput, texts: Sequence[str] | str) -> Tensor:
        """Cosine similarities between images (rows) and texts (columns)."""
        return self.encode_image(images) @ self.encode_text(texts).T

    @torch.no_grad()
    def classify(self, images: Sequence[ImageInput] | ImageInput, labels: Sequence[str] | str) -> Tensor:
        """Probabilities of the labels (columns) for each image (rows), at the model's temperature."""
        return (self.similarity(images, labels) * self.towers.clip.logit_scale.exp()).softmax(dim=-1)

    def _encode_images(self, images: list[ImageInput]) -> Tensor:
        stacked = torch.stack([self._transform(_upright(image)) for image in images])
        return self.towers.clip.encode_image(stacked.to(self.device), normalize=True)

    def _encode_texts(self, texts: list[str]) -> Tensor:
        return self.towers.encode_text(self._tokenizer(texts))

    @torch.no_grad()
    def _in_batches(self, inputs: list, encode: Callable[[list], Tensor]) -> Tensor:
        batches = [inputs[start : start + self.batch] for start in range(0, len(inputs), self.batch)]
        with float32_products("float32", self.device):
            return torch.cat([encode(batch) for batch in batches])


def load(
    model: str | Path,
    *,
    pretrained: str | Path | None = None,
    checkpoint: Literal["last", "best"] = "last",
    device: torch.device | str = "cpu",
) -> Model:
    """Load a model in eval mode.

    Args:
        model: the folder of a run, an exported folder, or an open_clip name or JSON config with `pretrained`.
        pretrained: weights for a name or config: a file, a folder, or an open_clip tag.
        checkpoint: which checkpoint of a run to load.
    """
    return Model(load_towers(model, pretrained=pretrained, checkpoint=checkpoint, device=device))


def load_towers(
    model: str | Path,
    *,
    pretrained: str | Path | None = None,
    checkpoint: Literal["last", "best"] = "last",
    device: torch.device | str = "cpu",
) -> TwoTowers:
    """Like `load`, but return the TwoTowers that training uses."""
    folder = Path(model).expanduser()
    if pretrained is not None:
        return build_model(str(model), pretrained=pretrained, device=device).eval()
    if is_run(folder):
        towers, tau = load_model(folder, checkpoint, device)
        if tau is not None:  # the temperature was learned in the loss
            towers.clip.logit_scale.data.fill_(-log(tau))
        return towers
    if folder.is_dir():
        return load_exported(folder, device)
    raise PathError(
        model,
        "is neither the folder of a run nor an exported folder. An open_clip model name needs weights: "
        "pass --pretrained (in Python, pretrained=…) with an open_clip tag, a file or a folder.",
    )


def load_model(
    run: Path,
    which: Which = "last",
    device: torch.device | str = "cpu",
    start: str | Path | None = None,
) -> tuple[TwoTowers, float | None]:
    """The model of a checkpoint in eval mode, and its temperature; None if that is the model's parameter.

    A run with LoRA needs the weights at which it started: `start`, if their source is gone.
    If the run averages its weights (`model.ema`), the model has the averages.
    """
    path = find_checkpoint(run, which)
    metadata, names = read_metadata(path), tensor_names(path)
    config = metadata["config"]
    dtype = torch.float64 if config["precision"] == "float64" else torch.float32
    options: dict[str, Any] = {
        "text_padding": config["model"].get("text_padding", "auto"),
        "device": device,
        "dtype": dtype,
    }
    if config["model"].get("lora", {}).get("rank"):  # its checkpoints hold only what was trained
        settings = resolve_again(config)
        options |= {"freeze": settings.model.freeze, "lora": settings.model.lora}
        towers = build_first(run, settings, Start(**metadata["start"]), start, **options)
    else:
        logit_bias = "model.clip.logit_bias" in names
        towers = build_model(str(run / CONFIG_FILE), logit_bias=logit_bias, **options)
    averaged = {name.removeprefix("ema.") for name in names if name.startswith("ema.")}
    tensors = {
        f"{'ema' if name in averaged else 'model'}.{name}": tensor
        for name, tensor in towers.checkpoint_state().items()
    }
    for name in _TAU & names.keys():
        tensors[name] = torch.empty(names[name][0], dtype=names[name][1])
    load_tensors(path, tensors)
    if broken := first_non_finite(tensors):
        raise PathError(path, f"has NaN or infinite values in {broken}: training had diverged before it.")
    return towers.float().eval(), _tau(tensors, config)


def load_exported(folder: Path | str, device: torch.device | str = "cpu") -> TwoTowers:
    """Load an exported folder, or any that open_clip loads as `local-dir:`, in eval mode."""
    name = find_model(str(folder))
    logit_bias = open_clip.get_model_config(name).get("init_logit_bias") is not None
    return build_model(name, pretrained=folder, logit_bias=logit_bias, device=device).eval()


def _upright(image: ImageInput) -> Image.Image:
    if isinstance(image, Image.Image):
        return turn_upright(image)
    try:
        return upright_rgb(Path(image).read_bytes())
    except UnusableSample as error:
        raise PathError(image, f"cannot be used: {error}.") from error


def _tau(tensors: dict[str, Tensor], config: dict) -> float | None:
    """The global temperature, or the mean of individual ones."""
    if "loss.log_scale" in tensors:
        return clamped_tau(tensors["loss.log_scale"], resolve_again(config).loss.tau_min)
    return float(tensors["loss.tau"].double().mean()) if "loss.tau" in tensors else None
