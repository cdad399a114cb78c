"""Tables and folders that others may have written: each has three good pairs, and something to report."""

import json
import os
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.collections import png
from tests.data.hostile_cases import Bad, Hostile
from tests.data.hostile_tars import GOOD, listen

PNG = png(0, size=(8, 8))
NO_FILE, NO_NAME, BAD_NAME = "image file not found", "no file name", "not a possible file name"


def images(folder):
    """Three good images, and what is called like one."""
    folder.mkdir(exist_ok=True)
    for i in range(3):
        (folder / f"{i}.png").write_bytes(PNG)
    (folder / "folder.png").mkdir()
    (folder / "empty.png").write_bytes(b"")
    (folder / "dangling.png").symlink_to("nothing")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "device.png").symlink_to("/dev/zero")
    os.mkfifo(folder / "fifo.png")
    listen(folder / "socket.png")


def table(name, file, content, bad=(), good=GOOD, refused=False, kind=None):
    """A case of a table beside the images; `content` is its bytes, or writes it to a path."""

    def make(folder):
        images(folder)
        write = content if callable(content) else lambda path: path.write_bytes(content)
        write(folder / file)
        return folder if file == "metadata.jsonl" else folder / file

    title = kind or file.rpartition(".")[2]
    return Hostile(f"{title}: {name}", "table", make, () if refused else good, tuple(bad), refused)


def lines(*rows):
    return b"\n".join(row if isinstance(row, bytes) else row.encode() for row in rows) + b"\n"


def csv_row(name, row, reason):
    """A row after the first good one."""
    content = lines("image,caption", "0.png,good 0", row, "1.png,good 1", "2.png,good 2")
    return table(name, "t.csv", content, [Bad("t.csv", "line 3", reason)])


ROWS = [
    csv_row("NUL in a name", b"a\0b.png,x", BAD_NAME),
    csv_row("folder as an image", "folder.png,x", "a folder, not a file"),
    csv_row("the table's folder as an image", ".,x", "a folder, not a file"),
    csv_row("FIFO as an image", "fifo.png,x", "a FIFO, not a file"),
    csv_row("socket as an image", "socket.png,x", "a socket, not a file"),
    csv_row("device as an image", "/dev/zero,x", "a device, not a file"),
    csv_row("link to a device", "device.png,x", "a device, not a file"),
    csv_row("dangling link", "dangling.png,x", NO_FILE),
    csv_row("link to itself", "loop.png,x", NO_FILE),
    csv_row("image that is not there", "none.png,x", NO_FILE),
    csv_row("image below a file", "0.png/x.png,x", NO_FILE),
    csv_row("name of 5,000 letters", "n" * 5000 + ".png,x", NO_FILE),
    csv_row("name with terminal codes", "\x1b[2J\x07.png,x", NO_FILE),
    csv_row("name with a newline", '"a\nb.png",x', NO_FILE),
    csv_row("image of 0 bytes", "empty.png,x", "image of 0 bytes"),
    csv_row("image that is no file's name", "passwd:/etc,x", NO_FILE),
    csv_row("no name", ",x", NO_NAME),
    csv_row("empty caption", "0.png,", "empty caption"),
    csv_row("caption of white space", '0.png," \t"', "empty caption"),
    csv_row("no caption", "0.png", "no caption"),
    csv_row("more fields than columns", "0.png,a,b", "more fields than columns"),
    csv_row("field of 17 million characters", "0.png," + "x" * 17_000_000, "not a readable row"),
    csv_row("caption of 101 lines", '0.png,"' + "x\n" * 101 + '"', "100 lines"),
    csv_row("URL of an unknown protocol", "nope://a/b.png,x", "unknown protocol"),
    csv_row("URL with a NUL", b"https://a/\0.png,x", "not a possible URL"),
    table(
        "quote that is not closed",
        "t.csv",
        lines("image,caption", "0.png,good 0", "1.png,good 1", '2.png,"open') + b"2.png,x\n" * 200,
        [Bad("t.csv", "line 4", "is a quote not closed")],
        GOOD[:2],
    ),
    table(
        "lists without an end in a caption",
        "t.csv",
        lines("image,caption", "0.png," + "[" * 9000 + "]" * 9000),
        good=("[" * 9000 + "]" * 9000,),
    ),
    table(
        "signs without an end in a caption",
        "t.csv",
        lines("image,caption", "0.png,[" + "-" * 9000 + "]"),
        good=("[" + "-" * 9000 + "]",),
    ),
]


def json_row(name, row, reason):
    rows = [json.dumps({"file_name": f"{i}.png", "text": f"good {i}"}) for i in range(3)]
    row = row if isinstance(row, (str, bytes)) else json.dumps(row)
    return table(
        name, "metadata.jsonl", lines(rows[0], row, *rows[1:]), [Bad("metadata.jsonl", "line 2", reason)]
    )


def json_cell(name, cell, reason, column="text"):
    """A cell in JSON, of a row after the first good one."""
    other = '"file_name": "0.png"' if column == "text" else '"text": "x"'
    return json_row(name, f'{{{other}, "{column}": {cell}}}', reason)


json_name = partial(json_cell, column="file_name")
NO_OBJECT = "not a JSON object"
JSON = [
    json_row("nested 100,000 deep", "[" * 100_000 + "]" * 100_000, NO_OBJECT),
    json_row("objects nested 100,000 deep", '{"text":' * 100_000, NO_OBJECT),
    json_row("integer of 5,000 digits", '{"file_name": "0.png", "text": %s}' % ("9" * 5000), NO_OBJECT),
    json_row("cut off", '{"file_name": "0.png", "te', NO_OBJECT),
    json_row("list as a row", "[1, 2]", NO_OBJECT),
    json_row("text as a row", '"0.png"', NO_OBJECT),
    json_row("NaN as a row", "NaN", NO_OBJECT),
    json_row("binary as a row", b"\x00\x01\x02", NO_OBJECT),
    json_cell("NaN as a caption", "NaN", "caption is a float"),
    json_cell("infinity as a caption", "-Infinity", "caption is a float"),
    json_cell("1e999 as a caption", "1e999", "caption is a float"),
    json_cell("number as a caption", "7", "caption is a int"),
    json_cell("integer of 4,000 digits as a caption", "9" * 4000, "caption is a int"),
    json_cell("truth as a caption", "true", "caption is a bool"),
    json_cell("object as a caption", '{"en": "x"}', "caption is a dict"),
    json_cell("null as a caption", "null", "no caption"),
    json_cell("empty list as a caption", "[]", "no caption"),
    json_cell("list of numbers as a caption", "[1, [2]]", "no caption"),
    json_cell("half a character in a caption", '"a \\ud83d"', "caption is not UTF-8"),
    json_name("half a character in a name", '"\\ud83d.png"', BAD_NAME),
    json_name("NUL in a name", '"\\u0000.png"', BAD_NAME),
    json_name("folder as an image", '"folder.png"', "a folder, not a file"),
    json_name("FIFO as an image", '"fifo.png"', "a FIFO, not a file"),
    json_name("number as a name", "3", NO_NAME),
    json_name("integer of 4,000 digits as a name", "9" * 4000, NO_NAME),
    json_name("NaN as a name", "NaN", NO_NAME),
    json_name("object as a name", '{"path": "0.png"}', NO_NAME),
    json_name("list nested 300 deep as a name", "[" * 300 + "]" * 300, NO_NAME),
    json_name("null as a name", "null", NO_NAME),
    json_name("truth as a name", "true", NO_NAME),
]


def parquet(name, columns, bad, good=GOOD, damage=None, refused=False, **options):
    """A case of a Parquet file with these columns, in row groups of one row, and then damaged."""

    def write(path):
        made = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(made, path, row_group_size=1, use_dictionary=False, **options)
        if damage:
            damage(path)

    return table(name, "t.parquet", write, bad, good, refused)


def page(group, column):
    """Damage the first page of a column of a row group."""

    def damage(path):
        place = pq.ParquetFile(path).metadata.row_group(group).column(column).data_page_offset
        raw = bytearray(path.read_bytes())
        raw[place : place + 8] = b"\xff" * 8
        path.write_bytes(raw)

    return damage


def flip(place):
    def damage(path):
        raw = bytearray(path.read_bytes())
        raw[place] ^= 0xFF
        path.write_bytes(raw)

    return damage


def text(*values):
    """Strings of these bytes, whether they are UTF-8 or not."""
    ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    )


def one_of(good, bad):
    """Four rows, the second of which is bad."""
    return [good[0], bad, *good[1:]]


def beside(name, columns, *bad):
    """A case of two tables, the second of which is bad as a whole."""

    def make(folder):
        images(folder)
        (folder / "data").mkdir()
        pq.write_table(pa.table({"image": BYTES, "caption": list(GOOD)}), folder / "data" / "a.parquet")
        pq.write_table(pa.table(columns), folder / "data" / "b.parquet")
        return folder / "data"

    return Hostile(f"parquet: {name}", "table", make, GOOD, tuple(Bad("b.parquet", *one) for one in bad))


BYTES, NAMES, FOUR = [PNG] * 3, ["0.png", "1.png", "2.png"], [*GOOD[:1], "x", *GOOD[1:]]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
HUGGING = [{"bytes": PNG, "path": None}] * 3
SECOND = [Bad("t.parquet", "row 1", "")]


def second(reason):
    return [Bad("t.parquet", "row 1", reason)]


def hugging(name, image, reason):
    column = pa.array(one_of(HUGGING, image), STRUCT)
    return parquet(name, {"image": column, "text": FOUR}, second(reason))


GROUP = [Bad("t.parquet", "row group 1, column caption (rows 1 to 1)", "damaged Parquet page")]
PATHS = {"image": one_of(NAMES, "0.png"), "caption": FOUR}
INSIDE = {"image": one_of(BYTES, PNG), "caption": FOUR}
PARQUET = [
    parquet("damaged page of captions", INSIDE, GROUP, damage=page(1, 1)),
    parquet("damaged page of captions, image files", PATHS, GROUP, damage=page(1, 1)),
    parquet(
        "damaged page of captions, without compression", INSIDE, GROUP, damage=page(1, 1), compression="none"
    ),
    parquet("damaged page of captions, gzip", INSIDE, GROUP, damage=page(1, 1), compression="gzip"),
    parquet(
        "damaged page of names",
        PATHS,
        [Bad("t.parquet", "row group 1, column image", "damaged Parquet page")],
        damage=page(1, 0),
    ),
    parquet(
        "damaged page of images",
        INSIDE,
        second("damaged Parquet page (row group 1, column image"),
        damage=page(1, 0),
    ),
    parquet(
        "damaged page of images without statistics",
        INSIDE,
        [Bad("t.parquet", "row group 1, column image", "damaged Parquet page")],
        damage=page(1, 0),
        write_statistics=False,
    ),
    parquet(
        "caption that is not UTF-8",
        {"image": one_of(BYTES, PNG), "caption": text(b"good 0", b"\xff", b"good 1", b"good 2")},
        second("caption is not UTF-8"),
    ),
    parquet(
        "name that is not UTF-8",
        {"image": text(b"0.png", b"\xff.png", b"1.png", b"2.png"), "caption": FOUR},
        second("file name is not UTF-8"),
    ),
    parquet("name with a NUL", {"image": one_of(NAMES, "a\0b"), "caption": FOUR}, second(BAD_NAME)),
    parquet(
        "folder as an image",
        {"image": one_of(NAMES, "folder.png"), "caption": FOUR},
        second("a folder, not a file"),
    ),
    parquet(
        "FIFO as an image",
        {"image": one_of(NAMES, "fifo.png"), "caption": FOUR},
        second("a FIFO, not a file"),
    ),
    parquet("null as a name", {"image": one_of(NAMES, None), "caption": FOUR}, second(NO_NAME)),
    parquet(
        "null as an image", {"image": one_of(BYTES, None), "caption": FOUR}, second("the row has no image")
    ),
    parquet("empty image", {"image": one_of(BYTES, b""), "caption": FOUR}, second("the row has no image")),
    parquet(
        "null as a caption",
        {"image": one_of(BYTES, PNG), "caption": one_of(GOOD, None)},
        second("no caption"),
    ),
    parquet(
        "empty list as a caption",
        {"image": one_of(BYTES, PNG), "caption": [["good 0"], [], ["good 1"], ["good 2"]]},
        second("no caption"),
    ),
    hugging("null as an image of Hugging Face", None, "the row has no image"),
    hugging("neither bytes nor path", {"bytes": None, "path": None}, "the row has no image"),
    hugging("path of a folder", {"bytes": None, "path": "folder.png"}, "a folder, not a file"),
    hugging("path of a FIFO", {"bytes": None, "path": "fifo.png"}, "a FIFO, not a file"),
    hugging("path of a device", {"bytes": b"", "path": "/dev/zero"}, "a device, not a file"),
    hugging("path with a NUL", {"bytes": None, "path": "a\0b"}, BAD_NAME),
    hugging("path of 5,000 letters", {"bytes": None, "path": "n" * 5000}, "too long"),
    hugging("path of nothing", {"bytes": None, "path": "none.png"}, "No such file"),
    hugging("bytes that are no image", {"bytes": b"<html>", "path": None}, "not an image"),
    parquet(
        "path of Hugging Face that is not UTF-8",
        {
            "image": pa.StructArray.from_arrays(
                [pa.array([PNG, None, PNG, PNG]), text(b"a", b"\xff", b"b", b"c")], ["bytes", "path"]
            ),
            "text": FOUR,
        },
        second("image is not UTF-8"),
    ),
    beside("numbers as captions", {"image": [PNG], "caption": [7]}, ("row 0", "caption is a int")),
    beside(
        "infinity as captions", {"image": [PNG], "caption": [float("inf")]}, ("row 0", "caption is a float")
    ),
    beside("bytes as captions", {"image": [PNG], "caption": [b"x"]}, ("row 0", "caption is a bytes")),
    beside("objects as captions", {"image": [PNG], "caption": [{"en": "x"}]}, ("row 0", "caption is a dict")),
    beside(
        "times beyond the year 9999 as captions",
        {"image": [PNG], "caption": pa.array([1 << 62], pa.timestamp("us"))},
        ("row 0", "caption cannot be read"),
    ),
    beside("nulls as captions", {"image": [PNG], "caption": pa.nulls(1)}, ("row 0", "no caption")),
    beside("numbers as images", {"image": [7], "caption": ["x"]}, ("row 0", NO_NAME)),
    beside("lists of bytes as images", {"image": [list(PNG[:9])], "caption": ["x"]}, ("row 0", NO_NAME)),
    beside(
        "objects without bytes as images",
        {"image": [{"url": "x"}], "caption": ["x"]},
        ("row 0", "the row has no image"),
    ),
    beside(
        "objects with text as images",
        {"image": [{"bytes": "x"}], "caption": ["x"]},
        ("row 0", "image is a str"),
    ),
    beside(
        "objects with numbers as images",
        {"image": [{"bytes": 7, "path": 7}], "caption": ["x"]},
        ("row 0", "image is a int"),
    ),
    beside(
        "objects with a number as a path",
        {"image": [{"bytes": None, "path": 7}], "caption": ["x"]},
        ("row 0", "the row has no image"),
    ),
]


def refused(name, file, content, reason):
    return table(f"table: {name}", file, content, [Bad(file, "", reason)], refused=True)


TWICE = pa.Table.from_arrays(
    [pa.array(BYTES), pa.array(BYTES), pa.array(list(GOOD))], ["image", "image", "caption"]
)
NOT_PARQUET = "is not a readable Parquet file"
REFUSED = [
    refused("FIFO", "t.csv", os.mkfifo, "a FIFO, not a file"),
    refused("folder", "t.csv", lambda path: path.mkdir(), "a folder, not a file"),
    refused("socket", "t.tsv", listen, "a socket, not a file"),
    refused("link to a device", "t.csv", lambda path: path.symlink_to("/dev/zero"), "a device, not a file"),
    refused("no columns", "t.csv", b"", "has no columns"),
    refused("other columns", "t.csv", b"a,b\n1,2\n", "has no column for the image"),
    refused("header of 17 million characters", "t.csv", b"x" * 17_000_000 + b"\n1,2\n", "line 1"),
    refused("not UTF-8", "t.csv", b"image,caption\n0.png,caf\xe9\n", "is not UTF-8"),
    refused("FIFO", "metadata.jsonl", os.mkfifo, "a FIFO, not a file"),
    refused("folder", "metadata.jsonl", lambda path: path.mkdir(), "a folder, not a file"),
    refused("FIFO", "t.parquet", os.mkfifo, "a FIFO, not a file"),
    refused("folder", "t.parquet", lambda path: path.mkdir(), "a folder, not a file"),
    refused("empty", "t.parquet", b"", NOT_PARQUET),
    refused("text", "t.parquet", b"image,caption\n", NOT_PARQUET),
    parquet(
        "damaged magic bytes", INSIDE, [Bad("t.parquet", "", NOT_PARQUET)], damage=flip(-1), refused=True
    ),
    parquet(
        "damaged length of the footer",
        INSIDE,
        [Bad("t.parquet", "", NOT_PARQUET)],
        damage=flip(-5),
        refused=True,
    ),
    parquet("damaged footer", INSIDE, [Bad("t.parquet", "", NOT_PARQUET)], damage=flip(-9), refused=True),
    parquet(
        "cut off",
        INSIDE,
        [Bad("t.parquet", "", NOT_PARQUET)],
        damage=lambda path: os.truncate(path, 700),
        refused=True,
    ),
    parquet(
        "two columns of one name", TWICE, [Bad("t.parquet", "", "several columns called image")], refused=True
    ),
]


def folder(name, change, *bad, good=GOOD):
    """A case of a folder of images with captions beside them, after `change(folder)`."""

    def make(path):
        path = path / "data"
        path.mkdir()
        for i in range(3):
            (path / f"{i}.png").write_bytes(PNG)
            (path / f"{i}.txt").write_text(f"good {i}")
        change(path)
        return path

    return Hostile(f"folder: {name}", "folder", make, good, tuple(Bad("", *one) for one in bad))


def image_with(make_caption):
    def change(path):
        (path / "bad.png").write_bytes(PNG)
        make_caption(path / "bad.txt")

    return change


def captioned(make_image):
    def change(path):
        (path / "bad.txt").write_text("a caption")
        make_image(path / "bad.png")

    return change


def sparse_file(path):
    path.touch()
    os.truncate(path, (1 << 24) + 1)


def links(path):
    for name in "abc":
        (path / name).symlink_to(".")


FOLDERS = [
    folder("folder as a caption", image_with(lambda path: path.mkdir()), ("bad.png", "caption is a folder")),
    folder("FIFO as a caption", image_with(os.mkfifo), ("bad.png", "caption is a FIFO")),
    folder(
        "device as a caption",
        image_with(lambda path: path.symlink_to("/dev/zero")),
        ("bad.png", "caption is a device"),
    ),
    folder(
        "caption that is a link to itself",
        image_with(lambda path: path.symlink_to(path.name)),
        ("bad.png", "caption cannot be read"),
    ),
    folder(
        "caption that is a link to nothing",
        image_with(lambda path: path.symlink_to("nothing")),
        ("bad.png", "no caption"),
    ),
    folder(
        "caption that is not UTF-8",
        image_with(lambda path: path.write_bytes(b"caf\xe9")),
        ("bad.png", "caption is not UTF-8"),
    ),
    folder("caption of 16 MiB", image_with(sparse_file), ("bad.png", "caption of more than 16 MiB")),
    folder("empty caption", image_with(lambda path: path.touch()), ("bad.png", "empty caption")),
    folder("no caption", image_with(lambda path: None), ("bad.png", "no caption")),
    folder("FIFO as an image", captioned(os.mkfifo), ("bad.png", "a FIFO, not a file")),
    folder("socket as an image", captioned(listen), ("bad.png", "a socket, not a file")),
    folder(
        "device as an image",
        captioned(lambda path: path.symlink_to("/dev/zero")),
        ("bad.png", "a device, not a file"),
    ),
    folder(
        "link to nothing as an image",
        captioned(lambda path: path.symlink_to("nothing")),
        ("bad.png", NO_FILE),
    ),
    folder(
        "link to itself as an image", captioned(lambda path: path.symlink_to(path.name)), ("bad.png", NO_FILE)
    ),
    folder("image of 0 bytes", captioned(lambda path: path.touch()), ("bad.png", "image of 0 bytes")),
    folder("image that is none", captioned(lambda path: path.write_bytes(b"<html>")), ("", "not an image")),
    folder("links that lead back", links),
]
HOSTILE_TABLES = [*ROWS, *JSON, *PARQUET, *REFUSED, *FOLDERS]
