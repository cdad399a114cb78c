"""What is counted between two records: means without skipped steps, rows of skips, and seconds."""

from math import isnan
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastclip.training.step_stats import StepStats, Stopwatch

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)


def count(tally, *losses):
    """A number is a step that counted, None one that was skipped."""
    for loss in losses:
        tally.add(torch.tensor(float("nan") if loss is None else loss), NO if loss is None else YES)
    return {name: value.item() for name, value in tally.numbers().items()}


# Losses and skipped steps


def test_the_loss_is_the_mean_of_the_steps_since_the_last_record():
    tally = StepStats(CPU)
    assert count(tally, 1.0, 2.0, 6.0) == {"loss": 3.0, "skipped": 0, "longest_skipped": 0}
    tally.start_again()
    assert count(tally, 5.0)["loss"] == 5.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 100.0])
def test_a_skipped_step_has_no_part_in_the_mean_whatever_its_loss(bad):
    tally = StepStats(CPU)
    count(tally, 1.0)
    tally.add(torch.tensor(bad), NO)
    assert count(tally, 3.0) == {"loss": 2.0, "skipped": 1, "longest_skipped": 1}


def test_without_a_step_that_counted_there_is_no_loss():
    found = count(StepStats(CPU), None, None)
    assert isnan(found["loss"])
    assert found["skipped"] == found["longest_skipped"] == 2


def test_skipped_steps_are_counted_over_the_whole_run():
    tally = StepStats(CPU)
    count(tally, None, 1.0, None)
    tally.start_again()
    assert count(tally, 1.0, None)["skipped"] == 3


def test_the_longest_row_since_the_record_is_told_even_if_it_has_ended():
    tally = StepStats(CPU)
    assert count(tally, None, None, None, 1.0, None)["longest_skipped"] == 3
    tally.start_again()
    assert count(tally, 1.0)["longest_skipped"] == 1  # the one that the record cut
    tally.start_again()
    assert count(tally, 1.0)["longest_skipped"] == 0


def test_a_row_of_skipped_steps_goes_on_over_records():
    tally = StepStats(CPU)
    for so_far in (3, 6, 9, 12):
        assert count(tally, None, None, None)["longest_skipped"] == so_far
        tally.start_again()


def test_a_tally_from_a_checkpoint_goes_on_on_each_worker():
    saved = [StepStats(CPU), StepStats(CPU)]
    for tally, loss in zip(saved, (1.0, 3.0), strict=True):  # a peer's loss is its worker's own
        count(tally, loss, None, None)
    everyones = [tally.values.tolist() for tally in saved]
    for rank, mean in ((0, 2.5), (1, 3.5)):
        resumed = StepStats(CPU)
        resumed.load_state(everyones, rank, workers=2)
        assert count(resumed, None, 4.0) == {"loss": mean, "skipped": 3, "longest_skipped": 3}


@pytest.mark.parametrize("workers", [1, 4])
def test_a_tally_of_another_number_of_workers_takes_the_mean(workers):
    saved = [StepStats(CPU), StepStats(CPU)]
    for tally, loss in zip(saved, (1.0, 3.0), strict=True):
        count(tally, loss, None)
    resumed = StepStats(CPU)
    resumed.load_state([tally.values.tolist() for tally in saved], rank=workers - 1, workers=workers)
    assert count(resumed, None) == {"loss": 2.0, "skipped": 2, "longest_skipped": 2}


def test_many_float32_losses_are_summed_without_rounding():
    tally = StepStats(CPU)
    tally.values[0], tally.values[1] = 2.0**25, 2.0**25 - 1  # the mean of as many ones, but for one step
    tally.add(torch.tensor(1.0), YES)
    assert tally.values[0] == 2.0**25 + 1


def test_counting_does_not_wait_for_the_device():
    with FakeTensorMode():  # whose CUDA tensors cannot be read
        tally = StepStats(torch.device("cuda"))
        tally.add(torch.empty((), device="cuda"), torch.empty((), dtype=torch.bool, device="cuda"))
        assert {value.device.type for value in tally.numbers().values()} == {"cuda"}
        tally.start_again()


# Seconds


@pytest.fixture
def time(monkeypatch):
    """A clock that stands until it is moved; it does not start at zero."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("fastclip.training.step_stats.time", clock)
    return clock


def slow_batches(time, *seconds):
    for number, wait in enumerate(seconds):
        time.now += wait
        yield number
    time.now += 0.25  # to find out that there are no more


def test_the_speed_is_that_of_the_steps_since_the_last_record(time):
    clock = Stopwatch(0.0, 10)
    time.now += 4
    record = clock.record(18, batch=32)
    assert record == {"elapsed": 4.0, "samples_per_second": 64.0, "data_wait": 0.0, "step": 0.5}
    time.now += 1
    assert clock.record(19, batch=32) == record | {"elapsed": 5.0, "samples_per_second": 32.0, "step": 1.0}


def test_time_of_earlier_processes_counts_as_elapsed_only(time):
    clock = Stopwatch(600.0, 0)
    time.now += 2
    assert clock.elapsed() == 602
    assert clock.record(1, batch=8)["samples_per_second"] == 4


def test_waiting_for_data_is_a_share_of_the_time(time):
    clock, seen = Stopwatch(0.0, 0), []
    for batch in clock.waiting(slow_batches(time, 1.0, 0.5, 0.25)):
        seen.append(batch)
        time.now += 2
    assert seen == [0, 1, 2]
    assert clock.record(3, batch=8)["data_wait"] == 2.0 / 8.0  # the end of the data too
    time.now += 1
    assert clock.record(4, batch=8)["data_wait"] == 0


def test_evaluations_and_checkpoints_do_not_slow_the_steps(time):
    clock = Stopwatch(0.0, 0)
    time.now += 2
    for _ in range(2):
        with clock.paused():
            time.now += 50
    record = clock.record(4, batch=8)
    assert (record["step"], record["samples_per_second"], record["elapsed"]) == (0.5, 16.0, 102.0)
    time.now += 2
    assert clock.record(8, batch=8)["step"] == 0.5  # a pause counts in one record


def test_a_record_right_after_another_divides_by_nothing(time):
    clock = Stopwatch(0.0, 5)
    record = clock.record(5, batch=8)
    assert record["data_wait"] == 0
    assert record["samples_per_second"] > 0


def test_a_checkpoint_is_due_minutes_after_the_last(time):
    clock = Stopwatch(3600.0, 0)  # earlier processes saved theirs
    assert not clock.save_due(minutes=2)
    time.now += 120
    assert not clock.save_due(minutes=2)
    time.now += 1
    assert clock.save_due(minutes=2)
    clock.saved()
    assert not clock.save_due(minutes=2)
