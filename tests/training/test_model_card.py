"""Model cards: metadata for the Hub, values for readers, and nothing private."""

import html
import json
import re
import shutil
from math import log
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.evaluation.retrieval import recalls
from fastclip.model import build_model
from fastclip.run.load import load_model
from fastclip.run.metrics_file import read_metrics
from fastclip.run.state_file import write_state
from fastclip.text import code_span, markdown, one_line
from fastclip.training.model_card import _scores_in_training, model_card
from tests.evaluation import replica


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return replica.tiny_run(tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def trained(run):
    return load_model(run)


@pytest.fixture
def make(run, trained, tmp_path):
    """Make a card of the run's model, with other metadata in its checkpoint or other weights."""

    def card(run=run, model=trained[0], tau=trained[1], config=None, **metadata):
        state = json.loads((run / "checkpoints" / "last" / "state.json").read_text())
        state["facts"] |= metadata
        for name, value in (config or {}).items():
            group, _, key = name.rpartition(".")
            (state["facts"]["config"][group] if group else state["facts"]["config"])[key] = value
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        write_state(tmp_path / "checkpoint", state["facts"], {}, {})
        return model_card(run, tmp_path / "checkpoint", model, tau)

    return card


def table(card):
    """The table of hyperparameters."""
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.MULTILINE))


def hub_scores(card):
    """(dataset, metric) → value, as the Hub's own library reads the metadata."""
    return {(r.dataset_name, r.metric_name): r.metric_value for r in ModelCard(card).data.eval_results or []}


@pytest.mark.slow
def test_the_metadata_is_valid_for_the_hub_and_has_the_runs_scores(run, make):
    card = ModelCard(make())
    assert card.data.library_name == "open_clip"
    assert card.data.pipeline_tag == "zero-shot-image-classification"
    assert card.data.tags == ["clip", "fastclip", "fastclip-v3"]
    assert card.data.model_name == "run"
    assert card.data.license is None
    assert card.data.datasets is None
    last = [record for record in read_metrics(run / "metrics.jsonl") if "evaluation" in record][-1]
    expected = {("train.tar", name): round(value, 4) for name, value in last["evaluation"].items()}
    assert hub_scores(str(card)) == expected
    assert len(expected) == len(recalls(torch.eye(2), torch.eye(2), torch.arange(2)))
    assert {result.task_type for result in card.data.eval_results} == {"image-text-retrieval"}


def test_training_and_the_export_command_write_the_same_card(run, tmp_path, make):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    written = (tmp_path / "out" / "README.md").read_text()
    assert written == (run / "model" / "README.md").read_text()
    assert written == make()


@pytest.fixture(scope="module")
def scored(run, tmp_path_factory):
    """A copy of the run after `fastclip eval` on a classification and a retrieval task."""
    folder = tmp_path_factory.mktemp("scored")
    copy = Path(shutil.copytree(run, folder / "run", symlinks=True))
    replica.write_classification(folder / "tasks" / "colours", classes=8)
    replica.write_retrieval(folder / "tasks" / "words")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCLIP_CACHE", str(folder / "cache"))
        for more in ([], ["--precision", "bfloat16"]):
            arguments = ["eval", copy, "--tasks", folder / "tasks", "--workers", 0, *more]
            assert main([str(argument) for argument in arguments]) == 0
    return copy


@pytest.mark.slow
def test_exporting_after_eval_adds_its_scores(scored, tmp_path, make):
    results = [json.loads(line) for line in (scored / "evaluation/results.jsonl").read_text().splitlines()]
    folder = scored / "model"
    assert main(["export", str(scored), str(folder)]) == 0  # replaces the one that training wrote
    shown = hub_scores((folder / "README.md").read_text())
    for result in results[:2]:  # float32, though bfloat16 was measured later
        value = result["scores"][result["measure"]]
        assert shown[result["task"], result["measure"]] == round(value, 4)
        row = rf"^\| {result['task']} \| `{result['measure']}` \| {100 * value:.2f} \|  \|$"
        assert re.search(row, (folder / "README.md").read_text(), re.MULTILINE)
    assert {result["measure"] for result in results} == {"acc1", "mean_recall@1"}
    kinds = {result.task_type for result in ModelCard(make(run=scored)).data.eval_results}
    assert kinds == {"image-text-retrieval", "zero-shot-image-classification"}


def test_scores_in_low_precision_are_marked_if_there_are_no_others(scored, tmp_path, make):
    copy = Path(shutil.copytree(scored, tmp_path / "run", symlinks=True))
    file = copy / "evaluation" / "results.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[2:]))
    assert re.search(r"\| colours \| `acc1` \| [\d.]+ \| [^|]*bfloat16 \|", make(run=copy))


def test_scores_of_other_weights_are_never_shown(scored, make, caplog):
    caplog.set_level("INFO", "fastclip")
    other = build_model(str(scored / "open_clip_config.json"), device="cpu", seed=5).eval()
    card = make(run=scored, model=other)
    (record,) = [record for record in caplog.records if record.name == "fastclip.training.model_card"]
    assert record.args == (scored / "evaluation" / "results.jsonl",)
    assert "acc1" not in card
    assert not {"colours", "words"} & {dataset for dataset, _ in hub_scores(card)}


def test_an_evaluation_at_another_step_is_not_shown(make):
    assert "recall@1" in make()
    card = make(step=3)
    assert "recall@1" not in card
    assert "model-index" not in card
    assert hub_scores(card) == {}


def test_tasks_scored_in_training_show_their_main_measure(run, tmp_path, make):
    copy = Path(shutil.copytree(run, tmp_path / "run", symlinks=True))
    scores = {"a/acc1": 0.5, "a/acc5": 0.75, "b/mean_recall@1": 0.25, "b/text_retrieval_recall@5": 0.5}
    record = {"step": 4, "evaluation": scores | {"tasks_mean": 0.375}}
    (copy / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert hub_scores(make(run=copy)) == {("a", "acc1"): 0.5, ("b", "mean_recall@1"): 0.25}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "known"),
    [
        ("fastclip-v3", {"ρ": [f"{0.7 * log(63):.4g}"], "γ": ["1", "0.2", "2"]}),
        ("fastclip-v2", {"ρ": ["2.9"], "Temperature τ": ["0.05", "0.1"]}),
        ("sogclr", {"ρ": None, "γ": ["0.6"], "Temperature τ": ["0.05", "0.1"]}),
        ("openclip", {"ρ": None, "γ": None}),
    ],
)
def test_the_table_has_the_hyperparameters(make, algorithm, known):
    arguments = ["--config", "scenes", "--algorithm", algorithm, "--optim.lr", "0.002", "--epochs", "4"]
    config = resolve(parse([*arguments, "--batch.size", "64", "--batch.reference", "32"])).written
    rows = table(make(tau=0.05, config=config))
    assert ("mean" in rows["Temperature τ"]) == (algorithm == "fastclip-v2")  # of individual temperatures
    for name, numbers in known.items():
        assert (re.findall(r"[\d.]+", rows[name]) if name in rows else None) == numbers, name
    assert rows["Algorithm"].split()[0] == algorithm
    assert resolve(parse(arguments)).loss.algorithm.loss in rows["Algorithm"]
    assert rows["Peak learning rate"] == "0.004"
    assert rows["Optimizer"] == "adamw"
    assert rows["Global batch size"] == "64"
    assert rows["Seed"] == "0"
    assert rows["Ranks"] == "1"
    assert rows["Architecture"] == "vit-scenes"
    assert rows["Epochs"] == "4 of 4"  # the last batch extends into the next epoch


def test_a_temperature_learned_by_the_model_is_shown(run, make):
    model = build_model(str(run / "open_clip_config.json"), device="cpu", tau=0.25, logit_bias=True)
    card = make(model=model, tau=None)
    assert table(card)["Temperature τ"].split()[0] == "0.25"
    assert "(logits + model.logit_bias).sigmoid()" in card
    assert "softmax" not in card


@pytest.mark.parametrize(
    ("train", "shown"),
    [
        ("/home/jane/secret/cc3m/{00000..00331}.tar", "`cc3m`"),
        ("data/scenes/train", "`scenes`"),
        (
            ["/mnt/a/tables/birds.csv", "/mnt/b/tables/birds.csv", "flowers/*.tar"],
            "`birds.csv` and `flowers`",
        ),
        ("https://user:word@example.org/sets/x.tar?token=abc", "`x.tar`"),
        ("hf://datasets/jane/cats@main/data/*.parquet", "`jane/cats`"),
        ("https://user:word@example.org/*.tar", "`*.tar`"),
    ],
)
def test_data_is_named_without_folders_of_the_machine(make, train, shown):
    pairs = "/home/jane/secret/held-out/test/*.tar"
    pretrained, name = "/home/jane/secret/weights.pt", "/home/jane/secret/my-model.json"
    config = {"data.train": train, "evaluate.pairs": pairs}
    config |= {"model.pretrained": pretrained, "model.name": name}
    card = make(config=config, fingerprint="f00d", num_samples=12345)
    (data,) = re.findall(r"^(`.*): 12,345 .*`f00d`", card, re.MULTILINE)
    assert data == shown
    assert table(card)["Initial weights"] == "`weights.pt`"
    assert table(card)["Architecture"] == "my-model"
    assert {dataset for dataset, _ in hub_scores(card)} == {"held-out"}
    assert not re.search(r"secret|/home|/mnt|user:|token=|(?<![\w:/.])/\w", card)
    assert ModelCard(card).data.datasets == (["jane/cats"] if "hf://" in str(train) else None)


def test_the_folder_of_the_run_is_not_in_the_card(run, make):
    assert not any(str(folder) in make() for folder in run.parents if len(folder.parts) > 1)


def test_licenses_beside_the_pairs_are_mentioned_and_the_models_own_is_requested(tmp_path, make):
    (tmp_path / "set" / "train").mkdir(parents=True)
    for train in (tmp_path / "set" / "train", tmp_path / "set" / "train" / "*.tar"):
        (tmp_path / "set" / "LICENSES.md").unlink(missing_ok=True)
        assert "LICENSES.md" not in make(config={"data.train": str(train)})
        (tmp_path / "set" / "LICENSES.md").write_text("# Licenses\n")
        card = make(config={"data.train": str(train)})
        assert "LICENSES.md" in card
        assert "`license:`" in card


def test_samples_that_could_not_be_used_are_counted(make):
    unusable = r"^(\d+) of them could not"
    assert not re.search(unusable, make(), re.MULTILINE)
    card = make(bad=[[1, "a.tar", "x"], [7, "a.tar", "y"]])
    assert re.findall(unusable, card, re.MULTILINE) == ["2"]


def test_scores_in_training_that_are_not_finite_are_omitted_and_kinds_are_right(tmp_path):
    scores = {
        "mean_recall@1": None,
        "flickr_1k_test_image_text_retrieval/mean_recall@1": 0.5,
        "flickr_1k_test_image_text_retrieval/image_retrieval_recall@1": 0.4,
        "wds_mnist_test/acc1": 0.25,
        "failed/acc1": None,
    }
    record = {"step": 7, "epoch": 1.0, "evaluation": scores}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    shown = _scores_in_training(tmp_path, {"step": 7, "config": {"evaluate": {"pairs": "a.csv"}}})
    assert [(score.dataset, score.kind, score.value) for score in shown] == [
        ("flickr_1k_test_image_text_retrieval", "retrieval", 0.5),
        ("wds_mnist_test", "classification", 0.25),
    ]


EVIL = ["<img src=x onerror=1>", "[a](b)", "**x** `y`|z", "\x1b[31m\u202e", "&lt;b&gt; <!--", "_x_ ~~y~~"]


@pytest.mark.parametrize("name", ["{{ 7*7 }}", "---", "a\n---\nb: [", "{% raw %}", "x: {y", "{# z #}", *EVIL])
def test_names_are_shown_literally_whatever_they_contain(run, tmp_path, make, name):
    copy = Path(shutil.copytree(run, tmp_path / name, symlinks=True))
    record = {"step": 4, "evaluation": {f"{name}/acc1": 0.5, "mean_recall@1": 0.25}}
    (copy / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    # datasets on the Hub: braces in a local path would be a pattern
    config = {
        "data.train": f"hf://datasets/jane/{name}/*.tar",
        "evaluate.pairs": f"hf://datasets/jane/{name}",
    }
    card = make(run=copy, config=config | {"model.name": name, "model.pretrained": f"{name}.pt"})
    plain, name = markdown(name), one_line(name)
    assert f"\n# {plain}\n" in card
    assert f" on {code_span(f'jane/{name}')}." in card
    assert f"| Architecture | {plain} |" in card
    assert f"| Initial weights | {code_span(name + '.pt')} |" in card
    assert f"| {plain} | `acc1` | 50.00 |  |" in card
    page = MarkdownIt().enable("table").enable("strikethrough").render(ModelCard(card).text)
    assert not re.search(r"<(img|!--|em|s|del|script)\b", page)
    assert f"<h1>{html.escape(name)}</h1>" in page  # as it is named, and nothing else
    assert f"<td>{html.escape(name)}</td>" in page
    head = ModelCard(card).data
    assert head.library_name == "open_clip"
    assert head.model_name == name
    assert head.datasets == [f"jane/{name}"]
    assert hub_scores(card) == {(name, "acc1"): 0.5, (f"jane/{name}", "mean_recall@1"): 0.25}
