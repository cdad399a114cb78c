import logging
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from fastclip.distributed.interrupts import Decision, Interrupts, StoppedCleanly
from fastclip.distributed.world import World
from tests.ranks import run_ranks

ALONE = World(0, 1, 0, torch.device("cpu"), None)
NOTHING = Decision(stop=False, due=False)


# Several ranks. Processes take seconds to start, so one set of them plays all scenarios.


@pytest.fixture(scope="module")
def played():
    """What each of two ranks saw in each scenario."""
    return run_ranks(_play_all, 2)


def _play_all(rank, size):
    world = World(rank, size, rank, torch.device("cpu"), dist.group.WORLD)
    return {
        "quiet": _polls(world),
        "terminated": _polls(world, before=_signal_itself(signal.SIGTERM, rank=1, call=3)),
        "interrupted": _polls(world, before=_signal_itself(signal.SIGINT, rank=0, call=1)),
        "due": _polls(world, due=lambda call: (rank, call) in {(0, 2), (1, 4)}),
        "due until answered": _polls(world, due=lambda call: rank == 0 and call in (1, 2, 4)),
        "asked between steps": _asked_between_steps(world),
        "slow": _seconds_of_a_poll(world),
        "logged": _logged_reasons(world),
        "failed": _polls_after_a_failure(world),
    }


def _polls(world, before=lambda rank, call: None, due=lambda call: False):
    """The decisions of six calls."""
    decisions = []
    with Interrupts(world) as interrupts:
        for call in range(6):
            before(world.rank, call)
            decisions.append(interrupts.poll(due(call)))
    return decisions


def _signal_itself(number, rank, call):
    return lambda at_rank, at_call: (
        os.kill(os.getpid(), number) if (at_rank, at_call) == (rank, call) else None
    )


def _asked_between_steps(world):
    """Rank 1 gets a signal after the first question; the polls of steps before and after are answered too."""
    with Interrupts(world) as interrupts:
        answers = [interrupts.poll(due=world.is_main), interrupts.stop_requested()]
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        answers += [interrupts.stop_requested(), interrupts.poll(), interrupts.poll()]
    return answers


def _seconds_of_a_poll(world):
    with Interrupts(world) as interrupts:
        world.barrier()
        if world.rank == 1:
            time.sleep(1)
        start = time.monotonic()
        interrupts.poll()
        return time.monotonic() - start


def _logged_reasons(world):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("fastclip").addHandler(handler)
    _polls(world, before=_signal_itself(signal.SIGTERM, rank=1, call=0))
    logging.getLogger("fastclip").removeHandler(handler)
    return [record.args for record in records]


def _polls_after_a_failure(world):
    """Both ranks fail; rank 1 one call earlier than rank 0, whose last flags it does not receive."""
    seconds = time.monotonic()
    try:
        with Interrupts(world) as interrupts:
            for call in range(3):
                if call == 2 and world.rank == 1:
                    raise OSError
                interrupts.poll()
            raise OSError
    except OSError:
        seconds = time.monotonic() - seconds
    if world.rank == 1:  # receive them now, so that the ranks can leave
        dist.all_reduce(torch.zeros(2, dtype=torch.int32), dist.ReduceOp.MAX)
    return seconds


@pytest.mark.slow
def test_without_a_signal_no_rank_stops(played):
    assert all(rank["quiet"] == [NOTHING] * 6 for rank in played)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_the_same_call(played):
    for rank in played:
        assert [decision.stop for decision in rank["terminated"]] == [False] * 4 + [True] * 2
        assert [decision.stop for decision in rank["interrupted"]] == [False] * 2 + [True] * 4


def test_only_rank_0_decides_what_is_due_and_all_see_it_one_call_later(played):
    for rank in played:
        assert [decision.due for decision in rank["due"]] == [False] * 3 + [True] + [False] * 2


def test_a_due_that_is_repeated_until_its_answer_is_answered_once(played):
    for rank in played:  # asked in calls 1, 2 and 4
        answers = [call for call, decision in enumerate(rank["due until answered"]) if decision.due]
        assert answers == [2, 5]


def test_between_steps_all_ranks_know_at_once_that_one_was_asked_to_stop(played):
    for rank in played:
        nothing, before, after, first, second = rank["asked between steps"]
        assert (nothing, before, after) == (NOTHING, False, True)
        assert (first, second.stop) == (NOTHING, True)


def test_a_poll_does_not_wait_for_a_slower_rank(played):
    assert all(rank["slow"] < 0.5 for rank in played)


def test_every_rank_logs_once_why_it_stops(played):
    (notified,), (signalled,) = (rank["logged"] for rank in played)
    assert signalled == ("SIGTERM",)
    assert notified != signalled


def test_after_an_exception_no_rank_waits_for_answers(played):
    assert all(rank["failed"] < 5 for rank in played)


# One process.


def test_alone_a_signal_counts_in_the_same_step(caplog):
    with Interrupts(ALONE) as interrupts:
        assert interrupts.poll() == NOTHING
        assert not interrupts.stop_requested()
        assert interrupts.poll(due=True) == Decision(stop=False, due=True)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.poll() == Decision(stop=True, due=False)
        assert interrupts.stop_requested()
    assert [(record.levelname, record.args) for record in caplog.records] == [("WARNING", ("SIGTERM",))]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_another_signal_quits_immediately(first):
    with Interrupts(ALONE) as interrupts:
        os.kill(os.getpid(), first)
        assert interrupts.poll().stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("error", [None, ValueError, StoppedCleanly])
def test_handlers_are_restored(error):
    def mine(number, frame):
        pass

    before = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(error) if error else Interrupts(ALONE), Interrupts(ALONE):
            assert mine not in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
            if error:
                raise error(3)
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is mine
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_another_thread_does_not_handle_signals_and_can_be_asked_to_stop():
    seen = []

    def work():
        before = signal.getsignal(signal.SIGTERM)
        with Interrupts(ALONE) as interrupts:
            seen.append(signal.getsignal(signal.SIGTERM) is before)
            interrupts.request()
            seen.append(interrupts.poll().stop)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True, True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_forked_process_ignores_ctrl_c_and_can_be_terminated(number):
    with Interrupts(ALONE) as interrupts:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), number)
            os._exit(10 + interrupts.poll().stop)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (10 if number == signal.SIGINT else -signal.SIGTERM)
        assert not interrupts.poll().stop


def test_a_clean_stop_carries_its_step():
    stop = StoppedCleanly(1234)
    assert stop.step == 1234
    assert "1,234" in str(stop)
