"""`fastclip eval` as a person uses it: all of DataComp, some of it, broken, interrupted, on two workers."""

import contextlib
import io
import json
import multiprocessing
import os
import re
import shutil
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType, SimpleNamespace

import pytest
import torch
from PIL import Image

from fastclip.cli import main
from fastclip.datasets import scenes
from fastclip.evaluation.features import Encoder
from tests.evaluation import replica
from tests.training.runs import _free_port

ROWS = replica.datacomp_rows()
GROUPS = {
    "Datacomp": [row["folder"] for row in ROWS],
    "Retrieval": [row["folder"] for row in ROWS if row["group"] == "retrieval"],
    "IN & Variants": [row["folder"] for row in ROWS if row["group"] == "imagenet_and_variants"],
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return replica.tiny_export(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def datacomp(tmp_path_factory):
    return replica.write_datacomp(tmp_path_factory.mktemp("datacomp") / "tasks")


@pytest.fixture
def whole_suite(datacomp, monkeypatch):
    """Options; the tests that have them share what was encoded and scored."""
    monkeypatch.setenv("FASTCLIP_CACHE", str(datacomp.parent / "cache"))
    return ["--suite", "datacomp", "--out", str(datacomp.parent / "out")]


@pytest.fixture
def tasks(tmp_path):
    """A retrieval task and two classification tasks."""
    folder = tmp_path / "tasks"
    replica.write_retrieval(folder / "pairs", 1)
    replica.write_classification(folder / "one", 2)
    replica.write_classification(folder / "two", 3)
    return folder


@pytest.fixture
def evaluate(tmp_path, capsys, monkeypatch):
    """Calls `fastclip eval`; gives the exit code, what it prints, and what it says besides."""
    monkeypatch.chdir(tmp_path)

    def call(model, tasks, *options):
        code = main(["eval", str(model), "--tasks", str(tasks), "--workers", "0", *options])
        said = capsys.readouterr()
        return SimpleNamespace(code=code, out=said.out, err=said.err)

    return call


@pytest.fixture
def encoded(monkeypatch):
    """What is encoded, in order: ("images", how many) and ("texts", how many)."""
    seen = []

    def watch(kind):
        original = getattr(Encoder, kind)

        def spy(self, things, *rest):
            seen.append((kind, len(things)))
            return original(self, things, *rest)

        monkeypatch.setattr(Encoder, kind, spy)

    watch("images")
    watch("texts")
    return seen


def by_task(said):
    return {result["task"]: result for result in json.loads(said.out)["results"]}


def means(said):
    return {found["name"]: found for found in json.loads(said.out)["means"]}


def test_all_38_tasks_go_through_each_with_its_measure_and_the_three_means(
    model, datacomp, evaluate, whole_suite
):
    said = evaluate(model, datacomp, *whole_suite, "--json")
    assert said.code == 0
    results, script = by_task(said), replica.PlainScript(model)
    assert [*results] == [row["folder"] for row in ROWS]
    assert len(results) == 38
    own = {}
    for row in ROWS:
        result = results[row["folder"]]
        assert result["measure"] == row["metric"]
        assert result["scores"] == pytest.approx(script.scores(datacomp / row["folder"])), row["folder"]
        own[row["folder"]] = result["scores"][row["metric"]]
    assert len(set(own.values())) > 10  # they are not all zero
    assert [(name, found["found"], found["tasks"]) for name, found in means(said).items()] == [
        ("Datacomp", 38, 38),
        ("Retrieval", 3, 3),
        ("IN & Variants", 7, 7),
    ]
    for name, folders in GROUPS.items():
        assert means(said)[name]["value"] == pytest.approx(mean(own[folder] for folder in folders))
        assert not means(said)[name]["partial"]
    assert json.loads(said.out)["missing"] == []


def test_a_whole_suite_is_not_called_partial_in_the_table(model, datacomp, evaluate, whole_suite):
    said = evaluate(model, datacomp, *whole_suite)
    assert "partial" not in said.out
    assert "missing" not in said.out
    for name in GROUPS:
        assert re.search(rf"^{name}: \d+\.\d\d %$", said.out, re.MULTILINE)
    assert re.search(r"^wds_geode_test +19 +acc_wg +\d+\.\d\d$", said.out, re.MULTILINE)
    assert max(len(line) for line in said.out.splitlines()) <= 80  # fits a narrow terminal


@pytest.mark.parametrize(
    ("removed", "partial"),
    [
        ("wds_mnist_test", ["Datacomp"]),
        ("winogavil", ["Datacomp", "Retrieval"]),
        ("wds_objectnet_test", ["Datacomp", "IN & Variants"]),
    ],
)
def test_without_one_task_the_means_that_hold_it_are_partial(
    model, datacomp, evaluate, whole_suite, tmp_path, removed, partial
):
    (datacomp / removed).rename(tmp_path / removed)
    said, table = evaluate(model, datacomp, *whole_suite, "--json"), evaluate(model, datacomp, *whole_suite)
    (tmp_path / removed).rename(datacomp / removed)
    assert said.code == table.code == 0
    own = {name: result["scores"][result["measure"]] for name, result in by_task(said).items()}
    for name, folders in GROUPS.items():
        found = means(said)[name]
        assert found["partial"] == (name in partial)
        assert found["value"] == pytest.approx(mean(own[one] for one in folders if one != removed))
    assert json.loads(said.out)["missing"] == [removed]

    told = [line.split(":")[0] for line in table.out.splitlines() if "(partial: " in line]
    assert told == partial
    assert "(partial: 37 of 38 tasks)" in table.out
    assert table.out.splitlines()[-1] == f"missing: {removed}"


def test_a_truncated_task_is_told_and_the_rest_go_on(model, datacomp, evaluate, whole_suite):
    broken = datacomp / "wds_imagenet1k_test" / "test" / "1.tar"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:2000])
    said, table = evaluate(model, datacomp, *whole_suite, "--json"), evaluate(model, datacomp, *whole_suite)
    broken.write_bytes(whole)
    assert said.code == table.code == 1
    assert said.err.splitlines()[-1].endswith("1 of 38 tasks could not be scored: wds_imagenet1k_test.")
    results = by_task(said)
    assert str(broken) in results["wds_imagenet1k_test"]["error"]
    assert [name for name, result in results.items() if result["error"]] == ["wds_imagenet1k_test"]
    assert means(said)["IN & Variants"]["found"] == 6
    assert means(said)["Datacomp"]["partial"]
    assert not means(said)["Retrieval"]["partial"]

    assert re.search(r"^wds_imagenet1k_test +– not scored +–$", table.out, re.MULTILINE)
    assert f"wds_imagenet1k_test: {broken}" in table.out
    assert re.search(r"^IN & Variants: .* \(partial: 6 of 7 tasks\)$", table.out, re.MULTILINE)
    assert evaluate(model, datacomp, *whole_suite).code == 0  # it is whole again


def test_a_task_without_what_its_measure_needs_is_an_error_and_no_zero(model, tmp_path, evaluate):
    replica.write_classification(tmp_path / "tasks" / "wds_geode_test", 1, columns=0)
    said = evaluate(model, tmp_path / "tasks", "--suite", "datacomp", "--json")
    assert said.code == 1
    assert "is judged by acc_wg" in by_task(said)["wds_geode_test"]["error"]
    assert means(said)["Datacomp"]["value"] is None


def test_broken_pictures_are_left_out_and_told(model, tmp_path, evaluate):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "photos" / name / f"{i}.png").write_bytes(replica.png(i))
    (tmp_path / "photos" / "cat" / "1.png").write_bytes(replica.png(1)[:90])
    said = evaluate(model, tmp_path / "photos")
    assert said.code == 0
    assert re.search(r"^photos +5 +acc1 +\d+\.\d\d$", said.out, re.MULTILINE)
    assert "photos: 1 images could not be used, and were left out" in said.out


def test_any_pairs_are_a_retrieval_task(model, tmp_path, evaluate):
    lines = ["filepath,title"]
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(replica.png(i))
        lines.append(f"{i}.png,thing number {i}")
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    result = by_task(evaluate(model, tmp_path / "pairs.csv", "--json"))["pairs.csv"]
    assert (result["kind"], result["measure"], result["images"]) == ("retrieval", "mean_recall@1", 6)


def test_a_second_run_encodes_nothing_and_says_the_same(model, tasks, evaluate, encoded, tmp_path):
    first = evaluate(model, tasks, "--json")
    assert encoded
    encoded.clear()
    second = evaluate(model, tasks, "--json")
    assert not encoded
    assert first.out == second.out
    lines = (tmp_path / "evaluations" / "model" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 3  # nothing was written twice


def test_tasks_named_by_another_path_are_the_same_tasks(model, tasks, evaluate, encoded):
    evaluate(model, tasks)
    encoded.clear()
    evaluate(model, "tasks")
    assert not encoded


def test_an_interrupted_run_goes_on_where_it_stopped(model, tasks, evaluate, encoded, monkeypatch, tmp_path):
    whole = evaluate(model, tasks, "--json", "--out", str(tmp_path / "whole")).out
    shutil.rmtree(tmp_path / "cache")
    encoded.clear()
    spied = Encoder.images

    def interrupted(self, pictures, *rest):
        if pictures.name == "two":
            raise KeyboardInterrupt
        return spied(self, pictures, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "images", interrupted)
        assert evaluate(model, tasks, "--json").code == 130
    assert [number for kind, number in encoded if kind == "images"] == [19, 9]
    encoded.clear()
    assert evaluate(model, tasks, "--json").out == whole
    assert [number for kind, number in encoded if kind == "images"] == [19]  # of the last task alone


def test_a_torn_last_line_costs_one_task_and_the_next_result_is_kept(
    model, tasks, evaluate, encoded, tmp_path
):
    first = evaluate(model, tasks, "--json").out
    file = tmp_path / "evaluations" / "model" / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    encoded.clear()
    assert evaluate(model, tasks, "--json").out == first
    assert [kind for kind, _ in encoded] == ["texts"]  # of one task; its images are in the cache
    encoded.clear()
    assert evaluate(model, tasks, "--json").out == first
    assert not encoded


def test_another_template_encodes_texts_but_no_image(model, tasks, evaluate, encoded):
    before = by_task(evaluate(model, tasks, "--json"))
    (tasks / "two" / "zeroshot_classification_templates.txt").write_text("a {c}, seen from above\n")
    encoded.clear()
    after = by_task(evaluate(model, tasks, "--json"))
    assert encoded == [("texts", 6)]
    assert {name for name in before if before[name] != after[name]} == {"two"}
    script = replica.PlainScript(model).scores(tasks / "two")
    assert after["two"]["scores"] == pytest.approx(script)


def test_another_image_is_encoded(model, tasks, evaluate, encoded):
    evaluate(model, tasks)
    shutil.rmtree(tasks / "two")
    replica.write_classification(tasks / "two", 4)
    encoded.clear()
    found = by_task(evaluate(model, tasks, "--json"))
    assert encoded == [("images", 19), ("texts", 12)]
    assert found["two"]["scores"] == pytest.approx(replica.PlainScript(model).scores(tasks / "two"))


def test_a_broken_cache_file_is_made_again(model, tasks, evaluate, encoded, tmp_path, caplog):
    first = evaluate(model, tasks, "--json", "--out", str(tmp_path / "first")).out
    for file in (tmp_path / "cache" / "features").iterdir():
        file.write_bytes(file.read_bytes()[:-10])
    encoded.clear()
    assert evaluate(model, tasks, "--json", "--out", str(tmp_path / "second")).out == first
    assert [kind for kind, _ in encoded].count("images") == 3
    assert "is broken" in caplog.text
    encoded.clear()
    assert evaluate(model, tasks, "--json", "--out", str(tmp_path / "third")).out == first
    assert "images" not in dict(encoded)


def test_a_changed_model_is_computed_anew(model, tasks, evaluate, encoded, tmp_path):
    first = evaluate(model, tasks, "--json", "--out", str(tmp_path / "out"))
    other = replica.tiny_export(tmp_path / "other", seed=1)
    encoded.clear()
    second = evaluate(other, tasks, "--json", "--out", str(tmp_path / "out"))
    assert [kind for kind, _ in encoded].count("images") == 3
    assert by_task(first)["pairs"]["key"] != by_task(second)["pairs"]["key"]
    assert by_task(second)["two"]["scores"] == pytest.approx(replica.PlainScript(other).scores(tasks / "two"))
    encoded.clear()
    assert evaluate(model, tasks, "--json", "--out", str(tmp_path / "out")).out == first.out
    assert not encoded


def test_another_precision_is_computed_anew(model, tasks, evaluate, encoded):
    evaluate(model, tasks)
    encoded.clear()
    assert evaluate(model, tasks, "--precision", "bfloat16").code == 0
    assert [kind for kind, _ in encoded].count("images") == 3


def worker(rank, port, arguments, folder, environment):
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with (
        open(f"{folder}/{rank}.out", "w") as out,
        open(f"{folder}/{rank}.err", "w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(arguments)
    sys.exit(code)


def test_two_processes_print_what_one_prints(model, datacomp, tasks, evaluate, tmp_path):
    """Also of a task that is broken, and of one with fewer batches than workers."""
    for name in ("winogavil", "wds_geode_test", "wds_wilds-iwildcam_test"):
        shutil.copytree(datacomp / name, tasks / name)
    os.truncate(tasks / "one" / "test" / "0.tar", 3000)
    options = ["--json", "--batch_size", "4"]
    alone = evaluate(model, tasks, *options)
    assert alone.code == 1

    context, port = multiprocessing.get_context("forkserver"), _free_port()
    arguments = ["eval", str(model), "--tasks", str(tasks), "--workers", "0", "--out", str(tmp_path / "two")]
    environment = {"FASTCLIP_CACHE": str(tmp_path / "another")}
    processes = [
        context.Process(
            target=worker, args=(rank, port, arguments + options, str(tmp_path), environment), daemon=True
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, 0], (tmp_path / "0.err").read_text()
    assert (tmp_path / "0.out").read_text() == alone.out
    assert (tmp_path / "1.out").read_text() == ""  # worker 0 speaks
    kept = [tmp_path / folder / "results.jsonl" for folder in ("evaluations/model", "two")]
    assert kept[0].read_text() == kept[1].read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return replica.tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def scene_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "TEST", 40)
    scenes.draw_tasks(tmp_path / "scenes")
    return tmp_path / "scenes"


def test_open_clip_alone_scores_the_exported_folder_alike(run, scene_tasks, evaluate):
    script, results = (
        replica.PlainScript(run / "model"),
        by_task(evaluate(run / "model", scene_tasks, "--json")),
    )
    assert {*results} == {"scenes_retrieval", "scenes_colour", "scenes_shape", "scenes_relation"}
    for name, result in results.items():
        assert result["scores"] == pytest.approx(script.scores(scene_tasks / name)), name
        assert 0 < sum(result["scores"].values()) < len(result["scores"])


def test_a_run_keeps_its_results_and_shares_features_with_its_export(run, scene_tasks, evaluate, encoded):
    of_run = evaluate(run, scene_tasks, "--json", "--select", "scenes_shape")
    assert len((run / "evaluation" / "results.jsonl").read_text().splitlines()) == 1
    assert dict(encoded)["images"] == 40
    encoded.clear()
    of_export = evaluate(run / "model", scene_tasks, "--json", "--select", "scenes_shape")
    assert "images" not in dict(encoded)
    assert of_run.out == of_export.out


def test_list_shows_what_is_there_and_what_is_missing(datacomp, tmp_path, capsys, evaluate):
    there = tmp_path / "some"
    there.mkdir()
    for name in ("winogavil", "wds_mnist_test"):
        (there / name).symlink_to(datacomp / name)
    assert main(["eval", "--tasks", str(there), "--suite", "datacomp", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["present", "wds_mnist_test", str(there / "wds_mnist_test")],
        ["present", "winogavil", str(there / "winogavil")],
    ]
    assert sum(line.startswith("missing  ") for line in lines) == 36
    assert lines[-1] == "docs/evaluation.md says how to get them."
    assert main(["eval", "--tasks", str(there), "--suite", "datacomp", "--list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["present"] == ["wds_mnist_test", "winogavil"]
    assert len(told["missing"]) == 36
    assert main(["eval", "--tasks", str(tmp_path / "none"), "--suite", "datacomp", "--list"]) == 0
    assert capsys.readouterr().out.count("missing  ") == 38


def test_select_scores_the_named_tasks_in_their_order(model, tasks, evaluate):
    assert [*by_task(evaluate(model, tasks, "--json", "--select", "two, one"))] == ["two", "one"]


def test_unselected_tasks_of_a_suite_are_not_called_missing(model, datacomp, evaluate):
    said = evaluate(model, datacomp, "--suite", "datacomp", "--select", "wds_mnist_test")
    assert "Datacomp: " in said.out
    assert "(partial: 1 of 38 tasks)" in said.out
    assert "missing" not in said.out


def test_options_may_come_before_the_model(model, tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--tasks", str(tasks), "--json", "--workers=0", str(model)]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--select", "tow"], "--select tow: there is no such task; there are one, pairs, two."),
        (["--suite", "datacomp"], "holds none of the 38 tasks of datacomp"),
        (["--batch_size", "0"], "batch_size=0 must be positive; try 256."),
        (["--checkpoint", "best", "--pretrained", "nowhere.pt"], "nowhere.pt"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(model, tasks, evaluate, options, message):
    said = evaluate(model, tasks, *options)
    assert said.code == 1
    assert message in said.err.splitlines()[-1]
    assert not said.out


def test_a_place_without_tasks_is_told(model, tasks, evaluate, tmp_path):
    said = evaluate(model, tasks.parent)
    assert f"{tasks.parent} holds no task folders; try --tasks {tasks}." in said.err
    assert "nowhere does not exist" in evaluate(model, "nowhere").err
    assert "is neither the folder of a run nor an exported folder" in evaluate("ViT-B-32", tasks).err
    assert "Which model?" in capture(["eval", "--tasks", str(tasks)])
    (tmp_path / "file").write_text("")
    assert evaluate(model, tasks, "--out", str(tmp_path / "file" / "out")).code == 1


def capture(arguments):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(arguments) == 1
    return said.getvalue()


def test_help_teaches_by_examples(capsys):
    for verb, words in {
        "eval": ["fastclip eval [MODEL]", "--suite datacomp --list", "torchrun", "docs/evaluation.md"],
        "search": ["fastclip search MODEL IMAGES [TEXT]", '"a red heart"', "--image", "contact sheet"],
    }.items():
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        out = capsys.readouterr().out
        assert all(word in out for word in words)


def test_the_conversions_of_the_document_make_folders_that_are_scored(model, tmp_path, evaluate, monkeypatch):
    """With data sets in the place of those on the network."""
    programs = re.findall(r"<!-- needs: network -->\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    converting = [program for program in programs if "load_dataset" in program]
    assert len(converting) == 2
    fake = ModuleType("datasets")
    fake.load_dataset = lambda name, **options: SomeRows(made_up_rows(name))
    fake.Image = lambda decode: None
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.chdir(tmp_path)
    for program in converting:
        exec(compile(program, "document", "exec"), {})
    said = evaluate(model, "data/datacomp", "--suite", "datacomp", "--json")
    assert said.code == 0
    results = by_task(said)
    assert {name: result["images"] for name, result in results.items()} == {
        "flickr_1k_test_image_text_retrieval": 7,
        "mscoco_2014_5k_test_image_text_retrieval": 7,
        "winogavil": 12,
    }
    script = replica.PlainScript(model)
    for name, result in results.items():
        if name != "winogavil":
            expected = script.scores(tmp_path / "data" / "datacomp" / name)
            assert result["scores"] == pytest.approx(expected)


class SomeRows(list):
    def cast_column(self, name, feature):
        return self


def made_up_rows(name):
    if name == "nlphuji/winogavil":
        names = [f"thing {i}" for i in range(12)]
        pictures = [Image.open(io.BytesIO(replica.png(i))) for i in range(12)]
        for size in (5, 10, 12):
            yield {
                "cue": "Ocean",
                "candidates": names[:size],
                "candidate_images": pictures[:size],
                "associations": names[1:3],
            }
    else:
        for i in range(7):
            yield {
                "image": {"bytes": replica.png(i), "path": None},
                "caption": [f"a thing\nnumber {i}", "another"],
            }
