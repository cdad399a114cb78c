"""Profiles as workers would have found them."""

from fastclip.tools.profiling.breakdown import AlgorithmProfile, WorkerProfile
from fastclip.tools.profiling.timeline import StepTimes


def times(total, computation=0.0, pure=0.0, overlap=0.0):
    others = total - computation - pure
    return StepTimes(total, computation, pure + overlap, pure, overlap, others, 0.0)


def worker(rank, steps, sent=None):
    return WorkerProfile(rank, steps, sent or {}, 3 << 20, "memory of some kind")


def profile(algorithm, workers, batch=32):
    return AlgorithmProfile(algorithm, batch, workers)
