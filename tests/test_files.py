"""parallel_map: results in order, from several processes or from this one."""

import os

from fastclip.files import parallel_map


def double_and_pid(x):
    return 2 * x, os.getpid()


def test_results_of_several_processes_are_in_order():
    results = list(parallel_map(double_and_pid, range(20), jobs=2))
    assert [value for value, _ in results] == list(range(0, 40, 2))
    assert os.getpid() not in {pid for _, pid in results}


def test_few_chunks_and_one_job_run_in_this_process():
    for chunks, jobs in ((4, 2), (20, 1), (0, 2)):
        results = list(parallel_map(double_and_pid, range(chunks), jobs=jobs))
        assert results == [(2 * x, os.getpid()) for x in range(chunks)]
