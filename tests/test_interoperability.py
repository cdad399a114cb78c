"""Exchange of files with open_clip, webdataset, img2dataset and the Hugging Face Hub, in both directions."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import webdataset
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import fastclip
from fastclip.cli import main
from fastclip.data.images import upright_rgb
from fastclip.data.manifest import open_manifest
from fastclip.datasets import scenes
from tests.data.collections import encode, picture, write_tar
from tests.evaluation import replica

TEXTS = ["a red heart", "a cat"]
# A program that uses open_clip and not fastclip
OPEN_CLIP_ALONE = """
import json
import sys
from pathlib import Path

import open_clip
import torch
from PIL import Image
from safetensors.torch import save_file

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
images, texts = [Image.open(path) for path in sorted(out.glob("*.png"))], json.loads(sys.argv[3])
features = {}


def encode(name, model, preprocess, tokenizer):
    model.eval()
    with torch.no_grad():
        batch = torch.stack([preprocess(image.convert("RGB")) for image in images])
        features[f"{name} image"] = model.encode_image(batch, normalize=True)
        features[f"{name} text"] = model.encode_text(tokenizer(texts), normalize=True)


for name in (f"local-dir:{folder}", "hf-hub:someone/tiny"):
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    tokenizer = open_clip.get_tokenizer(name)
    encode(name.split(":")[0], model, preprocess, tokenizer)

config = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
(out / "alone-tiny.json").write_text(json.dumps(config))
open_clip.add_model_config(out / "alone-tiny.json")
weights = folder / "open_clip_model.pt"
encode("pretrained", open_clip.create_model("alone-tiny", pretrained=str(weights)), preprocess, tokenizer)
empty = open_clip.create_model("alone-tiny")
open_clip.load_checkpoint(empty, str(weights), weights_only=True)
encode("load_checkpoint", empty, preprocess, tokenizer)

torch.manual_seed(7)
theirs = open_clip.create_model("alone-tiny")
state = theirs.state_dict()
save_file(state, out / "theirs.safetensors")
optimizer = torch.optim.AdamW(theirs.parameters())
theirs.encode_text(tokenizer(texts)).sum().backward()
torch.save(  # as open_clip's own training does, from inside DDP
    {
        "epoch": 3,
        "name": "their run",
        "state_dict": {f"module.{key}": tensor for key, tensor in state.items()},
        "optimizer": optimizer.state_dict(),
    },
    out / "theirs.pt",
)
save_file(features, out / "features.safetensors")
assert "fastclip" not in sys.modules
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return replica.tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def alone(run, tmp_path_factory):
    """A folder with the results of open_clip alone for the export, from the disk and from the Hub's cache."""
    out = tmp_path_factory.mktemp("alone")
    for i in range(3):
        (out / f"{i}.png").write_bytes(replica.png(i))
    hub = out / "hub" / "models--someone--tiny"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    (hub / "snapshots").mkdir()
    (hub / "snapshots" / ("0" * 40)).symlink_to(run / "model")
    environment = os.environ | {"HF_HUB_CACHE": str(out / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", OPEN_CLIP_ALONE, str(run / "model"), str(out), json.dumps(TEXTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("way", ["local-dir", "hf-hub", "pretrained", "load_checkpoint"])
def test_open_clip_alone_computes_the_features_of_the_run(run, alone, way):
    model, theirs = fastclip.load(run), load_file(alone / "features.safetensors")
    expected = {"image": model.encode_image(sorted(alone.glob("*.png"))), "text": model.encode_text(TEXTS)}
    for side, features in expected.items():
        torch.testing.assert_close(theirs[f"{way} {side}"], features, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["theirs.pt", "theirs.safetensors"])
def test_training_starts_from_weights_that_open_clip_alone_saved(run, alone, tmp_path, name):
    """At a learning rate of 0 it also ends with them."""
    pairs = run.parent / "train.tar"
    options = {
        "config": "scenes",
        "out": tmp_path / "run",
        "model.name": alone / "alone-tiny.json",
        "model.pretrained": alone / name,
        "optim.lr": 0,
        "data.train": pairs,
        "data.keep_decoded": "false",
        "evaluate.pairs": pairs,
        "epochs": 1,
        "batch.size": 30,
    }
    arguments = [f"--{option}={value}" for option, value in options.items()]
    with redirect_stdout(io.StringIO()):
        assert main(["train", *arguments]) == 0
    theirs = load_file(alone / "theirs.safetensors")
    ours = load_file(tmp_path / "run" / "model" / "open_clip_model.safetensors")
    assert theirs.keys() == ours.keys()
    different = [key for key in theirs if not torch.equal(theirs[key], ours[key])]
    assert different == ["logit_scale"]  # τ is the algorithm's
    assert f"| Initial weights | `{name}` |" in (tmp_path / "run" / "model" / "README.md").read_text()


@pytest.mark.slow
def test_the_programs_of_the_card_run(run, alone, tmp_path, monkeypatch):
    card = ModelCard.load(run / "model" / "README.md")
    with_open_clip, with_fastclip = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.png").write_bytes(replica.png(0))
    variables = {}
    with redirect_stdout(io.StringIO()) as printed:
        exec(with_open_clip.replace("hf-hub:OWNER/NAME", f"local-dir:{run / 'model'}"), variables)
        exec(with_fastclip.replace("FOLDER", str(run / "model")))
    assert printed.getvalue().count("tensor") == 2
    features = fastclip.load(run).encode_image("image.png")
    torch.testing.assert_close(variables["image_features"], features, atol=1e-6, rtol=0)


def test_webdataset_reads_our_shards_pair_by_pair(tmp_path):
    shards = [tmp_path / f"0000{i}.tar" for i in range(2)]
    for i, shard in enumerate(shards):
        scenes.draw_shard(shard, i, 40)
    theirs = list(webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=False).decode("pil"))
    ours = open_manifest(str(tmp_path / "*.tar"))
    assert len(theirs) == len(ours) == 80
    for number, sample in enumerate(theirs):
        image, caption = ours.read(number)
        assert sample["txt"] == caption
        assert sample["png"].tobytes() == upright_rgb(image).tobytes()


# img2dataset's three formats: a failed download has a row in its tables, but no image

FAILED = {1, 4, 5}


def records(start, count):
    for i in range(start, start + count):
        failed = i in FAILED
        yield {
            "url": f"https://example.org/{i}",
            "caption": f'a "caption", of picture {i}',
            "key": f"{i:09d}",
            "status": "failed_to_download" if failed else "success",
            "error_message": "HTTP Error 404: Not Found" if failed else None,
            "width": None if failed else 40,
            "height": None if failed else 30,
            "sha256": None if failed else "0" * 64,
        }


def jpeg(record):
    return encode(picture(int(record["key"])), "JPEG")


def write_img2dataset(folder, form, shards=2, count=6, encoded="jpg"):
    """Write a folder as img2dataset does with this --output_format."""
    (folder / "_tmp").mkdir(parents=True)
    for shard in range(shards):
        rows = list(records(shard * count, count))
        downloaded = [row for row in rows if row["status"] == "success"]
        stem = folder / f"{shard:05d}"
        members = [
            (f"{row['key']}.{end}", data)
            for row in downloaded
            for end, data in (
                ("jpg", jpeg(row)),
                ("txt", row["caption"].encode()),
                ("json", json.dumps(row).encode()),
            )
        ]
        if form == "webdataset":
            write_tar(stem.with_suffix(".tar"), members)
        elif form == "files":
            stem.mkdir()
            for name, data in members:
                (stem / name).write_bytes(data)
        else:
            rows = [row | {encoded: jpeg(row) if row in downloaded else None} for row in rows]
        pq.write_table(pa.Table.from_pylist(rows), stem.with_suffix(".parquet"), row_group_size=4)
        (folder / f"{shard:05d}_stats.json").write_text(
            json.dumps({"count": count, "successes": len(downloaded)})
        )
    return folder


@pytest.mark.parametrize("form", ["webdataset", "files", "parquet"])
def test_a_folder_of_img2dataset_is_read_in_all_its_formats(tmp_path, form):
    manifest = open_manifest(str(write_img2dataset(tmp_path / "set", form)))
    expected = [row for row in records(0, 12) if row["status"] == "success"]
    assert len(manifest) == len(expected) == 9
    for number, row in enumerate(expected):
        image, caption = manifest.read(number)
        assert caption == row["caption"]
        assert image == jpeg(row)
    assert sum(manifest.problem_counts.values()) == (len(FAILED) if form == "parquet" else 0)


def test_img2dataset_may_have_encoded_webp(tmp_path):
    assert len(open_manifest(str(write_img2dataset(tmp_path / "set", "parquet", encoded="webp")))) == 9


def test_an_unfinished_shard_of_img2dataset_does_not_hide_the_others(tmp_path):
    folder = write_img2dataset(tmp_path / "set", "files", shards=3)
    (folder / "00002_stats.json").unlink()  # written last
    assert len(open_manifest(str(folder))) == 15


def test_a_table_next_to_its_image_folder_is_still_a_table(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.jpg").write_bytes(encode(picture(0), "JPEG"))
    pq.write_table(pa.table({"image": ["train/0.jpg"], "caption": ["zero"]}), tmp_path / "train.parquet")
    assert open_manifest(str(tmp_path)).read(0).caption == "zero"
