"""The results of a study as in the paper: mean (sd) over seeds, the best, and the gain over the baseline.

All of it is plain data for `--json`, in fractions of 1, not percent; `rendering` makes tables of it. Equal
captions are counted here too: a contrastive loss treats their samples as negatives of each other.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pandas import DataFrame
from scipy.special import gammaln

from fastclip.config.options import TrainConfig, from_dict, steps_of
from fastclip.data.caption_groups import caption_group
from fastclip.data.images import UnusableSample
from fastclip.data.manifest import Manifest, open_manifest
from fastclip.data.order import Order
from fastclip.data.pairs import Columns
from fastclip.errors import OptionError
from fastclip.run.folder import Run
from fastclip.terminal import console, progress
from fastclip.tools.study.arms import find_baselines, shown_options
from fastclip.tools.study.learning_curves import effort_to_match, main_measures, points
from fastclip.tools.study.measures import Scores, interval_of, paired_difference, read_scores, summarise
from fastclip.tools.study.rendering import for_terminal
from fastclip.tools.study.study_state import StudyState, read_study
from fastclip.tools.study.tune import read_trials

MOST_PAIRS = 5_000_000
CHUNK = 1 << 20  # samples of a run's order that are counted at a time
Baselines = dict[str, str | None]


def print_study(out: Path, json: bool = False) -> None:
    """Print the tables of a study, with the runs that are done."""
    tables = study_tables(read_study(out))
    if json:
        print(json_module.dumps(tables, indent=2))
        return
    for part in for_terminal(tables):
        console().print(part)


def study_tables(state: StudyState, scores: Scores | None = None) -> dict[str, Any]:
    """Collect the scores of a study's runs; "missing" lists what is not included, as sentences."""
    scores, baseline = scores or read_scores(state), state.study.baseline
    baselines, missing = find_baselines(state.arms, baseline), list(scores.missing)
    if baseline and not any(baselines.values()):
        missing.append(
            f"No arm can be compared with the baseline ({shown_options(baseline)}): no other arm "
            "has the same values of all other options."
        )
    if scores.frame.empty:
        missing.append("There are no scores yet: no finished run has an evaluation or tasks.")
    return {
        "study": state.folder.resolve().name,
        "seeds": len(state.study.seeds),
        "arms": [asdict(arm) for arm in state.arms],
        "measures": [
            {"name": name, "kind": kind, "about": found.about.iloc[0], "partial": found.partial.iloc[0]}
            | {"rows": _rows(found, baselines, len(state.study.seeds))}
            for (kind, name), found in scores.frame.groupby(["kind", "measure"], sort=False)
        ],
        "effort": _effort(scores, baselines),
        "tuning": read_trials(state.folder, missing),
        "equal_captions": _captions(scores, missing),
        "missing": missing,
    }


def _rows(scores: DataFrame, baselines: Baselines, seeds: int) -> list[dict]:
    """The numbers of one metric, one row per arm."""
    known, rows = scores.dropna(subset="value").groupby("arm"), []
    values = {arm: dict(zip(found.seed, map(float, found.value), strict=True)) for arm, found in known}
    for name, baseline in baselines.items():
        own, against = values.get(name, {}), values.get(baseline or "", {})
        summary, difference = summarise(own.values()) if own else None, paired_difference(own, against)
        improvement = summary["mean"] - fmean(against.values()) if summary and against else None
        if difference is not None and own.keys() == against.keys():
            improvement = difference["mean"]  # the same number, without rounding differently
        rows.append(
            {
                "arm": name,
                "summary": summary,  # None if no seed has a score
                "missing": seeds - len(own),  # seeds of the study without a score
                "baseline": baseline,  # None for a baseline and without one
                "improvement": improvement,  # of the means over all seeds of each
                "difference": difference,  # paired, over the seeds that both have
                "best": False,
                "values": {str(seed): value for seed, value in own.items()},
            }
        )
    _mark_best(rows)
    return rows


def _mark_best(rows: list[dict]) -> None:
    """Mark the best within each baseline and its arms, or among all arms if there is no baseline.

    Arms that lack seeds are not considered.
    """
    compared = any(row["baseline"] for row in rows)
    for row in rows:
        own = row["baseline"] or row["arm"]
        group = [one for one in rows if not compared or (one["baseline"] or one["arm"]) == own]
        means = [one["summary"]["mean"] for one in group if not one["missing"]]
        row["best"] = len(group) > 1 and not row["missing"] and row["summary"]["mean"] == max(means)


def _effort(scores: Scores, baselines: Baselines) -> dict:
    """Samples and seconds until each arm reaches its baseline's final score, relative to the baseline.

    The mean over seeds and its interval; None unless every seed reached it, as a mean over those that did
    would be biased.
    """
    rows, measure = [], next(iter(main_measures(scores.all_runs)), "")
    for arm, baseline in baselines.items():
        own, theirs = scores.runs[arm], scores.runs.get(baseline or "", {})
        seeds = sorted(own.keys() & theirs.keys()) if measure else []
        if not seeds:
            continue
        efforts = {
            seed: effort_to_match(points(own[seed], measure), points(theirs[seed], measure)) for seed in seeds
        }
        found = {str(seed): effort for seed, effort in efforts.items() if effort is not None}
        samples = {seed: effort[0] for seed, effort in found.items()}
        seconds = {seed: effort[1] for seed, effort in found.items() if effort[1] is not None}
        means = [fmean(known.values()) if len(known) == len(seeds) else None for known in (samples, seconds)]
        rows.append(
            {"arm": arm, "baseline": baseline, "samples": means[0], "seconds": means[1]}
            | {"reached": len(samples), "seeds": len(seeds)}
            | {"samples_by_seed": samples, "seconds_by_seed": seconds}
            | {
                f"{name}_interval": interval_of(known) if len(known) == len(seeds) else (None, None)
                for name, known in (("samples", samples), ("seconds", seconds))
            }
        )
    return {"measure": measure, "rows": rows}


def _captions(scores: Scores, missing: list[str]) -> list[dict]:
    """How often equal captions meet in a batch, for each arm's first seed.

    Counted once for runs with the same data, batch, epochs and order.
    """
    counted: dict[str, dict | None] = {}
    rows = []
    for arm, runs in scores.runs.items():
        if not runs:
            continue
        try:
            config = _order_of(runs[min(runs)])
            data = [config.data.train, config.data.shuffle, config.data.window]
            key = json_module.dumps([data, config.batch.size, config.epochs, config.seed])
            if key not in counted:
                with progress("counting equal captions", "captions") as update:
                    counted[key] = equal_captions(config, update)
        except (OSError, ValueError, TypeError, KeyError) as error:
            sentence = f"How often equal captions meet in a batch is not known: {error}"
            missing += [] if sentence in missing else [sentence]
            continue
        if (found := counted[key]) is not None:
            rows.append({"arm": arm, "batch": config.batch.size, "found": found})
    return rows


def _order_of(run: Run) -> TrainConfig:
    """The part of a run's config that determines its batches, from its checkpoint."""
    saved = run.metadata["config"]
    known = {"data": saved.get("data", {}), "seed": saved.get("seed", 0)}
    return from_dict(known | {name: saved[name] for name in ("epochs", "batch")})


def equal_captions(
    config: TrainConfig,
    progress: Callable[[int, int], None] | None = None,
    *,
    most_pairs: int = MOST_PAIRS,
    chunk: int = CHUNK,
) -> dict[str, Any] | None:
    """An exact count over the run's own batches; None for collections of more than `most_pairs`.

    `actual` is the share of a global batch's samples whose caption occurs again in it, averaged over all
    steps of the run; `expected` is this share for random batches; `repeated` is the share of the collection's
    `samples` whose caption is not unique; `captions` is the number of distinct captions.
    """
    data = config.data
    if data.train is None:
        raise OptionError("data.train", None, "must be given to count captions")
    manifest = open_manifest(data.train, Columns(data.image_column, data.caption_column, data.encoding))
    if len(manifest) > most_pairs:
        return None
    code_n = caption_codes(manifest, progress)
    n, batch = len(manifest), config.batch.size
    steps = steps_of(config.epochs, n, batch)
    # The order is one stream: k batches are one batch k times as large
    together = max(1, min(steps, chunk // batch))
    order = Order(n, together * batch, config.seed, data.shuffle, manifest.block_ends(), data.window)
    met = 0
    for first in range(0, steps, together):
        code_sB = code_n[order.global_batch(first // together).ids].reshape(together, batch)
        met += count_equal(code_sB[: steps - first])
    size_c = np.bincount(code_n)
    shares = {"actual": met / (steps * batch), "expected": expected_share(size_c, batch)}
    repeated = float(size_c[size_c > 1].sum() / n)
    return shares | {"repeated": repeated, "captions": len(size_c), "samples": n}


def caption_codes(manifest: Manifest, progress: Callable[[int, int], None] | None = None) -> np.ndarray:
    """One number per sample, equal for captions that `loss.negatives: distinct` takes as equal."""
    seen: dict[int, int] = {}
    code_n = np.empty(len(manifest), dtype=np.int64)
    for sample in range(len(manifest)):
        try:
            caption = manifest.caption_at(manifest.place(sample))
        except UnusableSample:  # empty: replaced in training, and equal to no other
            caption = f"\0{sample}"
        code_n[sample] = seen.setdefault(caption_group(caption), len(seen))
        if progress is not None and sample % 4096 == 0:
            progress(sample, len(manifest))
    return code_n


def count_equal(code_sB: np.ndarray) -> int:
    """The number of samples whose code occurs again in their row."""
    ordered = np.sort(code_sB, axis=1)
    same = ordered[:, 1:] == ordered[:, :-1]
    edge = np.zeros((len(ordered), 1), dtype=bool)
    return int((np.hstack([same, edge]) | np.hstack([edge, same])).sum())


def expected_share(size_c: np.ndarray, batch: int) -> float:
    """The expected share of a random batch, where `size_c` is the number of samples of each caption.

    The others in the batch are B − 1 draws from the n − 1 other samples; C(n−c, B−1) / C(n−1, B−1) is the
    probability that none of the c − 1 with the same caption is among them.
    """
    n = int(size_c.sum())
    sizes, counts = np.unique(size_c, return_counts=True)
    possible = n - sizes >= batch - 1
    log_none = _log_choose(n - sizes[possible], batch - 1) - _log_choose(np.array(n - 1), batch - 1)
    none = np.zeros(len(sizes))
    none[possible] = np.exp(log_none)
    return float((sizes * counts * (1 - none)).sum() / n)


def _log_choose(n: np.ndarray, k: int) -> np.ndarray:
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
