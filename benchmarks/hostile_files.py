"""Opens hostile collections, reads every pair, and counts what came of them: the part `files` of `hostile`.

Each is read in one of two processes, which may take a minute. A collection fails if a good pair is lost, if
something bad is not reported with file, place and reason, or on any error that is not fastclip's own.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path

from tests.data.hostile_cases import Hostile, differences, image_cases, read_all
from tests.data.hostile_files import HOSTILE_FILES
from tests.data.hostile_images import HOSTILE_IMAGES

from fastclip.files import parallel_map

SECONDS = 60
JOBS = 2


def hostile_files() -> dict[str, Hostile]:
    """All cases by name; images of `tests/data/hostile_images.py` are cases too."""
    return HOSTILE_FILES | {case.name: case for case in image_cases(HOSTILE_IMAGES)}


def read_hostile_files() -> dict[str, dict[str, int]]:
    """How many of each kind were read, reported or refused; AssertionError with all that were neither."""
    cases = hostile_files()
    outcomes: dict[str, Counter[str]] = {case.kind: Counter() for case in cases.values()}
    wrong = []
    for name, (outcome, problems) in zip(cases, parallel_map(_read, list(cases), JOBS), strict=True):
        print(f"{name}: {outcome}", flush=True)
        outcomes[cases[name].kind][outcome] += 1
        wrong += [f"{name}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)
    return {kind: dict(sorted(found.items())) for kind, found in outcomes.items()}


def _read(name: str) -> tuple[str, list[str]]:
    """The outcome of a case, and in which ways it is wrong."""
    logging.getLogger("fastclip").setLevel(logging.ERROR)
    case = hostile_files()[name]
    signal.signal(signal.SIGALRM, _hung)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FASTCLIP_CACHE"] = str(Path(folder, "cache"))
        path = Path(folder, "collection")
        path.mkdir()
        try:
            made = case.make(path)
            signal.alarm(SECONDS)
            problems = differences(case, read_all(made))
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        finally:
            signal.alarm(0)
    if problems:
        return "wrong", problems
    if case.refused:
        return "refused by name", []
    return ("reported with file, place and reason" if case.bad else "read without loss"), []


def _hung(number: int, frame: object) -> None:
    raise TimeoutError(f"not read within {SECONDS} seconds")
