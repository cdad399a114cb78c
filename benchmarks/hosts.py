"""Up to four hosts on one machine, with links of limited rate between them: what a step takes and where its
time goes, by hosts and by rate, for OpenCLIP's loss, for FastCLIP-v3, and for that with float16 features.
OpenCLIP's stands there twice: as gloo does it, and sending gradients of features at once, as NCCL does.

    python -m benchmarks.hosts    # about 40 minutes on 2 cores, which must have nothing else to do

Two models show both ends: under `features` the exchange of features outweighs the gradients of the weights,
under `weights` their ratio is that of the paper's large setting at 8 nodes. The trainer's own steps run under
the profiler of `fastclip profile`, with one node of torchrun on each host; a round measures every cell once.
Beside a measured step stands what the model of `fastclip plan` foretells: a line behind hosts that take what
these took without a limit.

It needs root, iproute2 and the emoji pairs: `fastclip data get emoji`. Processes and namespaces are removed
whatever happens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.hosts_picture import draw, rate_name
from benchmarks.hosts_worker import CASES, Case
from benchmarks.namespaces import BURST, LATENCY, Hosts
from benchmarks.record import RESULTS, save
from fastclip.terminal import progress
from fastclip.tools.profiling.breakdown import PARTS, AlgorithmProfile
from fastclip.tools.profiling.memory import model_size, towers_on_meta
from fastclip.tools.profiling.network import Network, line_behind, predict_step
from fastclip.tools.profiling.plan import traffic_of
from fastclip.tools.profiling.traffic import Traffic

HOSTS = (1, 2, 4)
RATES = (None, 1000, 100)  # Mbit/s of each host's link; None is as fast as the machine
STEPS, WARM_UP = 10, 3
SLOWEST = 600  # seconds that a launch may take
VISION = {"image_size": 32, "layers": 1, "width": 32, "head_width": 32, "patch_size": 16}
OPTIONS = [  # two shards and many epochs, for the pictures are decoded on every host
    "--config=emoji",
    "--data.train=data/emoji/train/{00000..00001}.tar",
    "--epochs=100",
]
RATIOS = (
    ("fastclip-v3", "openclip"),
    ("fastclip-v3", "openclip at once"),
    ("fastclip-v3 float16", "openclip at once"),
)
TEXT = {"context_length": 8, "vocab_size": 49408, "heads": 1, "layers": 1}


class Setting(NamedTuple):
    """A model with 512 features, and what each host trains on in a step."""

    name: str
    text_width: int
    """Most of the weights are the vocabulary's: 49,408 times this."""
    local_batch: int

    @property
    def model(self) -> dict:
        """Its open_clip config."""
        text = TEXT | {"width": self.text_width}
        return {"embed_dim": 512, "vision_cfg": VISION, "text_cfg": text}

    def write(self, folder: Path) -> Path:
        path = folder / f"hosts-{self.name}.json"
        path.write_text(json.dumps(self.model))
        return path

    def facts(self) -> dict:
        """All that makes it, but for the number of hosts."""
        return {"model": self.model, "local_batch": self.local_batch, "options": OPTIONS}


SETTINGS = (Setting("features", 4, 128), Setting("weights", 64, 48))


class Cell(NamedTuple):
    """One of the cases at one number of hosts and one rate."""

    setting: str
    hosts: int
    megabits: int | None
    case: str
    batch: int
    traffic: Traffic
    rounds: list[dict[str, float]]
    """ms of each part of a step, by the median host."""

    def mean(self, part: str) -> float:
        return fmean(times[part] for times in self.rounds)

    def foretold(self, free: Cell) -> float:
        """ms of a step on this link, from what the same hosts took on one without a limit."""
        if self.megabits is None:
            return self.mean("total")
        own = free.mean("communication") / self.traffic.total * 1e6  # ms for a megabyte
        return predict_step(
            self.traffic,
            self.hosts,
            line_behind(self.megabits * 1e6, Network("hosts", own, 0.0, own), "line"),
            computation=free.mean("computation"),
            others=free.mean("others"),
        ).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        for cells in _measured(rounds, Path(folder)):
            _keep(_figures(cells))


def _keep(figures: dict) -> None:
    save("hosts", 0, figures)
    (RESULTS / "hosts.md").write_text("\n\n".join([_steps_table(figures), _parts_table(figures)]) + "\n")
    for setting in SETTINGS:
        cells = [cell for cell in figures["cells"] if cell["setting"] == setting.name]
        (RESULTS / f"hosts-{setting.name}.png").write_bytes(draw(cells))


def _measured(rounds: int, folder: Path) -> Iterator[list[Cell]]:
    """All cells after each round, which measures every one once: a busy minute falls on all alike."""
    places = [
        (s, hosts, rate) for s in SETTINGS for hosts in HOSTS for rate in RATES if hosts > 1 or not rate
    ]
    todo = places * rounds
    cells: dict[tuple, Cell] = {}
    with progress("measuring", "launches") as update:
        for number, (setting, hosts, rate) in enumerate(todo):
            update(number, len(todo))
            for profile in _profiles(setting, hosts, rate, number // len(places), folder):
                key = (setting.name, hosts, rate, profile.algorithm)
                if key not in cells:
                    sent = _traffic(setting, hosts, CASES[profile.algorithm], folder)
                    cells[key] = Cell(*key, profile.batch, sent, [])
                cells[key].rounds.append({part: profile.median.mean(part) for part in PARTS})
            if (number + 1) % len(places) == 0:
                yield list(cells.values())


def _profiles(
    setting: Setting, hosts: int, rate: int | None, first: int, folder: Path
) -> list[AlgorithmProfile]:
    """Of all cases in one start, from the `first` on."""
    words = ["-m", "benchmarks.hosts_worker", str(folder), str(STEPS), str(WARM_UP), str(first)]
    with Hosts(hosts, rate) as network:
        nodes = network.torchrun([*words, *_options(setting, hosts, folder)], folder)
        network.wait(nodes, folder, SLOWEST)
    found = json.loads((folder / "profiles.json").read_text(encoding="utf-8"))
    return [AlgorithmProfile.from_dict(profile) for profile in found]


def _options(setting: Setting, hosts: int, folder: Path) -> list[str]:
    """Of `fastclip train`."""
    return [
        *OPTIONS,
        f"--model.name={setting.write(folder)}",
        f"--batch.size={hosts * setting.local_batch}",
    ]


def _traffic(setting: Setting, hosts: int, case: Case, folder: Path) -> Traffic:
    """What each host sends in a step, as `fastclip plan` counts it."""
    config = case.config(_options(setting, hosts, folder))
    return traffic_of(config, model_size(towers_on_meta(config)), hosts, setting.local_batch)


def _figures(cells: list[Cell]) -> dict:
    unlimited = {(c.setting, c.hosts, c.case): c for c in cells if c.megabits is None}
    found = []
    for cell in cells:
        free = unlimited[cell.setting, cell.hosts, cell.case]
        found.append(
            {
                "setting": cell.setting,
                "hosts": cell.hosts,
                "megabits": cell.megabits,
                "case": cell.case,
                "batch": cell.batch,
                "sent": {name: round(getattr(cell.traffic, name)) for name in ("exchange", "weights")},
                "ms": {part: round(cell.mean(part), 2) for part in PARTS},
                "rounds": [{part: round(ms, 2) for part, ms in times.items()} for times in cell.rounds],
                "foretold_ms": None if cell.megabits is None else round(cell.foretold(free), 2),
            }
        )
    return {
        "steps": STEPS,
        "warm_up": WARM_UP,
        "settings": {setting.name: setting.facts() for setting in SETTINGS},
        "links": {"burst": BURST, "latency": LATENCY, "threads_a_host": 1},
        "units": "ms of the median host, mean of rounds; bytes a step sent by one host",
        "cells": found,
        "ratios": [_ratio(place, *names, cells) for place in _places(found) for names in RATIOS],
        "error_of_foretold_steps": {
            rate_name(rate): {case: _error(found, rate, case) for case in CASES} for rate in RATES if rate
        },
    }


def _ratio(place: tuple, case: str, peer: str, cells: list[Cell]) -> dict:
    """A step's time over the peer's at the same place, round by round; and the bytes that decide it."""
    setting, hosts, megabits = place
    by_place = {(c.setting, c.hosts, c.megabits, c.case): c for c in cells}
    own, other = by_place[*place, case], by_place[*place, peer]
    ratios = [ours["total"] / theirs["total"] for ours, theirs in zip(own.rounds, other.rounds, strict=True)]
    foretold = [c.foretold(by_place[setting, hosts, None, c.case]) for c in (own, other)]
    weights = other.traffic.weights
    return {
        "setting": setting,
        "hosts": hosts,
        "megabits": megabits,
        "case": case,
        "peer": peer,
        "of_rounds": [round(ratio, 3) for ratio in ratios],
        "median": round(median(ratios), 3),
        "foretold": None if megabits is None else round(foretold[0] / foretold[1], 3),
        "openclip_features_over_weights": round(other.traffic.exchange / weights, 3) if weights else None,
    }


def _error(cells: list[dict], rate: int, case: str) -> dict[str, float]:
    """Of what was foretold, relative to what was measured: the mean, and the largest without its sign."""
    errors = [
        cell["foretold_ms"] / cell["ms"]["total"] - 1
        for cell in cells
        if (cell["megabits"], cell["case"]) == (rate, case)
    ]
    return {"mean": round(fmean(errors), 3), "largest": round(max(map(abs, errors)), 3)}


def _steps_table(figures: dict) -> str:
    """Each place's steps, and their ratios: the median of the rounds, their range, and as foretold."""
    heads = ["setting", "hosts", "link", "features / weights", *(f"{case}, ms" for case in CASES)]
    heads += [f"{case} / {peer}" for case, peer in RATIOS]
    steps = {(_place(cell), cell["case"]): cell["ms"]["total"] for cell in figures["cells"]}
    ratios = {(_place(ratio), ratio["case"], ratio["peer"]): ratio for ratio in figures["ratios"]}
    rows = []
    for place in _places(figures["cells"]):
        setting, hosts, megabits = place
        row = [setting, str(hosts), rate_name(megabits) if hosts > 1 else "–"]
        weighed = ratios[place, *RATIOS[0]]["openclip_features_over_weights"]
        row += [
            "–" if weighed is None else f"{weighed:.2f}",
            *(f"{steps[place, case]:.0f}" for case in CASES),
        ]
        for found in (ratios[place, *names] for names in RATIOS):
            spread = f"{found['median']:.2f} ({min(found['of_rounds']):.2f}–{max(found['of_rounds']):.2f})"
            row.append(spread + (f", {found['foretold']:.2f}" if found["foretold"] else ""))
        rows.append(row)
    return _markdown(heads, rows, words=3)


def _parts_table(figures: dict) -> str:
    """Where the time goes at the most hosts, as the link becomes slower."""
    most = max(cell["hosts"] for cell in figures["cells"])
    rows = [
        [
            cell["setting"],
            cell["case"],
            rate_name(cell["megabits"]),
            *(f"{cell['ms'][part]:.0f}" for part in PARTS),
        ]
        for cell in figures["cells"]
        if cell["hosts"] == most
    ]
    return _markdown(["setting", f"{most} hosts", "link", *PARTS.values()], rows, words=3)


def _places(cells: list[dict]) -> list[tuple[str, int, int | None]]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(_place(cell) for cell in cells))


def _place(found: dict) -> tuple[str, int, int | None]:
    return found["setting"], found["hosts"], found["megabits"]


def _markdown(heads: list[str], rows: list[list[str]], words: int) -> str:
    """A table whose first columns are words, and the rest numbers."""
    ruler = ["---"] * words + ["---:"] * (len(heads) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ruler, *rows))


if __name__ == "__main__":
    main()
