"""`fastclip eval` from the command line: all of DataComp, parts of it, damaged, interrupted, on two ranks."""

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
from fastclip.errors import InputError, OptionError
from fastclip.evaluation import eval_command
from fastclip.evaluation.features import Encoder
from fastclip.processes import free_port
from tests.evaluation import replica
from tests.ranks import CONTEXT

ROWS = replica.datacomp_rows()
GROUPS = {
    "Datacomp": [row["folder"] for row in ROWS],
    "Retrieval": [row["folder"] for row in ROWS if row["group"] == "retrieval"],
    "IN & Variants": [row["folder"] for row in ROWS if row["group"] == "imagenet_and_variants"],
}
DOCS = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return replica.tiny_export(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def datacomp(tmp_path_factory):
    return replica.write_datacomp(tmp_path_factory.mktemp("datacomp") / "tasks")


@pytest.fixture
def suite_options(datacomp, monkeypatch):
    """Options for the full suite; tests that use them share features and results."""
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
    """Runs `fastclip eval` and returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(model, tasks, *options):
        code = main(["eval", str(model), "--tasks", str(tasks), "--workers", "0", *options])
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, out=printed.out, err=printed.err)

    return call


class Calls(list):
    """Calls of the encoder, in order: ("images", count) and ("texts", count)."""

    interrupt_at = None  # the name of a task


@pytest.fixture
def encoded(monkeypatch):
    calls = Calls()

    def watch(kind):
        original = getattr(Encoder, kind)

        def spy(self, items, *rest):
            if kind == "images" and items.name == calls.interrupt_at:
                raise KeyboardInterrupt
            calls.append((kind, len(items)))
            return original(self, items, *rest)

        monkeypatch.setattr(Encoder, kind, spy)

    watch("images")
    watch("texts")
    return calls


def by_task(run):
    return {result["task"]: result for result in json.loads(run.out)["results"]}


def means(run):
    return {mean["name"]: mean for mean in json.loads(run.out)["means"]}


@pytest.mark.slow
def test_all_38_tasks_are_scored_each_with_its_metric_and_the_three_means(
    model, datacomp, evaluate, suite_options
):
    run = evaluate(model, datacomp, *suite_options, "--json")
    assert run.code == 0
    results, script = by_task(run), replica.PlainScript(model)
    assert [*results] == [row["folder"] for row in ROWS]
    assert len(results) == 38
    own = {}
    for row in ROWS:
        result = results[row["folder"]]
        assert result["measure"] == row["metric"]
        assert result["scores"] == pytest.approx(script.scores(datacomp / row["folder"])), row["folder"]
        own[row["folder"]] = result["scores"][row["metric"]]
    assert len(set(own.values())) > 10  # they are not all zero
    assert [(name, mean["found"], mean["tasks"]) for name, mean in means(run).items()] == [
        ("Datacomp", 38, 38),
        ("Retrieval", 3, 3),
        ("IN & Variants", 7, 7),
    ]
    for name, folders in GROUPS.items():
        assert means(run)[name]["value"] == pytest.approx(mean(own[folder] for folder in folders))
        assert not means(run)[name]["partial"]
    assert json.loads(run.out)["missing"] == []


@pytest.mark.slow
def test_a_complete_suite_is_not_marked_partial_in_the_table(model, datacomp, evaluate, suite_options):
    table = evaluate(model, datacomp, *suite_options).out
    assert "partial" not in table
    assert "missing" not in table
    for name in GROUPS:
        assert re.search(rf"^{name}: \d+\.\d\d %$", table, re.MULTILINE)
    assert re.search(r"^wds_geode_test +19 +acc_wg +\d+\.\d\d$", table, re.MULTILINE)
    assert max(len(line) for line in table.splitlines()) <= 80  # fits a narrow terminal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("removed", "partial"),
    [
        ("wds_mnist_test", ["Datacomp"]),
        ("winogavil", ["Datacomp", "Retrieval"]),
        ("wds_objectnet_test", ["Datacomp", "IN & Variants"]),
    ],
)
def test_a_missing_task_makes_its_means_partial(
    model, datacomp, evaluate, suite_options, tmp_path, removed, partial
):
    (datacomp / removed).rename(tmp_path / removed)
    run = evaluate(model, datacomp, *suite_options, "--json")
    table = evaluate(model, datacomp, *suite_options)
    (tmp_path / removed).rename(datacomp / removed)
    assert run.code == table.code == 0
    own = {name: result["scores"][result["measure"]] for name, result in by_task(run).items()}
    for name, folders in GROUPS.items():
        expected = mean(own[folder] for folder in folders if folder != removed)
        assert means(run)[name]["partial"] == (name in partial)
        assert means(run)[name]["value"] == pytest.approx(expected)
    assert json.loads(run.out)["missing"] == [removed]

    marked = [line.split(":")[0] for line in table.out.splitlines() if "(partial: " in line]
    assert marked == partial
    assert "37 of 38 tasks" in table.out
    assert table.out.splitlines()[-1] == f"missing: {removed}"


@pytest.mark.slow
def test_a_truncated_task_is_reported_and_the_others_are_scored(model, datacomp, evaluate, suite_options):
    shard = datacomp / "wds_imagenet1k_test" / "test" / "1.tar"
    complete = shard.read_bytes()
    shard.write_bytes(complete[:2000])
    run = evaluate(model, datacomp, *suite_options, "--json")
    table = evaluate(model, datacomp, *suite_options)
    shard.write_bytes(complete)
    assert run.code == table.code == 1
    assert "1 of 38 tasks" in run.err.splitlines()[-1]
    assert "wds_imagenet1k_test" in run.err.splitlines()[-1]
    results = by_task(run)
    assert str(shard) in results["wds_imagenet1k_test"]["error"]
    assert [name for name, result in results.items() if result["error"]] == ["wds_imagenet1k_test"]
    assert means(run)["IN & Variants"]["found"] == 6
    assert means(run)["Datacomp"]["partial"]
    assert not means(run)["Retrieval"]["partial"]

    assert re.search(r"^wds_imagenet1k_test +– .* –$", table.out, re.MULTILINE)
    assert f"wds_imagenet1k_test: {shard}" in table.out
    assert re.search(r"^IN & Variants: .* \(partial: 6 of 7 tasks\)$", table.out, re.MULTILINE)
    assert evaluate(model, datacomp, *suite_options).code == 0  # the shard is complete again


def test_a_task_without_the_data_for_its_metric_is_an_error_instead_of_zero(model, tmp_path, evaluate):
    replica.write_classification(tmp_path / "tasks" / "wds_geode_test", 1, columns=0)
    run = evaluate(model, tmp_path / "tasks", "--suite", "datacomp", "--json")
    assert run.code == 1
    assert "acc_wg" in by_task(run)["wds_geode_test"]["error"]
    assert means(run)["Datacomp"]["value"] is None


def test_damaged_images_are_skipped_and_reported(model, tmp_path, evaluate):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "photos" / name / f"{i}.png").write_bytes(replica.png(i))
    (tmp_path / "photos" / "cat" / "1.png").write_bytes(replica.png(1)[:90])
    run = evaluate(model, tmp_path / "photos")
    assert run.code == 0
    assert re.search(r"^photos +5 +acc1 +\d+\.\d\d$", run.out, re.MULTILINE)
    assert re.search(r"^photos: .*\b1 images", run.out, re.MULTILINE)


@pytest.mark.slow
def test_any_pairs_are_a_retrieval_task(model, tmp_path, evaluate):
    lines = ["filepath,title"]
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(replica.png(i))
        lines.append(f"{i}.png,thing number {i}")
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    result = by_task(evaluate(model, tmp_path / "pairs.csv", "--json"))["pairs.csv"]
    assert (result["kind"], result["measure"], result["images"]) == ("retrieval", "mean_recall@1", 6)


@pytest.mark.slow
def test_a_second_run_encodes_nothing_and_prints_the_same(model, tasks, evaluate, encoded, tmp_path):
    first = evaluate(model, tasks, "--json")
    assert encoded
    encoded.clear()
    second = evaluate(model, tasks, "--json")
    assert not encoded
    assert first.out == second.out
    lines = (tmp_path / "evaluations" / "model" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 3  # nothing was written twice


@pytest.mark.slow
def test_a_relative_path_names_the_same_tasks(model, tasks, evaluate, encoded):
    evaluate(model, tasks)
    encoded.clear()
    evaluate(model, "tasks")
    assert not encoded


@pytest.mark.slow
def test_an_interrupted_run_resumes(model, tasks, evaluate, encoded, tmp_path):
    uninterrupted = evaluate(model, tasks, "--json", "--out", str(tmp_path / "uninterrupted")).out
    shutil.rmtree(tmp_path / "cache")
    encoded.clear()
    encoded.interrupt_at = "two"
    assert evaluate(model, tasks, "--json").code == 130
    assert [number for kind, number in encoded if kind == "images"] == [19, 9]
    encoded.clear()
    encoded.interrupt_at = None
    assert evaluate(model, tasks, "--json").out == uninterrupted
    assert [number for kind, number in encoded if kind == "images"] == [19]  # the last task only


@pytest.mark.slow
def test_a_truncated_last_line_costs_one_task_and_is_replaced(model, tasks, evaluate, encoded, tmp_path):
    first = evaluate(model, tasks, "--json").out
    file = tmp_path / "evaluations" / "model" / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    encoded.clear()
    assert evaluate(model, tasks, "--json").out == first
    assert [kind for kind, _ in encoded] == ["texts"]  # of one task; its image features are cached
    encoded.clear()
    assert evaluate(model, tasks, "--json").out == first
    assert not encoded


@pytest.mark.slow
def test_a_changed_template_encodes_texts_but_no_images(model, tasks, evaluate, encoded):
    before = by_task(evaluate(model, tasks, "--json"))
    (tasks / "two" / "zeroshot_classification_templates.txt").write_text("a {c}, seen from above\n")
    encoded.clear()
    after = by_task(evaluate(model, tasks, "--json"))
    assert encoded == [("texts", 6)]
    assert {name for name in before if before[name] != after[name]} == {"two"}
    script = replica.PlainScript(model).scores(tasks / "two")
    assert after["two"]["scores"] == pytest.approx(script)


@pytest.mark.slow
def test_changed_images_are_encoded_again(model, tasks, evaluate, encoded):
    evaluate(model, tasks)
    shutil.rmtree(tasks / "two")
    replica.write_classification(tasks / "two", 4)
    encoded.clear()
    results = by_task(evaluate(model, tasks, "--json"))
    assert encoded == [("images", 19), ("texts", 12)]
    assert results["two"]["scores"] == pytest.approx(replica.PlainScript(model).scores(tasks / "two"))


@pytest.mark.slow
def test_a_damaged_cache_file_is_reported_and_replaced(model, tasks, evaluate, encoded, tmp_path, caplog):
    first = evaluate(model, tasks, "--json", "--out", str(tmp_path / "first")).out
    for file in (tmp_path / "cache" / "features").iterdir():
        file.write_bytes(file.read_bytes()[:-10])
    encoded.clear()
    assert evaluate(model, tasks, "--json", "--out", str(tmp_path / "second")).out == first
    assert [kind for kind, _ in encoded].count("images") == 3
    warnings = [record for record in caplog.records if "feature_cache" in record.name]
    assert {record.args[0].parent for record in warnings} == {tmp_path / "cache" / "features"}
    assert len(warnings) == 3
    encoded.clear()
    assert evaluate(model, tasks, "--json", "--out", str(tmp_path / "third")).out == first
    assert "images" not in dict(encoded)


@pytest.mark.slow
def test_a_changed_model_is_scored_again(model, tasks, evaluate, encoded, tmp_path):
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


@pytest.mark.slow
def test_another_precision_is_scored_separately(model, tasks, evaluate, encoded):
    evaluate(model, tasks)
    encoded.clear()
    assert evaluate(model, tasks, "--precision", "bfloat16").code == 0
    assert [kind for kind, _ in encoded].count("images") == 3


def run_rank(rank, port, arguments, folder, environment):
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


@pytest.mark.slow
def test_two_ranks_print_the_same_as_one(model, datacomp, tasks, evaluate, tmp_path):
    """Including a damaged task, and one with fewer batches than ranks."""
    for name in ("winogavil", "wds_geode_test", "wds_wilds-iwildcam_test"):
        shutil.copytree(datacomp / name, tasks / name)
    os.truncate(tasks / "one" / "test" / "0.tar", 3000)
    options = ["--json", "--batch_size", "4"]
    alone = evaluate(model, tasks, *options)
    assert alone.code == 1

    context, port = multiprocessing.get_context("forkserver"), free_port()
    arguments = ["eval", str(model), "--tasks", str(tasks), "--workers", "0", "--out", str(tmp_path / "two")]
    environment = {"FASTCLIP_CACHE": str(tmp_path / "another")}
    processes = [
        context.Process(
            target=run_rank, args=(rank, port, arguments + options, str(tmp_path), environment), daemon=True
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, 0], (tmp_path / "0.err").read_text()
    assert (tmp_path / "0.out").read_text() == alone.out
    assert (tmp_path / "1.out").read_text() == ""  # only rank 0 prints
    files = [tmp_path / folder / "results.jsonl" for folder in ("evaluations/model", "two")]
    assert files[0].read_text() == files[1].read_text()


@pytest.mark.slow
def test_ranks_with_other_arguments_stop_with_the_same_error(model, tasks, tmp_path):
    common = ["eval", str(model), "--tasks", str(tasks), "--workers", "0", "--out", str(tmp_path / "two")]
    port = free_port()
    processes = [
        CONTEXT.Process(target=run_rank, args=(rank, port, arguments, str(tmp_path), {}), daemon=True)
        for rank, arguments in enumerate([common, [*common, "--select", "two"]])
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, 1]
    for rank in range(2):
        assert "ank 1 has tasks=['two']" in (tmp_path / f"{rank}.err").read_text()
    assert not (tmp_path / "two").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return replica.tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def scene_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "TEST", 40)
    scenes.draw_tasks(tmp_path / "scenes")
    return tmp_path / "scenes"


@pytest.mark.slow
def test_open_clip_alone_gives_the_same_scores_for_the_exported_folder(run, scene_tasks, evaluate):
    script = replica.PlainScript(run / "model")
    results = by_task(evaluate(run / "model", scene_tasks, "--json"))
    assert {*results} == {"scenes_retrieval", "scenes_colour", "scenes_shape", "scenes_relation"}
    for name, result in results.items():
        assert result["scores"] == pytest.approx(script.scores(scene_tasks / name)), name
        assert 0 < sum(result["scores"].values()) < len(result["scores"])


@pytest.mark.slow
def test_a_run_holds_its_results_and_shares_features_with_its_export(run, scene_tasks, evaluate, encoded):
    of_run = evaluate(run, scene_tasks, "--json", "--select", "scenes_shape")
    assert len((run / "evaluation" / "results.jsonl").read_text().splitlines()) == 1
    assert dict(encoded)["images"] == 40
    encoded.clear()
    of_export = evaluate(run / "model", scene_tasks, "--json", "--select", "scenes_shape")
    assert "images" not in dict(encoded)
    assert of_run.out == of_export.out


def test_list_shows_present_and_missing_tasks(datacomp, tmp_path, capsys, evaluate):
    folder = tmp_path / "some"
    folder.mkdir()
    for name in ("winogavil", "wds_mnist_test"):
        (folder / name).symlink_to(datacomp / name)
    assert main(["eval", "--tasks", str(folder), "--suite", "datacomp", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["present", "wds_mnist_test", str(folder / "wds_mnist_test")],
        ["present", "winogavil", str(folder / "winogavil")],
    ]
    assert sum(line.startswith("missing  ") for line in lines) == 36
    assert "docs/evaluation.md" in lines[-1]
    assert main(["eval", "--tasks", str(folder), "--suite", "datacomp", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["present"] == ["wds_mnist_test", "winogavil"]
    assert len(listed["missing"]) == 36
    assert main(["eval", "--tasks", str(tmp_path / "none"), "--suite", "datacomp", "--list"]) == 0
    assert capsys.readouterr().out.count("missing  ") == 38


@pytest.mark.slow
def test_select_scores_the_named_tasks_in_the_given_order(model, tasks, evaluate):
    assert [*by_task(evaluate(model, tasks, "--json", "--select", "two, one"))] == ["two", "one"]


@pytest.mark.slow
def test_unselected_tasks_of_a_suite_are_not_listed_as_missing(model, datacomp, evaluate):
    run = evaluate(model, datacomp, "--suite", "datacomp", "--select", "wds_mnist_test")
    assert re.search(r"^Datacomp: .*1 of 38 tasks", run.out, re.MULTILINE)
    assert "missing" not in run.out


def test_options_may_come_before_the_model(model, tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--tasks", str(tasks), "--json", "--workers=0", str(model)]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 3


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--select", "tow"], ["select=tow", "one, pairs, two"]),
        (["--suite", "datacomp"], ["38", "datacomp", "--list"]),
        (["--batch_size", "0"], ["batch_size=0", "256"]),
        (["--checkpoint", "best", "--pretrained", "nowhere.pt"], ["nowhere.pt"]),
    ],
)
def test_an_error_is_one_line_on_stderr(model, tasks, evaluate, options, facts):
    run = evaluate(model, tasks, *options)
    assert run.code == 1
    assert all(fact in run.err.splitlines()[-1] for fact in facts)
    assert not run.out


@pytest.mark.parametrize(
    ("options", "option", "value"),
    [
        ({"select": "one,tow"}, "select", "tow"),
        ({"select": " "}, "select", " "),
        ({"suite": "imagenet"}, "suite", "imagenet"),
        ({"batch_size": 0}, "batch_size", 0),
    ],
)
def test_invalid_options_are_rejected(model, tasks, tmp_path, monkeypatch, options, option, value):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as caught:
        eval_command.evaluate(str(model), str(tasks), **options)
    assert (caught.value.option, caught.value.value) == (option, value)


def test_folders_without_tasks_and_missing_models_are_errors(model, tasks, evaluate, tmp_path):
    for folder, options in ((tasks.parent, {}), (tasks, {"suite": "datacomp"})):
        with pytest.raises(OptionError) as caught:
            eval_command.evaluate(str(model), str(folder), **options)
        assert (caught.value.option, caught.value.value) == ("tasks", str(folder))
    with pytest.raises(OptionError) as caught:
        eval_command.evaluate(str(model), str(tasks.parent))
    assert f"--tasks {tasks}" in caught.value.advice
    with pytest.raises(InputError) as caught:
        eval_command.evaluate(tasks=str(tasks))
    assert caught.value.argument == "model"
    for run in (evaluate(model, "nowhere"), evaluate("nowhere", tasks)):
        assert run.code == 1
        assert "nowhere" in run.err.splitlines()[-1]
    (tmp_path / "file").write_text("")
    assert evaluate(model, tasks, "--out", str(tmp_path / "file" / "out")).code == 1


def test_help_shows_usage_and_examples(capsys):
    for command, facts in {
        "eval": ["fastclip eval [MODEL]", "--suite datacomp --list", "torchrun", "docs/evaluation.md"],
        "search": ["fastclip search MODEL IMAGES [TEXT]", '"a red heart"', "--image", "contact sheet"],
    }.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        out = capsys.readouterr().out
        assert all(fact in out for fact in facts)


@pytest.mark.slow
def test_programs_in_the_documentation_convert_datasets_to_tasks(model, tmp_path, evaluate, monkeypatch):
    """With made-up datasets instead of those on the network."""
    programs = re.findall(r"<!-- needs: network -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    converting = [program for program in programs if "load_dataset" in program]
    assert len(converting) == 2
    fake = ModuleType("datasets")
    fake.load_dataset = lambda name, **options: SomeRows(made_up_rows(name))
    fake.Image = lambda decode: None
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.chdir(tmp_path)
    for program in converting:
        exec(compile(program, "document", "exec"), {})
    run = evaluate(model, "data/datacomp", "--suite", "datacomp", "--json")
    assert run.code == 0
    results = by_task(run)
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
        images = [Image.open(io.BytesIO(replica.png(i))) for i in range(12)]
        for size in (5, 10, 12):
            yield {
                "cue": "Ocean",
                "candidates": names[:size],
                "candidate_images": images[:size],
                "associations": names[1:3],
            }
    else:
        for i in range(7):
            yield {
                "image": {"bytes": replica.png(i), "path": None},
                "caption": [f"a thing\nnumber {i}", "another"],
            }
