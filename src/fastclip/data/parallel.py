"""The same work on many chunks, on all cores, with the results in their order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import TypeVar

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
_FEW = 4  # chunks that are not worth starting processes for


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[Chunk], Result], chunks: Iterable[Chunk], jobs: int) -> Iterator[Result]:
    """work(chunk) of each chunk; `work` is a function of a module, or a partial of one. Few wait at once."""
    waiting = iter(chunks)
    first = list(islice(waiting, _FEW + 1))
    if jobs == 1 or len(first) <= _FEW:
        yield from map(work, first)
        yield from map(work, waiting)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        pending = deque(pool.submit(work, chunk) for chunk in [*first, *islice(waiting, jobs)])
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(work, chunk) for chunk in islice(waiting, 1))
