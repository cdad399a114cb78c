"""The commands `fastclip train` and `fastclip export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal


def train(train_options: list[str]) -> None:
    """Parse the options, join the other ranks, train. A run that is stopped and saved exits with code 75."""
    from fastclip.config.parse import parse
    from fastclip.config.resolved import resolve

    config = resolve(parse(train_options))  # before torch is imported: errors surface immediately
    from fastclip.distributed.interrupts import STOPPED_CLEANLY, StoppedCleanly
    from fastclip.distributed.world import join_world, silence_other_ranks
    from fastclip.training.trainer import train as train_run

    try:
        with join_world(timeout=config.timeout, device=config.device) as world:
            silence_other_ranks(world)
            train_run(config, world)
    except StoppedCleanly as stopped:
        if world.is_main:
            print(stopped, file=sys.stderr)
        raise SystemExit(STOPPED_CLEANLY) from None


def export(run: Path, out: Path, checkpoint: Literal["last", "best"] = "last") -> None:
    """Export a run's model to a folder that open_clip loads: create_model_and_transforms("local-dir:OUT").

    The folder includes a model card and is ready to push to the Hugging Face Hub: `hf upload OWNER/NAME OUT`.
    Export again after `fastclip eval RUN` to add its scores to the card.

    Args:
        run: the run's folder, e.g. runs/emoji-fastclip-v3.
        out: the folder to write; an earlier export there is replaced.
        checkpoint: the last one, or the best by evaluate.best.
    """
    from fastclip.run.folder import find_checkpoint
    from fastclip.run.load import load_model
    from fastclip.training.export import export as write
    from fastclip.training.model_card import model_card

    model, tau = load_model(run, checkpoint)
    folder = write(model, out, tau=tau, card=model_card(run, find_checkpoint(run, checkpoint), model, tau))
    inside = model.design.needs_its_folder
    name = "local-dir:." if inside else f"local-dir:{folder}"
    where = ", from inside the folder" if inside else ""
    print(f'Exported to {folder}. Load it with open_clip.create_model_and_transforms("{name}"){where}.')
