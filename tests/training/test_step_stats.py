"""Statistics between two records: means without skipped steps, streaks of skips, and seconds."""

import weakref
from math import isnan

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastclip.training.step_stats import StepStats, Stopwatch

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)


def count(stats, *losses):
    """Add steps: a number is the loss of a step, None a skipped step."""
    for loss in losses:
        stats.add(torch.tensor(float("nan") if loss is None else loss), NO if loss is None else YES)
    return {name: value.item() for name, value in stats.summary().items()}


# Losses and skipped steps


def test_the_loss_is_the_mean_of_the_steps_since_the_last_record():
    stats = StepStats(CPU)
    assert count(stats, 1.0, 2.0, 6.0) == {"loss": 3.0, "skipped": 0, "longest_skipped": 0, "skipped_now": 0}
    stats.start_new_record()
    assert count(stats, 5.0)["loss"] == 5.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 100.0])
def test_a_skipped_step_does_not_affect_the_mean_whatever_its_loss(bad):
    stats = StepStats(CPU)
    count(stats, 1.0)
    stats.add(torch.tensor(bad), NO)
    assert count(stats, 3.0) == {"loss": 2.0, "skipped": 1, "longest_skipped": 1, "skipped_now": 0}


def test_the_loss_is_nan_if_all_steps_were_skipped():
    summary = count(StepStats(CPU), None, None)
    assert isnan(summary["loss"])
    assert summary["skipped"] == summary["longest_skipped"] == 2


def test_skipped_steps_are_counted_over_the_whole_run():
    stats = StepStats(CPU)
    count(stats, None, 1.0, None)
    stats.start_new_record()
    assert count(stats, 1.0, None)["skipped"] == 3


def test_the_longest_streak_since_the_record_counts_even_if_it_has_ended():
    stats = StepStats(CPU)
    assert count(stats, None, None, None, 1.0, None)["longest_skipped"] == 3
    stats.start_new_record()
    assert count(stats, 1.0)["longest_skipped"] == 1  # the streak that was running at the record
    stats.start_new_record()
    assert count(stats, 1.0)["longest_skipped"] == 0


def test_a_streak_of_skipped_steps_continues_across_records():
    stats = StepStats(CPU)
    for so_far in (3, 6, 9, 12):
        assert count(stats, None, None, None)["longest_skipped"] == so_far
        stats.start_new_record()


def test_stats_from_a_checkpoint_continue_on_each_rank():
    saved = [StepStats(CPU), StepStats(CPU)]
    for stats, loss in zip(saved, (1.0, 3.0), strict=True):  # open_clip's losses differ between ranks
        count(stats, loss, None, None)
    of_all_ranks = [stats.values.tolist() for stats in saved]
    for rank, mean in ((0, 2.5), (1, 3.5)):
        resumed = StepStats(CPU)
        resumed.load_state(of_all_ranks, rank, world_size=2)
        expected = {"loss": mean, "skipped": 3, "longest_skipped": 3, "skipped_now": 0}
        assert count(resumed, None, 4.0) == expected


@pytest.mark.parametrize("ranks", [1, 4])
def test_stats_of_another_number_of_ranks_take_the_mean(ranks):
    saved = [StepStats(CPU), StepStats(CPU)]
    for stats, loss in zip(saved, (1.0, 3.0), strict=True):
        count(stats, loss, None)
    resumed = StepStats(CPU)
    resumed.load_state([stats.values.tolist() for stats in saved], rank=ranks - 1, world_size=ranks)
    assert count(resumed, None) == {"loss": 2.0, "skipped": 2, "longest_skipped": 2, "skipped_now": 2}


def test_many_float32_losses_are_summed_without_rounding():
    stats = StepStats(CPU)
    stats.values[0], stats.values[1] = 2.0**25, 2.0**25 - 1  # as many ones, except the last
    stats.add(torch.tensor(1.0), YES)
    assert stats.values[0] == 2.0**25 + 1


def test_adding_a_step_does_not_wait_for_the_device():
    with FakeTensorMode():  # whose CUDA tensors cannot be read
        stats = StepStats(torch.device("cuda"))
        stats.add(torch.empty((), device="cuda"), torch.empty((), dtype=torch.bool, device="cuda"))
        assert {value.device.type for value in stats.summary().values()} == {"cuda"}
        stats.start_new_record()


# Seconds


def slow_batches(clock, *seconds):
    for number, wait in enumerate(seconds):
        clock.now += wait
        yield number
    clock.now += 0.25  # to reach the end of the data


def test_speed_is_measured_since_the_last_record(clock):
    stopwatch = Stopwatch(0.0, 10, clock=clock)
    clock.now += 4
    record = stopwatch.record(18, batch=32)
    assert record == {"elapsed": 4.0, "samples_per_second": 64.0, "data_wait": 0.0, "step": 0.5}
    clock.now += 1
    slower = {"elapsed": 5.0, "samples_per_second": 32.0, "step": 1.0}
    assert stopwatch.record(19, batch=32) == record | slower


def test_time_of_earlier_processes_only_counts_as_elapsed(clock):
    stopwatch = Stopwatch(600.0, 0, clock=clock)
    clock.now += 2
    assert stopwatch.elapsed() == 602
    assert stopwatch.record(1, batch=8)["samples_per_second"] == 4


def test_a_batch_is_released_before_the_next_is_fetched(clock):
    class Large:
        """What a weak reference can point to."""

    seen = []

    def batches():
        for _ in range(3):
            assert [ref() for ref in seen] == [None] * len(seen)
            yield Large()

    for batch in Stopwatch(0.0, 0, clock=clock).waiting(batches()):
        seen.append(weakref.ref(batch))
        del batch
    assert len(seen) == 3


def test_waiting_for_data_is_measured_as_a_share_of_the_time(clock):
    stopwatch, seen = Stopwatch(0.0, 0, clock=clock), []
    for batch in stopwatch.waiting(slow_batches(clock, 1.0, 0.5, 0.25)):
        seen.append(batch)
        clock.now += 2
    assert seen == [0, 1, 2]
    assert stopwatch.record(3, batch=8)["data_wait"] == 2.0 / 8.0  # including the end of the data
    clock.now += 1
    assert stopwatch.record(4, batch=8)["data_wait"] == 0


def test_evaluations_and_checkpoints_do_not_slow_the_steps(clock):
    stopwatch = Stopwatch(0.0, 0, clock=clock)
    clock.now += 2
    for _ in range(2):
        with stopwatch.paused():
            clock.now += 50
    record = stopwatch.record(4, batch=8)
    assert (record["step"], record["samples_per_second"], record["elapsed"]) == (0.5, 16.0, 102.0)
    clock.now += 2
    assert stopwatch.record(8, batch=8)["step"] == 0.5  # a pause counts in one record


def test_two_records_at_the_same_time_do_not_divide_by_zero(clock):
    stopwatch = Stopwatch(0.0, 5, clock=clock)
    record = stopwatch.record(5, batch=8)
    assert record["data_wait"] == 0
    assert record["samples_per_second"] > 0


def test_a_checkpoint_is_due_some_minutes_after_the_last(clock):
    stopwatch = Stopwatch(3600.0, 0, clock=clock)  # earlier processes saved theirs
    assert not stopwatch.save_due(minutes=2)
    clock.now += 120
    assert not stopwatch.save_due(minutes=2)
    clock.now += 1
    assert stopwatch.save_due(minutes=2)
    stopwatch.saved()
    assert not stopwatch.save_due(minutes=2)
