"""Parts of a step from events: overlapping events count once, and a wait is never computation."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastclip.errors import InputError
from fastclip.tools.profiling import timeline
from fastclip.tools.profiling.timeline import (
    NoKernelsError,
    kind_on_cpu,
    kind_on_gpu,
    read_events,
    step_times,
)

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=12)
WINDOW = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: (min(ends), max(ends) + 1))


def event(name, start, end, category="cpu_op", **more):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, **more}


def step(number, start, end):
    return event(f"ProfilerStep#{number}", start, end, "user_annotation")


def waiting(start, end):
    return event(timeline.WAITING_FOR_DATA, start, end, "user_annotation")


# Spans.


def raster(spans, window):
    """The units of time inside any of the spans, one by one."""
    return {t for start, end in spans for t in range(start, end) if window[0] <= t < window[1]}


def array(spans):
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


def assert_covers(spans, units):
    assert raster(spans.tolist(), (-1000, 1000)) == units
    assert timeline.length(spans) == len(units)
    assert (spans[1:, 0] > spans[:-1, 1]).all()  # disjoint, sorted, and as few as possible


@given(SPANS, WINDOW)
def test_covered_and_free_time_agree_with_a_raster(spans, window):
    everything = set(range(*window))
    assert_covers(timeline.covered(array(spans), window), raster(spans, window))
    assert_covers(timeline.free(array(spans), window), everything - raster(spans, window))


@given(SPANS, SPANS, WINDOW)
def test_common_time_agrees_with_a_raster(some, others, window):
    units = raster(some, window) & raster(others, window)
    assert_covers(timeline.common(array(some), array(others), window), units)


@given(SPANS, SPANS, SPANS, st.booleans())
def test_the_parts_of_a_step_agree_with_a_raster(computed, communicated, waited, on_gpu):
    window = (5, 50)
    kernel = "kernel" if on_gpu else "cpu_op"
    events = [step(3, *window), *(waiting(*span) for span in waited)]
    events += [event("aten::mm", *span, kernel) for span in computed]
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if on_gpu else "gloo:all_reduce"
    events += [event(name, *span, kernel if on_gpu else "user_annotation") for span in communicated]
    if on_gpu:
        events.append(event("fill", 1, 2, "kernel"))  # a GPU must have some
    computation, communication, wait = (raster(s, window) for s in (computed, communicated, waited))
    if not on_gpu:
        computation -= wait
    (times,) = step_times(events, "cuda" if on_gpu else "cpu")
    milliseconds = {
        "total": 45,
        "computation": len(computation),
        "communication": len(communication),
        "pure_communication": len(communication - computation),
        "overlap": len(communication & computation),
        "others": 45 - len(communication | computation),
        "data_wait": len(wait - communication - computation),
    }
    assert vars(times) == pytest.approx({name: value / 1000 for name, value in milliseconds.items()})


# Steps.


def test_steps_are_contiguous():
    """The short time between two of the profiler's marks belongs to the earlier step."""
    events = [step(7, 2_000, 2_900), step(5, 0, 950), step(6, 1_000, 1_800)]
    assert [times.total for times in step_times(events, "cpu")] == [1.0, 1.0, 0.9]


def test_an_event_across_two_steps_is_split_between_them():
    events = [step(0, 0, 1_000), step(1, 1_000, 2_000), event("aten::mm", 700, 1_100)]
    assert [times.computation for times in step_times(events, "cpu")] == [0.3, 0.1]


def test_nanoseconds_survive_weeks_of_uptime():
    start = 3_988_247_023_101.059
    events = [step(0, start, start + 0.003), event("aten::mm", start + 0.001, start + 0.002)]
    (times,) = step_times(events, "cpu")
    assert (times.total, times.computation) == (3e-6, 1e-6)


def test_a_trace_without_steps_is_refused():
    with pytest.raises(InputError) as caught:
        step_times([event("aten::mm", 0, 1)], "cpu")
    assert caught.value.argument == "events"


def test_a_gpu_without_recorded_kernels_is_an_error_with_advice():
    with pytest.raises(NoKernelsError) as caught:
        step_times([step(0, 0, 10), event("aten::mm", 0, 5)], "cuda")
    assert "ERR_NVGPUCTRPERM" in str(caught.value)


def test_a_trace_is_read_as_the_profiler_writes_it(tmp_path):
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": [step(0, 0, 10)]}, file)
    assert read_events(path) == [step(0, 0, 10)]


# Kinds of events on a GPU.


@pytest.mark.parametrize(
    ("name", "category", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", "communication"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "kernel", "communication"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "kernel", "communication"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "kernel", "communication"),
        ("ampere_sgemm_128x64_tn", "kernel", "computation"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "kernel",
         "computation"),
        ("flash_fwd_kernel", "kernel", "computation"),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", None),
        ("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", None),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", "computation"),
        ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", "communication"),
        ("Memset (Device)", "gpu_memset", "computation"),
        ("nccl:all_reduce", "gpu_user_annotation", None),
        ("ProfilerStep#7", "gpu_user_annotation", None),
        ("aten::mm", "cpu_op", None),
        ("cudaLaunchKernel", "cuda_runtime", None),
        ("record_param_comms", "cpu_op", None),
        (timeline.WAITING_FOR_DATA, "user_annotation", "data"),
        (timeline.WAITING_FOR_DATA, "gpu_user_annotation", None),
    ],
)  # fmt: skip
def test_kind_of_an_event_on_a_gpu(name, category, kind):
    assert kind_on_gpu(event(name, 0, 1, category)) == kind


def test_a_step_on_a_gpu_as_it_is_recorded():
    """The host runs ahead, so its events do not count; streams run concurrently."""
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 10},
        step(5, 0, 900),
        event("ProfilerStep#5", 0, 950, "gpu_user_annotation"),
        step(6, 1_000, 2_000),
        waiting(0, 400),
        event("aten::mm", 400, 420),
        event("c10d::allreduce_", 430, 450),
        event("cudaStreamSynchronize", 450, 900, "cuda_runtime"),
        event("Memcpy HtoD (Pinned -> Device)", 50, 100, "gpu_memcpy", tid=7),
        event("ampere_sgemm_128x64_tn", 100, 500, "kernel", tid=7),
        event("ampere_sgemm_64x64_nn", 450, 550, "kernel", tid=13),  # on another stream
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 500, 800, "kernel", tid=20),
        event("nccl:all_reduce", 500, 800, "gpu_user_annotation", tid=20),
    ]
    first, second = step_times(events, "cuda")
    assert vars(first) == pytest.approx(
        {
            "total": 1.0,
            "computation": 0.45,
            "communication": 0.3,
            "pure_communication": 0.25,
            "overlap": 0.05,
            "others": 0.3,
            "data_wait": 0.1,  # the rest of the wait overlaps with kernels
        }
    )
    assert (second.computation, second.communication, second.others) == (0, 0, 1.0)


# Kinds of events on a CPU.


@pytest.mark.parametrize(
    ("name", "category", "kind"),
    [
        ("aten::addmm", "cpu_op", "computation"),
        ("aten::_foreach_add_", "cpu_op", "computation"),
        ("torchvision::nms", "cpu_op", "computation"),
        ("## Call CompiledFxGraph fgozks5oke3o ##", "cpu_op", "computation"),
        ("autograd::engine::evaluate_function: _AllGatherBackward", "cpu_op", None),
        ("_AllGatherBackward", "cpu_op", None),
        ("_AllGather", "cpu_op", None),
        ("torch::autograd::AccumulateGrad", "cpu_op", None),
        ("c10d::allreduce_", "cpu_op", None),
        ("_c10d_functional::wait_tensor", "cpu_op", None),
        ("gloo:all_reduce", "user_annotation", "communication"),
        ("gloo:all_gather", "cpu_op", "communication"),
        ("DistributedDataParallel.forward", "user_annotation", None),
        ("Optimizer.step#AdamW.step", "user_annotation", None),
        (timeline.WAITING_FOR_DATA, "user_annotation", "data"),
    ],
)
def test_kind_of_an_event_on_a_cpu(name, category, kind):
    assert kind_on_cpu(event(name, 0, 1, category)) == kind


def test_a_step_on_a_cpu_as_it_is_recorded():
    """A backward node that waits for other ranks computes only while one of its operators runs."""
    events = [
        step(5, 0, 1_000),
        waiting(0, 100),
        event("aten::stack", 20, 60),  # the batch is collated in this process
        event("DistributedDataParallel.forward", 100, 300, "user_annotation"),
        event("aten::linear", 100, 200),
        event("aten::addmm", 110, 190),
        event("c10d::_allgather_base_", 200, 210),
        event("gloo:all_gather", 205, 400, "user_annotation", tid=99),
        event("aten::linear", 210, 300),
        event("autograd::engine::evaluate_function: _AllGatherBackward", 400, 900),
        event("_AllGatherBackward", 401, 899),
        event("gloo:scatter", 410, 850, "user_annotation", tid=98),
        event("aten::copy_", 860, 890),
    ]
    (times,) = step_times(events, "cpu")
    assert vars(times) == pytest.approx(
        {
            "total": 1.0,
            "computation": 0.1 + 0.09 + 0.03,
            "communication": 0.195 + 0.44,
            "pure_communication": 0.105 + 0.44,
            "overlap": 0.09,
            "others": 1.0 - 0.22 - 0.545,
            "data_wait": 0.1,
        }
    )
