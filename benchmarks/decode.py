"""Images/s per core: decode, augment and tokenise, compared with open_clip's transform and tokenizer.

640 x 480 JPEGs in tar shards, read with one loader worker of one thread; the cases differ in the decoder and
the tokenizer. The time of `finish`, which runs on the device, is reported separately, as is the difference
between the pixels of `fast` and `exact`.
"""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import open_clip
import torch
from open_clip.transform import image_transform
from PIL import Image, ImageDraw

from benchmarks.record import interleaved, save
from fastclip.data.decode import Augment, ExactDecoder, FastDecoder, ImageForm
from fastclip.data.loader import PairLoader
from fastclip.data.manifest import open_manifest
from fastclip.data.order import Order
from fastclip.data.tokenize import Tokenizer
from fastclip.datasets.resumable_build import write_tar

FILES, IMAGES, BATCH, ROUNDS = 256, 1024, 32, 5  # a round is long, as training is: loader workers start once


def photo(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A JPEG with the spectrum of a photo: noise whose strength falls with its frequency, and some edges."""
    canvas, cells = np.zeros((height, width, 3), np.float32), 2
    while cells < 2 * width:
        noise = rng.normal(size=(max(2, cells * height // width), cells, 4)).astype(np.float32)
        noise = noise[..., 3:] + 0.35 * noise[..., :3]  # mostly luminance, some colour
        layers = [Image.fromarray(np.ascontiguousarray(noise[..., c])) for c in range(3)]
        canvas += np.stack([np.asarray(x.resize((width, height), 3)) for x in layers], -1) * cells**-0.45
        cells *= 2
    canvas = (canvas - canvas.mean()) / canvas.std() * 50 + 120
    image = Image.fromarray(canvas.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, w, h = rng.uniform(0, 1, 4) * (width, height, width / 4, height / 4)
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        colour = tuple(int(v) for v in rng.integers(0, 256, 3))
        shape((x, y, x + w, y + h), outline=colour, width=int(rng.integers(1, 6)))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88)
    return file.getvalue()


def captions(rng: np.random.Generator, tokenizer, count: int) -> list[str]:
    """Captions of 8 to 16 words with a Zipf distribution: a few are frequent, most are rare."""
    words = [token[:-4] for token in tokenizer.encoder if token.endswith("</w>") and token[:-4].isalpha()]
    words = [word for word in words if word.isascii() and len(word) > 2]
    text = []
    for _ in range(count):
        drawn = [words[int(i) % len(words)] for i in rng.zipf(1.2, size=rng.integers(8, 17))]
        text.append(" ".join(drawn).capitalize() + ".")
    return text


def write_shards(folder: Path, files: list[bytes], text: list[str]) -> None:
    for shard in range(4):
        members = []
        for i in range(shard, len(files), 4):
            members += [(f"{i}.jpg", files[i]), (f"{i}.txt", text[i].encode())]
        write_tar(folder / f"{shard}.tar", members)


class OpenClip:
    """open_clip's training transform as a decoder."""

    def __init__(self) -> None:
        self.transform = image_transform(224, is_train=True)
        self.form = ImageForm((3, 224, 224), torch.float32)

    def train(self, data: bytes, seed: int) -> torch.Tensor:
        return self.transform(Image.open(io.BytesIO(data)))


def main() -> None:
    seed = 0
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    files = [photo(rng, 640, 480) for _ in range(FILES)]
    text = captions(rng, tokenizer, FILES)
    exact, fast, finer = ExactDecoder(Augment()), FastDecoder(Augment()), FastDecoder(Augment(), oversample=2)
    ours = {"exact": exact, "fast": fast, "fast, oversample=2": finer}

    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FASTCLIP_CACHE"] = temporary + "/cache"
        write_shards(Path(temporary), files, text)
        manifest = open_manifest(temporary + "/*.tar")
        order = Order(len(manifest), BATCH)

        def epoch(decoder, tokens):
            loader = PairLoader(manifest, order, decoder, tokens, stop_step=IMAGES // BATCH, workers=1)
            return lambda: [batch.step for batch in loader]

        cases = {"open_clip": epoch(OpenClip(), tokenizer)}
        cases |= {name: epoch(ready, Tokenizer(tokenizer)) for name, ready in ours.items()}
        seconds = interleaved(cases, ROUNDS)
    batch = torch.stack([fast.train(file, i) for i, file in enumerate(files[:BATCH])])
    finish = interleaved({"finish": lambda: fast.finish(batch, "cpu")}, ROUNDS)["finish"]
    sizes = ((320, 240), (640, 480), (1280, 960), (2560, 1920))
    photos = {f"{width}x{height}": [photo(rng, width, height) for _ in range(4)] for width, height in sizes}

    figures: dict = {
        "kilobytes_per_image": round(sum(map(len, files)) / len(files) / 1000, 1),
        "images_per_second": {name: round(IMAGES / seconds[name], 1) for name in cases},
        "times_open_clip": {name: round(seconds["open_clip"] / seconds[name], 2) for name in ours},
        "finish_ms_per_image_on_this_cpu": round(1e3 * finish / BATCH, 3),
        "differs_from_exact_by": {
            name: {size: difference(exact, ours[name], some) for size, some in photos.items()}
            for name in ours
            if name != "exact"
        },
    }
    for name, ratio in figures["times_open_clip"].items():
        print(f"{name:18s} {figures['images_per_second'][name]} images/s, {ratio} times open_clip's")
    for name, by_size in figures["differs_from_exact_by"].items():
        for size, by in by_size.items():
            print(f"{name} at {size}: mean {by['mean']}, 99 % within {by['p99']}, of 255")
    save("decode", seed, figures)


def difference(exact: ExactDecoder, fast: FastDecoder, files: list[bytes]) -> dict[str, float]:
    """The difference between two decoders' pixels, in steps of 0..255, on four crops of each file."""
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (Augment.mean, Augment.std))
    off = []
    for seed in range(4):
        for file in files:
            expected = (exact.train(file, seed) * std + mean).mul(255).round()
            off.append((expected - fast.train(file, seed).permute(2, 0, 1)).abs().flatten())
    all_off = torch.cat(off).numpy()
    return {
        "mean": round(float(all_off.mean()), 3),
        "p99": float(np.percentile(all_off, 99)),
        "max": float(all_off.max()),
    }


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
