"""What tuning tried and chose, as OUT/tuning.json tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from fastclip.run.folder import number
from fastclip.tools.study.arms import identity
from fastclip.tools.study.study import TUNING_FILE


class Tried(NamedTuple):
    """One try of one arm."""

    arm: str
    values: dict[str, object]
    score: float | None
    """On the validation pairs; None if it is not there yet, or failed."""
    chosen: bool
    error: str = ""


def read_tried(out: Path, missing: list[str]) -> list[Tried]:
    """Every try of every arm; none where nothing is tuned. What cannot be read is told in `missing`."""
    path = out / TUNING_FILE
    if not path.exists():
        return []
    try:
        arms = json.loads(path.read_text(encoding="utf-8", errors="replace"))["arms"]
        found = [
            Tried(
                str(arm["arm"]),
                dict(one["values"]),
                number(one.get("score")),
                bool(arm["chosen"]) and identity(dict(one["values"])) == identity(dict(arm["chosen"])),
                str(one.get("error") or ""),
            )
            for arm in arms
            for one in arm["tried"]
        ]
        for one in found:
            if one.error:
                missing.append(
                    f"Tuning {one.arm} with {json.dumps(one.values)} failed: {_last_line(one.error)}"
                )
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        missing.append(f"{TUNING_FILE} cannot be read, so what was tuned is not shown ({error!r}).")
        return []


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
