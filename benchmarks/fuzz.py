"""Coverage-guided fuzzing of every reader of files: executions, and errors that are not ours.

Each reader of tests/fuzzing.py runs in a process of its own, for its share of the time. An input that raises
what is not ours is saved and counted once per place; the search continues. An input that crashes or hangs the
process is saved by libFuzzer, and the search starts anew.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.record import save

STARTED = time.monotonic()
INSTRUMENTED = ["fastclip", "tarfile", "json", "csv", "yaml", "zipfile"]  # where coverage guides the search
LONGEST = 30  # seconds per input; libFuzzer reports a longer one as a hang
MOST_MEMORY = 4_096  # MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", help="all by default")
    parser.add_argument("--seconds", type=float, default=600, help="in total (default: 600)")
    parser.add_argument(
        "--inputs", type=Path, help="folder for inputs that failed (default: a temporary one)"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    inputs = given.inputs or Path(tempfile.mkdtemp(prefix="fastclip-fuzz-"))
    if given.child:
        search(given.child, given.seconds, inputs)
        return
    from tests.fuzzing import READERS

    names = given.readers or [*READERS]
    figures: dict[str, Any] = {"seconds": given.seconds, "readers": {}}
    for name in names:
        found = fuzz(name, given.seconds / len(names), inputs)
        print(f"{name}: {found['executions']:,} executions, {found['failures'] or 'no failures'}", flush=True)
        figures["readers"][name] = found | {"failures": sorted(found["failures"])}
    if not given.readers:
        save("fuzz", 0, figures, f"make fuzz SECONDS={given.seconds:g}")
    if any(found["failures"] for found in figures["readers"].values()):
        sys.exit(f"The inputs are in {inputs}.")


def fuzz(name: str, seconds: float, inputs: Path) -> dict[str, Any]:
    """Search with one reader; executions, seconds, and failures by their place with a file each."""
    executions, restarts, start = 0, 0, time.monotonic()
    failures: dict[str, str] = {}
    while (left := seconds - (time.monotonic() - start)) > 1 and restarts < 20:
        command = [sys.executable, "-m", "benchmarks.fuzz", "--child", name, "--seconds", str(round(left))]
        done = subprocess.run(
            [*command, "--inputs", str(inputs)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=left + 300,  # for imports on a busy machine, and one input that hangs
        )
        counts = re.findall(r"^(?:#|stat::number_of_executed_units: )(\d+)", done.stderr, re.MULTILINE)
        executions += max(map(int, counts), default=0)
        failures |= dict(re.findall(r"^FAILED (.+) -> (\S+)$", done.stdout, re.MULTILINE))
        if done.returncode == 0:
            break
        restarts += 1
        artifact = re.search(r"Test unit written to (\S+)", done.stderr)
        reason = re.search(r"ERROR: libFuzzer: (.+)", done.stderr)
        kind = reason[1] if reason else f"exit code {done.returncode}: {done.stderr[-300:]}"
        failures[re.sub(r"\d+", "N", kind)] = artifact[1] if artifact else ""
    return {"executions": executions, "seconds": round(time.monotonic() - start), "failures": failures}


def search(name: str, seconds: float, inputs: Path) -> None:
    """Run libFuzzer in this process; it ends the process."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzzing import CHANGES, CHUNKS, READERS, damaged, read_both

    reader, seen = READERS[name], set()
    work = tempfile.TemporaryDirectory()
    corpus = Path(work.name, "corpus")
    folder = Path(work.name, "folder")
    for path in (corpus, folder, inputs):
        path.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(reader.seeds(folder)):
        (corpus / str(number)).write_bytes(seed)

    def test_one_input(data: bytes) -> None:
        try:
            read_both(reader, data, folder)
        except Exception as error:
            place = where(error)
            if place not in seen:
                seen.add(place)
                file = inputs / f"{name.replace(' ', '-')}-{hashlib.sha1(data).hexdigest()[:12]}"
                file.write_bytes(data)
                print(f"FAILED {place} -> {file}", flush=True)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            return atheris.Mutate(data, most)
        change = random.choice(CHANGES), random.random(), random.random(), random.choice(CHUNKS)
        return damaged(data, [change])[:most]

    seconds = max(1, seconds - (time.monotonic() - STARTED))  # 0 would be without an end
    limits = [f"-max_total_time={seconds:.0f}", f"-timeout={LONGEST}", f"-rss_limit_mb={MOST_MEMORY}"]
    quiet = [f"-artifact_prefix={inputs}/", "-print_final_stats=1", "-max_len=65536", "-verbosity=0"]
    atheris.Setup([sys.argv[0], str(corpus), *limits, *quiet], test_one_input, custom_mutator=mutate)
    atheris.Fuzz()


def where(error: BaseException) -> str:
    """The class of an error, and the innermost line of fastclip on its way."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/fastclip/" in frame.filename] or frames
    return f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].lineno}"


if __name__ == "__main__":
    main()
