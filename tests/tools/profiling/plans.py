"""Plans of a tiny model."""

import json

from fastclip.cli import call

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 100, "width": 16, "heads": 1, "layers": 2},
}


def write_recipe(folder, monkeypatch):
    """A recipe in the current folder, and the words that name it."""
    monkeypatch.chdir(folder)
    (folder / "tiny-plan.json").write_text(json.dumps(MODEL))
    (folder / "mine.yaml").write_text("model: {name: tiny-plan.json}\nbatch: {size: 256}\n")
    return ["--config", "mine.yaml"]


def as_json(words, capsys):
    """What the verb prints for machines."""
    call("plan", [*words, "--json"])
    return json.loads(capsys.readouterr().out)
