"""The training pairs of several ranks: they index and decode them together."""

import os
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastclip.cli import main
from fastclip.config.options import DataConfig
from fastclip.data import index_files
from fastclip.data.manifest import open_manifest
from fastclip.data.pairs import SourceError
from fastclip.distributed.world import World
from fastclip.terminal import progress
from fastclip.training import training_pairs
from fastclip.training.training_pairs import open_manifest_of, require_same_pairs
from tests.data.collections import encode, picture, write_shards, write_tar
from tests.ranks import run_ranks
from tests.training.runs import Lab

CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_run_on_avif_images_stops_with_the_option_that_lets_it_resume(tmp_path, capsys):
    lab = Lab(tmp_path / "lab", epochs=1)
    members = ((f"{i}.{kind}", avif_or_text(i, kind)) for i in range(16) for kind in ("png", "txt"))
    pairs = write_tar(tmp_path / "s.tar", members)
    changed = {"data__train": pairs, "evaluate__pairs": pairs, "batch__size": 8, "data__workers": 0}
    for more, code in (({}, 1), ({"data__formats": "avif"}, 0)):
        assert main(["train", *lab.options(tmp_path / "run", "fastclip-v3", **changed, **more)]) == code
        printed = capsys.readouterr().err
        assert ("--data.formats avif" in printed.splitlines()[-1]) == bool(code)
    assert "Skipped" not in printed  # by the evaluation


def avif_or_text(number, kind):
    return encode(picture(number), "AVIF") if kind == "png" else f"picture {number}".encode()


def _open(rank, size, data, caches):
    """Open a collection on a rank; returns the manifest's files and what was read to build it."""
    os.environ["FASTCLIP_CACHE"] = str(caches[rank])
    read_pairs, names = index_files.read_pairs, []

    def read(file, columns):
        names.append(Path(file.path).name)
        time.sleep(0.03)
        return read_pairs(file, columns)

    index_files.read_pairs = read
    world = World(rank, size, rank, CPU, None)
    dist.barrier()
    manifest = open_manifest_of(str(data), DataConfig(), world)
    require_same_pairs("data.train", manifest, world)
    return {path.name: path.read_bytes() for path in manifest.folder.iterdir()}, names


@pytest.mark.slow
def test_two_ranks_share_the_work_and_open_the_same_manifest(tmp_path, cache):
    data = write_shards(tmp_path / "data", 40, 20)
    (first, by_first), (second, by_second) = run_ranks(_open, 2, data, [cache, cache])
    assert by_first
    assert by_second
    assert set(Counter(by_first + by_second).values()) == {1}
    assert len(by_first + by_second) == 20
    assert first == second
    os.environ["FASTCLIP_CACHE"] = str(tmp_path / "alone")  # the fixture restores it
    alone = open_manifest(str(data)).folder
    assert first == {path.name: path.read_bytes() for path in alone.iterdir()}


@pytest.mark.slow
def test_ranks_with_separate_caches_each_index_everything(tmp_path):
    data = write_shards(tmp_path / "data", 8, 4)
    (first, by_first), (second, by_second) = run_ranks(_open, 2, data, [tmp_path / "a", tmp_path / "b"])
    assert sorted(by_first) == sorted(by_second) == [f"0000{i}.tar" for i in range(4)]
    assert first == second


def _open_bad(rank, size, data, cache):
    with pytest.raises(SourceError) as caught:
        _open(rank, size, data, [cache, cache])
    return caught.value.path


@pytest.mark.slow
def test_a_bad_file_is_named_on_every_rank(tmp_path, cache):
    data = tmp_path / "tables"
    data.mkdir()
    for i in range(6):
        (data / f"{i}.csv").write_text("image,caption\n" if i != 3 else "neither,nor\n")
    assert run_ranks(_open_bad, 2, data, cache) == [str(data / "3.csv")] * 2


def test_rank_0_shows_its_progress_and_how_many_ranks_have_finished(monkeypatch, capsys, clock):
    def together(world, work, waiting):
        work(lambda: None)
        if waiting:
            waiting(1, 2)

    def work(report):
        clock.now += 60
        report(5, 10)

    monkeypatch.setattr(training_pairs, "together", together)
    monkeypatch.setattr(training_pairs, "progress", partial(progress, clock=clock))
    for rank, expected in ((0, ["indexing: 5 of 10 bytes", "indexing finished on: 1 of 2 ranks"]), (1, [])):
        training_pairs._with_progress(World(rank, 2, rank, CPU, None), "indexing", "bytes", work)
        assert capsys.readouterr().err.splitlines() == expected
