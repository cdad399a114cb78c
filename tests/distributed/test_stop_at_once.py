"""Signals outside the training loop end the process at once, wherever it is; each test is a small program."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from fastclip.distributed import stop_at_once
from fastclip.distributed.stop_at_once import STOPPED_CLEANLY, stopping_at_once
from tests.processes import gone, wait_for

BEGIN = """
import ctypes, multiprocessing, os, signal, sys, time
from fastclip.distributed import stop_at_once
from fastclip.distributed.stop_at_once import *

def say(word):
    os.write(1, word.encode() + b"\\n")

stop_at_once.StopAtOnce().start()
"""
SIGNALS = [signal.SIGTERM, signal.SIGINT]


class Program:
    """Runs these lines after `BEGIN`; what it says comes line by line."""

    def __init__(self, lines, **environment):
        command = [sys.executable, "-c", BEGIN + lines]
        environment = {name: value for name, value in os.environ.items() if name != "RANK"} | environment
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def hear(self, word):
        assert self.process.stdout.readline().decode().strip() == word

    def end(self):
        """Its exit code, what else it said, and its lines on stderr."""
        said, errors = self.process.communicate(timeout=60)
        return self.process.returncode, said.decode().split(), errors.decode().splitlines()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    "busy",
    [
        "while True: pass",
        "ctypes.CDLL(None).sleep(600)",  # C code: Python runs no handler until it returns
        "import threading; threading.Lock().acquire(); threading.Event().wait()",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
    ids=["python", "c", "lock", "catches all"],
)
def test_a_signal_ends_the_process_with_75_and_one_line_whatever_it_does(number, busy):
    with Program(f"say('ready')\n{busy}") as program:
        program.hear("ready")
        program.process.send_signal(number)
        code, _, (line,) = program.end()
    assert code == STOPPED_CLEANLY
    assert line.startswith(f"{number.name}: ")
    assert "same command" in line


def test_the_line_says_what_was_described_and_other_ranks_are_silent():
    for rank, lines in (("0", ["SIGTERM: as told"]), ("1", [])):
        with Program("describe('as told'); signal.raise_signal(15)", RANK=rank) as program:
            assert program.end() == (STOPPED_CLEANLY, [], lines)


def test_clean_ups_are_called_newest_first_and_a_failing_one_does_not_stop_the_others():
    with Program(
        "CLEAN_UP += [lambda: say('first'), lambda: 1 / 0, lambda: say('last')]; os.kill(os.getpid(), 15)"
    ) as program:
        code, said, _ = program.end()
    assert (code, said) == (STOPPED_CLEANLY, ["last", "first"])


def test_a_stop_because_another_rank_failed_is_an_error():
    with Program("CLEAN_UP.append(lambda: 'rank 0 failed'); os.kill(os.getpid(), 15)", RANK="1") as program:
        assert program.end() == (1, [], ["SIGTERM: rank 0 failed"])


def test_processes_that_it_has_started_end_too():
    program = """
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
say(str(child.pid))
time.sleep(600)
"""
    with Program(program) as program:
        pid = int(program.process.stdout.readline())
        program.process.terminate()
        assert program.end()[0] == STOPPED_CLEANLY  # and nobody holds its output open
    assert wait_for(lambda: gone(pid))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, 7)])
def test_a_signal_to_a_forked_process_is_not_one_to_its_parent(number, code):
    program = f"""
child = os.fork()
if child == 0:
    os.kill(os.getpid(), {int(number)})
    os._exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
time.sleep(0.1)  # a signal in the pipe would be heard
say(str(status))
"""
    with Program(program) as program:
        assert program.end() == (0, [str(code)], [])


def test_whoever_sets_another_handler_gets_the_signals_until_it_is_restored():
    program = """
before = signal.signal(15, lambda *_: say("mine"))
os.kill(os.getpid(), 15)
time.sleep(0.1)  # the thread leaves it alone
signal.signal(15, before)
os.kill(os.getpid(), 15)
say("never")
"""
    with Program(program) as program:
        assert program.end()[:2] == (STOPPED_CLEANLY, ["mine"])


def test_when_all_is_done_signals_are_ignored_to_the_end_of_python():
    program = """
class Last:
    def __del__(self, kill=os.kill, me=os.getpid()):  # while Python exits
        kill(me, 15)
        kill(me, 2)
last = Last()
ignore_signals()
os.kill(os.getpid(), 15)
"""
    with Program(program) as program:
        assert program.end() == (0, [], [])


def test_a_rank_that_lost_the_others_ends_with_75_if_it_was_asked_to_stop():
    with Program("note(15); await_signal(); say('never')") as program:
        assert program.end()[:2] == (STOPPED_CLEANLY, [])
    with Program("stop_at_once._LATE = 0.01; await_signal(); say('continues')") as program:
        assert program.end()[0] == 0


def test_handlers_are_restored_and_calls_may_be_nested():
    before = [signal.getsignal(number) for number in SIGNALS], threading.active_count()
    with stopping_at_once():
        within = signal.getsignal(signal.SIGTERM)
        with stopping_at_once():
            assert signal.getsignal(signal.SIGTERM) == within
        assert signal.getsignal(signal.SIGTERM) == within != before[0][0]
    assert ([signal.getsignal(number) for number in SIGNALS], threading.active_count()) == before
    assert stop_at_once._current is None
    assert signal.set_wakeup_fd(-1) == -1


def test_in_another_thread_and_without_a_handler_nothing_happens():
    seen = []

    def work():
        with stopping_at_once():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
    stop_at_once.describe("nothing")
    stop_at_once.note(15)
    stop_at_once.await_signal()
    stop_at_once.ignore_signals()
    assert signal.getsignal(signal.SIGTERM) == seen[0]
