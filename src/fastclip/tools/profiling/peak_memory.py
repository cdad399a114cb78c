"""The peak memory of a training step: of the GPU, or of this process on a CPU."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux


class PeakMemory:
    """The growth of memory since it was created.

    Args:
        clear_refs: the file that resets this process's peak.
    """

    def __init__(self, device: torch.device, clear_refs: Path = _CLEAR_REFS):
        self.device, self._known = device, True
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError, AttributeError):  # let glibc return what an earlier model freed,
                ctypes.CDLL(None).malloc_trim(0)  # or the next would appear to need nothing
            try:
                clear_refs.write_text("5")  # resets the peak to the current value
            except OSError:
                self._known = False  # an earlier model may have needed more
        self._before = self._highest()

    @property
    def what(self) -> str:
        """A description of the measurement."""
        if self.device.type == "cuda":
            return "peak of allocated GPU memory (max_memory_allocated)"
        return "growth of the process's resident memory (peak RSS without mapped files, to about 20 MiB)"

    def bytes(self) -> int | None:
        """The peak above what was in use at the start; None if the system cannot say."""
        return self._highest() - self._before if self._known else None

    def _highest(self) -> int:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.device) if on_gpu else _most_resident()


def _most_resident() -> int:
    """Without mapped files (libraries, images), which the first model would pay for."""
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        kib = {name: int(lines[name].split()[0]) for name in ("VmHWM", "RssFile", "RssShmem")}
        return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) << 10
    except (OSError, KeyError):
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else highest << 10
