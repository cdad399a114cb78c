"""Work on chunks."""

import os

from fastclip.files import in_order


def double_and_who(x):
    return 2 * x, os.getpid()


def test_results_come_in_order_from_several_processes():
    results = list(in_order(double_and_who, range(20), jobs=2))
    assert [value for value, _ in results] == list(range(0, 40, 2))
    assert os.getpid() not in {who for _, who in results}


def test_little_work_and_one_job_stay_here():
    for chunks, jobs in ((4, 2), (20, 1), (0, 2)):
        results = list(in_order(double_and_who, range(chunks), jobs=jobs))
        assert results == [(2 * x, os.getpid()) for x in range(chunks)]
