"""Recipes hold the paper's values; a command line selects and overrides them, or gets a helpful error."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from math import log

import pytest

from fastclip.cli import main
from fastclip.config.options import SECTIONS, BatchConfig, PatchDropout
from fastclip.config.parse import _parser, find_recipe, parse, recipe_names
from fastclip.config.resolved import resolve
from fastclip.errors import OptionError, PathError, UnknownOption
from fastclip.objective.algorithms import ALGORITHMS
from fastclip.run.folder import write_config
from tests.training.runs import Run, collection, metrics

recipe = cache(lambda name: parse(["--config", name]))

# Table settings: model, global batch, epochs
SETTINGS = {
    "cc3m-medium": ("RN50", 1024, 37),
    "cc12m-large": ("ViT-B-32", 2048, 33),
    "laion-xlarge": ("ViT-B-16", 5120, 42),
}

# Tables tuned_gamma and tuned_rho, and the text around them: τ, lr_τ, ρ, schedule of γ, γ or γ_min, E.
# v2 is the temperature study's. v0 has the common values of that study; its lr_τ is ours, the model's rate.
ALGORITHM_VALUES = {
    ("cc3m-medium", "sogclr"): (0.03, None, None, "constant", 0.6, None),
    ("cc3m-medium", "isogclr"): (0.03, 1e-2, 9.0, "constant", 0.6, None),
    ("cc3m-medium", "fastclip-v0"): (0.03, 1e-3, None, "cosine", 0.2, 18),
    ("cc3m-medium", "fastclip-v1"): (0.03, None, None, "cosine", 0.2, 18),
    ("cc3m-medium", "fastclip-v2"): (0.03, 1e-2, 7.0, "cosine", 0.2, 18),
    ("cc3m-medium", "fastclip-v3"): (0.07, 2e-4, 6.5, "cosine", 0.2, 18),
    ("cc12m-large", "sogclr"): (0.03, None, None, "constant", 0.6, None),
    ("cc12m-large", "isogclr"): (0.03, 1e-2, 9.0, "constant", 0.8, None),
    ("cc12m-large", "fastclip-v0"): (0.03, 4e-4, None, "cosine", 0.2, 16),
    ("cc12m-large", "fastclip-v1"): (0.03, None, None, "cosine", 0.2, 16),
    ("cc12m-large", "fastclip-v2"): (0.03, 1e-4, 8.5, "cosine", 0.2, 16),
    ("cc12m-large", "fastclip-v3"): (0.07, 1e-4, 8.5, "cosine", 0.2, 16),
    ("laion-xlarge", "fastclip-v3"): (0.07, 5e-5, 16.0, "cosine", 0.8, 10),
}
EPSILON = {"cc3m-medium": 1e-14, "cc12m-large": 1e-14, "laion-xlarge": 1e-6}

# Tables default_hyperparams and tuned_lr_wd: lr, wd, betas, ε, warm-up, min_lr. Lion's betas are ours.
OPTIMIZER_VALUES = {
    ("cc3m-medium", "adamw"): (1e-3, 0.1, (0.9, 0.999), 1e-8, 10_000, 0),
    ("cc3m-medium", "lamb"): (2e-3, 0.1, (0.9, 0.999), 1e-8, 10_000, 0),
    ("cc3m-medium", "lion"): (2e-4, 0.3, (0.9, 0.99), None, 10_000, 0),
    ("cc3m-medium", "sgd"): (1.0, 3e-6, None, None, 10_000, 0),
    ("cc12m-large", "adamw"): (4e-4, 0.1, (0.9, 0.98), 1e-6, 10_000, 0),
    ("cc12m-large", "lamb"): (2e-3, 0.1, (0.9, 0.98), 1e-6, 10_000, 0),
    ("cc12m-large", "lion"): (1e-4, 0.3, (0.9, 0.99), None, 10_000, 0),
    ("cc12m-large", "sgd"): (2.0, 3e-6, None, None, 10_000, 0),
    ("laion-xlarge", "adamw"): (2e-4, 0.2, (0.9, 0.98), 1e-6, 13_000, 0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_papers_settings(name):
    config = recipe(name)
    assert (config.model.name, config.batch.size, config.epochs) == SETTINGS[name]
    assert (config.algorithm, config.optimizer) == ("fastclip-v3", "adamw")
    assert config.batch.reference == config.batch.size  # the paper's rates are for its own batch


@pytest.mark.slow
@pytest.mark.parametrize(("name", "algorithm"), ALGORITHM_VALUES)
def test_the_algorithm_alone_switches_to_the_papers_values(name, algorithm):
    config = resolve(parse(["--config", name, "--algorithm", algorithm]))
    tau, tau_lr, rho, schedule, gamma, decay_epochs = ALGORITHM_VALUES[name, algorithm]
    s = config.loss
    assert s.algorithm.name == algorithm
    assert s.tau == tau
    assert s.tau_lr == (tau_lr or 0)
    assert s.rho == (rho or 0)
    assert (s.gamma_schedule, s.gamma) == (schedule, gamma)
    assert config.written["algorithms"][algorithm].get("gamma_decay_epochs") == decay_epochs
    assert s.gamma_at(0) == (1 if schedule == "cosine" else gamma)
    assert s.gamma_at(100) == gamma
    assert s.epsilon == EPSILON[name]
    assert s.estimator == "paper"
    assert config.optim == resolve(recipe(name)).optim  # the optimizer is as it was


@pytest.mark.parametrize(("name", "optimizer"), OPTIMIZER_VALUES)
def test_the_optimizer_alone_switches_to_the_papers_values(name, optimizer):
    config = resolve(parse(["--config", name, "--optimizer", optimizer]))
    row, taken = config.optim, config.optim.options.get
    lr, weight_decay, betas, eps, warmup, min_lr = OPTIMIZER_VALUES[name, optimizer]
    assert (row.lr, row.weight_decay, taken("betas"), taken("eps")) == (lr, weight_decay, betas, eps)
    assert (row.warmup, row.min_lr) == (warmup, min_lr or 0.0)
    assert taken("momentum") == (0.9 if optimizer == "sgd" else None)
    assert row.clip is None  # the paper clips nothing
    assert config.loss == resolve(recipe(name)).loss


def test_the_peers_learn_at_the_models_rate():
    for name in SETTINGS:
        for peer in ("openclip", "siglip"):
            row = resolve(replace(recipe(name), algorithm=peer)).written["algorithms"][peer]
            assert row == {"tau": 0.07 if peer == "openclip" else 0.1}


def test_every_recipe_has_a_row_for_every_algorithm_and_optimizer():
    for name in recipe_names():
        assert recipe(name).algorithms.keys() == ALGORITHMS.keys()
        assert recipe(name).optimizers.keys() == {"adamw", "lamb", "lion", "sgd"}


def test_small_batches_take_a_radius_that_they_can_reach():
    for name in ("scenes", "emoji", "icons"):
        for algorithm in recipe(name).algorithms:
            if ALGORITHMS[algorithm].robust:
                reach = log(recipe(name).batch.size - 1)
                assert 0 < resolve(replace(recipe(name), algorithm=algorithm)).loss.rho < reach


@pytest.mark.parametrize("name", SETTINGS)
def test_rates_scale_in_proportion_to_the_batch_and_nothing_else_does(name):
    own, batch = resolve(recipe(name)), recipe(name).batch
    for factor in (0.5, 4):
        config = resolve(replace(recipe(name), batch=replace(batch, size=int(batch.size * factor))))
        assert config.loss.tau_lr == pytest.approx(factor * own.loss.tau_lr)
        assert replace(config.loss, tau_lr=0.0) == replace(own.loss, tau_lr=0.0)
        assert config.optim.lr == pytest.approx(factor * own.optim.lr)
        assert replace(config.optim, lr=0.0) == replace(own.optim, lr=0.0)
        assert config.written["optimizers"] == own.written["optimizers"]  # for the reference


@pytest.mark.slow
def test_a_run_uses_the_scaled_rates(tmp_path):
    options = {
        "--config": "scenes",
        "--out": tmp_path / "run",
        "--data.train": collection(tmp_path / "train", 24),
        "--data.keep_decoded": "false",
        "--evaluate.pairs": "null",
        "--batch.size": 24,
        "--batch.reference": 8,
        "--epochs": 1,  # one step: the warm-up's last, at the peak
        "--log.every_steps": 1,
    }
    environment = {"FASTCLIP_CACHE": str(tmp_path / "cache")}
    Run([str(word) for pair in options.items() for word in pair], environment=environment).finish()
    (record,) = metrics(tmp_path / "run")
    assert record["lr"] == pytest.approx(3 * 1e-3)
    assert record["tau_lr"] == pytest.approx(3 * 1e-3)


@pytest.mark.parametrize("name", recipe_names())
def test_a_written_config_gives_the_same_run_again(name, tmp_path):
    whole = resolve(recipe(name))
    path = tmp_path / "config.yaml"
    write_config(whole, tmp_path)
    assert resolve(parse(["--config", str(path)])) == whole


@pytest.mark.slow
def test_a_written_config_with_options_gives_the_same_run_and_other_algorithms_again(tmp_path):
    words = [
        "--config",
        "cc12m-large",
        "--optimizer",
        "lion",
        "--loss.rho_share",
        "0.5",
        "--loss.tau",
        "0.05",
    ]
    words += ["--optim.lr", "3e-5", "--data.train", "[a.tar, é.csv]", "--data.augment", "{scale: [0.5, 1.0]}"]
    whole = resolve(
        parse([*words, "--algorithm", "fastclip-v2", "--seed", "7", "--loss.tau_betas", "[0.8, 0.9]"])
    )
    path = tmp_path / "config.yaml"
    write_config(whole, tmp_path)
    assert resolve(parse(["--config", str(path)])) == whole
    assert whole.data.train == ["a.tar", "é.csv"]
    for algorithm in ("fastclip-v1", "fastclip-v3", "openclip"):
        switched = resolve(parse(["--config", str(path), "--algorithm", algorithm]))
        fresh = resolve(replace(recipe("cc12m-large"), algorithm=algorithm))
        assert switched.loss == fresh.loss
        assert switched.written["algorithms"][algorithm] == fresh.written["algorithms"][algorithm]
        assert switched.optim == whole.optim


def test_a_recipe_is_found_by_its_name_and_a_file_by_its_path(tmp_path, monkeypatch):
    paper, ours = ["cc12m-large", "cc3m-medium", "laion-xlarge"], ["icons", "scenes"]
    assert recipe_names() == sorted([*paper, *ours, "emoji", "emoji-full", "emoji-low"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("epochs: 3\nbatch: {size: 32}\n")
    config = parse(["--config=mine.yaml"])
    assert (config.epochs, config.batch.size, config.out) == (3, 32, "runs/mine-fastclip-v3")
    (tmp_path / "emoji").mkdir()  # such as data that were put there
    assert parse(["--config", "emoji"]).out == "runs/emoji-fastclip-v3"
    assert parse([]).out == "runs/train-fastclip-v3"


def test_options_override_files_wherever_they_are_and_later_files_override_earlier_ones(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "epochs: 3\noptimizer: lamb\nalgorithms: {fastclip-v1: {tau: 0.02}}\nloss: {gamma: 0.3}\n"
    )
    before = parse(
        ["--algorithm", "fastclip-v1", "--epochs", "2", "--config", "scenes", "--config", str(mine)]
    )
    after = parse(
        ["--config", "scenes", "--config", str(mine), "--epochs", "2", "--algorithm", "fastclip-v1"]
    )
    assert before == after
    assert (before.epochs, before.optimizer, before.algorithm) == (2, "lamb", "fastclip-v1")
    assert before.model.name == "vit-scenes"  # what the second file leaves out is the first one's
    s = resolve(before).loss
    assert (s.tau, s.gamma, s.gamma_schedule) == (
        0.02,
        0.3,
        "cosine",
    )  # one value of the row; `loss`; the row
    other = parse(["--config", str(mine), "--config", "scenes"])
    assert (other.epochs, other.optimizer) == (5, "adamw")


def error_of(words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        resolve(parse(words))
    return caught.value


@pytest.mark.parametrize(
    ("words", "option", "value", "hint"),
    [
        ("--config emojis", "config", "emojis", "emoji?"),
        ("--config cc3m", "config", "cc3m", "cc3m-medium?"),
        ("--config .", "config", ".", "cc12m-large"),
        ("--config", "config", "", "cc12m-large"),
        ("--config --epochs 3", "config", "", "cc12m-large"),
        ("--algorithm fastclip-v4", "algorithm", "fastclip-v4", "fastclip-v3"),
        ("--optimizer adam", "optimizer", "adam", "adamw?"),
        ("--epochs ten", "epochs", "ten", "a number"),
        ("--batch.size 64.5", "batch.size", "64.5", "a whole number"),
        ("--batch.size 1", "batch.size", 1, "1024"),
        ("--batch.micro often", "batch.micro", "often", "a whole number or auto"),
        ("--batch.micro 0", "batch.micro", 0, "auto"),
        ("--data.workers many", "data.workers", "many", "a whole number or auto"),
        ("--data.workers -1", "data.workers", -1, "auto"),
        ("--loss.gamma much", "loss.gamma", "much", "a number or auto"),
        ("--optim.betas 0.9", "optim.betas", "0.9", "[0.9, 0.98]"),
        ("--precision fp16", "precision", "fp16", "float16?"),
        ("--loss.gamma_schedule cosin", "loss.gamma_schedule", "cosin", "cosine?"),
        ("--log.tensorboard maybe", "log.tensorboard", "maybe", "true or false"),
        ("--log.tensorboard", "log.tensorboard", "", "true or false"),
        ("--data.train", "data.train", "", "a path"),
        ("--model RN50", "model", "RN50", "model.name=RN50?"),
        ("--model.patch_dropout half", "model.patch_dropout.share", "half", "a number"),
        ("--model.patch_dropout 1.5", "model.patch_dropout.share", 1.5, "0.5"),
        ("--model.patch_dropout", "model.patch_dropout.share", "", "a number"),
        ("--model.patch_dropout {share:0.5}", "model.patch_dropout", "{share:0.5}", "{share: 0.5"),
        ("--loss.rho_share=-1", "loss.rho_share", -1.0, ""),
        ("--loss.rho 3 --loss.rho_share 0.5", "loss.rho", 3.0, "rho_share"),
    ],
)
def test_a_wrong_value_is_named_with_its_option_and_what_would_work(words, option, value, hint):
    error = error_of(words.split())
    assert isinstance(error, OptionError)
    assert (error.option, error.value) == (option, value)
    assert hint in str(error)


@pytest.mark.parametrize(
    ("words", "option", "suggestions"),
    [
        ("--algoritm sogclr", "algoritm", ["algorithm"]),
        ("--loss.roh=5", "loss.roh", ["loss.rho"]),
        ("--lr 1e-3", "lr", ["optim.lr"]),
        ("--batch-size 64", "batch-size", ["batch.size"]),
        ("--every_steps 3", "every_steps", ["checkpoint.every_steps", "log.every_steps"]),
        ("--no.such.thing 3", "no.such.thing", []),
    ],
)
def test_an_unknown_option_gets_suggestions(words, option, suggestions):
    error = error_of(words.split())
    assert isinstance(error, UnknownOption)
    assert error.option == option
    assert sorted(error.suggestions) == suggestions


@pytest.mark.parametrize(
    ("text", "words", "share", "until"),
    [
        ("", ["--model.patch_dropout", "0.5"], 0.5, 1.0),
        ("", ["--model.patch_dropout=0.5"], 0.5, 1.0),
        ("", ["--model.patch_dropout", "{share: 0.5, until: 0.9}"], 0.5, 0.9),
        ("", ["--model.patch_dropout.until", "0.9", "--model.patch_dropout.share", "0.5"], 0.5, 0.9),
        ("model: {patch_dropout: 0.25}", [], 0.25, 1.0),
        ("model: {patch_dropout: {share: 0.25, until: 0.9}}", [], 0.25, 0.9),
        ("model: {patch_dropout: {share: 0.25, until: 0.9}}", ["--model.patch_dropout", "0.5"], 0.5, 0.9),
        ("model: {patch_dropout: 0.25}", ["--model.patch_dropout", "0"], 0.0, 1.0),
    ],
)
def test_patch_dropout_is_a_share_or_a_table(text, words, share, until, tmp_path):
    (tmp_path / "mine.yaml").write_text(text or "epochs: 3")
    config = parse(["--config", str(tmp_path / "mine.yaml"), *words])
    assert config.model.patch_dropout == PatchDropout(share, until)


def test_a_value_too_many_is_named():
    assert "'b.tar'" in str(error_of(["--data.train", "a.tar", "b.tar"]))


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("batch: 64", "batch", 64),
        ("algorithms: {fastclip-v3: {rho: five}}", "algorithms.rho", "five"),
        ("algorithms: {fastclip-v9: {rho: 5}}", "algorithm", "fastclip-v9"),
        ("algorithms: 3", "algorithms", "3"),
        ("optimizers: {adamv: {lr: 1}}", "optimizer", "adamv"),
        ("optimizers: {adamw: {lr: -1}}", "optim.lr", -1.0),
        ("batch: {size: 1}", "batch.size", 1),
        ("model: {patch_dropout: half}", "model.patch_dropout.share", "half"),
        ("model: {patch_dropout: {share: 0.5, until: 0}}", "model.patch_dropout.until", 0.0),
        ("batch: {micro: often}", "batch.micro", "often"),
    ],
)
def test_a_wrong_value_in_a_file_is_named(text, option, value, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    error = error_of(["--config", str(tmp_path / "mine.yaml")])
    assert isinstance(error, OptionError)
    assert (error.option, error.value) == (option, value)


@pytest.mark.parametrize(
    ("text", "option", "suggestion"),
    [
        ("epoch: 3", "epoch", "epochs"),
        ("batch: {sise: 3}", "batch.sise", "batch.size"),
        ("model: {patch_dropout: {shar: 0.5}}", "model.patch_dropout.shar", "model.patch_dropout.share"),
        ("algorithms: {fastclip-v3: {roh: 5}}", "roh", "rho"),
    ],
)
def test_an_unknown_option_in_a_file_gets_a_suggestion(text, option, suggestion, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    error = error_of(["--config", str(tmp_path / "mine.yaml")])
    assert isinstance(error, UnknownOption)
    assert (error.option, error.suggestions) == (option, [suggestion])


@pytest.mark.parametrize("text", ["epochs: [3", "just words", "", "é".encode("latin-1")])
def test_a_file_without_settings_is_named(text, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    error = error_of(["--config", str(path)])
    assert isinstance(error, PathError)
    assert error.path == str(path)


def test_a_run_folder_as_config_leads_to_its_file(tmp_path):
    (tmp_path / "config.yaml").write_text("epochs: 3")
    with pytest.raises(OptionError) as caught:
        find_recipe(str(tmp_path))
    assert caught.value.example == tmp_path / "config.yaml"


def test_an_error_is_one_line_and_exit_code_1(capsys):
    assert main(["train", "--config", "scenes", "--algorithm", "fastclip-v1", "--loss.rho", "3"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastclip train: loss.rho=3.0 ")


@pytest.mark.slow
def test_help_and_errors_need_no_torch():
    code = """if True:
        import contextlib, sys
        from fastclip.cli import main
        with contextlib.suppress(SystemExit):
            main(["train", "--help"])
        assert main(["train", "--config", "emoji", "--optim.momentum", "0.9"]) == 1
        import fastclip.config.resolved
        heavy = {"torch", "numpy", "open_clip", "PIL"} & sys.modules.keys()
        assert not heavy, heavy
        """
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, run.stderr
    assert "optim.momentum=0.9" in run.stderr


def test_help_teaches():
    command = [sys.executable, "-m", "fastclip", "train", "--help"]
    environment = os.environ | {"COLUMNS": "110"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
    assert run.returncode == 0, run.stderr
    for name in [*recipe_names(), *ALGORITHMS]:
        assert name in run.stdout
    for taught in ("Exit codes:", "75", "config.yaml", "torchrun", "(default: fastclip-v3)"):
        assert taught in run.stdout
    for noise in ("type: ", "null", "Path to a configuration file", "LossOptions"):
        assert noise not in run.stdout
    assert all(len(line) <= 110 for line in run.stdout.splitlines())


def test_every_option_is_explained():
    actions = [action for action in _parser("fastclip train")._actions if action.dest not in SECTIONS]
    assert len(actions) > 60
    assert [action.dest for action in actions if not action.help] == []


def test_all_settings_can_be_printed_and_read_again(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--print_config", "--config", "scenes", "--epochs", "3"])
    assert stop.value.code == 0
    path = tmp_path / "mine.yaml"
    path.write_text(capsys.readouterr().out)
    again = parse(["--config", str(path)])
    assert resolve(again) == resolve(replace(recipe("scenes"), epochs=3.0, out=again.out))


def test_a_smaller_batch_on_the_command_line_lowers_the_rates():
    config = resolve(parse(["--config", "cc12m-large", "--batch.size", "512"]))
    assert config.batch == BatchConfig(size=512, reference=2048)
    assert config.loss.tau_lr == pytest.approx(1e-4 / 4)
