"""The first five minutes, `make demo`: pairs, training, scores, a report and searches, command by command.

Each part is printed as the command that a user would type. Run again, the tour resumes where it stopped: the
commands themselves recognise finished work.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from fastclip.cli import main as fastclip
from fastclip.data.contact_sheet import CELL, draw_contact_sheet
from fastclip.evaluation.suites import SUITES
from fastclip.files import cache_folder
from fastclip.terminal import SafeConsole, say


class Stop(NamedTuple):
    """A pair collection of the tour, the folder of its run, and queries for the model."""

    collection: str
    run: Path
    searches: tuple[str, ...]  # among held-out images


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
EXAMPLES = 3  # searches that are printed; the sheet has all
INTERRUPTED = 130  # exit code of a command ended by Ctrl-C
SHOWN = 7  # images per search on the sheet

console = SafeConsole(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the whole tour; return the exit code of the command that failed, or 0."""
    run = None
    try:
        from fastclip.distributed.interrupts import STOPPED_CLEANLY

        stop = get_pairs()
        run, pairs = stop.run, stop.collection
        suite = ("--suite", pairs) if pairs in SUITES else ()
        _must("train", "--config", pairs, "--out", str(run))
        _must("eval", str(run), "--tasks", f"data/{pairs}/tasks", *suite)
        _must("export", str(run), str(run / "model"))  # again: the card now includes the scores
        _must("report", str(run), "--search", ";".join(stop.searches))
        search(stop)
    except SystemExit as ended:
        if ended.code in (INTERRUPTED, STOPPED_CLEANLY):
            say("Run `make demo` again to resume.", file=sys.stderr)
        elif run is not None and run.exists():
            say(f"If {run} is from an earlier version, remove it: rm -r {run}", file=sys.stderr)
        return int(ended.code or 0)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"make demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted. Run `make demo` again to resume.", file=sys.stderr)
        return INTERRUPTED
    _print_next_steps(stop)
    return 0


def get_pairs() -> Stop:
    """Get the emoji if npm can download them, otherwise generate scenes."""
    local = Path("data/emoji/complete.json").exists() or any(cache_folder().glob("iconify-json-*.tgz"))
    if shutil.which("npm") is None and not local:
        console.print(
            "npm, which downloads the emoji, is not installed: this demo trains on generated scenes instead. "
            "For real images, install Node.js and run `make demo` again."
        )
    else:
        code = _run("data", "get", EMOJI.collection)
        if code == 0:
            return EMOJI
        if code == INTERRUPTED:
            raise SystemExit(code)
        console.print("The emoji cannot be downloaded: this demo trains on generated scenes instead.")
    _must("data", "get", SCENES.collection)
    return SCENES


def search(stop: Stop) -> None:
    """Print the results of a few searches, and draw all of them on one sheet."""
    from fastclip.run.folder import evaluation_pairs
    from fastclip.tools.search.index import Index

    index = Index.open(str(stop.run), evaluation_pairs(stop.run).paths)
    cells = []
    for number, text in enumerate(stop.searches):
        cells.append((_draw_query(text), ""))
        if number < EXAMPLES:
            console.print(f"\n{text}", style="bold")
        for place, match in enumerate(index.by_text(text, SHOWN)):
            caption = ", ".join(index.pictures.pictures[match.number].captions)
            cells.append((index.image(match.number), f"{match.score:.2f}\n{caption}"))
            if number < EXAMPLES and place < 3:
                console.print(f"  {match.score:.2f}  {caption}")
    draw_contact_sheet(cells, stop.run / "searches.png", columns=SHOWN + 1)


def _draw_query(text: str) -> Image.Image:
    """A square with the text of a search, for the first column of the sheet."""
    square = Image.new("RGB", (CELL, CELL), "white")
    shown, middle, font = textwrap.fill(text, 14), (CELL / 2, CELL / 2), ImageFont.load_default(20)
    ImageDraw.Draw(square).multiline_text(middle, shown, "black", font, anchor="mm", align="center")
    return square


def _must(*arguments: str) -> None:
    """Run a command; end the tour if it fails."""
    if code := _run(*arguments):
        raise SystemExit(code)


def _run(*arguments: str) -> int:
    """Print a command, run it, and return its exit code."""
    shown = " ".join(f'"{text}"' if " " in text or ";" in text else text for text in arguments)
    console.print(f"\n$ fastclip {shown}", style="bold")
    return fastclip([*arguments])


def _print_next_steps(stop: Stop) -> None:
    run, train = stop.run, f"fastclip train --config {stop.collection}"
    results = {
        run / "report.html": "curves, scores and search results",
        run / "searches.png": f"{len(stop.searches)} searches among held-out images",
        run / "model": "the model for open_clip, ready to push to the Hugging Face Hub",
    }
    next_steps = {
        f"fastclip demo {run}": "a page to try it on: type text, drop images",
        f"{train} --data.train pairs.csv --out runs/mine": "your own pairs: docs/data.md",
        f"{train} --algorithm openclip": "another algorithm: docs/choosing.md",
        "torchrun --nproc-per-node 8 -m fastclip train …": "GPUs: docs/scaling.md",
    }
    for title, lines in (("Results", results), ("Next steps (fastclip is in .venv/bin)", next_steps)):
        console.print(f"\n{title}", style="bold")
        width = max(len(str(name)) for name in lines)
        for name, description in lines.items():
            console.print(f"  {name!s:{width}s}  {description}")


if __name__ == "__main__":
    sys.exit(main())
