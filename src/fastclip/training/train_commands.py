"""The commands `fastclip train` and `fastclip export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from fastclip.errors import OptionError


def train(train_options: list[str]) -> None:
    """Parse the options, join the other ranks, train. A run that is stopped and saved exits with code 75."""
    from fastclip.config.parse import DRY_RUN, parse
    from fastclip.config.resolved import resolve

    config = resolve(parse(train_options))  # before torch is imported: errors surface immediately
    from fastclip.distributed.interrupts import STOPPED_CLEANLY, StoppedCleanly
    from fastclip.distributed.world import join_world, silence_other_ranks
    from fastclip.training.parameter_table import print_parameters
    from fastclip.training.trainer import train as train_run

    try:
        with join_world(timeout=config.timeout, device=config.device) as world:
            silence_other_ranks(world)
            if any(word in DRY_RUN for word in train_options):
                print_parameters(config, world)
            else:
                train_run(config, world)
    except StoppedCleanly as stopped:
        if world.is_main:
            print(stopped, file=sys.stderr)
        raise SystemExit(STOPPED_CLEANLY) from None


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
    from fastclip.run.blend import Blends
    from fastclip.run.folder import find_checkpoint
    from fastclip.run.load import load_model
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
    card = model_card(run, find_checkpoint(run, checkpoint), model, tau, blend)
    folder = write(model, out, tau=tau, card=card)
    print(f'Exported to {folder}. Load it with open_clip.create_model_and_transforms("local-dir:{folder}").')
