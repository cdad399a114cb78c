"""Small studies for the fake fastclip: real options and files that pass every check."""

import json

from fastclip.errors import PathError
from fastclip.tools.study.definition import Study
from fastclip.tools.study.jobs import locked
from tests.data.collections import write_shards

ALGORITHMS = ("openclip", "fastclip-v3")


def write_data(folder):
    """Three shards to train on and a task to test on."""
    write_shards(folder / "train", 12, 3)
    write_shards(folder / "tasks" / "some_retrieval" / "test", 4, 1)
    return folder


def small_study(data, algorithms=ALGORITHMS, **changed):
    """2 arms × 2 seeds; the last shard is held out."""
    settings = {
        "set": {"data.train": str(data / "train/{00000,00001}.tar"), "evaluate.pairs": None, "epochs": 2},
        "vary": {"algorithm": list(algorithms)},
        "seeds": [0, 1],
    } | changed
    return Study("scenes", **settings)


def tuned_study(data, **changed):
    """The same with one seed, two learning rates to choose from, and tests."""
    tune, pairs = {"optim.lr": [0.002, 0.001]}, str(data / "train/00002.tar")
    settings = {"tune": tune, "validation": {"pairs": pairs}, "tasks": str(data / "tasks"), "seeds": [0]}
    return small_study(data, **(settings | changed))


def calls(folder):
    """The arguments of each call of the fake fastclip for this run."""
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_free(out):
    """Whether no process works on this study."""
    try:
        with locked(out):
            return True
    except PathError:
        return False
