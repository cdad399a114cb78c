"""Adding a component takes one row in one place, as docs/architecture.md says; everything else uses it.

An optimizer is added in tests/test_optim.py.
"""

from functools import partial

import pytest

from fastclip.data import sources
from fastclip.data.manifest import open_manifest
from fastclip.data.tables import file_pair
from fastclip.errors import PathError
from fastclip.evaluation import metrics
from fastclip.evaluation.task_layout import open_task
from fastclip.objective import algorithms
from fastclip.objective.algorithms import RHO_SHARE, Algorithm
from fastclip.training.build import build_step, build_towers
from tests.data.collections import png
from tests.evaluation.test_task_layout import labelled, write_task
from tests.evaluation.test_zero_shot import scored, tiny_model
from tests.training.test_build import ALONE, VIT, config, models  # noqa: F401


def read_psv(file, columns):
    """Read pairs from lines such as `heart.png|a red heart`."""
    with open(file.path, encoding="utf-8") as lines:
        for line in lines:
            image, _, caption = line.rstrip("\n").partition("|")
            yield file_pair(file.path, image, caption)


def test_a_data_source_is_a_reader_and_a_row(tmp_path, monkeypatch):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    (tmp_path / "pairs.psv").write_text("".join(f"{i}.png|picture {i}\n" for i in range(4)))
    with pytest.raises(PathError) as caught:
        open_manifest(str(tmp_path / "pairs.psv"))
    assert caught.value.path == str(tmp_path / "pairs.psv")
    monkeypatch.setitem(sources.TABLES, "psv", read_psv)
    manifest = open_manifest(str(tmp_path / "pairs.psv"))
    assert [manifest.caption_at(manifest.place(i)) for i in range(4)] == [f"picture {i}" for i in range(4)]
    assert manifest.image_at(manifest.place(2)) == png(2)


def test_a_metric_is_a_function_and_a_row(tmp_path, monkeypatch):
    write_task(tmp_path / "animals", [labelled(0, 1, 2, 0, 1, 2, 0)])
    task = open_task("animals", tmp_path / "animals")
    before = scored(task, tiny_model())
    monkeypatch.setitem(metrics.CLASSIFICATION, "acc2", partial(metrics.accuracy, k=2))
    after = scored(task, tiny_model())
    assert after.keys() - before.keys() == {"acc2"}
    assert after["acc1"] <= after["acc2"] <= after["acc5"]


def test_an_algorithm_is_a_row(models, monkeypatch):  # noqa: F811
    row = Algorithm("warm", "RGCL-g", "constant", "learnable", tau=0.2, gamma=0.5, tau_lr=1e-3)
    monkeypatch.setitem(algorithms.ALGORITHMS, "warm", row)
    settings = config(algorithm="warm", model=type(config().model)(models["vit"]))
    step = build_step(settings, build_towers(settings, ALONE), 24, ALONE)
    assert (step.loss.settings.rho_share, step.loss.gamma) == (RHO_SHARE, 0.5)
    assert step.loss.mean_tau() == pytest.approx(0.2)
