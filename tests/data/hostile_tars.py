"""Tars that others may have written: each holds three good pairs, and something that must be reported."""

import io
import os
import socket
import struct

import numpy as np

from tests.data.collections import png
from tests.data.hostile_cases import Bad, Hostile, in_folder

PNG = png(0, size=(8, 8))
END = bytes(1024)


def header(
    name, size=0, kind=b"0", *, size_field=None, link=b"", checksum=None, magic=b"ustar\x0000", rest=b""
):
    """A block of 512 bytes; `size_field` and `checksum` replace what belongs there, `rest` its last bytes."""
    name = name if isinstance(name, bytes) else name.encode()
    field = size_field if size_field is not None else b"%011o\0" % size
    block = struct.pack(
        "100s8s8s8s12s12s8sc100s8s", name, *[b"0000644\0"] * 3, field, b"0" * 11, b" " * 8, kind, link, magic
    )
    block = block.ljust(512 - len(rest), b"\0") + rest
    right = b"%06o\0 " % sum(block)
    return block[:148] + (right if checksum is None else checksum) + block[156:]


def padded(data):
    return data + bytes(-len(data) % 512)


def member(name, data=b"", kind=b"0", **options):
    return header(name, len(data), kind, **options) + padded(data)


def pair(number, name=None, image=PNG):
    name = name or f"g{number}"
    return member(f"{name}.png", image) + member(f"{name}.txt", f"good {number}".encode())


def base_256(number, width=12):
    return (
        (number % 256**width | 0x80 << 8 * (width - 1)).to_bytes(width, "big")
        if number >= 0
        else (256**width + number).to_bytes(width, "big")
    )


def pax(*records, kind=b"x", name="pax", size_field=None):
    """An extended header of (keyword, value) records, or of raw bytes."""
    content = b""
    for record in records:
        if isinstance(record, bytes):
            content += record
            continue
        keyword, value = (part if isinstance(part, bytes) else part.encode() for part in record)
        length = len(keyword) + len(value) + 3
        length += next(digits for digits in range(1, 9) if len(str(length + digits)) == digits)
        content += b"%d %s=%s\n" % (length, keyword, value)
    return member(name, content, kind, size_field=size_field)


def long_name(name, kind=b"L", **options):
    return member("././@LongLink", name + b"\0", kind, **options)


BEFORE = pair(0)
AFTER = pair(1) + pair(2) + END
BYTE = f"byte {len(BEFORE):,}"  # where `between` begins
GOOD = ("good 0", "good 1", "good 2")
CAPTION = member("bad.txt", b"a caption")
DAMAGED = "truncated or damaged tar"
LINK = "a link or a sparse member, not a plain file"
SPECIAL = "a FIFO, a device or of an unknown type, not a plain file"


def tar(name, content, good=GOOD, bad=()):
    """A case of one shard."""
    return Hostile(f"tar: {name}", "tar", in_folder({"s.tar": content}), tuple(good), tuple(bad))


def between(name, content, *reasons, offsets=None):
    """A case of something after the first good pair, which has these reasons at these offsets into it."""
    offsets = offsets or [0] * len(reasons)
    bad = [Bad("s.tar", f"byte {len(BEFORE) + at:,}", why) for why, at in zip(reasons, offsets, strict=True)]
    return tar(name, BEFORE + content + AFTER, bad=bad)


def orphan(name, content, reason, **options):
    """As `between`, of an image: its caption follows, and has none then."""
    offsets = [0, len(content)]
    return between(name, content + CAPTION, reason, "caption without an image", offsets=offsets, **options)


IMAGE = padded(PNG)
SIZES = [
    orphan(
        "size in base 256, of 2^62",
        header("bad.png", size_field=base_256(1 << 62)) + IMAGE,
        "member larger than its tar",
    ),
    orphan(
        "size in base 256, the largest",
        header("bad.png", size_field=b"\x80" + b"\xff" * 11) + IMAGE,
        "member larger than its tar",
    ),
    orphan(
        "size in base 256, negative",
        header("bad.png", size_field=base_256(-512)) + IMAGE,
        "member of a negative size",
    ),
    orphan(
        "size in base 256, the most negative",
        header("bad.png", size_field=b"\xff" + bytes(11)) + IMAGE,
        "member of a negative size",
    ),
    orphan(
        "size in octal, negative",
        header("bad.png", size_field=b"-0000001000\0") + IMAGE,
        "member of a negative size",
    ),
    orphan(
        "size in octal, larger than the file",
        header("bad.png", size_field=b"77777777777\0") + IMAGE,
        "member larger than its tar",
    ),
    orphan("size that is no number", header("bad.png", size_field=b"a few bytes\0") + IMAGE, DAMAGED),
    between("size of blanks", header("bad.png", size_field=b" " * 12) + CAPTION, "image of 0 bytes"),
    between(
        "negative size of an ignored member",
        header("x.json", size_field=base_256(-1)),
        "member of a negative size",
    ),
    between(
        "small size in base 256",
        header("g9.png", size_field=base_256(0)) + member("g9.txt", b"x"),
        "image of 0 bytes",
    ),
]
BAD_HEADERS = [
    orphan("wrong checksum", member("bad.png", PNG, checksum=b"000001\0 "), DAMAGED),
    orphan("no checksum", member("bad.png", PNG, checksum=bytes(8)), DAMAGED),
    orphan("checksum in text", member("bad.png", PNG, checksum=b"checksum"), DAMAGED),
    between(
        "wrong checksum of a caption",
        member("bad.png", PNG) + member("bad.txt", b"x", checksum=b"000001\0 "),
        "no caption",
        DAMAGED,
        offsets=[0, len(IMAGE) + 512],
    ),
    between("header of ones", b"\xff" * 512, DAMAGED),
    between("junk between members", np.random.default_rng(0).bytes(2048), DAMAGED),
    between("text between members", padded(b"<html>404</html>" * 50), DAMAGED),
    tar(
        "header with a wrong checksum at the start",
        member("x.json", b"{}", checksum=b"0" * 8) + BEFORE + AFTER,
        bad=[Bad("s.tar", "byte 0", DAMAGED)],
    ),
    between(
        "number of the owner that is none",
        (lambda block: block[:108] + b"nobody!!" + block[116:])(header("x.json")),
        DAMAGED,
    ),
]
ENDS = [
    between("lone zero block", bytes(512)),
    between("concatenated", END),
    between("concatenated, with padding of 10 KiB", bytes(10_240)),
    between("concatenated twice", END + member("x.json", b"{}") + bytes(10_240)),
    between("zeros of 5 MiB between members", bytes(5 << 20)),
    between(
        "concatenated, with junk between", END + padded(b"junk" * 200) + bytes(512), DAMAGED, offsets=[1024]
    ),
    tar("zeros first", END + BEFORE + AFTER),
    tar(
        "junk behind the end",
        BEFORE + AFTER + b"\1" * 5000,
        bad=[Bad("s.tar", f"byte {len(BEFORE + AFTER):,}", "bytes beyond the end")],
    ),
    tar(
        "a few bytes behind the end",
        BEFORE + AFTER + b"bye\n",
        bad=[Bad("s.tar", f"byte {len(BEFORE + AFTER):,}", "bytes beyond the end")],
    ),
    tar(
        "zeros and junk behind the end",
        BEFORE + AFTER + bytes(99_840) + b"bye",
        bad=[Bad("s.tar", f"byte {len(BEFORE + AFTER) + 99_840:,}", "bytes beyond the end")],
    ),
    tar("odd zeros behind the end", BEFORE + AFTER + bytes(100)),
    tar("one block as the end", BEFORE + AFTER[:-512]),
    tar(
        "no end", BEFORE + AFTER[:-1024], bad=[Bad("s.tar", f"byte {len(BEFORE + AFTER) - 1024:,}", DAMAGED)]
    ),
    tar(
        "end of half a block",
        BEFORE + AFTER[:-768],
        bad=[Bad("s.tar", f"byte {len(BEFORE + AFTER) - 768:,}", DAMAGED)],
    ),
    tar(
        "cut in an image",
        BEFORE + pair(1) + pair(2)[:530],
        GOOD[:2],
        [
            Bad("s.tar", f"byte {2 * len(BEFORE):,}", "image cut off"),
            Bad("s.tar", f"byte {2 * len(BEFORE):,}", DAMAGED),
        ],
    ),
    tar(
        "cut in a caption",
        BEFORE + pair(1) + pair(2)[:-510],
        GOOD[:2],
        [
            Bad("s.tar", f"byte {2 * len(BEFORE):,}", "caption cut off"),
            Bad("s.tar", f"byte {3 * len(BEFORE) - 1024:,}", DAMAGED),
        ],
    ),
    tar(
        "cut in a header",
        BEFORE + pair(1) + pair(2)[:300],
        GOOD[:2],
        [Bad("s.tar", f"byte {2 * len(BEFORE):,}", DAMAGED)],
    ),
    tar(
        "cut in the padding of the last member",
        BEFORE + pair(1) + pair(2)[:-500],
        bad=[Bad("s.tar", f"byte {3 * len(BEFORE) - 1024:,}", DAMAGED)],
    ),
]
CHAIN = long_name(b"x.json")
EXTENDED = [
    between(
        "a thousand long names in a row",
        CHAIN * 1000 + member("x.json"),
        "extended headers in a row",
        offsets=[64 * len(CHAIN)],
    ),
    between(
        "a thousand pax headers in a row",
        pax(("comment", "a")) * 1000,
        "extended headers in a row",
        offsets=[64 * 1024],
    ),
    between("three long names in a row", long_name(b"x.json") * 3 + member("x")),
    between(
        "long name larger than the file",
        header("././@LongLink", kind=b"L", size_field=b"77777777777\0"),
        DAMAGED,
    ),
    between(
        "long name of a negative size",
        header("././@LongLink", kind=b"L", size_field=base_256(-5000)),
        "member of a negative size",
    ),
    between("long name of 2 MiB", long_name(b"n" * (2 << 20)), "extended header of more than 1 MiB"),
    tar("long name without a member", BEFORE + AFTER[:-1024] + CHAIN + END),
    between(
        "long name that is not UTF-8",
        long_name(b"\xff\xfe.png") + member("x", PNG),
        "no caption",
        offsets=[1024],
    ),
    between(
        "long name of an image",
        long_name(b"b" * 300 + b".png") + member("x", PNG),
        "no caption",
        offsets=[1024],
    ),
    between("pax header of 2 MiB", pax(("comment", "c" * (2 << 20))), "extended header of more than 1 MiB"),
    between(
        "pax header larger than the file", header("pax", kind=b"x", size_field=base_256(1 << 60)), DAMAGED
    ),
    between("pax record of length 0", pax(b"0 a=b\n"), "damaged extended header"),
    between("pax record of a length beyond its header", pax(b"99 path=b\n"), "damaged extended header"),
    between("pax record of a length of 19 digits", pax(b"9" * 19 + b" a=b\n"), "damaged extended header"),
    between("pax record of a negative length", pax(b"-5 a=b\n"), "damaged extended header"),
    between("pax record without a value", pax(b"7 abcd\n"), "damaged extended header"),
    between("pax record in binary", pax(b"\xff\xfe\xfd" * 30), "damaged extended header"),
    between("pax size, negative", pax(("size", "-1")), "damaged extended header"),
    between("pax size of 5,000 digits", pax(("size", "9" * 5000)), "damaged extended header"),
    between("pax size that is no number", pax(("size", "many")), "damaged extended header"),
    between(
        "pax size larger than the file",
        pax(("size", "9" * 15)) + member("bad.png", PNG),
        "member larger than its tar",
        offsets=[1024],
    ),
    between(
        "pax path with a NUL", pax(("path", b"b\0ad.png")) + member("x", PNG), "no caption", offsets=[1024]
    ),
    between(
        "pax path that is not UTF-8",
        pax(("path", b"\xff\xfe.png")) + member("x", PNG),
        "no caption",
        offsets=[1024],
    ),
    between(
        "pax path with terminal codes",
        pax(("path", b"\x1b[2J\x07.png")) + member("x", PNG),
        "no caption",
        offsets=[1024],
    ),
    between("one path for all", pax(("path", "g0.png"), kind=b"g"), "one name or size for all"),
    between("one size for all", pax(("size", "1"), kind=b"g"), "one name or size for all"),
    between("a comment for all", pax(("comment", "by git"), kind=b"g")),
]
MAP = struct.pack("12s12s", b"00000000000\0", b"00000000005\0")
KINDS = [
    between(
        "sparse image of GNU tar",
        header("bad.png", 512, b"S", magic=b"ustar  \0", rest=bytes(30) + b"00000001000\0" + bytes(17))
        + bytes(512),
        LINK,
    ),
    tar(
        "sparse map without an end",
        BEFORE
        + AFTER[:-1024]
        + header(
            "bad.png",
            512,
            b"S",
            magic=b"ustar  \0",
            rest=MAP[:24] + bytes(2) + b"\1" + b"00000001000\0" + bytes(17),
        )
        + (bytes(504) + b"\1" + bytes(7)) * 3,
        bad=[Bad("s.tar", f"byte {3 * len(BEFORE):,}", DAMAGED)],
    ),
    between(
        "sparse image, pax 0.0",
        pax(("GNU.sparse.size", "9"), ("GNU.sparse.numblocks", "0")) + member("bad.png", PNG),
        LINK,
        offsets=[1024],
    ),
    between(
        "sparse image, pax 0.1", pax(("GNU.sparse.map", "0,x")) + member("bad.png", PNG), LINK, offsets=[1024]
    ),
    between(
        "sparse image, pax 1.0",
        pax(("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.name", "bad.png"))
        + member("x", b"no map"),
        LINK,
        offsets=[1024],
    ),
    between("hard link as an image", header("bad.png", kind=b"1", link=b"g0.png"), LINK),
    between("link as an image", header("bad.png", kind=b"2", link=b"/etc/passwd"), LINK),
    between(
        "link as a caption",
        header("bad.txt", kind=b"2", link=b"g0.txt") + member("bad.png", PNG),
        LINK,
        "no caption",
        offsets=[0, 512],
    ),
    between("FIFO as an image", header("bad.png", kind=b"6"), SPECIAL),
    between("device as an image", header("bad.png", kind=b"3"), SPECIAL),
    between("block device as a caption", header("bad.txt", kind=b"4"), SPECIAL),
    between("image of an unknown type", member("bad.png", PNG, b"Q"), SPECIAL),
    between("folder called as an image", header("bad.png/", kind=b"5")),
]
NAMES = [
    between("same image twice", member("g0.png", PNG), "duplicate key"),
    between("same image in another format", member("g0.jpg", PNG), "duplicate key"),
    between("same caption twice", member("g0.txt", b"another"), "duplicate key"),
    tar("absolute names", pair(0, "/etc/cron.d/g0") + pair(1, "/g1") + pair(2, "//g2") + END),
    tar("names of folders above", pair(0, "../../g0") + pair(1, "../g1") + pair(2, "a/../../g2") + END),
    between("image without a name", member(".png", PNG), "no caption"),
    between("member without any name", member("", PNG)),
    between("name with terminal codes", member("\x1b]0;owned\x07.png", PNG), "no caption"),
    between("name that is not UTF-8", member(b"\xff\xfe.png", PNG), "no caption"),
]
CONTENT = [
    between("empty caption", member("bad.png", PNG) + member("bad.txt"), "empty caption"),
    between("image of 0 bytes", member("bad.png") + CAPTION, "image of 0 bytes"),
    between("image without a caption", member("bad.png", PNG), "no caption"),
    between("caption without an image", CAPTION, "caption without an image"),
    between(
        "caption of white space",
        member("bad.png", PNG) + member("bad.txt", b" \n\t"),
        "empty caption",
        offsets=[512],
    ),
    between(
        "caption that is not UTF-8",
        member("bad.png", PNG) + member("bad.txt", b"caf\xe9"),
        "caption is not UTF-8",
        offsets=[512],
    ),
    between("image that is none", member("bad.png", b"no image") + CAPTION, "not an image", offsets=[512]),
    between(
        "image cut off inside the member",
        member("bad.png", PNG[: len(PNG) // 2]) + CAPTION,
        "truncated PNG",
        offsets=[512],
    ),
]


def _with_hole(before, hole, after):
    """A shard with so many bytes of nothing, which take no place on the disk."""

    def make(folder):
        with (folder / "s.tar").open("wb") as file:
            file.write(before)
            file.seek(hole, io.SEEK_CUR)
            file.write(after)
            file.truncate()
        return folder / "s.tar"

    return make


def _large(name, size, reason, start, after=b""):
    content = BEFORE + start + header(name, size_field=base_256(size))
    bad = (Bad("s.tar", BYTE, reason),)
    return Hostile(f"tar: {reason}", "tar", _with_hole(content, size + -size % 512, after + AFTER), GOOD, bad)


def _endless(folder):
    (folder / "s.tar").write_bytes(BEFORE + AFTER)
    os.truncate(folder / "s.tar", 1 << 40)
    return folder / "s.tar"


LARGE = [
    _large("bad.png", (1 << 32) + 5, "image of more than 4 GiB", b"", CAPTION),
    _large("bad.txt", (1 << 24) + 1, "caption of more than 16 MiB", member("bad.png", PNG)),
    Hostile("tar: a terabyte of nothing behind the end", "tar", _endless, GOOD),
]


def _beside(name, make, reason, refused=False):
    """A case of two shards, the second of which is `make(path)`: all of it is refused, or it is reported."""

    def both(folder):
        (folder / "data").mkdir()
        (folder / "data" / "a.tar").write_bytes(BEFORE + AFTER)
        make(folder / "data" / "b.tar")
        return folder / "data"

    bad = (Bad("b.tar", "" if refused else "byte 0", reason),)
    return Hostile(f"tar: {name}", "tar", both, () if refused else GOOD, bad, refused)


def listen(path):
    """A socket as a file; its process need not stay."""
    before = os.getcwd()
    os.chdir(path.parent)  # an address has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


FILES = [
    _beside("zeros alone", lambda path: path.write_bytes(bytes(10_240)), DAMAGED),
    _beside("empty file", lambda path: path.write_bytes(b""), DAMAGED),
    _beside("text", lambda path: path.write_bytes(b"this is not a tar " * 100), DAMAGED),
    _beside(
        "gzip",
        lambda path: path.write_bytes(b"\x1f\x8b\x08\0" + np.random.default_rng(1).bytes(3000)),
        DAMAGED,
    ),
    _beside("FIFO", os.mkfifo, "a FIFO, not a file", refused=True),
    _beside("socket", listen, "a socket, not a file", refused=True),
    _beside("folder", lambda path: path.mkdir(), "a folder, not a file", refused=True),
    _beside(
        "link to a device", lambda path: path.symlink_to("/dev/zero"), "a device, not a file", refused=True
    ),
    _beside("link to nothing", lambda path: path.symlink_to("nothing"), "cannot be opened", refused=True),
    _beside("link to itself", lambda path: path.symlink_to("b.tar"), "cannot be opened", refused=True),
]
HOSTILE_TARS = [*SIZES, *BAD_HEADERS, *ENDS, *EXTENDED, *KINDS, *NAMES, *CONTENT, *LARGE, *FILES]
