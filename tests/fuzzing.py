"""The readers of files that others wrote, each with valid files to damage, for test_fuzz.py and `make fuzz`.

A reader may return anything or raise an error of ours (`is_ours`), and nothing else.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save
from xxhash import xxh3_128_hexdigest

from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.data.images import thumbnail, upright_rgb
from fastclip.data.pairs import File, Pair
from fastclip.data.sources import expand_braces, read_pairs
from fastclip.model_config import read_config
from fastclip.run.checkpoint import load, tensor_names
from fastclip.run.folder import evaluation_pairs, is_trained, read_run
from fastclip.run.metrics_file import last_record, read_metrics, truncate_metrics
from fastclip.run.results import Result, read_results
from fastclip.run.state_file import read_state
from fastclip.tools.study.definition import load_study
from fastclip.weights import read_tensors
from tests.data.collections import encode, pair_members, picture, write_tar


def is_ours(error: BaseException) -> bool:
    """Whether an error says what is wrong in words of fastclip: its class is defined there."""
    return type(error).__module__.partition(".")[0] == "fastclip"


class Reader(NamedTuple):
    seeds: Callable[[Path], list[bytes]]
    """Makes valid files, given a folder to work in."""
    read: Callable[[bytes, Path], object]
    """Reads a file with this content; may write into the folder."""
    repair: Callable[[bytes], bytes] | None = None
    """Makes checksums right, so that damage reaches what lies behind them."""


def read_both(reader: Reader, data: bytes, folder: Path) -> None:
    """Read the content as it is, and with right checksums; raises what is not ours."""
    logging.disable(logging.WARNING)  # of every line that is skipped
    try:
        for content in [data] if reader.repair is None else [data, reader.repair(data)]:
            with suppress_ours():
                reader.read(content, folder)
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def suppress_ours() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_ours(error):
            raise


CHANGES = ("flip", "cut", "insert", "overwrite", "repeat", "value")
_VALUE = re.compile(rb'"[^"\n]*"|-?\d[\d.eE+-]*|true|false|null|[\[{][^\[\]{}\n]*[\]}]')  # of JSON and YAML
CHUNKS = [  # what readers of numbers, text and nested values are known to stumble over
    *(
        b"\0",
        b"\xff" * 8,
        b"9" * 30,
        b"9" * 5000,
        b"-1",
        b"1e999",
        b"NaN",
        b"null",
        b"true",
        b'""',
        b"{}",
        b"[]",
    ),
    *(b'"x"', b'{"x": 1}', b'["x"]', b"1.5", b"-0", b"Infinity", b'"\\u0000"', b'"9"', b"4294967296"),
    *(b"[" * 3000, b'{"a":' * 3000, b"\n", b'"', b"\xed\xa0\x80", b"\\ud800", b"../", b"*a", b"&a "),
    *(b"\x80" + bytes(10) + b"\xff", bytes(512), bytes(1024), b"\x7f\xff\xff\xff", b"0" * 11),
]


def damaged(data: bytes, changes: Iterable[tuple[str, float, float, bytes]]) -> bytes:
    """The content after some changes at places that are given as shares of its length."""
    for kind, place, other, chunk in changes:
        at, to = sorted((int(place * len(data)), int(other * len(data))))
        if kind == "flip" and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ (1 << int(7 * other))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[to:]
        elif kind == "insert":
            data = data[:at] + chunk + data[at:]
        elif kind == "overwrite":
            data = data[:at] + chunk + data[at + len(chunk) :]
        elif kind == "repeat":
            data = data[:to] + data[at:to] + data[to:]
        elif kind == "value" and (values := [*_VALUE.finditer(data[:100_000])]):
            value = values[int(place * (len(values) - 1))]
            data = data[: value.start()] + chunk + data[value.end() :]
    return data


# Collections


def _write(folder: Path, name: str, data: bytes) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def _tars(folder: Path) -> list[bytes]:
    plain = write_tar(folder / "plain.tar", pair_members(range(2)))
    with tarfile.open(folder / "pax.tar", "w", format=tarfile.PAX_FORMAT) as pax:
        info = tarfile.TarInfo("é" * 60 + ".txt")
        info.pax_headers = {"comment": "x", "mtime": "1.5"}
        pax.addfile(info)
    with tarfile.open(folder / "gnu.tar", "w", format=tarfile.GNU_FORMAT) as gnu:
        gnu.addfile(tarfile.TarInfo("long/" * 40 + "a.png"))
    return [(folder / name).read_bytes() for name in (plain.name, "pax.tar", "gnu.tar")]


def _tar_checksums(data: bytes) -> bytes:
    """The sum of every block that could be a header, written into it."""
    blocks = bytearray(data)
    for start in range(0, len(blocks) - 511, 512):
        if blocks[start + 257 : start + 262] == b"ustar":
            blocks[start + 148 : start + 156] = b" " * 8
            blocks[start + 148 : start + 156] = b"%06o\0 " % sum(blocks[start : start + 512])
    return bytes(blocks)


def _read_collection(name: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, folder: Path) -> None:
        file = _write(folder, name, data)
        kind = "tar" if name.endswith("tar") else "folder" if name.endswith("jsonl") else "table"
        source = File(str(folder) if kind == "folder" else str(file), kind)
        for item in read_pairs(source):
            if isinstance(item, Pair) and isinstance(item.image, tuple):
                assert 0 <= item.image[0] <= sum(item.image) <= len(data), f"{item} is not in the file"

    return read


_CSV = "filepath,title\na.png,a cat\nb.png,\"a dog, or two\"\nc.png,\"['a', 'b']\"\n"
_TSV = "image\tcaption\na.png\ta cät\nb.png\ta dog\n"
_JSONL = '{"file_name": "a.png", "text": "a cat"}\n{"file_name": "b.png", "text": ["a", "b"]}\n'


def _parquets(folder: Path) -> list[bytes]:
    names = {"filepath": ["a.png", "b.png", None], "title": ["a cat", "a dog", "x"]}
    images = {"image": [b"1", b"", None], "caption": [["a", "b"], ["c"], None]}
    structs = {"image": [{"bytes": b"1", "path": "a"}] * 3, "text": ["a", None, "b"]}
    tables = [(names, "NONE"), (names, "SNAPPY"), (images, "NONE"), (structs, "ZSTD")]
    for number, (columns, compression) in enumerate(tables):
        pq.write_table(
            pa.table(columns), folder / f"{number}.parquet", compression=compression, row_group_size=2
        )
    return [(folder / f"{number}.parquet").read_bytes() for number in range(len(tables))]


# Images


def _images(folder: Path) -> list[bytes]:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    return [
        encode(picture(1), "JPEG", exif=exif),
        encode(picture(2), "JPEG", progressive=True),
        encode(picture(3, mode="RGBA")),
        encode(picture(4, mode="P"), "PNG", transparency=0),
        encode(picture(5), "WEBP"),
        encode(picture(6, mode="P"), "GIF", save_all=True, append_images=[picture(7, mode="P")]),
        encode(picture(8), "BMP"),
        encode(picture(9), "TIFF", compression="tiff_lzw"),
    ]


def _png_checksums(data: bytes) -> bytes:
    """The CRC of every chunk, written behind it."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        length = struct.unpack_from(">I", out, at)[0]
        if at + 12 + length > len(out):
            break
        struct.pack_into(">I", out, at + 8 + length, zlib.crc32(out[at + 4 : at + 8 + length]))
        at += 12 + length
    return bytes(out)


def _read_image(data: bytes, folder: Path) -> None:
    assert upright_rgb(data, max_pixels=1_000_000).mode == "RGB"
    thumbnail(data, 16)


# A run's folder


def _metrics(folder: Path) -> list[bytes]:
    step = {"step": 10, "epoch": 0.5, "samples": 640, "loss": 1.5, "time": {"elapsed": 3.5}, "skipped": 0}
    scores = {"step": 10, "epoch": 0.5, "evaluation": {"image_to_text_r1": 0.5}}
    return ["".join(json.dumps(one) + "\n" for one in (step, scores, step | {"step": 20})).encode()]


def _read_metrics(data: bytes, folder: Path) -> None:
    file = _write(folder, "metrics.jsonl", data)
    read_metrics(file)
    last_record(file)
    run = read_run(folder, settings=False)
    run.state(now=0.0)
    for record in (*run.records, *run.evaluations):
        run.samples_at(record)
        run.seconds_at(record)
    truncate_metrics(file, 10)
    assert all(record.get("step", 0) <= 10 for record in read_metrics(file))


def _results(folder: Path) -> list[bytes]:
    scores = {"recall": 0.5, "other": 0.25}
    listed = (Result("task", "key", "pairs", "recall", scores, 10), Result("failed", error="no file"))
    return ["".join(json.dumps(asdict(result)) + "\n" for result in listed).encode()]


def _read_results(data: bytes, folder: Path) -> None:
    file = _write(folder, "evaluation/results.jsonl", data)
    _write(folder, "metrics.jsonl", b"")
    for result in read_results(file).values():
        assert result.value is None or isinstance(result.value, int | float)
    read_run(folder, settings=False)


_FACTS = {"step": 10, "total_steps": 10, "num_samples": 64, "config": {"epochs": 1, "batch": {"size": 4}}}


def _states(folder: Path) -> list[bytes]:
    name, early = "rank-00000.safetensors", {name: _FACTS[name] for name in ("step", "num_samples", "config")}
    new = {"facts": _FACTS, "files": {name: 4}, "digests": {name: "0" * 32}}
    return [_seal(json.dumps(new).encode()), json.dumps({"facts": early, "files": {}}).encode()]


def _seal(data: bytes) -> bytes:
    """With the digest that begins a state.json."""
    rest = data.partition(b",")[2] if data.startswith(b'{"digest"') else data.removeprefix(b"{")
    return f'{{"digest": "{xxh3_128_hexdigest(rest)}",'.encode() + rest


def _read_state(data: bytes, folder: Path) -> None:
    _write(folder, "checkpoints/step-00000010/state.json", data)
    _write(folder, "metrics.jsonl", b"")
    read_run(folder, settings=False).state(now=0.0)
    is_trained(folder)


def _tensors(folder: Path) -> list[bytes]:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(2, dtype=torch.float64),
        "c": torch.tensor(3),
    }
    offsets = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
    return [save(tensors, {"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"})]


def _header_length(data: bytes) -> bytes:
    """The length of the header that begins a safetensors file."""
    end = data.rfind(b"}") + 1
    end += len(data[end:]) - len(data[end:].lstrip(b" "))  # it is filled up with spaces
    return struct.pack("<Q", max(0, end - 8)) + data[8:]


def _read_checkpoint(data: bytes, folder: Path) -> None:
    """As of an earlier version, without digests, so that damage reaches the tensors."""
    checkpoint = folder / "checkpoints" / "step-00000010"
    _write(folder, "checkpoints/step-00000010/rank-00000.safetensors", data)
    state = {"facts": _FACTS, "files": {"rank-00000.safetensors": len(data)}}
    _write(folder, "checkpoints/step-00000010/state.json", json.dumps(state).encode())
    read_state(checkpoint)
    names = tensor_names(checkpoint)
    small = {name: kind for name, kind in names.items() if kind[0].numel() < 1_000_000}
    load(checkpoint, {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in small.items()})


# Configs and weights


def _pickles(folder: Path) -> list[bytes]:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(2, dtype=torch.float16)}
    torch.save({"state_dict": tensors}, folder / "new.pt")
    torch.save(tensors, folder / "old.pt", _use_new_zipfile_serialization=False)
    return [(folder / name).read_bytes() for name in ("new.pt", "old.pt")]


def _read_yaml(data: bytes, folder: Path) -> None:
    file = _write(folder, "config.yaml", data)
    evaluation_pairs(folder)
    for read in (lambda: resolve(parse(["--config", str(file)])), lambda: load_study(file)):
        try:
            read()
        except Exception as error:
            if not is_ours(error) and type(error) is not ValueError:  # the parser's own, in one line
                raise


_CONFIG = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16},
        "text_cfg": {"context_length": 8, "vocab_size": 512, "width": 32, "heads": 2, "layers": 1},
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
}
_YAML = """\
algorithm: fastclip-v3
epochs: 2
batch: {size: 64}
data:
  train: &t [a.tar, b.tar]
evaluate: {pairs: *t}
"""
_STUDY = """\
config: emoji
set: {epochs: 2, loss.tau: 0.1}
vary: {algorithm: [openclip, fastclip-v3]}
seeds: [0, 1]
"""


def _text(*texts: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [text.encode() for text in texts]


READERS = {
    "tar": Reader(_tars, _read_collection("a.tar"), _tar_checksums),
    "csv": Reader(_text(_CSV, _TSV), _read_collection("a.csv")),
    "jsonl": Reader(_text(_JSONL), _read_collection("metadata.jsonl")),
    "parquet": Reader(_parquets, _read_collection("a.parquet")),
    "image": Reader(_images, _read_image, _png_checksums),
    "metrics": Reader(_metrics, _read_metrics),
    "results": Reader(_results, _read_results),
    "checkpoint state": Reader(_states, _read_state, _seal),
    "checkpoint tensors": Reader(_tensors, _read_checkpoint, _header_length),
    "safetensors": Reader(
        _tensors, lambda data, folder: read_tensors(_write(folder, "a.safetensors", data)), _header_length
    ),
    "pickle": Reader(_pickles, lambda data, folder: read_tensors(_write(folder, "a.pt", data))),
    "model config": Reader(
        _text(json.dumps(_CONFIG)), lambda data, folder: read_config(_write(folder, "a.json", data))
    ),
    "yaml": Reader(_text(_YAML, _STUDY), _read_yaml),
    "pattern": Reader(_text("a{0..9}/{b,c}.tar"), lambda data, folder: expand_braces(data.decode("latin-1"))),
}
