"""Fills the tables of README.md and docs/ that repeat figures of results/, between two markers:

    <!-- generated: NAME ARGUMENT … -->
    <!-- end -->

`make docs` writes them, and the tables.md of each study; a test checks that they are up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import plan_fit
from fastclip.files import atomic_write
from fastclip.tools.study.measures import paired_difference
from fastclip.tools.study.rendering import as_markdown

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
STUDIES = ROOT / "results" / "studies"
MEANS = ("Mean", "Retrieval", "Classification & Variants")
_BLOCK = re.compile(r"^( *)<!-- generated: (\S+)(.*?) -->\n.*?^ *<!-- end -->$", re.DOTALL | re.MULTILINE)


def outdated() -> dict[Path, str]:
    """Every file that `make docs` would change, with its new content."""
    wanted = {path: fill(path.read_text(encoding="utf-8")) for path in DOCUMENTS}
    for path in STUDIES.glob("*/figures.json"):
        wanted[path.with_name("tables.md")] = as_markdown(_figures(f"studies/{path.parent.name}/figures"))
    return {path: text for path, text in wanted.items() if path.read_text(encoding="utf-8") != text}


def fill(text: str) -> str:
    """A document with its tables generated anew."""

    def block(found: re.Match[str]) -> str:
        indent, name, arguments = found[1], found[2], found[3].split()
        if name not in TABLES:
            raise ValueError(f"generated: {name} is not one of {', '.join(TABLES)}.")
        first_line = found[0].partition("\n")[0]
        table = [indent + line for line in TABLES[name](*arguments)]
        return "\n".join([first_line, *table, f"{indent}<!-- end -->"])

    return _BLOCK.sub(block, text)


# docs/results.md


def study(name: str, title: str) -> list[str]:
    """One table of a study: Summary, Tuning, …"""
    parts = as_markdown(_figures(f"studies/{name}/figures")).split("\n\n")
    place = next(i for i, part in enumerate(parts) if part.startswith(f"**{title}**"))
    return parts[place + 1].rstrip().split("\n")


def paired(*rows: str) -> list[str]:
    """Paired differences, one row per ARM/BASELINE@STUDY[+STUDY]; those that exclude 0 are bold."""
    cells = []
    for row in rows:
        arms, _, studies = row.partition("@")
        arm, _, baseline = arms.partition("/")
        by_metric: dict[str, dict[str, float]] = {name: {} for name in MEANS}
        for name in studies.split("+"):
            for metric, by_seed in by_metric.items():
                by_seed |= differences(name, arm, baseline, metric)
        seeds = sorted(int(seed) for seed in by_metric["Mean"])
        names = " and ".join(f"`{name}`" for name in studies.split("+"))
        intervals = [interval(by_seed, bold=True) for by_seed in by_metric.values()]
        cells.append([f"{arm} − {baseline}, {names}", f"{seeds[0]}–{seeds[-1]}", *intervals])
    return _table(["", "seeds", *MEANS], cells, names=2)


def differences(study_name: str, arm: str, baseline: str, metric: str) -> dict[str, float]:
    """An arm's score minus the baseline's by seed, in percentage points."""
    metrics = {row["name"]: row for row in _figures(f"studies/{study_name}/figures")["measures"]}
    by_arm = {row["arm"]: row["values"] for row in metrics[metric]["rows"]}
    return {seed: 100 * (score - by_arm[baseline][seed]) for seed, score in by_arm[arm].items()}


def interval(by_seed: dict[str, float], bold: bool = False) -> str:
    """Mean and 95 % interval of differences: "+0.41 [+0.32, +0.49]"."""
    found = paired_difference(by_seed, dict.fromkeys(by_seed, 0.0))
    assert found is not None
    text = f"{found['mean']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]".replace("-", "−")
    return f"**{text}**" if bold and found["low"] * found["high"] > 0 else text


def gamma_search() -> list[str]:
    figures = _figures("gamma_search")
    openclip = figures["openclip, same runs"]
    rows = [
        [
            name.partition(",")[0],
            *_best(100 * recall for recall in by_gamma.values()),
            _percent(openclip[name]),
        ]
        for name, by_gamma in figures.items()
        if name.startswith("batch")
    ]
    gammas = [gamma.replace("1 (constant)", "1, no memory") for gamma in figures["batch 16, lr 5e-4"]]
    return _table(["final γ of the cosine", *gammas, "OpenCLIP"], rows)


# docs/choosing.md and docs/training.md


def rho_rules() -> list[str]:
    rules = _figures("rho_rule")["rules"]
    rows = [
        [name, f"{rule['constant']:g}", f"{100 * rule['mean']:.2f}", f"{100 * rule['worst']:.2f}"]
        for name, rule in sorted(rules.items(), key=lambda item: -item[1]["mean"])
    ]
    return _table(["ρ by", "c", "mean, %", "worst, %"], rows)


def rho_runs() -> list[str]:
    """Recall in percent by ρ as a share of log(B−1)."""
    runs = _figures("rho_rule")["runs"]
    shares = [f"{run['share']:g}" for run in next(iter(runs.values()))]
    rows = [[name, *_best(100 * run["recall"] for run in of)] for name, of in runs.items()]
    return _table(["ρ / log(B−1)", *shares], rows)


def unpadded_text() -> list[str]:
    figures = {name: one for name, one in _figures("unpadded_text").items() if "time_ratio" in one}
    rows = [[name, f"{one['mean_tokens']:g}", f"{one['time_ratio']:.2f}×"] for name, one in figures.items()]
    return _table(["", "tokens per caption", "time"], rows)


def end_to_end() -> list[str]:
    """Samples/s of both trainers."""
    names = {
        "emoji": "emoji's model, batch 128",
        "CC3M": "ViT-B-32, batch 64, 640×480 JPEG, captions as long as CC3M's",
        "CC12M": "the same, captions as long as CC12M's",
    }
    rows = []
    for key, name in names.items():
        one = _figures("end_to_end")[key]
        speeds = [one[f"{trainer}_samples_per_second"] for trainer in ("open_clip", "fastclip")]
        rows.append([name, *(f"{speed:,.3g}" if speed < 100 else f"{speed:,.0f}" for speed in speeds)])
        rows[-1].append(f"{one['ratio']:.2f}×")
    return _table(["", "OpenCLIP's trainer", "fastclip", "ratio"], rows)


# docs/scaling.md


def plan_errors() -> list[str]:
    return list(plan_fit.markdown())


def hosts(table: str, *only: str) -> list[str]:
    """Table 1 (step times) or 2 (parts of a step) of results/hosts.md; only rows that match a pattern."""
    tables = (ROOT / "results" / "hosts.md").read_text().strip().split("\n\n")
    heading, rule, *rows = tables[int(table) - 1].split("\n")
    wanted = re.compile("|".join(only))
    return [heading, rule, *(row for row in rows if wanted.search(row.replace(" ", "")))]


# README.md and docs/benchmarks.md


def headline() -> list[str]:
    loss, wire = _figures("loss_kernel"), _figures("bytes_on_the_wire")["cases"]
    speed = _figures("end_to_end")
    one = loss["b=256, B=8192, kept"]
    sent, half = (wire[f"K=8, fastclip-v3{form}"]["ratio"] for form in ("", ", float16 wire"))
    slow_link = {
        ratio["setting"]: ratio["median"]
        for ratio in _figures("hosts")["ratios"]
        if (ratio["hosts"], ratio["megabits"]) == (4, 100)
        and (ratio["case"], ratio["peer"]) == ("fastclip-v3", "openclip at once")
    }
    return _with_files(
        ["", "ratio", ""],
        {
            "time in the loss, b = 256 of B = 8,192 (extra memory)": (
                f"{one['time_ratio']:.2f}× ({one['memory_ratio']:.2f}×)",
                "loss_kernel",
            ),
            "bytes sent per step besides weight gradients, K = 8 (with float16 features)": (
                f"{sent:.3f}× ({half:.3f}×)",
                "bytes_on_the_wire",
            ),
            "step, 4 hosts at 100 Mbit/s, features twice the weights (at the paper's 6 %)": (
                f"{slow_link['features']:.2f}× ({slow_link['weights']:.2f}×)",
                "hosts",
            ),
            "samples/s of training, ViT-B-32, captions as long as CC3M's (CC12M's)": (
                f"{speed['CC3M']['ratio']:.2f}× ({speed['CC12M']['ratio']:.2f}×)",
                "end_to_end",
            ),
            "images/s through the loader, 640×480 JPEG, `--data.decoder fast`": (
                f"{_figures('decode')['times_open_clip']['fast']:.2f}×",
                "decode",
            ),
        },
    )


def loss_kernel() -> list[str]:
    figures = _figures("loss_kernel")
    names = {
        "b=256, B=8192, kept": "one rank's share, b = 256 of B = 8,192; similarities kept",
        "b=256, B=8192, kept, distinct": "the same with distinct negatives",
        "b=256, B=8192, recomputed": "b = 256 of B = 8,192; similarities recomputed",
        "b=256, B=8192, recomputed, distinct": "the same with distinct negatives",
        "b=2048, B=2048, kept": "one process, b = B = 2,048; kept",
        "b=2048, B=2048, kept, distinct": "the same with distinct negatives",
        "b=2048, B=2048, recomputed": "b = B = 2,048; recomputed",
        "b=2048, B=2048, recomputed, distinct": "the same with distinct negatives",
        "b=B=16384, recomputed": "one process, b = B = 16,384; recomputed",
    }
    rows = []
    for key, name in names.items():
        time, memory = figures[key].get("time_ratio"), figures[key]["memory_ratio"]
        peer = figures[f"{key.partition(', kept')[0].partition(', recomputed')[0]}, ClipLoss"]["extra_mib"]
        saved = f" ({figures[key]['extra_mib']:,.0f} MiB instead of {peer:,.0f})" if time is None else ""
        rows.append([name, "–" if time is None else f"{time:.2f}×", f"{memory:.3g}×{saved}"])
    return _table(["", "time", "extra memory"], rows)


def wire() -> list[str]:
    """Bytes per rank and step besides the gradients of the weights."""
    cases = _figures("bytes_on_the_wire")["cases"]
    names = [name.removeprefix("K=4, ") for name in cases if name.startswith("K=4")]
    rows = []
    for name in names:
        sent = [cases[f"K={K}, {name}"] for K in (4, 8)]
        rows.append([name, *(f"{case['bytes_sent']:,.0f} ({case['ratio']:.3f}×)" for case in sent)])
    return _table(["", "K = 4", "K = 8"], rows)


def other_figures() -> list[str]:
    """Figures without a table of their own."""
    decode, speed, start = (
        _figures("decode")["times_open_clip"],
        _figures("training_speed"),
        _figures("start_up"),
    )
    share, kills, save = (
        _figures("objective_share"),
        _figures("hostile")["K=1"]["kills"],
        _figures("checkpoint_save"),
    )
    lookup, cut, index = _figures("data_lookup"), _figures("cut_link"), _figures("indexing")
    shares = [
        f"{model} {row['fastclip-v3']['share_percent']:.2f} % ({row['openclip']['share_percent']:.2f} %)"
        for model, row in share.items()
    ]
    speeds = [f"{speed[f'batch {batch}']['speed_up']:.2f}× at batch {batch:,}" for batch in (128, 1024)]
    state_ms = _figures("sample_state")["n=315000000"]["milliseconds"]
    help_s, python_s = start["seconds"].values()
    return _with_files(
        ["", "", ""],
        {
            "images/s against open_clip's transform and tokenizer, 640×480 JPEG": (
                f"`fast` {decode['fast']:.2f}×, `exact` {decode['exact']:.2f}×",
                "decode",
            ),
            "share of a step in the loss, 2 ranks (open_clip's loss)": ("; ".join(shares), "objective_share"),
            "fetch and update 5,120 of 315 million estimators": (f"{state_ms:.1f} ms", "sample_state"),
            "samples/s of two ranks with one thread each, against one rank": (
                ", ".join(speeds),
                "training_speed",
            ),
            f"killed {sum(kills.values())} times at random moments, then resumed, 1 and 2 ranks": (
                "the same bits",
                "hostile",
            ),
            "two hosts, link cut, `--timeout 20`: seconds until both ranks stopped": (
                f"{cut['seconds_until_all_workers_had_stopped']}; the resumed run has the same losses",
                "cut_link",
            ),
            f"save a checkpoint of {save['megabytes']:,} MB, against a plain write": (
                f"{save['ratio']:.2f}×",
                "checkpoint_save",
            ),
            f"index {index['pairs']:,} pairs, two processes (two ranks) against one": (
                f"{index['two_processes_speedup']:.2f}× ({index['two_ranks_speedup']:.2f}×)",
                "indexing",
            ),
            f"find {lookup['batch']:,} pairs among {lookup['rows'] // 10**6} million": (
                f"{lookup['lookup']['full_milliseconds']:.1f} ms",
                "data_lookup",
            ),
            "`fastclip --help` (Python alone)": (f"{help_s:.3f} s ({python_s:.3f} s)", "start_up"),
        },
        names=2,
    )


def fuzz() -> list[str]:
    """Executions and failures of each reader."""
    rows = [
        [name, f"{found['executions']:,}", str(len(found["failures"])), ", ".join(found["failures"]) or "–"]
        for name, found in _figures("fuzz")["readers"].items()
    ]
    return _table(["reader", "executions", "failures", "where"], rows)


def lora() -> list[str]:
    """A step with LoRA and one of full fine-tuning."""
    figures = _figures("lora")
    rows = [
        ["step, s", *_pair(figures["step_seconds"]), f"{figures['time_ratio']:.2f}"],
        ["largest memory of a rank, MiB", *_pair(figures["peak_mib"]), f"{figures['memory_ratio']:.2f}"],
        [
            "checkpoint without the state per sample, MB",
            *_pair(figures["checkpoint_mb"]),
            f"{figures['checkpoint_ratio']:.3f}",
        ],
    ]
    return _table(["ViT-B-32, two ranks, 16 pairs each, float32", "full", "LoRA, rank 8", "ratio"], rows)


def _pair(of_case: dict[str, float]) -> list[str]:
    return [f"{of_case['full']:,}", f"{of_case['lora']:,}"]


_END = {"0": "exit code 0", "75": "exit code 75", "0 and 75": "exit codes 0 and 75"}


def hostile() -> list[str]:
    """What came of kills, of signals and of damaged files."""
    figures = _figures("hostile")
    rows = []
    for ranks in (1, 2):
        found = figures[f"K={ranks}"]
        moments = ", ".join(f"{count} during {moment}" for moment, count in found["kills"].items())
        steps = f"{found['steps']:,} steps, then the same bits"
        rows.append(
            [
                f"kills, K = {ranks} ({found['algorithm']})",
                f"{sum(found['kills'].values())}",
                f"{moments}; {steps}",
            ]
        )
    for phase, ends in figures.get("signals", {}).get("phases", {}).items():
        shown = ", ".join(f"{count} × {_END.get(end, end)}" for end, count in ends.items())
        rows.append([f"signals: {phase}", f"{sum(ends.values())}", shown])
    for name, outcomes in figures["mutations"].items():
        kinds: dict[str, int] = {}
        for outcome, count in outcomes.items():
            kind = outcome.partition(" (")[0]
            kinds[kind] = kinds.get(kind, 0) + count
        rows.append(
            [
                f"damaged: {name}",
                f"{sum(kinds.values())}",
                ", ".join(f"{kind}: {n}" for kind, n in kinds.items()),
            ]
        )
    for kind, outcomes in figures.get("files", {}).items():
        found = ", ".join(f"{outcome}: {count}" for outcome, count in outcomes.items())
        rows.append([f"hostile: {kind}", f"{sum(outcomes.values())}", found])
    return _table(["`results/hostile.json`", "times", "outcome"], rows)


# docs/fine-tuning.md


def low_resolution() -> list[str]:
    """Recall after training at a low image size, after the finish at the full one, and without either."""
    rows = [
        [
            f"`{name}`",
            f"{run['epochs']} at {run['image_size']} pixels",
            f"{run['tokens_per_image']}",
            _percent(run["mean_recall@1"]),
        ]
        for name, run in _figures("low_resolution").items()
    ]
    return _table(["recipe", "epochs", "tokens per image", "mean recall@1, %"], rows, names=2)


TABLES: dict[str, Callable[..., list[str]]] = {
    "study": study,
    "paired": paired,
    "gamma-search": gamma_search,
    "plan-errors": plan_errors,
    "hosts": hosts,
    "headline": headline,
    "loss-kernel": loss_kernel,
    "unpadded-text": unpadded_text,
    "end-to-end": end_to_end,
    "rho-rules": rho_rules,
    "rho-runs": rho_runs,
    "wire": wire,
    "other-figures": other_figures,
    "hostile": hostile,
    "fuzz": fuzz,
    "lora": lora,
    "low-resolution": low_resolution,
}


def _figures(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["figures"]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _best(values: Iterable[float]) -> list[str]:
    """Two decimals, the highest in bold."""
    values = list(values)
    return [f"**{value:.2f}**" if value == max(values) else f"{value:.2f}" for value in values]


def _with_files(headings: list[str], rows: dict[str, tuple[str, str]], names: int = 1) -> list[str]:
    """A figure per row, with the file that it comes from."""
    cells = [[name, figure, f"`results/{file}.json`"] for name, (figure, file) in rows.items()]
    return _table(headings, cells, names)


def _table(headings: list[str], rows: list[list[str]], names: int = 1) -> list[str]:
    """A Markdown table whose first columns are names and the rest numbers."""
    head, *body = (f"| {' | '.join(row)} |" for row in (headings, *rows))
    rule = "|" + "---|" * names + "---:|" * (len(headings) - names)
    return [re.sub(" {2,}", " ", head), rule, *body]


def main() -> None:
    changed = outdated()
    for path, text in changed.items():
        atomic_write(path, text)
        print(f"updated {path.relative_to(ROOT)}")
    if not changed:
        print("All tables are up to date.")


if __name__ == "__main__":
    main()
