"""What is counted between two records: losses and skipped steps on the device, seconds on the host."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fastclip.data.loader import Batch


class StepStats:
    """Losses, and steps that were skipped; nothing waits for the device until a record is made."""

    def __init__(self, device: torch.device):
        # sum of losses, steps in it, all skipped steps, skipped in a row now, longest row since the record
        self.values = torch.zeros(5, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, finite: Tensor) -> None:
        total, steps, skipped, row, longest = self.values.unbind()
        row = torch.where(finite, 0.0, row + 1)
        counts = [total + torch.where(finite, loss, 0.0), steps + finite, skipped + ~finite, row]
        self.values.copy_(torch.stack([*counts, torch.maximum(longest, row)]))

    def numbers(self) -> dict[str, Tensor]:
        """`loss` is the mean since the last record, of the steps that counted."""
        total, steps, skipped, _, longest = self.values.unbind()
        return {"loss": total / steps, "skipped": skipped, "longest_skipped": longest}

    def start_again(self) -> None:
        """After a record: a row of skipped steps that goes on is not forgotten."""
        self.values[:2] = 0
        self.values[4] = self.values[3]

    def load_state(self, saved: list[list[float]], rank: int, workers: int) -> None:
        """This worker's own of everyone's values; if there were more workers or fewer, the mean of all."""
        values = torch.tensor(saved, dtype=torch.float64)
        self.values.copy_(values[rank] if len(saved) == workers else values.mean(dim=0))


class Stopwatch:
    """Seconds of the run, of waiting for data, since the last record, and since the last checkpoint."""

    def __init__(self, before: float, step: int):
        now = time.monotonic()
        self._began, self._last_save, self._last_record = now - before, now, now
        self._record_step, self._waited, self._paused = step, 0.0, 0.0

    def waiting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, with the time that each of them takes to come."""
        source = iter(batches)
        while True:
            asked = time.monotonic()
            batch = next(source, None)
            self._waited += time.monotonic() - asked
            if batch is None:
                return
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluations and checkpoints do not count as time of training steps."""
        started = time.monotonic()
        yield
        self._paused += time.monotonic() - started

    def elapsed(self) -> float:
        """Of the whole run, earlier processes included."""
        return time.monotonic() - self._began

    def record(self, step: int, batch: int) -> dict[str, float]:
        """Speed since the last record."""
        now = time.monotonic()
        seconds = max(1e-9, now - self._last_record - self._paused)
        steps = max(1, step - self._record_step)
        found = {
            "elapsed": self.elapsed(),
            "samples_per_second": steps * batch / seconds,
            "data_wait": min(1.0, self._waited / seconds),
            "step": seconds / steps,
        }
        self._last_record, self._record_step, self._waited, self._paused = now, step, 0.0, 0.0
        return found

    def save_due(self, minutes: float) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._last_save > 60 * minutes

    def saved(self) -> None:
        self._last_save = time.monotonic()
