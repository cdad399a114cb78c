"""Many tasks: a failure does not stop the others, results survive a truncated line, ranks agree."""

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
from tests.ranks import run_ranks


class IdleEncoder(Encoder):
    """Fails if anything is encoded."""

    images = texts = None


def encoder_and_key(exported, rank=0, world_size=1, kind=Encoder):
    towers = load_towers(exported)
    encoder = kind(towers, World(rank, world_size, rank, torch.device("cpu"), None), batch_size=4)
    return encoder, model_key(towers, None)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return replica.tiny_export(tmp_path_factory.mktemp("export"))


@pytest.fixture
def folders(tmp_path):
    """Three tasks, and one that does not exist; `damage` makes the second unusable."""
    return {
        "one": replica.write_classification(tmp_path / "one", 1),
        "damaged": replica.write_classification(tmp_path / "damaged", 2, shards=3),
        "winogavil": replica.write_winogavil(tmp_path / "winogavil", 3),
        "nowhere.csv": str(tmp_path / "nowhere.csv"),
    }


def damage(folders):
    shard = folders["damaged"] / "test" / "1.tar"
    shard.unlink()
    return shard


@pytest.mark.slow
def test_tasks_come_in_order_and_a_failure_does_not_stop_the_others(exported, folders):
    missing = damage(folders)
    results = list(evaluate(folders, *encoder_and_key(exported)))
    assert [result.task for result in results] == [*folders]
    assert [bool(result.error) for result in results] == [False, True, False, True]
    assert str(missing) in results[1].error
    assert folders["nowhere.csv"] in results[3].error
    assert results[1].value is None
    script = replica.PlainScript(exported)
    for result in (results[0], results[2]):
        assert result.scores == pytest.approx(script.scores(folders[result.task]))
        assert result.value == result.scores[result.measure]


def test_a_task_with_only_damaged_images_fails_alone(exported, folders):
    for file in (folders["winogavil"] / "images").iterdir():
        file.write_bytes(b"junk")
    results = list(evaluate(folders, *encoder_and_key(exported)))
    assert str(folders["winogavil"] / "images") in results[2].error
    assert "14 images" in results[2].error
    assert results[0].value is not None


def test_a_known_result_is_returned_without_encoding(exported, folders):
    first = {
        result.key: result for result in evaluate(folders, *encoder_and_key(exported)) if not result.error
    }
    idle = encoder_and_key(exported, kind=IdleEncoder)
    again = [result for result in evaluate(folders, *idle, done=first) if not result.error]
    assert again == [*first.values()]


@pytest.mark.slow
def test_progress_is_reported_for_tasks_whose_images_are_encoded(exported, folders):
    seen = {}

    def progress(name):
        return lambda done, total: seen.update({name: (done, total)})

    list(evaluate(folders, *encoder_and_key(exported), progress=progress))
    assert seen == {"one": (19, 19), "damaged": (19, 19), "winogavil": (14, 14)}
    seen.clear()
    list(evaluate(folders, *encoder_and_key(exported), progress=progress))
    assert seen == {}  # they are cached
    os.utime(folders["one"] / "test" / "0.tar", (1, 1))
    list(evaluate(folders, *encoder_and_key(exported), progress=progress))
    assert seen == {"one": (19, 19)}


def test_results_are_read_back_as_written(tmp_path):
    path = tmp_path / "results.jsonl"
    assert read_results(path) == {}
    results = [
        Result(f"t{i}", f"k{i}", "retrieval", "mean_recall@1", {"mean_recall@1": i / 7}) for i in range(3)
    ]
    for result in results:
        append_result(path, result)
    append_result(path, Result("failed", "k9", error="no such file"))  # will be tried again
    assert read_results(path) == {result.key: result for result in results}


@pytest.mark.parametrize("junk", [b'{"task": "t1", "ke', b"\xff\xfe\x00", b"[1, 2]", b'{"other": 1}', b"7"])
def test_a_result_after_a_damaged_line_has_its_own_line(tmp_path, junk):
    path = tmp_path / "results.jsonl"
    first, second = Result("a", "ka", scores={"acc1": 0.5}), Result("b", "kb", scores={"acc1": 0.25})
    append_result(path, first)
    with path.open("ab") as file:
        file.write(junk)
    append_result(path, second)
    assert read_results(path) == {"ka": first, "kb": second}
    assert json.loads(path.read_bytes().splitlines()[-1]) == asdict(second)


def score_on_a_rank(rank, world_size, exported, folders, cache, missing):
    """With `missing`, rank 1 does not see that file, as on a machine with its own disk."""
    os.environ["FASTCLIP_CACHE"] = f"{cache}/{rank}"
    if rank == 1 and missing:
        folders = folders | {"one": Path(missing)}
    encoder, key = encoder_and_key(exported, rank, world_size)
    once = list(evaluate(folders, encoder, key))
    done = {result.key: result for result in once if result.key} if rank == 0 else {}
    again = list(evaluate(folders, encoder, key, done=done))  # only rank 0 has them
    return [[asdict(result) for result in results] for results in (once, again)]


@pytest.mark.slow
def test_two_ranks_score_like_one(exported, folders, tmp_path):
    damage(folders)
    alone = [asdict(result) for result in evaluate(folders, *encoder_and_key(exported))]
    both = run_ranks(score_on_a_rank, 2, exported, folders, tmp_path / "caches", "")
    assert both[0][0] == both[0][1] == both[1][0] == both[1][1] == alone


@pytest.mark.slow
def test_a_task_that_one_rank_cannot_open_fails_on_all_and_the_others_are_scored(exported, folders, tmp_path):
    (once, again), (others, _) = run_ranks(
        score_on_a_rank, 2, exported, folders, tmp_path / "caches", str(tmp_path / "not here")
    )
    assert "another rank" in once[0]["error"]
    assert "not here" in others[0]["error"]
    assert once == again
    assert once[1:] == others[1:]
    assert [bool(result["error"]) for result in once] == [True, False, False, True]
