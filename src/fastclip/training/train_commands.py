"""The verbs `fastclip train` and `fastclip export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal


def train(train_options: list[str]) -> None:
    """Read the options, join the other workers, train. A run that was asked to stop exits with code 75."""
    from fastclip.config.parse import parse
    from fastclip.config.resolved import resolve

    config = resolve(parse(train_options))  # before torch is imported: a mistake is told at once
    from fastclip.distributed.interrupts import STOPPED_CLEANLY, StoppedCleanly
    from fastclip.distributed.world import join_world, silence_other_ranks
    from fastclip.training.trainer import train as train_run

    try:
        with join_world(timeout=config.timeout) as world:
            silence_other_ranks(world)
            train_run(config, world)
    except StoppedCleanly as stopped:
        if world.is_main:
            print(stopped, file=sys.stderr)
        raise SystemExit(STOPPED_CLEANLY) from None


def export(run: Path, out: Path, checkpoint: Literal["last", "best"] = "last") -> None:
    """Write a run's model as a folder that open_clip loads: create_model_and_transforms("local-dir:OUT").

    A model card lies beside the weights, so that the folder can be put on the Hugging Face hub as it is:
    `hf upload OWNER/NAME OUT`. Export again after `fastclip eval RUN` to bring its scores into the card.

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
    print(f'{folder} is ready: open_clip.create_model_and_transforms("local-dir:{folder}").')
