"""The commands `fastclip train` and `fastclip export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastclip.distributed.stop_at_once import STOPPED_CLEANLY, ignore_signals, stopping_at_once
from fastclip.terminal import say

if TYPE_CHECKING:
    from fastclip.config.options import TrainConfig
    from fastclip.config.resolved import Resolved


def train(train_options: list[str]) -> None:
    """Parse the options, join the other ranks, train. A run that is stopped exits with code 75."""
    with stopping_at_once():
        from fastclip.config.resolved import resolve

        config = resolve(_parse(train_options))  # before torch is imported: errors surface immediately
        _train(config)


def _train(config: Resolved) -> None:
    from fastclip.distributed.interrupts import StoppedCleanly
    from fastclip.distributed.world import LostRanks, join_world, silence_other_ranks
    from fastclip.training.trainer import train as train_run

    finished = False
    try:
        with join_world(timeout=config.timeout, device=config.device) as world:
            silence_other_ranks(world)
            train_run(config, world)
            finished = True
            ignore_signals()  # all ranks have done their work, and only leave
    except StoppedCleanly as stopped:
        if world.is_main:
            say(stopped, file=sys.stderr)
        raise SystemExit(STOPPED_CLEANLY) from None
    except LostRanks:
        if not finished:  # one that was stopped while it left
            raise


def _parse(words: list[str]) -> TrainConfig:
    if any(word.partition("=")[0] == "--from" for word in words):
        from fastclip.run.start_from import parse_from

        return parse_from(words)
    from fastclip.config.parse import parse

    return parse(words)


def export(run: Path, out: Path, checkpoint: Literal["last", "best"] = "last") -> None:
    """Export a run's model to a folder that open_clip loads: create_model_and_transforms("local-dir:OUT").

    The folder includes a model card and is ready to push to the Hugging Face Hub: `hf upload OWNER/NAME OUT`.
    Export again after `fastclip eval RUN` to add its scores to the card.

    Args:
        run: the run's folder, e.g. runs/emoji-fastclip-v3.
        out: the folder to write; an earlier export there is replaced.
        checkpoint: the last one, or the best by evaluate.best.
    """
    from fastclip.config.resolved import resolve_again
    from fastclip.errors import PathError
    from fastclip.run.folder import find_checkpoint, read_metadata
    from fastclip.run.load import load_model
    from fastclip.training.divergence import advice
    from fastclip.training.export import NonFiniteModel
    from fastclip.training.export import export as write
    from fastclip.training.model_card import model_card

    model, tau = load_model(run, checkpoint)
    path = find_checkpoint(run, checkpoint)
    try:
        folder = write(model, out, tau=tau, card=model_card(run, path, model, tau))
    except NonFiniteModel as error:
        raise PathError(
            path, f": the {error} {advice(run, resolve_again(read_metadata(path)['config']))}"
        ) from None
    say(f'Exported to {folder}. Load it with open_clip.create_model_and_transforms("local-dir:{folder}").')
