"""Statistics between two records: losses and skipped steps on the device, seconds on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fastclip.data.joining import Batch


class StepStats:
    """Counts losses and skipped steps without waiting for the device until a record is made."""

    def __init__(self, device: torch.device):
        # sum of losses, number of losses, skipped steps of the run, current streak of skips, longest streak
        self.values = torch.zeros(5, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, finite: Tensor) -> None:
        total, steps, skipped, streak, longest = self.values.unbind()
        streak = torch.where(finite, 0.0, streak + 1)
        counts = [total + torch.where(finite, loss, 0.0), steps + finite, skipped + ~finite, streak]
        self.values.copy_(torch.stack([*counts, torch.maximum(longest, streak)]))

    def summary(self) -> dict[str, Tensor]:
        """`loss` is the mean since the last record, without skipped steps; `skipped` is of the whole run.

        `skipped_now` counts consecutive ones up to this step, `longest_skipped` the most since a record.
        """
        total, steps, skipped, streak, longest = self.values.unbind()
        return {"loss": total / steps, "skipped": skipped, "skipped_now": streak, "longest_skipped": longest}

    def start_new_record(self) -> None:
        """Reset the loss and the longest streak; a streak that is still running continues."""
        self.values[:2] = 0
        self.values[4] = self.values[3]

    def load_state(self, saved: list[list[float]], rank: int, world_size: int) -> None:
        """Restore this rank's values; their mean over ranks if the number of ranks has changed."""
        values = torch.tensor(saved, dtype=torch.float64)
        self.values.copy_(values[rank] if len(saved) == world_size else values.mean(dim=0))


class Stopwatch:
    """Measures seconds of the run, of waiting for data, since the last record and since the last checkpoint.

    Args:
        before: seconds of training in earlier processes.
        step: steps done in earlier processes.
        clock: the current time in seconds.
    """

    def __init__(self, before: float, step: int, *, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        now = clock()
        self._began, self._last_save, self._last_record = now - before, now, now
        self._record_step, self._waited, self._paused = step, 0.0, 0.0

    def waiting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and count the time that each takes to arrive."""
        source = iter(batches)
        while True:
            started = self._clock()
            batch = next(source, None)
            self._waited += self._clock() - started
            if batch is None:
                return
            yield batch
            del batch  # before the next one is fetched: it may be large

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside, of an evaluation or a checkpoint, from the speed of training."""
        started = self._clock()
        yield
        self._paused += self._clock() - started

    def elapsed(self) -> float:
        """Seconds of the whole run, earlier processes included."""
        return self._clock() - self._began

    def record(self, step: int, batch: int) -> dict[str, float]:
        """Speed since the last record."""
        now = self._clock()
        seconds = max(1e-9, now - self._last_record - self._paused)
        steps = max(1, step - self._record_step)
        times = {
            "elapsed": self.elapsed(),
            "samples_per_second": steps * batch / seconds,
            "data_wait": min(1.0, self._waited / seconds),
            "step": seconds / steps,
        }
        self._last_record, self._record_step, self._waited, self._paused = now, step, 0.0, 0.0
        return times

    def save_due(self, minutes: float) -> bool:
        """Whether it is time for a checkpoint."""
        return self._clock() - self._last_save > 60 * minutes

    def saved(self) -> None:
        self._last_save = self._clock()
