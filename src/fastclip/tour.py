"""The first five minutes, `make demo`: pairs, training, scores, a report and searches, verb after verb.

Each part is a command that a person could have typed, and is shown as such. Called again, it goes on where it
was: finished parts are found finished by the verbs themselves.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont
from rich.console import Console

from fastclip.cli import main as fastclip
from fastclip.data.contact_sheet import CELL, draw_contact_sheet
from fastclip.evaluation.suites import SUITES
from fastclip.files import cache_folder


class Stop(NamedTuple):
    """A pair collection of the tour, where its run goes, and what is asked of the model."""

    collection: str
    run: Path
    searches: tuple[str, ...]  # among the pictures that it was evaluated on, and not trained on


_EMOJI = ("police officer", "banana", "a smiling face", "woman firefighter", "person swimming")
_SCENES = (
    "a small red square above a large blue circle",
    "a large green triangle to the left of a small pink star",
    "a small yellow cross below a large red heart",
    "two blue diamonds",
    "a green star",
)
EMOJI = Stop("emoji", Path("runs/demo"), _EMOJI)
SCENES = Stop("scenes", Path("runs/demo-scenes"), _SCENES)
EXAMPLES = 3  # searches that are printed; the sheet has them all
INTERRUPTED = 130  # the exit code of a verb that Ctrl-C ended
SHOWN = 7  # pictures of a search on the sheet

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the whole tour; the exit code is that of the part that did not work."""
    run = None
    try:
        from fastclip.distributed.interrupts import STOPPED_CLEANLY

        stop = get_pairs()
        run, pairs = stop.run, stop.collection
        suite = ("--suite", pairs) if pairs in SUITES else ()
        _must("train", "--config", pairs, "--out", str(run))
        _must("eval", str(run), "--tasks", f"data/{pairs}/tasks", *suite)
        _must("export", str(run), str(run / "model"))  # again: its card now has the scores
        _must("report", str(run), "--search", ";".join(stop.searches))
        search(stop)
    except SystemExit as ended:
        if ended.code in (INTERRUPTED, STOPPED_CLEANLY):
            print("`make demo` goes on from here.", file=sys.stderr)
        elif run is not None and run.exists():
            print(f"If {run} is of an earlier version, remove it: rm -r {run}", file=sys.stderr)
        return int(ended.code or 0)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"make demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. `make demo` goes on from here.", file=sys.stderr)
        return INTERRUPTED
    _say_what_next(stop)
    return 0


def get_pairs() -> Stop:
    """Emoji where npm can bring them, generated scenes elsewhere."""
    here = Path("data/emoji/complete.json").exists() or any(cache_folder().glob("iconify-json-*.tgz"))
    if shutil.which("npm") is None and not here:
        console.print(
            "npm is not installed, and the emoji come as an npm package: this demo trains on generated "
            "scenes. Install Node.js and call `make demo` again for real pictures."
        )
    else:
        code = _run("data", "get", EMOJI.collection)
        if code == 0:
            return EMOJI
        if code == INTERRUPTED:
            raise SystemExit(code)
        console.print("The emoji cannot be had now: this demo trains on generated scenes.")
    _must("data", "get", SCENES.collection)
    return SCENES


def search(stop: Stop) -> None:
    """Print a few searches, and draw them all on one sheet."""
    from fastclip.data.images import upright_rgb
    from fastclip.run.folder import evaluation_pairs
    from fastclip.tools.search.index import Index

    index = Index.open(str(stop.run), evaluation_pairs(stop.run).paths)
    cells = []
    for number, text in enumerate(stop.searches):
        cells.append((_words(text), ""))
        if number < EXAMPLES:
            console.print(f"\n[bold]{text}[/bold]")
        for place, match in enumerate(index.by_text(text, SHOWN)):
            caption = ", ".join(index.pictures.pictures[match.number].captions)
            cells.append((upright_rgb(index.pictures.image(match.number)), f"{match.score:.2f}\n{caption}"))
            if number < EXAMPLES and place < 3:
                console.print(f"  {match.score:.2f}  {caption}", markup=False)
    draw_contact_sheet(cells, stop.run / "searches.png", columns=SHOWN + 1)


def _words(text: str) -> Image.Image:
    """A square with the words of a search, to stand before what it found."""
    square = Image.new("RGB", (CELL, CELL), "white")
    shown, middle, font = textwrap.fill(text, 14), (CELL / 2, CELL / 2), ImageFont.load_default(20)
    ImageDraw.Draw(square).multiline_text(middle, shown, "black", font, anchor="mm", align="center")
    return square


def _must(*words: str) -> None:
    """What cannot be done ends the tour."""
    if code := _run(*words):
        raise SystemExit(code)


def _run(*words: str) -> int:
    """Show a command, run it, and give its exit code."""
    shown = " ".join(f'"{word}"' if " " in word or ";" in word else word for word in words)
    console.print(f"\n[bold]$ fastclip {shown}[/bold]")
    return fastclip([*words])


def _say_what_next(stop: Stop) -> None:
    run, train = stop.run, f"fastclip train --config {stop.collection}"
    found = {
        run / "report.html": "curves, scores, and what the model finds",
        run / "searches.png": f"{len(stop.searches)} searches among pictures that it was not trained on",
        run / "model": "the model: open_clip loads it, and a hub takes it as it is",
    }
    then = {
        f"fastclip demo {run}": "a page to play with: type words, drop pictures",
        f"{train} --data.train pairs.csv --out runs/mine": "your own pairs: docs/data.md",
        f"{train} --algorithm openclip": "another algorithm: docs/choosing.md",
        "torchrun --nproc-per-node 8 -m fastclip train …": "GPUs: docs/scaling.md",
    }
    for title, lines in (("Done. Look at", found), ("What next (fastclip is in .venv/bin)", then)):
        console.print(f"\n[bold]{title}[/bold]")
        width = max(len(str(thing)) for thing in lines)
        for thing, what in lines.items():
            console.print(f"  {thing!s:{width}s}  {what}")


if __name__ == "__main__":
    sys.exit(main())
