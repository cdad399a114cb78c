"""Ranks started on this machine: all of them end, whatever happens."""

import json
import os
import signal
import subprocess
import sys

import pytest

from fastclip.tools.profiling.rank_counts import RankFailure, profile_rank_counts, run_ranks
from tests.processes import gone, wait_for

SLEEP = "import os, sys, time; open(f'{sys.argv[1]}/{os.getpid()}.pid', 'w'); time.sleep(60)"
PRINT_PLACE = (
    "import json, os\n"
    "print(json.dumps({k: os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')}))"
)
FAIL_ON_RANK_1 = (
    "import os, sys, time\n"
    "if os.environ['RANK'] == '1': print('out of luck', file=sys.stderr); sys.exit(3)\n" + SLEEP
)
WRITE_PROFILE = """
import json, os, sys
options = dict(argument[2:].split('=', 1) for argument in sys.argv[2:])
if os.environ['RANK'] == '0':
    profile = {'command': sys.argv[1], 'ranks': os.environ['WORLD_SIZE'], **options}
    json.dump(profile, open(options['out'] + '/profile.json', 'w'))
"""


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def pids(folder):
    return [int(path.stem) for path in folder.glob("*.pid")]


def test_every_rank_has_its_place_and_one_thread(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run_ranks(python(PRINT_PLACE), 2, tmp_path, lambda: None)
    places = [json.loads((tmp_path / f"rank{rank}.log").read_text()) for rank in range(2)]
    assert [place["RANK"] for place in places] == [place["LOCAL_RANK"] for place in places] == ["0", "1"]
    assert {(place["WORLD_SIZE"], place["OMP_NUM_THREADS"]) for place in places} == {("2", "1")}


def test_a_failed_rank_is_reported_with_its_output_and_the_others_end(tmp_path):
    with pytest.raises(RankFailure) as caught:
        run_ranks(python(FAIL_ON_RANK_1, tmp_path), 2, tmp_path, lambda: None)
    log = tmp_path / "rank1.log"
    assert (caught.value.ranks, caught.value.logs) == (2, {1: log})
    assert str(log) in str(caught.value)
    assert "out of luck" in str(caught.value)
    assert all(gone(pid) for pid in pids(tmp_path))


def test_an_error_while_polling_ends_all_ranks(tmp_path):
    def poll():
        if len(pids(tmp_path)) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(python(SLEEP, tmp_path), 2, tmp_path, poll)
    assert len(pids(tmp_path)) == 2
    assert all(gone(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_parent(tmp_path, number):
    code = (
        "import signal, sys\nfrom pathlib import Path\n"
        "from fastclip.tools.profiling.rank_counts import run_ranks\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
        f"run_ranks([sys.executable, '-c', {SLEEP!r}, sys.argv[1]], 2, Path(sys.argv[1]), lambda: None)"
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


def test_every_rank_keeps_its_batch_and_each_number_of_ranks_has_its_folder(tmp_path):
    old = tmp_path / "workers-2" / "trace-openclip-rank0.json.gz"
    old.parent.mkdir()
    old.write_bytes(b"of an earlier profile")
    profiles = profile_rank_counts(["--steps=2"], [1, 2], 16, tmp_path, 1, program=python(WRITE_PROFILE))
    assert [one["batch.size"] for one in profiles] == ["16", "32"]
    assert [one["ranks"] for one in profiles] == ["1", "2"]
    assert profiles[1] == json.loads((tmp_path / "workers-2" / "profile.json").read_text())
    assert {(one["command"], one["steps"]) for one in profiles} == {("profile", "2")}
    assert not old.exists()


def test_the_largest_number_of_ranks_runs_first_as_the_most_likely_to_fail(tmp_path):
    with pytest.raises(RankFailure) as caught:
        profile_rank_counts([], [1, 2, 4], 16, tmp_path, 1, program=python("raise SystemExit(1)"))
    assert caught.value.ranks == 4
    assert [path.name for path in tmp_path.iterdir()] == ["workers-4"]
