"""Images that would take hours or the whole memory are refused; ordinary ones are not."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastclip.data.decode import Augment, decoder
from fastclip.data.image_limits import MAX_SCANS, excess
from fastclip.data.images import MAX_PIXELS, UnusableSample, thumbnail, upright_rgb
from tests.data.hostile_images import DECODES, HOSTILE_IMAGES, encoded, scans
from tests.data.test_decode import file, picture
from tests.data.test_images import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, reason) in HOSTILE_IMAGES.items() if reason != DECODES])
def test_a_hostile_image_is_refused_by_every_decoder(name):
    make, reason = HOSTILE_IMAGES[name]
    data = make()
    acts = [upright_rgb, partial(thumbnail, side=64)]
    acts += [partial(decoder(kind, Augment(image_size=16)).train, seed=0) for kind in ("exact", "fast")]
    for act in acts:
        with pytest.raises(UnusableSample) as caught:
            act(data)
        assert reason in str(caught.value)


@pytest.mark.slow
def test_no_hostile_image_takes_more_than_its_time_and_memory():
    """In a process with limits on both, which would end it."""
    command = [sys.executable, "-m", "tests.data.hostile_images"]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    found = {name: reason for name, reason, *_ in map(json.loads, run.stdout.splitlines())}
    assert run.returncode == 0, f"after {[*found][-1:]}: {run.stderr[-2000:]}"
    assert found.keys() == HOSTILE_IMAGES.keys()
    for name, (_, reason) in HOSTILE_IMAGES.items():
        assert reason in found[name] if reason else not found[name]


ORDINARY = {
    **{kind: data for kind, (data, _) in KINDS.items()},
    "progressive": file(picture(300, 200), "JPEG", progressive=True),
    "progressive cmyk": encoded(Image.new("CMYK", (300, 200)), "JPEG", progressive=True),  # 18 scans
    "tiff of tiles": file(picture(300, 200), "TIFF", tiffinfo={322: 64, 323: 64}, compression="tiff_lzw"),
    "tiff of a jpeg": file(picture(300, 200), "TIFF", compression="jpeg"),
    "big tiff": file(picture(300, 200), "TIFF", big_tiff=True),
    "tiff of 1 bit": file(picture(300, 200).convert("1"), "TIFF", compression="group4"),
    "profile": file(picture(300, 200), "JPEG", icc_profile=bytes(600_000)),  # in ten segments
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_images_are_not_refused(kind):
    assert excess(ORDINARY[kind], MAX_PIXELS) is None
    assert upright_rgb(ORDINARY[kind]).mode == "RGB"


def test_scans_are_limited_by_their_number_and_by_the_pixels_they_pass_over():
    few = len(encoded(Image.new("L", (64, 64)), "JPEG", progressive=True).split(b"\xff\xda")) + 3
    assert excess(scans(MAX_SCANS - few, 64, 64), MAX_PIXELS) is None
    assert excess(scans(MAX_SCANS + 1, 64, 64), MAX_PIXELS)
    assert excess(scans(20, 64, 64), max_pixels=64 * 64)  # more than 16 times 64 × 64
    assert excess(scans(1, 64, 64), max_pixels=64 * 64) is None


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*ORDINARY.values()]), st.data())
def test_damaged_bytes_never_raise(data, draw):
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 8))):
        damaged[draw.draw(st.integers(0, min(len(data), 400) - 1))] = draw.draw(st.integers(0, 255))
    reason = excess(bytes(damaged[: draw.draw(st.integers(0, len(data)))]), MAX_PIXELS)
    assert reason is None or reason
