"""Many tasks: a failure stops none of the others, results survive a torn line, workers agree."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fastclip.distributed.world import World
from fastclip.evaluation.feature_cache import model_key
from fastclip.evaluation.features import Encoder
from fastclip.evaluation.run_tasks import evaluate
from fastclip.run.load import load_towers
from fastclip.run.results import Result, append_result, read_results
from tests.evaluation import replica
from tests.workers import run_workers


def encoder_of(exported, rank=0, world_size=1):
    towers = load_towers(exported)
    encoder = Encoder(towers, World(rank, world_size, rank, torch.device("cpu"), None), batch_size=4)
    return encoder, model_key(towers, None)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return replica.tiny_export(tmp_path_factory.mktemp("export"))


@pytest.fixture
def folders(tmp_path):
    """Two tasks, one that is broken between them, and one that is not there."""
    return {
        "one": replica.write_classification(tmp_path / "one", 1),
        "broken": replica.write_classification(tmp_path / "broken", 2, shards=3),
        "winogavil": replica.write_winogavil(tmp_path / "winogavil", 3),
        "nowhere.csv": str(tmp_path / "nowhere.csv"),
    }


def break_it(folders):
    (folders["broken"] / "test" / "1.tar").unlink()


def test_tasks_come_in_order_and_a_failure_stops_none_of_the_others(exported, folders):
    break_it(folders)
    results = list(evaluate(folders, *encoder_of(exported)))
    assert [result.task for result in results] == [*folders]
    assert [bool(result.error) for result in results] == [False, True, False, True]
    assert "1.tar" in results[1].error
    assert "nowhere.csv does not exist" in results[3].error
    assert results[1].value is None
    script = replica.PlainScript(exported)
    for result in (results[0], results[2]):
        assert result.scores == pytest.approx(script.scores(folders[result.task]))
        assert result.value == result.scores[result.measure]


def test_only_pictures_that_cannot_be_used_are_a_failure_of_their_task(exported, folders):
    for file in (folders["winogavil"] / "images").iterdir():
        file.write_bytes(b"junk")
    results = list(evaluate(folders, *encoder_of(exported)))
    assert "None of the" in results[2].error
    assert results[0].value is not None


def test_a_result_that_is_known_is_given_without_a_look_at_the_images(exported, folders, monkeypatch):
    encoder, key = encoder_of(exported)
    first = {result.key: result for result in evaluate(folders, encoder, key) if not result.error}
    monkeypatch.setattr(encoder, "images", None)
    monkeypatch.setattr(encoder, "texts", None)
    again = [result for result in evaluate(folders, encoder, key, done=first) if not result.error]
    assert again == [*first.values()]


def test_progress_is_told_of_the_tasks_whose_images_are_encoded(exported, folders):
    seen = {}

    def progress(name):
        return lambda done, total: seen.update({name: (done, total)})

    list(evaluate(folders, *encoder_of(exported), progress=progress))
    assert seen == {"one": (19, 19), "broken": (19, 19), "winogavil": (14, 14)}
    seen.clear()
    list(evaluate(folders, *encoder_of(exported), progress=progress))
    assert seen == {}  # they are kept
    os.utime(folders["one"] / "test" / "0.tar", (1, 1))
    list(evaluate(folders, *encoder_of(exported), progress=progress))
    assert seen == {"one": (19, 19)}


def test_results_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "results.jsonl"
    assert read_results(path) == {}
    results = [
        Result(f"t{i}", f"k{i}", "retrieval", "mean_recall@1", {"mean_recall@1": i / 7}) for i in range(3)
    ]
    for result in results:
        append_result(path, result)
    append_result(path, Result("failed", "k9", error="no such file"))  # is tried again
    assert read_results(path) == {result.key: result for result in results}


@pytest.mark.parametrize("torn", [b'{"task": "t1", "ke', b"\xff\xfe\x00", b"[1, 2]", b'{"other": 1}', b"7"])
def test_after_a_torn_line_the_next_result_has_a_line_of_its_own(tmp_path, torn):
    path = tmp_path / "results.jsonl"
    first, second = Result("a", "ka", scores={"acc1": 0.5}), Result("b", "kb", scores={"acc1": 0.25})
    append_result(path, first)
    with path.open("ab") as file:
        file.write(torn)
    append_result(path, second)
    assert read_results(path) == {"ka": first, "kb": second}
    assert json.loads(path.read_bytes().splitlines()[-1]) == asdict(second)


def score_in_a_worker(rank, world_size, exported, folders, cache, missing):
    """With `missing`, worker 1 does not see that file; as on a machine with a disk of its own."""
    os.environ["FASTCLIP_CACHE"] = f"{cache}/{rank}"
    if rank == 1 and missing:
        folders = folders | {"one": Path(missing)}
    encoder, key = encoder_of(exported, rank, world_size)
    once = list(evaluate(folders, encoder, key))
    done = {result.key: result for result in once if result.key} if rank == 0 else {}
    again = list(evaluate(folders, encoder, key, done=done))  # only one worker knows them
    return [[asdict(result) for result in results] for results in (once, again)]


def test_two_workers_score_as_one_does(exported, folders, tmp_path):
    break_it(folders)
    alone = [asdict(result) for result in evaluate(folders, *encoder_of(exported))]
    both = run_workers(score_in_a_worker, 2, exported, folders, tmp_path / "caches", "")
    assert both[0][0] == both[0][1] == both[1][0] == both[1][1] == alone


def test_a_task_that_one_worker_cannot_open_is_no_ones_and_the_rest_go_on(exported, folders, tmp_path):
    (once, again), (others, _) = run_workers(
        score_in_a_worker, 2, exported, folders, tmp_path / "caches", str(tmp_path / "not here")
    )
    assert "another worker could not open it" in once[0]["error"]
    assert "not here" in others[0]["error"]
    assert once == again
    assert once[1:] == others[1:]
    assert [bool(result["error"]) for result in once] == [True, False, False, True]
