"""The verb `fastclip demo`."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastclip.terminal import progress

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
) -> None:
    """Open a page to play with a trained model.

      fastclip demo runs/emoji
      fastclip demo runs/emoji --images my/photos --port 8000
      fastclip demo ViT-B-32 --pretrained laion2b_s34b_b79k --images my/photos

    On the page: pictures that fit words, captions that fit a picture, and probabilities of labels for a
    picture. It is for this machine alone unless --host says otherwise, asks no other site for anything, and
    keeps no upload. The pictures' features are kept (RUN/search), as `fastclip search` does.

    Args:
        model: a run's folder, an exported folder, or an open_clip name with --pretrained.
        images: what to search in: a folder of pictures, also in tars and in folders within; or any pairs. For
            a run, the pairs that it was evaluated on if left out.
        host: the address to listen on; 0.0.0.0 lets everyone in who reaches this machine.
        port: the first port to try; if it is taken, the next free one of 20.
        pretrained: weights for an open_clip name: a file, a folder or a tag.
        checkpoint: which checkpoint of a run.
        workers: processes that decode images.
    """
    if find_spec("gradio") is None:
        install = "pip install 'fastclip[demo]'"
        raise RuntimeError(f"The page is made with gradio, which is not installed: {install}.")
    from fastclip.run.folder import EvaluationPairs

    where = EvaluationPairs([images]) if images else _pairs_of_run(model)
    from fastclip.tools.demo.server import is_loopback, serve, sigterm_as_ctrl_c, take_port, temporary_folder

    with take_port(host, port) as listening:
        number = listening.getsockname()[1]
        if number != port:
            print(f"Port {port} is taken; the page takes {number}.")
        from fastclip.tools.search.index import Index  # takes seconds: after the port

        with progress("encoding pictures", "images") as update:
            index = Index.open(model, where.paths, pretrained, checkpoint, workers, update, where.columns)
        counts = f"{len(index.features.kept_b):,} pictures", f"{len(index.captions):,} captions"
        print(" with ".join(counts), flush=True)
        with progress("encoding captions", "captions") as update:
            index.caption_features(update)
        if not is_loopback(host):
            alone = "--host 127.0.0.1 keeps it to yourself."
            print(f"Everyone who reaches this machine can use the page. {alone}")
        ready = partial(print, f"The page is at {_address(host, number)} (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt), sigterm_as_ctrl_c(), temporary_folder() as folder:
            from fastclip.tools.demo.page import build_app  # gradio reads its settings when it is imported

            title = " · ".join([Path(model).expanduser().resolve().name, *counts])
            serve(build_app(index, title, folder, host), listening, ready)
    print("\nThe page is closed.")


def _pairs_of_run(model: str) -> EvaluationPairs:
    """What a run was evaluated on."""
    from fastclip.data.sources import find_files
    from fastclip.run.folder import evaluation_pairs

    pairs = evaluation_pairs(Path(model).expanduser())
    if not pairs.paths:
        raise ValueError(
            f"Which pictures to search in? {model} is not a run that names some (evaluate.pairs in its "
            "config.yaml). Give --images: a folder of pictures, tars, or any pairs."
        )
    try:
        find_files(pairs.paths)
    except (OSError, ValueError) as error:
        raise ValueError(f"The run was evaluated on other pictures: {error} Or give --images.") from error
    return pairs


def _address(host: str, port: int) -> str:
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"
