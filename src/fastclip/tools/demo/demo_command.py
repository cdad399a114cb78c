"""The command `fastclip demo`."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastclip.errors import CommandError, PathError
from fastclip.terminal import progress, say

if TYPE_CHECKING:
    from fastclip.run.folder import EvaluationPairs


def demo(
    model: str,
    images: str | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    pretrained: str | None = None,
    checkpoint: Literal["last", "best"] = "last",
    workers: int = 2,
    formats: str | None = None,
) -> None:
    """Serve a web page to try out a trained model.

      fastclip demo runs/emoji
      fastclip demo runs/emoji --images my/photos --port 8000
      fastclip demo ViT-B-32 --pretrained laion2b_s34b_b79k --images my/photos

    The page finds images for a text, captions for an image, and probabilities of labels for an image. By
    default only this machine can open it. It makes no requests to other sites and deletes uploads. Image
    features are cached in RUN/search, as for `fastclip search`.

    Args:
        model: the folder of a run, an exported folder, or an open_clip name with --pretrained.
        images: images to search: a folder of images, including subfolders and tars, or any pairs (default for
            a run: its evaluate.pairs).
        host: the address to listen on; 0.0.0.0 lets anyone who can reach this machine use the page.
        port: the port to listen on; if it is in use, one of the next 20 is chosen.
        pretrained: weights for an open_clip name: a file, a folder or a tag.
        checkpoint: the checkpoint of a run.
        workers: loader workers.
        formats: image formats to decode besides JPEG, PNG, WebP, GIF, BMP and TIFF, separated by commas:
            avif, jpeg2000, ppm. Those of a run's data.formats are included.
    """
    if find_spec("gradio") is None:
        raise CommandError("The demo needs gradio, which is not installed: pip install 'fastclip[demo]'.")
    from fastclip.config.options import split_formats
    from fastclip.run.folder import EvaluationPairs

    accepted = split_formats("formats", formats)
    where = EvaluationPairs([images]) if images else _pairs_of_run(model)
    from fastclip.tools.demo.guard import is_loopback
    from fastclip.tools.demo.server import serve, sigterm_as_ctrl_c, take_port, temporary_folder

    with take_port(host, port) as listening:
        number = listening.getsockname()[1]
        if number != port:
            say(f"Port {port} is in use; using port {number}.")
        from fastclip.tools.search.index import Index  # slow to import, so after the port is checked

        with progress("encoding images", "images") as update:
            index = Index.open(
                model, where.paths, pretrained, checkpoint, workers, update, where.columns, accepted
            )
        counts = f"{len(index.features.kept_b):,} images", f"{len(index.captions):,} captions"
        say(" with ".join(counts))
        with progress("encoding captions", "captions") as update:
            index.caption_features(update)
        if not is_loopback(host):
            say("Anyone who can reach this machine can use the page; --host 127.0.0.1 prevents this.")
        ready = partial(say, f"The demo is at {_address(host, number)} (press Ctrl-C to stop)")
        with suppress(KeyboardInterrupt), sigterm_as_ctrl_c(), temporary_folder() as folder:
            from fastclip.tools.demo.page import build_app  # gradio reads its settings when it is imported

            title = " · ".join([Path(model).expanduser().resolve().name, *counts])
            serve(build_app(index, title, folder, host), listening, ready)
    say("\nThe demo has stopped.")


def _pairs_of_run(model: str) -> EvaluationPairs:
    """The pairs that a run was evaluated on."""
    from fastclip.data.sources import find_files
    from fastclip.run.folder import evaluation_pairs

    pairs = evaluation_pairs(Path(model).expanduser())
    if not pairs.paths:
        raise PathError(
            model,
            "has no config.yaml with evaluate.pairs, so there are no images to search. "
            "Pass --images: a folder of images, tars, or any pairs.",
        )
    try:
        find_files(pairs.paths)
    except (OSError, ValueError) as error:
        raise PathError(
            model, f"was evaluated on pairs that cannot be read: {error} Or pass --images."
        ) from error
    return pairs


def _address(host: str, port: int) -> str:
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"
