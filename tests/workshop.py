"""A folder with everything that the documents' commands name, all of it tiny.

A recipe is first searched for as a file, so the workshop has files called `emoji`, `cc12m-large` and so on:
the real recipes with a tiny model, a small batch and one epoch. Commands run unchanged.
"""

import csv
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from fastclip.config.parse import find_recipe, recipe_names
from tests.commands import run_shell
from tests.data.collections import encode, picture, png, write_shards, write_tar
from tests.evaluation.replica import MODEL, WORDS, write_classification, write_retrieval, write_winogavil

BATCH = 16


def build_workshop(folder):
    """Fill the folder in a few seconds, most of them for training a run."""
    folder.mkdir()
    narrow = {"text_cfg": MODEL["text_cfg"] | {"width": 4}}  # the vocabulary is most of a checkpoint
    (folder / "my-vit.json").write_text(json.dumps(MODEL | narrow))
    (folder / "mine.yaml").write_text("algorithm: fastclip-v2\nloss: {tau_lr: 1.0e-3}\n")
    for name in recipe_names():
        (folder / name).write_text(yaml.safe_dump(_tiny(yaml.safe_load(find_recipe(name).read_text()))))
    _write_collection(folder / "data" / "emoji", "emoji", ["twemoji_retrieval", "twemoji_words"])
    _write_collection(folder / "data" / "scenes", "scenes", ["scenes_retrieval", "scenes_colour"])
    write_classification(folder / "data" / "datacomp" / "wds_mnist_test")
    write_winogavil(folder / "data" / "datacomp" / "winogavil")
    write_shards(folder / "shards", n=96, shards=4)
    for name in ("pictures", "data/mine"):
        _write_images(folder / name, range(BATCH, 3 * BATCH))
    _write_tables(folder)
    for number, name in enumerate(("cat", "dog", "green_house")):
        (folder / "my" / "photos" / name).mkdir(parents=True)
        for i in range(3):
            photo = encode(picture(10 * number + i), "JPEG")
            (folder / "my" / "photos" / name / f"{i}.jpg").write_bytes(photo)
    (folder / "examples").symlink_to(Path(__file__).parents[1] / "examples")
    for number, name in enumerate(("heart.png", "cat.png")):
        (folder / name).write_bytes(png(number))
    _write_runs(folder)
    return folder


def copy_workshop(workshop, folder):
    """Copy the workshop for a block that may change it."""
    return Path(shutil.copytree(workshop, folder, symlinks=True))


def _tiny(recipe):
    """The recipe with all its options; only those that make it long or large are changed."""
    recipe["model"]["name"] = "my-vit.json"
    recipe["batch"]["size"] = recipe["batch"]["reference"] = BATCH
    recipe["epochs"] = 1
    recipe["data"]["workers"] = 0
    return recipe


def _write_collection(folder, name, tasks):
    """Write a collection as `fastclip data get` does: shards, tasks, and complete.json."""
    (folder / "train").mkdir(parents=True)
    write_tar(folder / "train" / "00000.tar", _members(range(3 * BATCH)))
    for task in tasks:
        write = write_retrieval if task.endswith("retrieval") else write_classification
        write(folder / "tasks" / task)
    summary = {
        "name": name,
        "pairs": 3 * BATCH,
        "shards": {"00000.tar": 3 * BATCH},
        "tasks": dict.fromkeys(tasks),
    }
    (folder / "complete.json").write_text(json.dumps(summary))


def _members(numbers):
    for i in numbers:
        yield f"{i:05d}.png", png(i)
        yield f"{i:05d}.txt", _caption(i).encode()


def _caption(i):
    return f"a {WORDS[i % 8]} {WORDS[i // 8 % 8]} thing number {i}"


def _write_images(folder, numbers):
    folder.mkdir(parents=True)
    for name, data in _members(numbers):
        (folder / name).write_bytes(data)


def _write_tables(folder):
    """Write tables of image files, and a Parquet table that holds the images, as Hugging Face writes them."""
    for name, count in (("pairs.csv", 3 * BATCH), ("held-out.csv", BATCH)):
        with (folder / name).open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["filepath", "title"])
            rows.writerows((f"pictures/{BATCH + i % BATCH:05d}.png", _caption(i)) for i in range(count))
    images = [{"bytes": png(i), "path": None} for i in range(2 * BATCH)]
    captions = [_caption(i) for i in range(2 * BATCH)]
    pq.write_table(pa.table({"image": images, "caption": captions}), folder / "pairs.parquet")


def _write_runs(folder):
    """Write a finished run under each name that the documents use."""
    run_shell("fastclip train --config emoji", folder)
    for name in ("demo", "mine"):
        shutil.copytree(folder / "runs" / "emoji-fastclip-v3", folder / "runs" / name, symlinks=True)
