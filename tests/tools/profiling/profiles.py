"""Profiles with known times."""

from fastclip.tools.profiling.breakdown import AlgorithmProfile, RankProfile
from fastclip.tools.profiling.timeline import StepTimes


def times(total, computation=0.0, pure=0.0, overlap=0.0):
    others = total - computation - pure
    return StepTimes(total, computation, pure + overlap, pure, overlap, others, 0.0)


def rank_profile(rank, steps, sent=None):
    return RankProfile(rank, steps, sent or {}, 3 << 20, "memory of some kind")


def profile(algorithm, ranks, batch=32):
    return AlgorithmProfile(algorithm, batch, ranks)
