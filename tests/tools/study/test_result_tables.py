"""Tables equal plain arithmetic over the runs, and have nothing for missing ones."""

import json
from collections import Counter
from math import ceil, comb
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.config.options import BatchConfig, DataConfig, TrainConfig
from fastclip.data.manifest import open_manifest
from fastclip.data.order import Order
from fastclip.tools.study.result_tables import (
    caption_codes,
    count_equal,
    equal_captions,
    expected_share,
    print_study,
    study_tables,
)
from tests.data.collections import png, write_tar
from tests.tools.study.studies import make_study, read_study, value_of

N, BATCH, SEED = 60, 8, 3  # of the runs whose captions are counted


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study")


def rows_of(study, name="Mean"):
    found = study_tables(read_study(study))
    measure = next(measure for measure in found["measures"] if measure["name"] == name)
    return {row["arm"]: row for row in measure["rows"]}


def test_a_row_is_mean_and_sd_over_seeds(study):
    arm = read_study(study).arms[0]
    values = [fmean(value_of(arm, seed, task) for task in range(3)) for seed in range(3)]
    summary = rows_of(study)[arm.name]["summary"]
    assert summary == {"mean": pytest.approx(fmean(values)), "sd": pytest.approx(stdev(values)), "n": 3}


def test_an_arm_is_compared_with_the_baseline_of_the_same_batch_size(study):
    rows = rows_of(study)
    assert rows["fastclip-v3-b32"]["baseline"] == "openclip-b32"
    assert rows["fastclip-v3-b64"]["baseline"] == "openclip-b64"
    assert rows["fastclip-v3-b64"]["improvement"] == pytest.approx(0.1)
    assert rows["fastclip-v3-b64"]["difference"]["mean"] == pytest.approx(0.1)
    # seeds have the same effect on both
    assert rows["fastclip-v3-b64"]["difference"]["high"] == pytest.approx(0.1)
    assert rows["openclip-b32"]["baseline"] is None
    assert rows["openclip-b32"]["improvement"] is None


def test_the_best_is_marked_among_the_arms_of_a_baseline(study):
    assert [row["arm"] for row in rows_of(study).values() if row["best"]] == [
        "fastclip-v3-b32",
        "fastclip-v3-b64",
    ]


def test_without_a_baseline_the_best_of_all_is_marked(tmp_path):
    study = make_study(tmp_path / "study", baseline={})
    rows = rows_of(study)
    assert [row["arm"] for row in rows.values() if row["best"]] == ["fastclip-v3-b64"]
    assert all(row["difference"] is None for row in rows.values())


def test_an_arm_that_lacks_seeds_is_not_the_best(tmp_path):
    def done(arm, seed):
        return arm.name != "fastclip-v3-b64" or seed == 0

    rows = rows_of(make_study(tmp_path / "study", done))
    partial = rows["fastclip-v3-b64"]
    assert (partial["missing"], partial["summary"]["n"], partial["summary"]["sd"]) == (2, 1, None)
    assert not partial["best"]
    assert partial["difference"]["n"] == 1
    assert partial["difference"]["low"] is None
    assert rows["openclip-b64"]["best"]


def test_an_arm_without_scores_has_no_summary_and_does_not_affect_others(tmp_path):
    rows = rows_of(make_study(tmp_path / "study", lambda arm, seed: arm.name != "openclip-b32"))
    assert rows["openclip-b32"]["summary"] is None
    assert rows["fastclip-v3-b32"]["improvement"] is None
    assert rows["fastclip-v3-b64"]["improvement"] == pytest.approx(0.1)


def test_the_effort_to_match_the_baseline_is_counted_in_evaluations(study):
    found = study_tables(read_study(study))
    assert found["effort"]["measure"] == "mean_recall@1"
    (row, _) = found["effort"]["rows"]
    # 0.4032 · step/40 reaches 0.3032 at step 40; at step 30 it is below
    assert (row["arm"], row["baseline"], row["reached"], row["seeds"]) == (
        "fastclip-v3-b32",
        "openclip-b32",
        3,
        3,
    )
    assert (row["samples"], row["seconds"]) == (1.0, 1.0)
    assert row["samples_by_seed"] == dict.fromkeys("012", 1.0)
    assert row["samples_interval"] == (1.0, 1.0)


def test_there_is_an_effort_only_if_every_seed_reached_the_score(study):
    slow = study / "runs" / "fastclip-v3-b32-seed1" / "metrics.jsonl"
    lines = [json.loads(line) for line in slow.read_text().splitlines()]
    for line in lines:
        if "evaluation" in line:
            line["evaluation"]["mean_recall@1"] /= 10
    slow.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = study_tables(read_study(study))["effort"]["rows"][0]
    assert (row["samples"], row["seconds"], row["reached"], row["seeds"]) == (None, None, 2, 3)


def train_on(study, pairs):
    """Make the checkpoints of all runs say that they were trained on these pairs."""
    for path in study.glob("runs/*/checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        state["facts"]["num_samples"] = N
        state["facts"]["config"] |= {"data": {"train": str(pairs)}, "batch": {"size": BATCH}, "seed": SEED}
        path.write_text(json.dumps(state))


def test_equal_captions_are_counted_once_for_runs_with_the_same_batches(study, collection):
    train_on(study, collection)
    rows = study_tables(read_study(study))["equal_captions"]
    assert [row["arm"] for row in rows] == [arm.name for arm in read_study(study).arms]
    assert rows[0]["found"] == equal_captions(config(collection, epochs=4))
    assert all(row["found"] is rows[0]["found"] for row in rows)  # one count


def test_captions_that_cannot_be_counted_are_reported_once(study):
    train_on(study, study / "gone.tar")
    found = study_tables(read_study(study))
    assert len([sentence for sentence in found["missing"] if "gone.tar" in sentence]) == 1
    assert found["equal_captions"] == []


def test_an_empty_study_has_no_scores_and_reports_it(tmp_path):
    state = read_study(make_study(tmp_path / "study", lambda arm, seed: False))
    found = study_tables(state)
    assert found["measures"] == []
    assert len(found["missing"]) == len(state.runs) + 1  # each run, and the lack of scores
    assert "scores" in found["missing"][-1]


def test_a_baseline_without_a_match_is_reported(tmp_path):
    study = make_study(
        tmp_path / "study",
        vary={},
        arms=[{"algorithm": "openclip", "batch.size": 32}, {"algorithm": "mbcl", "batch.size": 64}],
    )
    missing = study_tables(read_study(study))["missing"]
    assert len([one for one in missing if "(algorithm openclip)" in one]) == 1


def test_a_study_is_printed_as_tables_and_as_json(study, capsys):
    print_study(study)
    printed = capsys.readouterr().out
    assert "Classification & Variants" in printed
    assert "+10.00 [+10.00, +10.00]" in printed
    print_study(study, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["measures"][0]["rows"][2]["difference"]["mean"] == pytest.approx(0.1)


@pytest.fixture
def collection(tmp_path):
    pairs = {}
    for i in range(N):
        pairs[f"{i:03d}.png"] = png(0)
        pairs[f"{i:03d}.txt"] = f" caption {min(i, 40)} ".encode()  # the last 20 have one caption
    write_tar(tmp_path / "pairs.tar", pairs.items())
    return tmp_path / "pairs.tar"


def config(collection, epochs=2.5):
    data = DataConfig(train=str(collection))
    return TrainConfig(epochs=epochs, seed=SEED, data=data, batch=BatchConfig(size=BATCH))


def counted_plainly(rows):
    return sum(count for row in rows for count in Counter(row).values() if count > 1)


def test_the_batches_of_the_run_are_counted(collection):
    order = Order(N, BATCH, SEED, "full")
    steps = ceil(2.5 * N / BATCH)
    rows = [[min(i, 40) for i in order.global_batch(step).ids.tolist()] for step in range(steps)]
    found = equal_captions(config(collection))
    assert found["actual"] == pytest.approx(counted_plainly(rows) / (steps * BATCH))
    assert (found["captions"], found["samples"], found["repeated"]) == (41, N, pytest.approx(20 / N))


@pytest.mark.parametrize("chunk", [1, 3 * BATCH, 5 * BATCH + 1])
def test_the_count_does_not_depend_on_the_chunk(collection, chunk):
    assert equal_captions(config(collection), chunk=chunk) == equal_captions(config(collection))


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=6))
def test_the_count_equals_a_plain_loop(rows):
    assert count_equal(np.array(rows)) == counted_plainly(rows)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=6), st.integers(2, 6))
def test_the_expected_share_equals_counted_draws(sizes, batch):
    n = sum(sizes)
    if batch > n:
        return
    none = sum(size * comb(n - size, batch - 1) for size in sizes) / (n * comb(n - 1, batch - 1))
    assert expected_share(np.array(sizes), batch) == pytest.approx(1 - none, abs=1e-9)


def test_captions_are_compared_as_training_reads_them(tmp_path):
    texts = [b"a cat", b" a cat\n", b"a  Cat", b"a cat.", b"", b" "]
    members = [
        (f"{i}.{kind}", content)
        for i, text in enumerate(texts)
        for kind, content in (("png", png(0)), ("txt", text))
    ]
    write_tar(tmp_path / "pairs.tar", members)
    manifest = open_manifest(str(tmp_path / "pairs.tar"))
    codes = caption_codes(manifest).tolist()
    assert codes[0] == codes[1] == codes[2]
    assert len(set(codes)) == len(codes) - 2


def test_a_collection_too_large_to_count_gives_nothing(collection):
    assert equal_captions(config(collection), most_pairs=N - 1) is None
    assert equal_captions(config(collection), most_pairs=N) is not None
