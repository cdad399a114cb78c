"""Decode an image file's bytes to the tensor that a model trains on, with one of two decoders.

`exact` is open_clip's training transform, bit for bit. `fast` draws the same crop, jitter and erasure but
computes the pixels differently: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the crop needs no
more, torch's vectorised code resamples it, and pixels stay uint8 until they are on the device.

On the scale of 0 to 255, `fast` differs from `exact` by 0.003 on average (99 of 100 pixels are equal) where
the file is decoded at full size: every other format, and JPEGs of less than twice the model's size. Reduced,
640 x 480 to 224 differs by 2.2 on average and by 15 or more in one pixel of 100: the filters differ, and the
crop is rounded to pixels of the smaller image. Larger files are closer (benchmarks/decode.py).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite, prod, sqrt
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.transform import AugmentationCfg, MaybeConvertMode, image_transform
from PIL import Image, ImageFile, JpegImagePlugin
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import Compose, RandomResizedCrop

from fastclip.data.images import MAX_PIXELS, exif_orientation, open_image, reading, turn_upright, upright_rgb
from fastclip.errors import InputError, OptionError


@dataclass(frozen=True)
class Augment:
    """Options of the training transform (`data.augment`); the defaults are open_clip's."""

    image_size: int = 224
    """Side of the model's square input, in pixels."""
    mean: tuple[float, float, float] = OPENAI_DATASET_MEAN
    """Subtracted from red, green and blue, which run from 0 to 1."""
    std: tuple[float, float, float] = OPENAI_DATASET_STD
    """Divides them afterwards."""
    scale: tuple[float, float] = (0.9, 1.0)
    """Smallest and largest fraction of the image's area that a crop takes."""
    ratio: tuple[float, float] | None = None
    """Narrowest and widest crop, width / height; None is (3/4, 4/3). With use_timm only."""
    color_jitter: float | tuple[float, ...] | None = None
    """Strength of brightness, contrast, saturation, hue; with use_timm also three of them, or one number."""
    color_jitter_prob: float | None = None
    """Fraction of images that are jittered; requires color_jitter. Without use_timm only."""
    gray_scale_prob: float | None = None
    """Fraction of images turned to greyscale. Without use_timm only."""
    re_prob: float | None = None
    """Fraction of images in which rectangles are erased. With use_timm only."""
    re_count: int | None = None
    """Largest number of rectangles erased per image; None is 1. With use_timm only."""
    use_timm: bool = False
    """Build the transform with timm, as open_clip's option of this name does."""
    max_pixels: int = MAX_PIXELS
    """Larger images are rejected before they are decoded."""
    formats: tuple[str, ...] = ()
    """Formats to decode besides JPEG, PNG, WebP, GIF, BMP and TIFF (`data.formats`)."""

    def __post_init__(self) -> None:
        _check(self)


class ImageForm(NamedTuple):
    """An image as a decoder returns it."""

    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Decoder(Protocol):
    """The loader's interface to a decoder. A sample's randomness comes from its seed, 0 ≤ seed < 2⁶³.

    The process's own random states are unchanged.
    """

    augment: Augment
    form: ImageForm

    def train(self, data: bytes, seed: int) -> Tensor:
        """Decode and augment one image file, in the form that `finish` takes; raises UnusableSample."""

    def train_array(self, pixels: np.ndarray, seed: int) -> Tensor:
        """The same for an image already decoded by `upright_rgb`: uint8, (height, width, 3)."""

    def finish(self, batch: Tensor, device: torch.device | str) -> Tensor:
        """Bring stacked images to the device for the model: normalised float32, (images, 3, size, size)."""


class ExactDecoder:
    """open_clip's training transform on the upright RGB image, bit for bit: float32, (3, size, size).

    Equal to `image_transform(..., is_train=True)` after torch.manual_seed(seed) and random.seed(seed).
    """

    def __init__(self, augment: Augment):
        self.augment, self.steps = augment, (steps := _Steps(augment))
        self.form = ImageForm((3, augment.image_size, augment.image_size), torch.float32)
        # ToTensor and Normalize applied to the 256 values of each channel: (3, 256)
        values = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(256, 1, 3)
        normalised: Tensor = steps.normalize(steps.to_tensor(Image.fromarray(values)))
        self.normalised: np.ndarray = normalised.squeeze(2).numpy()

    def train(self, data: bytes, seed: int) -> Tensor:
        return self._train(upright_rgb(data, self.augment.max_pixels, self.augment.formats), seed)

    def train_array(self, pixels: np.ndarray, seed: int) -> Tensor:
        return self._train(Image.fromarray(pixels), seed)

    def finish(self, batch: Tensor, device: torch.device | str) -> Tensor:
        return batch.to(device, non_blocking=True)

    def _train(self, image: Image.Image, seed: int) -> Tensor:
        size, steps = self.augment.image_size, self.steps
        with seeded(seed, steps.python_random):
            top, left, height, width = steps.draw_box(image.height, image.width)
            image = image.crop((left, top, left + width, top + height))
            image = image.resize((size, size), Image.Resampling.BICUBIC)
            image = steps.colour(image)
            pixels_hwc, out_chw = np.asarray(image), np.empty((3, size, size), np.float32)
            for channel, values in enumerate(self.normalised):
                np.take(values, pixels_hwc[..., channel], out=out_chw[channel], mode="clip")
            return steps.erase(torch.from_numpy(out_chw))


class FastDecoder:
    """The same crops, jitter and erasures in less than half the time: uint8, (size, size, 3) in memory.

    A JPEG is decoded at a reduced scale if the crop still has `oversample` times the pixels it needs along
    each side; 2 is closer to `exact`, and slower. For all other files `train_array` equals `train`.
    """

    def __init__(self, augment: Augment, oversample: float = 1.0):
        self.augment, self.steps, self.oversample = augment, _Steps(augment), oversample
        self.form = ImageForm((augment.image_size, augment.image_size, 3), torch.uint8)
        self.mean, self.std = (torch.tensor(x).view(3, 1, 1) for x in (augment.mean, augment.std))
        self.on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def train(self, data: bytes, seed: int) -> Tensor:
        with reading(data):
            image = open_image(data, self.augment.max_pixels, self.augment.formats)
            if not isinstance(image, JpegImagePlugin.JpegImageFile) or image.mode not in ("RGB", "L"):
                return self.train_array(np.asarray(turn_upright(image)), seed)
            orientation = exif_orientation(image)
            width, height = image.size if orientation < 5 else image.size[::-1]
            with seeded(seed, self.steps.python_random):
                box = self.steps.draw_box(height, width)
                # The largest reduction that leaves enough pixels, out of libjpeg's 8, 4, 2 and 1
                room = min(box[2:]) / (self.oversample * self.augment.image_size)
                reduce = next((reduce for reduce in (8, 4, 2) if reduce <= room), 1)
                if reduce == 1 and orientation == 1:
                    pixels_hwc = _decode_whole(data, image)
                else:
                    image.draft(None, (image.width // reduce, image.height // reduce))
                    pixels_hwc = np.asarray(turn_upright(image, orientation))
                return self._cut(pixels_hwc, tuple(side / reduce for side in box))

    def train_array(self, pixels: np.ndarray, seed: int) -> Tensor:
        with seeded(seed, self.steps.python_random):
            return self._cut(pixels, self.steps.draw_box(*pixels.shape[:2]))

    def finish(self, batch: Tensor, device: torch.device | str) -> Tensor:
        device = torch.device(device)
        if device not in self.on_device:
            self.on_device[device] = (self.mean.to(device), self.std.to(device))
        mean, std = self.on_device[device]
        batch = batch.to(device, non_blocking=True).permute(0, 3, 1, 2)
        return batch.to(torch.float32, memory_format=torch.contiguous_format).div_(255).sub_(mean).div_(std)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"on_device": {}}  # loader workers stay off the device

    def _cut(self, pixels_hwc: np.ndarray, box: tuple[float, ...]) -> Tensor:
        size, (top, left, height, width) = self.augment.image_size, box
        crop_hwc = pixels_hwc[round(top) : round(top + height), round(left) : round(left + width)]
        crop_hwc = crop_hwc if crop_hwc.flags.writeable else crop_hwc.copy()  # torch requires writable memory
        # [None] first: otherwise the strides look like three planes to torch, and it repacks them.
        crop_1chw = torch.from_numpy(crop_hwc[None]).permute(0, 3, 1, 2)
        crop = interpolate(crop_1chw, (size, size), mode="bicubic", antialias=True)[0].permute(1, 2, 0)
        if self.steps.colour.transforms:
            crop = torch.from_numpy(np.array(self.steps.colour(Image.fromarray(crop.numpy()))))
        return self._erase(crop)

    def _erase(self, image_hwc: Tensor) -> Tensor:
        """timm erases normalised images; its draws are mapped to 0..255 and clamped."""
        size = self.augment.image_size
        for erase in self.steps.erase.transforms:
            drawn = erase(torch.full((3, size, size), torch.nan))  # NaN: not erased
            pixels = drawn.mul(self.std).add_(self.mean).mul_(255).round_().clamp_(0, 255).nan_to_num_(0)
            pixels_hwc, unerased_hwc = (x.permute(1, 2, 0) for x in (pixels.byte(), drawn.isnan()))
            image_hwc = torch.where(unerased_hwc, image_hwc, pixels_hwc)
        return image_hwc


def decoder(name: Literal["exact", "fast"], augment: Augment) -> Decoder:
    """Make the decoder of this name."""
    if name not in DECODERS:
        raise OptionError.unknown("data.decoder", name, DECODERS)
    return DECODERS[name](augment)


DECODERS: dict[str, type[ExactDecoder] | type[FastDecoder]] = {"exact": ExactDecoder, "fast": FastDecoder}


@contextmanager
def seeded(seed: int, python_random: bool) -> Iterator[None]:
    """Draw from this seed inside the block; afterwards restore the random states of the process.

    torch.manual_seed would also seed every GPU, at 60 times the cost of seeding the CPU's generator alone.
    Nothing in the transforms draws from numpy.
    """
    generator = torch.default_generator
    torch_state, python_state = generator.get_state(), random.getstate() if python_random else None
    generator.manual_seed(seed)
    if python_random:
        random.seed(seed)
    try:
        yield
    finally:
        generator.set_state(torch_state)
        if python_state:
            random.setstate(python_state)


class _Steps:
    """open_clip's transform in four parts: crop, colour, ToTensor and Normalize, erasing."""

    def __init__(self, augment: Augment):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it reports the jitter options as unused, and uses them
            shared = asdict(augment).keys() & AugmentationCfg.__dataclass_fields__
            options = AugmentationCfg(**{name: getattr(augment, name) for name in shared})
            transform = image_transform(augment.image_size, True, augment.mean, augment.std, aug_cfg=options)
        # Images are RGB already; convert would copy them.
        steps = [step for step in transform.transforms if not isinstance(step, MaybeConvertMode)]
        at = [type(step).__name__ for step in steps].index("MaybeToTensor")
        self.crop, self.colour, self.erase = steps[0], Compose(steps[1:at]), Compose(steps[at + 2 :])
        self.to_tensor, self.normalize = steps[at : at + 2]
        self.log_ratio: list[float] = torch.log(torch.tensor(self.crop.ratio)).tolist()
        # Otherwise all draws are from torch's generator.
        self.python_random = bool(augment.use_timm or augment.color_jitter_prob or augment.gray_scale_prob)

    def draw_box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Draw top, left, height and width of the crop exactly as torchvision or timm does.

        torchvision's draws and arithmetic are written out here, in a third of the time. It often makes all of
        its ten attempts: a crop of nine tenths of a 4:3 image rarely fits with another aspect ratio.
        """
        crop, area, drawn = self.crop, height * width, torch.empty(1)
        if not isinstance(crop, RandomResizedCrop):
            return crop.get_params(torch.empty(3, height, width, device="meta"), crop.scale, crop.ratio)
        for _ in range(10):
            target = area * drawn.uniform_(*crop.scale).item()
            aspect = drawn.uniform_(*self.log_ratio).exp_().item()
            w, h = round(sqrt(target * aspect)), round(sqrt(target / aspect))
            if 0 < w <= width and 0 < h <= height:
                top, left = (int(torch.randint(0, room + 1, (1,)).item()) for room in (height - h, width - w))
                return top, left, h, w
        narrowest, widest = crop.ratio
        w, h = min(width, round(height * widest)), min(height, round(width / narrowest))
        return (height - h) // 2, (width - w) // 2, h, w


def _decode_whole(data: bytes, image: ImageFile.ImageFile) -> np.ndarray:
    """Decode a JPEG at full size; torchvision writes RGB, Pillow writes RGBX and has to repack it."""
    try:
        file = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(file, mode=ImageReadMode.RGB).permute(1, 2, 0).numpy()
    except RuntimeError:  # truncated, unsupported, or built without libjpeg: Pillow raises the reason
        return np.asarray(turn_upright(image, orientation=1))


def _check(a: Augment) -> None:
    if a.image_size < 1:
        raise InputError("image_size", f"is {a.image_size}; it must be at least 1, e.g. 224.")
    if len(a.mean) != 3 or not all(map(isfinite, a.mean)):
        raise InputError("mean", f"is {a.mean}; it must be three finite numbers, e.g. {OPENAI_DATASET_MEAN}.")
    if len(a.std) != 3 or not all(isfinite(x) and x > 0 for x in a.std):
        raise InputError("std", f"is {a.std}; it must be three numbers above 0, e.g. {OPENAI_DATASET_STD}.")
    if a.max_pixels < 1:
        raise _error(a, "max_pixels", "must be at least 1", f"{MAX_PIXELS:_}")
    if len(a.scale) != 2 or not 0 < a.scale[0] <= a.scale[1] <= 1:
        raise _error(a, "scale", "must satisfy 0 < smallest ≤ largest ≤ 1", (0.9, 1.0))
    if a.ratio is not None and (len(a.ratio) != 2 or not 0 < a.ratio[0] <= a.ratio[1]):
        raise _error(a, "ratio", "must satisfy 0 < narrowest ≤ widest", (0.75, 1.3333))
    for field in ("ratio", "re_prob", "re_count", "color_jitter_prob", "gray_scale_prob"):
        value, needs_timm = getattr(a, field), field in ("ratio", "re_prob", "re_count")
        if value is not None and needs_timm != a.use_timm:
            advice = f"Remove it, or set data.augment.use_timm={needs_timm}."
            raise _error(a, field, f"has no effect with use_timm={a.use_timm}", advice=advice)
        if value is not None and field.endswith("_prob") and not 0 <= value <= 1:
            raise _error(a, field, "must be in [0, 1]", 0.5)
    if a.re_count is not None and (not a.re_prob or a.re_count < 1):
        raise _error(a, "re_count", "must be at least 1, and requires re_prob", "re_prob=0.25, re_count=1")
    _check_jitter(a)


def _check_jitter(a: Augment) -> None:
    jitter, good = a.color_jitter, (0.32, 0.32, 0.32, 0.08)
    if not a.use_timm and (jitter is None) != (not a.color_jitter_prob):
        given, other = "color_jitter", "color_jitter_prob"
        if jitter is None:
            given, other = other, given
        raise _error(a, given, f"requires {other}", f"color_jitter={good}, color_jitter_prob=0.8")
    if jitter is None or (a.use_timm and isinstance(jitter, (int, float)) and jitter >= 0):
        return
    strengths = (jitter,) if isinstance(jitter, (int, float)) else tuple(jitter)
    if len(strengths) not in ((3, 4) if a.use_timm else (4,)) or min(strengths) < 0 or strengths[3:] > (0.5,):
        raise _error(a, "color_jitter", "must be four strengths of 0 or more, hue up to 0.5", good)


def _error(a: Augment, field: str, rule: str, example: object = None, advice: str = "") -> OptionError:
    return OptionError(f"data.augment.{field}", getattr(a, field), rule, example=example, advice=advice)
