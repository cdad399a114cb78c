"""Step times of up to four hosts on one machine, connected by links of limited rate.

    python -m benchmarks.hosts    # about 40 minutes on 2 otherwise idle cores

It measures where the time goes, by hosts and by rate, for OpenCLIP's loss, for FastCLIP-v3, and for v3 with
float16 features. OpenCLIP is measured twice: as gloo does it, and sending the gradients of features at once,
as NCCL does. Two models show both extremes: in `features` the exchange of features outweighs the gradients of
the weights, in `weights` their ratio is that of the paper's large setting at 8 nodes. The trainer's own steps
run under the profiler of `fastclip profile`, with one node of torchrun per host; a round measures every cell
once. Each measured step is compared with the prediction of `fastclip plan` for a line between the same hosts,
from their times without a limit.

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

from benchmarks.hosts_plot import draw, rate_name
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
RATES = (None, 1000, 100)  # Mbit/s of each host's link; None: no limit
STEPS, WARM_UP = 10, 3
TIMEOUT = 600  # seconds per launch
VISION = {"image_size": 32, "layers": 1, "width": 32, "head_width": 32, "patch_size": 16}
OPTIONS = [  # two shards and many epochs, as every host decodes all images
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
    """A model with 512 features, and the batch of each host."""

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
        """Everything that defines it, except the number of hosts."""
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
    """ms of each part of a step, of the median host."""

    def mean(self, part: str) -> float:
        return fmean(times[part] for times in self.rounds)

    def predicted(self, free: Cell) -> float:
        """Predict the ms of a step on this link from the times of the same hosts without a limit."""
        if self.megabits is None:
            return self.mean("total")
        own = free.mean("communication") / self.traffic.total * 1e6  # ms per megabyte
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
            _save(_figures(cells))


def _save(figures: dict) -> None:
    save("hosts", 0, figures)
    (RESULTS / "hosts.md").write_text("\n\n".join([_steps_table(figures), _parts_table(figures)]) + "\n")
    for setting in SETTINGS:
        cells = [cell for cell in figures["cells"] if cell["setting"] == setting.name]
        (RESULTS / f"hosts-{setting.name}.png").write_bytes(draw(cells))


def _measured(rounds: int, folder: Path) -> Iterator[list[Cell]]:
    """Yield all cells after each round, which measures every one once: a busy minute affects all equally."""
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
    """Profile all cases in one launch, starting with number `first`."""
    arguments = ["-m", "benchmarks.hosts_worker", str(folder), str(STEPS), str(WARM_UP), str(first)]
    with Hosts(hosts, rate) as network:
        nodes = network.torchrun([*arguments, *_options(setting, hosts, folder)], folder)
        network.wait(nodes, folder, TIMEOUT)
    profiles = json.loads((folder / "profiles.json").read_text(encoding="utf-8"))
    return [AlgorithmProfile.from_dict(profile) for profile in profiles]


def _options(setting: Setting, hosts: int, folder: Path) -> list[str]:
    """Options of `fastclip train`."""
    return [
        *OPTIONS,
        f"--model.name={setting.write(folder)}",
        f"--batch.size={hosts * setting.local_batch}",
    ]


def _traffic(setting: Setting, hosts: int, case: Case, folder: Path) -> Traffic:
    """Bytes that each host sends per step, as `fastclip plan` counts them."""
    config = case.config(_options(setting, hosts, folder))
    return traffic_of(config, model_size(towers_on_meta(config)), hosts, setting.local_batch)


def _figures(cells: list[Cell]) -> dict:
    unlimited = {(c.setting, c.hosts, c.case): c for c in cells if c.megabits is None}
    rows = []
    for cell in cells:
        free = unlimited[cell.setting, cell.hosts, cell.case]
        rows.append(
            {
                "setting": cell.setting,
                "hosts": cell.hosts,
                "megabits": cell.megabits,
                "case": cell.case,
                "batch": cell.batch,
                "sent": {name: round(getattr(cell.traffic, name)) for name in ("exchange", "weights")},
                "ms": {part: round(cell.mean(part), 2) for part in PARTS},
                "rounds": [{part: round(ms, 2) for part, ms in times.items()} for times in cell.rounds],
                "foretold_ms": None if cell.megabits is None else round(cell.predicted(free), 2),
            }
        )
    return {
        "steps": STEPS,
        "warm_up": WARM_UP,
        "settings": {setting.name: setting.facts() for setting in SETTINGS},
        "links": {"burst": BURST, "latency": LATENCY, "threads_a_host": 1},
        "units": "ms of the median host, mean of rounds; bytes per step sent by one host",
        "cells": rows,
        "ratios": [_ratio(place, *names, cells) for place in _places(rows) for names in RATIOS],
        "error_of_foretold_steps": {
            rate_name(rate): {case: _error(rows, rate, case) for case in CASES} for rate in RATES if rate
        },
    }


def _ratio(place: tuple, case: str, peer: str, cells: list[Cell]) -> dict:
    """Step time relative to the peer's at the same place, round by round, and the bytes that decide it."""
    setting, hosts, megabits = place
    by_place = {(c.setting, c.hosts, c.megabits, c.case): c for c in cells}
    own, other = by_place[*place, case], by_place[*place, peer]
    ratios = [ours["total"] / theirs["total"] for ours, theirs in zip(own.rounds, other.rounds, strict=True)]
    predicted = [c.predicted(by_place[setting, hosts, None, c.case]) for c in (own, other)]
    weights = other.traffic.weights
    return {
        "setting": setting,
        "hosts": hosts,
        "megabits": megabits,
        "case": case,
        "peer": peer,
        "of_rounds": [round(ratio, 3) for ratio in ratios],
        "median": round(median(ratios), 3),
        "foretold": None if megabits is None else round(predicted[0] / predicted[1], 3),
        "openclip_features_over_weights": round(other.traffic.exchange / weights, 3) if weights else None,
    }


def _error(cells: list[dict], rate: int, case: str) -> dict[str, float]:
    """Relative error of the predictions: the mean, and the largest absolute value."""
    errors = [
        cell["foretold_ms"] / cell["ms"]["total"] - 1
        for cell in cells
        if (cell["megabits"], cell["case"]) == (rate, case)
    ]
    return {"mean": round(fmean(errors), 3), "largest": round(max(map(abs, errors)), 3)}


def _steps_table(figures: dict) -> str:
    """The steps of each place, and their ratios: median and range of the rounds, and the prediction."""
    heads = ["setting", "hosts", "link", "features / weights", *(f"{case}, ms" for case in CASES)]
    heads += [f"{case} / {peer}" for case, peer in RATIOS]
    steps = {(_place(cell), cell["case"]): cell["ms"]["total"] for cell in figures["cells"]}
    ratios = {(_place(ratio), ratio["case"], ratio["peer"]): ratio for ratio in figures["ratios"]}
    rows = []
    for place in _places(figures["cells"]):
        setting, hosts, megabits = place
        row = [setting, str(hosts), rate_name(megabits) if hosts > 1 else "–"]
        relative = ratios[place, *RATIOS[0]]["openclip_features_over_weights"]
        row += [
            "–" if relative is None else f"{relative:.2f}",
            *(f"{steps[place, case]:.0f}" for case in CASES),
        ]
        for ratio in (ratios[place, *names] for names in RATIOS):
            spread = f"{ratio['median']:.2f} ({min(ratio['of_rounds']):.2f}–{max(ratio['of_rounds']):.2f})"
            row.append(spread + (f", {ratio['foretold']:.2f}" if ratio["foretold"] else ""))
        rows.append(row)
    return _markdown(heads, rows, texts=3)


def _parts_table(figures: dict) -> str:
    """Where the time goes with the most hosts, as links become slower."""
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
    return _markdown(["setting", f"{most} hosts", "link", *PARTS.values()], rows, texts=3)


def _places(cells: list[dict]) -> list[tuple[str, int, int | None]]:
    """The places in the order of measurement."""
    return list(dict.fromkeys(_place(cell) for cell in cells))


def _place(row: dict) -> tuple[str, int, int | None]:
    return row["setting"], row["hosts"], row["megabits"]


def _markdown(heads: list[str], rows: list[list[str]], texts: int) -> str:
    """A table whose first columns are text, and the rest numbers."""
    ruler = ["---"] * texts + ["---:"] * (len(heads) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ruler, *rows))


if __name__ == "__main__":
    main()
