"""Kills and signals runs at random moments, damages checkpoints and caches at random places, and checks.

After kills and signals the result must be bit-identical to that of an undisturbed run. A damaged file must be
refused by name or rebuilt: nothing may be used silently. Of hostile collections, every bad pair must be
reported.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from random import Random

import torch
from tests.training.runs import ALGORITHM, MOMENTS, Lab, assert_same_run, metrics

from benchmarks.hostile_files import read_hostile_files
from benchmarks.hostile_signals import signal_repeatedly
from benchmarks.record import RESULTS, save
from fastclip.data.decoded_cache import DecodedCache
from fastclip.data.images import MAX_PIXELS
from fastclip.data.manifest import open_manifest
from fastclip.distributed.world import World
from fastclip.errors import PathError
from fastclip.evaluation.feature_cache import cached_features, model_key
from fastclip.evaluation.features import Encoder
from fastclip.evaluation.task_layout import open_pairs_task
from fastclip.run.checkpoint import load, tensor_names
from fastclip.run.folder import find_checkpoint
from fastclip.run.load import load as load_model
from fastclip.run.state_file import read_metadata
from fastclip.tools.search.index import Index

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[*PARTS], choices=[*PARTS, []], help="all by default")
    for part in parser.parse_args().parts:
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](Path(folder), Random(SEED))
        file = RESULTS / "hostile.json"
        known = json.loads(file.read_text())["figures"] if file.exists() else {}
        save("hostile", SEED, known | {part: found}, "python -m benchmarks.hostile")


def kill_repeatedly(folder: Path, ranks: int, kills: int, random: Random) -> dict:
    """Kill and resume this often; AssertionError if the end differs in one bit from an undisturbed run."""
    lab = Lab(folder, epochs=2 * kills)  # 12 steps per kill, more than it needs
    moments: Counter[str] = Counter()
    for number in range(kills):
        moment = random.choice(MOMENTS)
        lab.start(folder / "run", ranks).kill_during(moment, random)
        moments[moment] += 1
        print(f"K={ranks}: kill {number + 1} of {kills}, during {moment}", flush=True)
    for name in ("run", "undisturbed"):
        lab.start(folder / name, ranks).finish(timeout=900)
    assert_same_run(folder / "run", folder / "undisturbed")
    steps = metrics(folder / "run")[-1]["step"]
    print(f"K={ranks}: bit-identical after {kills} kills and {steps} steps", flush=True)
    return {
        "algorithm": ALGORITHM[ranks],
        "steps": steps,
        "kills": dict(sorted(moments.items())),
        "bit_equal": ["weights", "optimizer", "sample state", "metrics"],
    }


def mutate_everything(folder: Path, mutations: int, random: Random) -> dict[str, dict[str, int]]:
    """Damage each kind of file in turn; how often it was refused, rebuilt, or had no effect."""
    os.environ["FASTCLIP_CACHE"] = str(folder / "cache")
    lab = Lab(folder / "lab", epochs=2)
    lab.environment["FASTCLIP_CACHE"] = str(folder / "cache")
    lab.start(folder / "run").finish()
    uses = _uses(folder / "run", lab.train)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in uses}
    for number in range(mutations):
        name = list(uses)[number % len(uses)]
        use, files = uses[name]
        outcome, file = _try_mutation(use, files(), random)
        outcomes[name][outcome] += 1
        print(f"mutation {number + 1} of {mutations}: {name}, {file}: {outcome}", flush=True)
        assert outcome != "used silently", file
    return {name: dict(sorted(found.items())) for name, found in outcomes.items()}


PARTS: dict[str, Callable[[Path, Random], dict]] = {
    "files": lambda folder, random: read_hostile_files(),
    "mutations": lambda folder, random: mutate_everything(folder, 600, random),
    "K=1": lambda folder, random: kill_repeatedly(folder, 1, 100, random),
    "K=2": lambda folder, random: kill_repeatedly(folder, 2, 100, random),
    "signals": lambda folder, random: signal_repeatedly(folder, 60, random),
}

Use = Callable[[], str]
Files = Callable[[], list[Path]]


def _uses(run: Path, pairs: Path) -> dict[str, tuple[Use, Files]]:
    """What reads each kind of file, as a digest of all that it read; and where the files are."""
    cache = Path(os.environ["FASTCLIP_CACHE"])

    def below(*folders: Path) -> Files:
        return lambda: [
            path
            for folder in folders
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix != ".lock"
        ]

    def checkpoint() -> str:
        path = find_checkpoint(run, "last")
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in tensor_names(path).items()}
        load(path, tensors)
        return _digest(dict(read_metadata(path)), *(tensors[name] for name in sorted(tensors)))

    def manifest() -> str:
        found = open_manifest(str(pairs))
        read = [found.read(sample) for sample in range(len(found))]
        return _digest(found.fingerprint, found.files, read, [tuple(one) for one in found.problems()])

    def decoded() -> str:
        found = DecodedCache.open(open_manifest(str(pairs)), MAX_PIXELS, jobs=1)
        return _digest(*(found.image(sample).tobytes() for sample in range(96)))

    model = load_model(run)
    encoder = Encoder(model.towers, World.alone())
    key, task = model_key(model.towers, None), open_pairs_task(str(pairs))
    features_file = cache / "hostile" / "features.safetensors"

    def features() -> str:
        found = cached_features(task, encoder, features_file, key)
        return _digest(found.image_bd, found.kept_b, found.bad)

    def search() -> str:
        index = Index.open(str(run), str(pairs), workers=0)
        return _digest([tuple(match) for match in index.by_text("a red thing", 5)])

    uses: dict[str, tuple[Use, Files]] = {
        "checkpoint": (checkpoint, below(find_checkpoint(run, "last"))),
        "manifest": (manifest, below(open_manifest(str(pairs)).folder)),
        "decoded images": (decoded, below(cache / "decoded")),
        "features": (features, below(features_file.parent)),
        "search index": (search, below(run / "search")),
    }
    for use, _ in uses.values():
        use()  # makes the cache
    return uses


def _try_mutation(use: Use, files: list[Path], random: Random) -> tuple[str, str]:
    """Damage one file, use it, and restore all files."""
    wanted, file = use(), random.choice([path for path in files if path.stat().st_size])
    with _restored(files):
        damage, before = random.choice(DAMAGE), file.read_bytes()
        while file.read_bytes() == before:  # zeros over zeros
            damage(file, random)
        try:
            with _logged() as records:
                same = use() == wanted
        except PathError as error:
            return f"refused by name ({damage.__name__})", Path(error.path).name
        if not same:
            return "used silently", file.name
        return ("rebuilt" if records else "no effect") + f" ({damage.__name__})", file.name


def flip(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, random: Random) -> None:
    os.truncate(file, random.randrange(file.stat().st_size))


def blank(file: Path, random: Random) -> None:
    """Zeros over some bytes, as a lost block."""
    content = bytearray(file.read_bytes())
    start = random.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    file.write_bytes(content)


def extend(file: Path, random: Random) -> None:
    with file.open("ab") as stream:
        stream.write(random.randbytes(7))


DAMAGE = (flip, flip, flip, truncate, blank, extend)


@contextmanager
def _restored(files: list[Path]) -> Iterator[None]:
    saved = {path: path.read_bytes() for path in files}
    folders = {path.parent for path in files}
    try:
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for path, content in saved.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


@contextmanager
def _logged() -> Iterator[list[logging.LogRecord]]:
    """What fastclip logs: a cache that is built again is reported."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("fastclip")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def _digest(*parts: object) -> str:
    found = blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        else:
            found.update(part if isinstance(part, bytes) else repr(part).encode())
    return found.hexdigest()


if __name__ == "__main__":
    main()
