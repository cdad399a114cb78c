"""What the emoji model learns and forgets when it is fine-tuned to icons, and what blends keep of both.

    fastclip data get emoji && fastclip data get icons && make demo
    python -m benchmarks.blend

Fine-tuning is 2 epochs of 28,823 icons at a third of the recipe's rate. New tasks: retrieval in four sets of
icons, none of them seen; tasks of before: retrieval in the held-out emoji sets.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.record import RESULTS, save
from fastclip.cli import main as fastclip

SEED, SHARES = 0, "0,0.125,0.25,0.375,0.5,0.625,0.75,0.875,1"
NEW = ("carbon_retrieval", "ion_retrieval", "mdi_retrieval", "tabler_retrieval")
PICTURE = RESULTS.parent / "docs" / "pictures" / "blend.png"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", default="runs/demo/model", help="the model that `make demo` exported")
    start = parser.parse_args().start
    with tempfile.TemporaryDirectory() as folder:
        run, new, before = (Path(folder, name) for name in ("run", "new", "before"))
        training = {
            "config": "icons",
            "model.name": "vit-emoji",
            "model.pretrained": start,
            "data.train": "data/icons/train/{00000..00002}.tar",
            "evaluate.pairs": "null",
            "epochs": "2",
            "optim.lr": "3e-4",
            "seed": str(SEED),
            "out": str(run),
        }
        assert (
            fastclip(["train", *(word for name in training for word in (f"--{name}", training[name]))]) == 0
        )
        emoji = sorted(path.name for path in Path("data/emoji/tasks").glob("*_retrieval"))
        for tasks, source, names in ((new, "icons", NEW), (before, "emoji", emoji)):
            tasks.mkdir()
            for name in names:
                (tasks / name).symlink_to(Path("data", source, "tasks", name).resolve())
        command = ["eval", str(run), "--blend", SHARES, "--tasks", str(new), "--tasks_before", str(before)]
        assert fastclip(command) == 0
        curve = json.loads((run / "evaluation" / "blend.json").read_text())
        shutil.copyfile(run / "evaluation" / "blend.png", PICTURE)
    figures = {"fine-tuning": {name: value for name, value in training.items() if name not in ("out",)}}
    figures["fine-tuning"]["model.pretrained"] = "the emoji recipe's model"
    save("blend", SEED, figures | curve, "python -m benchmarks.blend")


if __name__ == "__main__":
    main()
