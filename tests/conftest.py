"""Two threads at most, and the same examples each time."""

import os

import hypothesis
import torch

torch.set_num_threads(2)
os.environ.setdefault("OMP_NUM_THREADS", "2")
phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink)
hypothesis.settings.register_profile(
    "fastclip", deadline=None, derandomize=True, max_examples=25, phases=phases, database=None
)
hypothesis.settings.load_profile("fastclip")
