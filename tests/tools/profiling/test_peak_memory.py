"""Peak memory on a CPU."""

import pytest
import torch

from fastclip.tools.profiling.peak_memory import PeakMemory

CPU = torch.device("cpu")


@pytest.mark.slow
def test_freed_memory_counts_and_earlier_memory_does_not():
    before = torch.ones(64 << 20, dtype=torch.uint8)
    measured = PeakMemory(CPU)
    freed = torch.ones(64 << 20, dtype=torch.uint8)
    del freed
    assert 54 << 20 < measured.bytes() < 84 << 20
    assert len(before)


@pytest.mark.slow
def test_the_peak_is_unknown_where_an_earlier_one_cannot_be_reset(tmp_path):
    assert PeakMemory(CPU, clear_refs=tmp_path / "none" / "clear_refs").bytes() is None
