"""The commands `fastclip train` and `fastclip export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastclip.distributed.stop_at_once import STOPPED_CLEANLY, ignore_signals, stopping_at_once
from fastclip.errors import OptionError, PathError
from fastclip.terminal import say

if TYPE_CHECKING:
    from fastclip.config.options import TrainConfig
    from fastclip.config.resolved import Resolved


def train(train_options: list[str]) -> None:
    """Parse the options, join the other ranks, train. A run that is stopped exits with code 75."""
    with stopping_at_once():
        from fastclip.config.parse import DRY_RUN
        from fastclip.config.resolved import resolve

        config = resolve(_parse(train_options))  # before torch is imported: errors surface immediately
        _train(config, dry_run=any(word in DRY_RUN for word in train_options))


def _train(config: Resolved, dry_run: bool) -> None:
    from fastclip.distributed.interrupts import StoppedCleanly
    from fastclip.distributed.world import LostRanks, join_world, silence_other_ranks
    from fastclip.training.parameter_table import print_parameters
    from fastclip.training.trainer import train as train_run

    finished = False
    try:
        with join_world(timeout=config.timeout, device=config.device) as world:
            silence_other_ranks(world)
            if dry_run:
                print_parameters(config, world)
            else:
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


def export(
    run: Path,
    out: Path,
    checkpoint: Literal["last", "best"] = "last",
    blend: float | None = None,
    start: str | None = None,
) -> None:
    """Export a run's model to a folder that open_clip loads: create_model_and_transforms("local-dir:OUT").

    The folder includes a model card and is ready to push to the Hugging Face Hub: `hf upload OWNER/NAME OUT`.
    Export again after `fastclip eval RUN` to add its scores to the card.

    Args:
        run: the run's folder, e.g. runs/emoji-fastclip-v3.
        out: the folder to write; an earlier export there is replaced.
        checkpoint: the last one, or the best by evaluate.best.
        blend: between 0, the weights at which a fine-tune started, and 1, those at its end: 0.5 often keeps
            most of both old and new skills (WiSE-FT). `fastclip eval RUN --blend` shows how much.
        start: a file or folder with the weights at which the run started, if their source is gone.
    """
    from fastclip.config.resolved import resolve_again
    from fastclip.run.blend import Blends
    from fastclip.run.folder import find_checkpoint, read_metadata
    from fastclip.run.load import load_model
    from fastclip.training.divergence import advice
    from fastclip.training.export import NonFiniteModel
    from fastclip.training.export import export as write
    from fastclip.training.model_card import model_card

    if blend is None:
        model, tau = load_model(run, checkpoint, start=start)
        if start is not None and not model.adapted:
            rule = "has no effect without --blend, as this run has no LoRA"
            raise OptionError("start", start, rule, advice="Omit it.")
    else:
        blends = Blends(run, checkpoint, start)
        model, tau = blends.blend(blend), blends.tau
    path = find_checkpoint(run, checkpoint)
    try:
        folder = write(model, out, tau=tau, card=model_card(run, path, model, tau, blend))
    except NonFiniteModel as error:
        raise PathError(
            path, f": the {error} {advice(run, resolve_again(read_metadata(path)['config']))}"
        ) from None
    inside = model.design.needs_its_folder
    name = "local-dir:." if inside else f"local-dir:{folder}"
    where = ", from inside the folder" if inside else ""
    say(f'Exported to {folder}. Load it with open_clip.create_model_and_transforms("{name}"){where}.')
