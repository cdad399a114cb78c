"""Weights of others: hostile files are refused in one line, broken values by name. See also test_model.py."""

import json
import pickle
import struct
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from fastclip.errors import PathError
from fastclip.model import build_model
from fastclip.run.checkpoint import load as load_tensors
from fastclip.run.load import load
from tests.evaluation import replica

NAME = "vit-scenes"


@pytest.fixture(scope="module")
def state():
    return build_model(NAME, device="cpu").clip.state_dict()


def refusal(file):
    with pytest.raises(PathError) as caught:
        build_model(NAME, device="cpu", pretrained=file)
    assert caught.value.path == str(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    return caught.value.problem


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_values_that_are_not_finite_are_refused_with_file_and_tensor(tmp_path, state, value, suffix):
    file, broken = tmp_path / f"broken{suffix}", {name: tensor.clone() for name, tensor in state.items()}
    broken["ln_final.bias"][3] = value
    save_file(broken, file) if suffix == ".safetensors" else torch.save({"state_dict": broken}, file)
    assert "ln_final.bias" in refusal(file)


@pytest.mark.slow
def test_a_run_and_its_export_with_such_values_are_refused(tmp_path, monkeypatch):
    run = replica.tiny_run(tmp_path)
    model = run / "model"
    tensors = torch.load(model / "open_clip_model.pt", weights_only=True)["state_dict"]
    tensors["visual.proj"][0, 0] = float("nan")
    save_file(tensors, model / "open_clip_model.safetensors")
    with pytest.raises(PathError) as caught:
        load(model)
    assert "visual.proj" in caught.value.problem

    def load_broken(path, tensors):
        load_tensors(path, tensors)
        tensors["model.clip.visual.proj"].data[0, 0] = float("inf")

    monkeypatch.setattr("fastclip.run.load.load_tensors", load_broken)
    with pytest.raises(PathError) as caught:
        load(run)
    assert "model.clip.visual.proj" in caught.value.problem


def header(content, body=b"", size=None):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def tensor(start, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


SAFETENSORS = {
    "length": header({}, size=2**63),
    "longer": header({}, size=10**8),
    "deep": header(b'{"a":' * 5_000),
    "text": header(b"\xff\xfe"),
    "list": header([1, 2]),
    "overlap": header({"a": tensor(0, 4), "b": tensor(2, 6)}, bytes(8)),
    "gap": header({"a": tensor(0, 4), "b": tensor(6, 10)}, bytes(10)),
    "beyond": header({"a": tensor(0, 400, (100,))}, bytes(4)),
    "negative": header({"a": tensor(-4, 0)}, bytes(4)),
    "backwards": header({"a": tensor(4, 0)}, bytes(4)),
    "product": header({"a": tensor(0, 4, (2**40, 2**40))}, bytes(4)),
    "kind": header({"a": tensor(0, 4, dtype="F99")}, bytes(4)),
    "empty": header({}),
    "other": header({"a\n\x1b[2J": tensor(0, 4)}, bytes(4)),
}


@pytest.mark.parametrize("content", SAFETENSORS.values(), ids=SAFETENSORS)
def test_a_hostile_header_is_refused(tmp_path, content):
    file = tmp_path / "hostile.safetensors"
    file.write_bytes(content)
    refusal(file)


def test_an_archive_that_would_unpack_to_much_more_is_refused(tmp_path):
    file = tmp_path / "bomb.pt"
    torch.save({"a": torch.zeros(8_000_000)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(file, "w") as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name), zipfile.ZIP_DEFLATED)
    assert "unpack" in refusal(file)


class Calls:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def nested(depth):
    inner = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "content",
    [
        {"a": Calls(print, "run")},
        {"a": Calls(bytearray, 10**15)},
        {1: torch.ones(1)},
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.empty(3, device="meta")},
        {"a": torch.ones(1).expand(10**6, 10**6)},
        nested(400),
    ],
    ids=["code", "memory", "keys", "sparse", "meta", "expanded", "nested"],
)
def test_a_pickle_of_anything_but_plain_tensors_is_refused(tmp_path, content, capsys):
    file = tmp_path / "hostile.pt"
    torch.save(content, file)
    refusal(file)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02" + b"(" * 10**5,
        b"\x80\x02]" + b"\x94" * 1000 + b".",
        pickle.dumps([[0] * 9] * 9),
        b"\x80\x04\x95" + b"\xff" * 8,
    ],
    ids=["marks", "memo", "list", "frame"],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_damaged_pickle_is_refused(tmp_path, content):
    file = tmp_path / "damaged.bin"
    file.write_bytes(content)
    refusal(file)
