"""Workers that are started here: all of them end, whatever happens."""

import json
import os
import signal
import subprocess
import sys

import pytest

from fastclip.tools.profiling import sizes
from fastclip.tools.profiling.sizes import profile_sizes, run_workers
from tests.processes import gone, wait_for

SLEEPER = "import os, sys, time; open(f'{sys.argv[1]}/{os.getpid()}.pid', 'w'); time.sleep(60)"
TELLER = (
    "import os; print({k: os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')})"
)
FAILER = (
    "import os, sys, time\n"
    "if os.environ['RANK'] == '1': print('out of luck', file=sys.stderr); sys.exit(3)\n" + SLEEPER
)
PRETENDER = """
import json, os, sys
options = dict(word[2:].split('=', 1) for word in sys.argv[2:])
if os.environ['RANK'] == '0':
    facts = {'verb': sys.argv[1], 'size': os.environ['WORLD_SIZE'], **options}
    json.dump(facts, open(options['out'] + '/profile.json', 'w'))
"""


def python(code, *words):
    return [sys.executable, "-c", code, *map(str, words)]


def pids(folder):
    return [int(path.stem) for path in folder.glob("*.pid")]


def test_every_worker_has_its_place_and_one_thread(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run_workers(python(TELLER), 2, tmp_path, lambda: None)
    said = [eval((tmp_path / f"rank{rank}.log").read_text()) for rank in range(2)]
    assert [place["RANK"] for place in said] == [place["LOCAL_RANK"] for place in said] == ["0", "1"]
    assert {(place["WORLD_SIZE"], place["OMP_NUM_THREADS"]) for place in said} == {("2", "1")}


def test_a_worker_that_fails_is_told_with_its_words_and_the_others_end(tmp_path):
    with pytest.raises(RuntimeError, match=r"With 2 workers(.|\n)*worker 1 .*rank1.log(.|\n)*out of luck"):
        run_workers(python(FAILER, tmp_path), 2, tmp_path, lambda: None)
    assert all(gone(pid) for pid in pids(tmp_path))


def test_an_error_while_looking_ends_all_workers(tmp_path):
    def look():
        if len(pids(tmp_path)) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_workers(python(SLEEPER, tmp_path), 2, tmp_path, look)
    assert len(pids(tmp_path)) == 2
    assert all(gone(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path, number):
    code = (
        "import signal, sys\nfrom pathlib import Path\n"
        "from fastclip.tools.profiling.sizes import run_workers\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
        f"run_workers([sys.executable, '-c', {SLEEPER!r}, sys.argv[1]], 2, Path(sys.argv[1]), lambda: None)"
    )
    parent = subprocess.Popen(python(code, tmp_path), stderr=subprocess.DEVNULL, process_group=0)
    try:
        assert wait_for(lambda: len(pids(tmp_path)) == 2)
        parent.send_signal(number)
        assert parent.wait(30) != 0
        assert wait_for(lambda: all(gone(pid) for pid in pids(tmp_path)))
    finally:
        parent.kill()
        for pid in pids(tmp_path):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_every_worker_keeps_its_batch_and_each_size_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "PROGRAM", python(PRETENDER))
    old = tmp_path / "workers-2" / "trace-openclip-rank0.json.gz"
    old.parent.mkdir()
    old.write_bytes(b"of an earlier profile")
    found = profile_sizes(["--steps=2"], [1, 2], 16, tmp_path, traces=1)
    assert [one["batch.size"] for one in found] == ["16", "32"]
    assert [one["size"] for one in found] == ["1", "2"]
    assert found[1] == json.loads((tmp_path / "workers-2" / "profile.json").read_text())
    assert {(one["verb"], one["steps"]) for one in found} == {("profile", "2")}
    assert not old.exists()


def test_the_largest_size_comes_first_for_it_is_the_one_that_may_fail(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(sizes, "run_workers", lambda command, size, *rest: started.append(size) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        profile_sizes([], [1, 2, 4], 16, tmp_path, traces=1)
    assert started == [4]
