"""Small collections of pairs for the tests, in every format."""

import io
import tarfile
from itertools import pairwise

import numpy as np
from PIL import Image


def picture(number, size=(40, 30), mode="RGB"):
    """A different image for each number."""
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encode(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(number, **options):
    return encode(picture(number, **options))


def write_tar(path, members):
    """Write a shard of (name, bytes) members in this order."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pair_members(numbers):
    """key.png, key.txt and an ignored key.json for each number."""
    for i in numbers:
        yield f"{i:06d}.png", png(i)
        yield f"{i:06d}.txt", f"picture {i}".encode()
        yield f"{i:06d}.json", b"{}"


def write_shards(folder, n=60, shards=3):
    """Write n pairs into `shards` tars of unequal sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, (start, end) in enumerate(pairwise(np.linspace(0, n, shards + 1).astype(int))):
        write_tar(folder / f"{i:05d}.tar", pair_members(range(start, end)))
    return folder
