"""Parts are joined row by row; on a GPU on a stream of its own, and the host never waits."""

import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastclip.data.bad_samples import BadSample
from fastclip.data.batch_parts import Labels, Part
from fastclip.data.joining import Joiner, one_ahead
from fastclip.data.tokenize import TextEnds

CPU = torch.device("cpu")


def part(start, count, longest=4, patches=True):
    """Pairs numbered from `start`; captions of 1 to `longest` tokens, ended by 9."""
    ids = np.arange(start, start + count)
    tokens = np.zeros((count, 16), dtype=np.int64)
    lengths = [1 + int(i) % longest for i in ids]
    for row, length in enumerate(lengths):
        tokens[row, length - 1] = 9
    kept = np.stack([ids, ids + 1], axis=1) if patches else None
    images = torch.from_numpy(ids.astype(np.float32)).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).contiguous()
    labels = Labels(tokens, lengths, ids, ids % 2, kept, [BadSample(int(ids[0]), "a.tar", "empty")])
    return Part(images, labels)


def assert_same(found, expected):
    for name, value in vars(expected).items():
        other = getattr(found, name)
        same = torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
        assert same or name == "bad", name


@pytest.mark.parametrize("sizes", [(3, 3, 1), (1, 6), (7,)])
def test_a_batch_does_not_depend_on_its_parts(sizes):
    joiner = Joiner(CPU, TextEnds("highest", 9, 16))
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    parts = [part(start, size) for start, size in zip(starts, sizes, strict=True)]
    whole = joiner.join(5, 1, 7, iter([part(0, 7)]))
    assert_same(joiner.join(5, 1, 7, iter(parts)), whole)
    assert (whole.step, whole.epoch, whole.tokens.shape) == (5, 1, (7, 4))  # cut to the longest
    assert [one.id for one in joiner.join(5, 1, 7, iter(parts)).bad] == starts


def test_a_batch_of_one_part_is_not_copied():
    only = part(0, 4)
    assert Joiner(CPU, None).join(0, 0, 4, iter([only])).images is only.images


def test_a_part_is_released_before_the_next_is_fetched():
    alive = []

    class Once:
        """Holds nothing of what it returns, unlike a generator."""

        def __init__(self, starts):
            self.starts = iter(starts)

        def __iter__(self):
            return self

        def __next__(self):
            assert [ref() for ref in alive] == [None] * len(alive)
            one = part(next(self.starts), 2)
            alive.append(weakref.ref(one.images))
            return one

    Joiner(CPU, None).join(0, 0, 6, Once((0, 2, 4)))
    assert len(alive) == 3


def test_without_ends_and_patches_a_batch_has_whole_captions_and_no_patches():
    batch = Joiner(CPU, None).join(0, 0, 4, iter([part(0, 2, patches=False), part(2, 2, patches=False)]))
    assert batch.tokens.shape == (4, 16)
    assert (batch.lengths, batch.patches, batch.copied) == (None, None, None)
    assert batch.arrived() is batch


class Stream:
    """Records what happens on streams, in the order of the host's calls."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def record_event(self):
        self.events.append(f"event of {self.name}")
        return "event"

    def wait_event(self, event):
        assert event == "event"
        self.events.append(f"{self.name} waits")


@pytest.fixture
def events(monkeypatch):
    """Streams and copies that are recorded; fake tensors have no streams."""
    events, current = [], ["compute"]

    @contextmanager
    def on(stream):
        current.append(stream.name)
        yield
        current.pop()

    def record(name, original):
        def call(tensor, *args, **options):
            assert options.get("non_blocking", True)
            events.append(f"{name} on {current[-1]}")
            return original(tensor, *args, **options)

        return call

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(events, "copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(events, "compute"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "copy_", record("copy", torch.Tensor.copy_))
    monkeypatch.setattr(torch.Tensor, "to", record("to", torch.Tensor.to))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: events.append("kept"))
    return events


def test_on_a_gpu_parts_are_copied_on_their_own_stream_and_only_use_waits_for_them(events):
    """Fake CUDA tensors raise if the host reads them.

    A default device that another test has set is a mode that calls each recorded function once more.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch._C.DisableTorchFunction():
        joiner = Joiner(torch.device("cuda"), TextEnds("highest", 9, 16))
        batch = joiner.join(0, 0, 4, iter([part(0, 3), part(3, 1)]))
        assert events == ["copy on copies"] * 2 + ["to on copies"] * 2 + ["event of copies"]
        events.clear()
        assert batch.arrived() is batch
        assert events == ["compute waits", *["kept"] * 3]
    devices = [value.device.type for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert devices == ["cuda", "cuda", "cpu", "cpu", "cuda"]  # ids and groups stay on the host
    assert (batch.images.shape, batch.tokens.shape) == ((4, 3, 2, 2), (4, 4))


def numbers(count, fetched, error=None):
    for i in range(count):
        fetched.append(i)
        yield i
    if error is not None:
        raise error


def test_the_next_batch_is_fetched_before_a_step_begins():
    fetched, seen = [], []
    for i in one_ahead(numbers(4, fetched)):
        seen.append((i, len(fetched)))
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert list(one_ahead(numbers(0, []))) == []
    assert list(one_ahead(numbers(1, []))) == [0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_error_is_raised_after_the_batches_before_it(count):
    items = one_ahead(numbers(count, [], OSError("disk")))
    assert [next(items) for _ in range(count)] == list(range(count))
    with pytest.raises(OSError, match="disk"):
        next(items)
