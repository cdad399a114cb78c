"""How much memory a training step needs at most: of the GPU, or of this process on a CPU."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux


class PeakMemory:
    """Measures from where it is made on; what was there before does not count."""

    def __init__(self, device: torch.device):
        self.device, self._known = device, True
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError, AttributeError):  # glibc gives back what an earlier model freed,
                ctypes.CDLL(None).malloc_trim(0)  # or the next would seem to need nothing
            try:
                _FORGET.write_text("5")  # the highest so far is what it is now
            except OSError:
                self._known = False  # an earlier model may have needed more
        self._before = self._highest()

    @property
    def what(self) -> str:
        """What is measured, in words."""
        if self.device.type == "cuda":
            return "most GPU memory that was allocated (max_memory_allocated)"
        return (
            "growth of the process's resident memory (peak RSS, without files it maps; good to some 20 MiB)"
        )

    def bytes(self) -> int | None:
        """The most that was in use since the start, beyond what was in use then; None if nobody knows."""
        return self._highest() - self._before if self._known else None

    def _highest(self) -> int:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.device) if on_gpu else _most_resident()


def _most_resident() -> int:
    """Libraries and pictures that are mapped do not count: whoever comes first would pay for all."""
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        kib = {name: int(lines[name].split()[0]) for name in ("VmHWM", "RssFile", "RssShmem")}
        return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) << 10
    except (OSError, KeyError):
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else highest << 10
