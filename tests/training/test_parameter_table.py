"""The table of what trains is what the optimizer has."""

import pytest
import torch

from fastclip.cli import main
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.distributed.world import World
from fastclip.model import build_model
from fastclip.training.build import build_loss, build_run_optimizer, build_towers
from fastclip.training.export import export
from fastclip.training.parameter_table import Row, parameter_rows

ALONE = World(0, 1, 0, torch.device("cpu"), None)
EMOJI = ["--config", "emoji", "--data.train", "x.tar", "--optim.lr", "1e-3", "--batch.reference", "null"]


def build(*options):
    config = resolve(parse([*EMOJI, *options]))
    towers = build_towers(config, ALONE)
    return towers, build_run_optimizer(config, towers, build_loss(config, towers, 4, ALONE))


@pytest.fixture
def rows():
    def found(*options):
        return {(row.tower, row.layer): row for row in parameter_rows(*build(*options))}

    return found


def test_everything_trains_at_one_rate_by_default(rows):
    found = rows()
    assert [*found] == [
        ("image", "embeddings"), ("image", "blocks 1–3"), ("image", "norm"), ("image", "projection"),
        ("text", "embeddings"), ("text", "blocks 1–2"), ("text", "norm"), ("text", "projection"),
        ("both", "scale"), ("loss", "τ"),
    ]  # fmt: skip
    towers = [row for row in found.values() if row.tower in ("image", "text")]
    assert all(row.trained == row.parameters and row.lr == 1e-3 for row in towers)
    assert {row.layer for row in towers if row.weight_decay is None} == {"norm"}


def test_rates_by_layer_and_tower_and_frozen_blocks(rows):
    found = rows(
        "--model.freeze", "{image: 1}", "--optim.layer_decay", "0.5", "--optim.text_lr", "1e-4"
    )  # fmt: skip
    assert found["image", "blocks 1–2"].trained == 0
    assert found["image", "blocks 1–2"].lr is None
    assert found["image", "block 3"].lr == pytest.approx(5e-4)
    assert found["image", "projection"].lr == pytest.approx(1e-3)
    assert [
        found["text", layer].lr for layer in ("embeddings", "block 1", "block 2", "norm")
    ] == pytest.approx([1.25e-5, 2.5e-5, 5e-5, 1e-4])


def test_the_table_has_every_trained_parameter_with_the_rate_and_decay_of_its_group(tmp_path):
    weights = str(export(build_model("vit-emoji", device="cpu"), tmp_path / "start", tau=0.07))
    towers, optimizer = build(
        "--model.pretrained",
        weights,
        "--model.lora",
        "4",
        "--optim.layer_decay",
        "0.5",
        "--optim.image_lr",
        "2e-3",
    )
    found = parameter_rows(towers, optimizer)
    trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert sum(row.trained for row in found) == trained
    blocks = [row for row in found if row.tower == "image" and row.layer.startswith("block")]
    assert [row.lr for row in blocks] == pytest.approx([2.5e-4, 5e-4, 1e-3])
    assert all(0 < row.trained < row.parameters for row in blocks)


def test_a_dry_run_prints_the_table_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *EMOJI, "--dry-run", "--model.freeze", "trunks"]) == 0
    printed = capsys.readouterr().out
    assert "projection" in printed
    assert "18,433 of 5,342,498 parameters are trained" in printed
    assert not [*tmp_path.iterdir()]
    assert Row("loss", "τ", 1, 1, 1e-3, None) in parameter_rows(*build())
