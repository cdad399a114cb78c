"""One thread per process (`make test` runs two processes), and the same examples each time."""

import os

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink)
hypothesis.settings.register_profile(
    "fastclip", deadline=None, derandomize=True, max_examples=25, phases=phases, database=None
)
hypothesis.settings.load_profile("fastclip")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give every test its own cache."""
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def _counted_captions(monkeypatch):
    """Give tables of studies statistics of equal captions, without the pairs."""
    from fastclip.tools.study import result_tables

    statistics = {"actual": 0.1, "expected": 0.11, "repeated": 0.5, "captions": 320, "samples": 640}
    monkeypatch.setattr(result_tables, "equal_captions", lambda config, progress: statistics)


class Clock:
    """A clock that a test moves; it does not start at zero."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()
