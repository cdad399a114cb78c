"""Our reader of tars lists what the standard library's does, and reads on where that one stops."""

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.data.tar_headers import DAMAGED, TRAILING, read_tar
from tests.data.hostile_tars import AFTER, BEFORE, END, base_256, header, member, pair

NAMES = st.text("aü/.\U0001f600-\udce9", min_size=1, max_size=140).map(lambda name: name.strip("/") or "x")
KINDS = (
    tarfile.REGTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CONTTYPE,
)
FORMATS = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)


def written(members, form, headers):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, pax_headers=headers) as tar:
        for name, kind, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mtime = kind, name[:3], 1.5
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return out


def listed(stream):
    with tarfile.open(fileobj=stream) as tar:
        infos = [info for info in tar if not info.isdir()]
    return [(info.name, info.offset_data, info.size, info.isreg()) for info in infos]


def read(content):
    members, damages = read_tar(io.BytesIO(content))
    return [f"{one.key}.{one.extension}" for one in members], damages


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(NAMES, st.sampled_from(KINDS), st.binary(max_size=1100)), min_size=1, max_size=6),
    st.sampled_from(FORMATS),
    st.sampled_from([{}, {"comment": "by git"}]),
)
def test_of_an_intact_tar_the_members_are_those_of_the_standard_library(members, form, headers):
    stream = written(members, form, headers)
    found = read_tar(stream)
    assert found.damages == []
    expected = listed(io.BytesIO(stream.getvalue()))
    places = [(one.offset, one.size, one.plain) for one in found.members]
    assert places == [one[1:] for one in expected]
    for one, (name, *_) in zip(found.members, expected, strict=True):
        folder, slash, base = name.rpartition("/")
        assert one.key == folder + slash + base.partition(".")[0]


def test_concatenated_tars_are_read_whole():
    names, damages = read(BEFORE + END + pair(1) + bytes(512) + pair(2) + END)
    assert (names, damages) == ([f"g{i}.{kind}" for i in range(3) for kind in ("png", "txt")], [])


def test_bytes_beyond_the_end_have_their_offset():
    whole = BEFORE + AFTER
    (damage,) = read(whole + b"junk" * 1000)[1]
    assert (damage.start, damage.stop, damage.reason) == (len(whole), len(whole) + 4000, TRAILING)


def test_after_a_damaged_header_the_next_member_is_found():
    names, (damage,) = read(BEFORE + member("bad.png", b"x" * 700, checksum=b"0" * 8) + AFTER)
    assert (damage.start, damage.stop, damage.reason) == (len(BEFORE), len(BEFORE) + 1536, DAMAGED)
    assert names[-4:] == ["g1.png", "g1.txt", "g2.png", "g2.txt"]


@pytest.mark.parametrize("size", [-(1 << 80), -513, -512, -1, 1 << 40, (1 << 87) - 1])
def test_no_size_leads_astray(size):
    names, (damage,) = read(BEFORE + header("bad.png", size_field=base_256(size)) + AFTER)
    assert (damage.start, damage.key) == (len(BEFORE), "bad.png")
    assert len(names) == 6


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_bytes_are_damaged_the_reader_ends_and_stays_inside_the_file(data):
    raw = bytearray(BEFORE + AFTER)
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    members, damages = read_tar(io.BytesIO(raw))
    assert all(0 <= damage.start <= damage.stop <= len(raw) for damage in damages)
    assert all(one.size >= 0 and 0 <= one.header < one.offset for one in members)
    assert [one.header for one in members] == sorted({one.header for one in members})
