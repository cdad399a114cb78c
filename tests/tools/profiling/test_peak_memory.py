"""The most memory that a step needs, on a CPU."""

import torch

from fastclip.tools.profiling import peak_memory
from fastclip.tools.profiling.peak_memory import PeakMemory

CPU = torch.device("cpu")


def test_what_was_freed_counts_and_what_was_there_before_does_not():
    before = torch.ones(64 << 20, dtype=torch.uint8)
    measured = PeakMemory(CPU)
    freed = torch.ones(64 << 20, dtype=torch.uint8)
    del freed
    assert 54 << 20 < measured.bytes() < 84 << 20
    assert len(before)


def test_nobody_knows_where_an_earlier_peak_cannot_be_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(peak_memory, "_FORGET", tmp_path / "none" / "clear_refs")
    assert PeakMemory(CPU).bytes() is None
