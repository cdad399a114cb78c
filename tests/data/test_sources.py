"""Finding files and reading pairs, from every kind of source, intact and damaged."""

import csv
import io
import json
import pickle
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastclip.data.pairs import Columns, File, Pair, Problem, SourceError
from fastclip.data.sources import expand_braces, find_files, read_pairs
from tests.data.collections import pair_members, picture, png, write_shards, write_tar


def split(file, **options):
    """(pairs, {key: reason}) of a file."""
    items = list(read_pairs(file, **options))
    problems = {item.key: item.reason for item in items if isinstance(item, Problem)}
    return [item for item in items if isinstance(item, Pair)], problems


class TestFinding:
    def test_braces_count_and_choose(self):
        assert expand_braces("a/{008..010}.tar") == ["a/008.tar", "a/009.tar", "a/010.tar"]
        assert expand_braces("{x,y}/{1..2}") == ["x/1", "x/2", "y/1", "y/2"]
        assert expand_braces("plain.tar") == ["plain.tar"]
        assert expand_braces("{a{1..2},b}") == ["a1", "b", "a2", "b"]
        assert len(expand_braces("{000000..009999}/{0..9}.tar")) == 100_000

    @pytest.mark.parametrize(
        "pattern",
        [
            "{0..99999999}.tar",
            "{0..9999}/{0..9999}.tar",
            "{0..99999999}{5..3}.tar",
            "{a,b}" * 1_000,
            "{1..1}" * 5_000,
            f"{{0..{'9' * 5_000}}}",
            f"{{{'9' * 5_000}..1}}",
            "{x{0..999},{y{0..999},z{0..999}}}",
        ],
        ids=range(8),
    )
    def test_a_pattern_of_too_many_files_is_refused_before_it_is_expanded(self, pattern):
        with pytest.raises(SourceError) as caught:
            find_files(pattern)
        assert pattern.startswith(caught.value.path)

    def test_globs_lists_and_folders_are_in_byte_order(self, tmp_path):
        for name in ("b.tar", "a.tar", "B.tar", "é.tar"):
            write_tar(tmp_path / name, [])
        expected = [str(tmp_path / name) for name in ("B.tar", "a.tar", "b.tar", "é.tar")]
        assert [file.path for file in find_files(str(tmp_path))] == expected
        assert [file.path for file in find_files(str(tmp_path / "*.tar"))] == expected
        assert [file.path for file in find_files([expected[2], expected[0]])] == [expected[2], expected[0]]

    def test_existing_name_with_brackets_is_not_a_pattern(self, tmp_path):
        folder = tmp_path / "data[1]"
        folder.mkdir()
        write_tar(folder / "a.tar", [])
        assert len(find_files(str(folder))) == 1

    def test_img2dataset_tables_beside_shards_are_ignored(self, tmp_path):
        write_shards(tmp_path, 4, 2)
        (tmp_path / "00000.parquet").write_bytes(b"")
        (tmp_path / "00000_stats.json").write_text("{}")
        assert {file.kind for file in find_files(str(tmp_path))} == {"tar"}

    @pytest.mark.parametrize(
        ("path", "hint"),
        [
            ("missing.tar", ""),
            ("nodes.md", "notes.md"),
            ("*.none", ""),
            ("a.tar.gz", ".tar"),
            ("notes.md", "tar, csv, tsv, parquet"),
            ("web[1]/none.tar", ""),
        ],
    )
    def test_unreadable_path_is_rejected(self, tmp_path, path, hint):
        for name in ("a.tar.gz", "notes.md"):
            (tmp_path / name).write_text("x")
        with pytest.raises(SourceError) as caught:
            find_files(str(tmp_path / path))
        assert caught.value.path == str(tmp_path / path)
        assert hint in caught.value.problem

    def test_no_path_is_rejected(self):
        with pytest.raises(SourceError) as caught:
            find_files([])
        assert caught.value.path == "[]"

    def test_error_can_be_rebuilt_from_its_message(self):
        """As DataLoader does with an error of a loader worker."""
        error = SourceError("t.csv", "has no column for the image.")
        assert str(SourceError(str(error))) == str(error)
        assert pickle.loads(pickle.dumps(error)).path == "t.csv"


class TestTar:
    def test_pairs_are_in_the_order_of_images_and_other_members_ignored(self, tmp_path):
        members = [
            ("x/b.txt", b"two"),
            ("x/b.jpg", b"jpeg"),
            ("x/a.seg.png", b"not an image of ours"),
            ("x/a.JPG", b"first"),
            ("x/c.webp", b"webp!"),
            ("x/a.txt", b"one"),
            ("x/c.txt", b"three"),
            ("x/a.json", b"{}"),
        ]
        path = write_tar(tmp_path / "s.tar", members)
        raw = path.read_bytes()
        pairs, problems = split(File(str(path), "tar"))
        assert not problems
        contents = [tuple(raw[o : o + n] for o, n in (pair.image, pair.caption)) for pair in pairs]
        assert contents == [(b"jpeg", b"two"), (b"first", b"one"), (b"webp!", b"three")]

    def test_long_names_and_pax_headers(self, tmp_path):
        name = "a" * 150 + "/" + "ü" * 120
        path = write_tar(tmp_path / "s.tar", [(name + ".png", b"1"), (name + ".txt", b"2")])
        assert len(split(File(str(path), "tar"))[0]) == 1

    def test_every_problem_has_a_reason(self, tmp_path):
        members = [
            ("good.png", b"1"),
            ("good.txt", b"2"),
            ("no_caption.png", b"1"),
            ("empty_caption.png", b"1"),
            ("empty_caption.txt", b""),
            ("zero.png", b""),
            ("zero.txt", b"2"),
            ("no_image.txt", b"2"),
            ("twice.png", b"1"),
            ("twice.txt", b"2"),
            ("twice.jpg", b"3"),
        ]
        pairs, problems = split(File(str(write_tar(tmp_path / "s.tar", members)), "tar"))
        assert len(pairs) == 2
        assert problems == {
            "no_caption": "no caption",
            "empty_caption": "empty caption",
            "zero": "image of 0 bytes",
            "no_image": "caption without an image",
            "twice": "duplicate key, second .jpg skipped",
        }

    @pytest.mark.slow
    def test_complete_pairs_of_a_truncated_tar_are_read(self, tmp_path):
        path = write_tar(tmp_path / "s.tar", pair_members(range(10)))
        complete = path.read_bytes()
        end = len(complete.rstrip(b"\0"))  # the end of the last member, before the end of the tar
        for cut in {c for block in range(512, end, 512) for c in (block - 1, block, block + 1)} | {1, 100}:
            path.write_bytes(complete[:cut])
            pairs, problems = split(File(str(path), "tar"))
            assert all(sum(place) <= cut for pair in pairs for place in pair[:2])
            assert "truncated or damaged tar" in problems[""], cut
        path.write_bytes(b"this is not a tar " * 100)
        pairs, problems = split(File(str(path), "tar"))
        assert not pairs
        assert "truncated or damaged tar after 0 images" in problems[""]

    def test_a_damaged_header_costs_its_pair_and_has_its_place(self, tmp_path):
        path = write_tar(tmp_path / "s.tar", pair_members(range(10)))
        raw = bytearray(path.read_bytes())
        start = raw.index(b"000005.png")
        raw[start + 150] ^= 0xFF  # in the header's checksum
        path.write_bytes(raw)
        items = list(read_pairs(File(str(path), "tar")))
        problems = [item for item in items if isinstance(item, Problem)]
        assert len(items) - len(problems) == 9
        assert [(one.place, one.reason.split(" after ")[0], one.pairs) for one in problems] == [
            (f"byte {start:,}", "truncated or damaged tar", 1),
            (f"byte {raw.index(b'000005.txt'):,}", "caption without an image", 1),
        ]

    def test_pairs_that_are_overwritten_are_counted_as_lost(self, tmp_path):
        path = write_tar(tmp_path / "s.tar", pair_members(range(10)))
        raw = bytearray(path.read_bytes())
        start, stop = raw.index(b"000003.png"), raw.index(b"000007.png")
        raw[start:stop] = b"\1" * (stop - start)
        path.write_bytes(raw)
        problems = [item for item in read_pairs(File(str(path), "tar")) if isinstance(item, Problem)]
        assert [problem.pairs for problem in problems] == [4]  # estimated from the bytes that cannot be read

    def test_links_are_problems(self, tmp_path):
        path = tmp_path / "s.tar"
        with tarfile.open(path, "w") as tar:
            for name, kind in (("a.png", tarfile.LNKTYPE), ("b.png", tarfile.SYMTYPE)):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "other.png"
                tar.addfile(info)
        _, problems = split(File(str(path), "tar"))
        assert problems == dict.fromkeys("ab", "a link or a sparse member, not a plain file")

    def test_folders_and_dot_prefixes_are_accepted(self, tmp_path):
        path = tmp_path / "s.tar"
        with tarfile.open(path, "w") as tar:
            folder = tarfile.TarInfo("./x.jpg")  # a folder with an image's name
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for name, data in (("./x/a.png", b"1"), ("./x/a.txt", b"2")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        pairs, problems = split(File(str(path), "tar"))
        assert (len(pairs), problems) == (1, {})


class TestTables:
    @pytest.mark.parametrize(
        ("name", "delimiter", "columns"),
        [
            ("t.csv", ",", ("filepath", "title")),
            ("t.csv", "\t", ("filepath", "title")),  # open_clip's default is a CSV with tabs
            ("t.tsv", "\t", ("image_path", "caption")),
            ("t.csv", ",", ("File_Name", "Text")),
        ],
    )
    def test_common_columns_are_found(self, tmp_path, name, delimiter, columns):
        (tmp_path / "img").mkdir()
        for i in range(2):
            (tmp_path / "img" / f"{i}.png").write_bytes(png(i))
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(["nr", *columns])
            writer.writerow([0, "img/0.png", 'a "quoted", caption\nin two lines'])
            writer.writerow([1, str(tmp_path / "img/1.png"), "absolute"])
            writer.writerow([2, "img/none.png", "lost"])
            writer.writerow([3, "img/0.png", " "])
        pairs, problems = split(File(str(tmp_path / name), "table"))
        assert pairs[0] == Pair("img/0.png", 'a "quoted", caption\nin two lines')
        assert len(pairs) == 2
        assert problems == {"img/none.png": "image file not found", "img/0.png": "empty caption"}

    def test_unusual_columns_must_be_named(self, tmp_path):
        (tmp_path / "0.png").write_bytes(png(0))
        (tmp_path / "t.csv").write_text("bild,wort\n0.png,hello\n")
        file = File(str(tmp_path / "t.csv"), "table")
        with pytest.raises(SourceError) as caught:
            split(file)
        assert caught.value.path == file.path
        for text in ("bild, wort", "--data.image_column", " --image_column"):
            assert text in caught.value.problem
        assert split(file, columns=Columns("bild", "wort"))[0] == [Pair("0.png", "hello")]
        with pytest.raises(SourceError) as caught:
            split(file, columns=Columns("bild2", "wort"))
        assert "bild2" in caught.value.problem

    def test_parquet_with_image_bytes_as_hugging_face_writes_them(self, tmp_path):
        images = [{"bytes": png(i), "path": f"{i}.png"} for i in range(5)]
        table = pa.table({"image": images, "text": ["a", None, "c", " ", "e"]})
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
        pairs, problems = split(File(str(tmp_path / "t.parquet"), "table"))
        assert pairs == [Pair(0, "a"), Pair(2, "c"), Pair(4, "e")]
        assert problems == {"row 1": "no caption", "row 3": "empty caption"}

    def test_parquet_with_paths_and_a_damaged_one(self, tmp_path):
        (tmp_path / "0.png").write_bytes(png(0))
        pq.write_table(pa.table({"filepath": ["0.png"], "caption": ["x"]}), tmp_path / "t.parquet")
        assert split(File(str(tmp_path / "t.parquet"), "table"))[0] == [Pair("0.png", "x")]
        (tmp_path / "t.parquet").write_bytes(b"PAR1 nothing")
        with pytest.raises(SourceError) as caught:
            split(File(str(tmp_path / "t.parquet"), "table"))
        assert caught.value.path == str(tmp_path / "t.parquet")

    @pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
    def test_parquet_with_paths_in_any_kind_of_string(self, tmp_path, kind):
        (tmp_path / "0.png").write_bytes(png(0))
        table = pa.table({"path": pa.array(["0.png"]).cast(kind), "captions": [["", "first", "second"]]})
        pq.write_table(table, tmp_path / "t.parquet")
        assert split(File(str(tmp_path / "t.parquet"), "table"))[0] == [Pair("0.png", "first", 1)]

    def test_csv_errors_are_not_taken_for_captions(self, tmp_path):
        (tmp_path / "0.png").write_bytes(png(0))
        file = File(str(tmp_path / "t.csv"), "table")
        lines = "image,caption\n0.png,a dog, running\n0.png,fine\n"
        (tmp_path / "t.csv").write_text(lines)
        pairs, problems = split(file)
        assert [pair.caption for pair in pairs] == ["fine"]
        assert list(problems) == ["line 2"]
        (tmp_path / "t.csv").write_text('image,caption\n0.png,"never closed\n' + "0.png,x\n" * 200)
        pairs, problems = split(file)
        assert not pairs
        assert "100 lines" in problems["0.png"]
        (tmp_path / "t.csv").write_text("image,caption\n0.png," + "long " * 50_000 + "\n")
        assert len(split(file)[0]) == 1

    @pytest.mark.parametrize(
        ("cell", "extra"),
        [
            ("['a cat', 'a dog']", 1),
            (' ["a cat", "a dog", "", "caf\\u00e9"] ', 2),
            ('["a cat", null, "a dog"]', 1),
            ("['it\\'s']", 0),
            ("[1, 2]", 0),
            ("[sic] a dog [0]", 0),
            ("[" * 5000 + "]" * 5000, 0),
            ("a cat\nand a dog", 0),
        ],
    )
    def test_lists_of_captions_in_a_cell_are_counted_and_left_as_they_are(self, tmp_path, cell, extra):
        (tmp_path / "0.png").write_bytes(png(0))
        with (tmp_path / "t.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["image", "caption"], ["0.png", cell]])
        assert split(File(str(tmp_path / "t.csv"), "table"))[0] == [Pair("0.png", cell, extra)]

    def test_further_captions_of_a_parquet_list_are_counted(self, tmp_path):
        captions = [["a", "b", None, " ", "c"], ["d"], ["", "e", "f"]]
        pq.write_table(
            pa.table({"image": [png(i) for i in range(3)], "caption": captions}), tmp_path / "t.parquet"
        )
        pairs = split(File(str(tmp_path / "t.parquet"), "table"))[0]
        assert pairs == [Pair(0, "a", 2), Pair(1, "d", 0), Pair(2, "e", 1)]


class TestFolders:
    def test_sidecar_captions(self, tmp_path):
        (tmp_path / "sub").mkdir()
        for i, name in enumerate(("b.png", "sub/a.jpg", "c.webp")):
            picture(i).save(tmp_path / name)
        (tmp_path / "b.txt").write_text("bee")
        (tmp_path / "sub" / "a.txt").write_text("ay")
        pairs, problems = split(File(str(tmp_path), "folder"))
        assert pairs == [Pair("b.png", "bee"), Pair("sub/a.jpg", "ay")]
        assert problems == {"c.webp": "no caption"}

    def test_metadata_jsonl(self, tmp_path):
        (tmp_path / "0.png").write_bytes(png(0))
        lines = [
            json.dumps({"file_name": "0.png", "text": "zero"}),
            "{truncated",
            "",
            json.dumps({"file_name": "1.png"}),
        ]
        (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
        (file,) = find_files(str(tmp_path))
        pairs, problems = split(file)
        assert pairs == [Pair("0.png", "zero")]
        assert problems == {"line 2": "not a JSON object", "1.png": "image file not found"}
        lines = [
            "\ufeff" + json.dumps({"file_name": "0.png"}),
            json.dumps({"file_name": "0.png", "text": ["", "a"]}),
        ]
        lines.append(json.dumps({"file_name": 3, "text": "x"}))
        (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
        pairs, problems = split(file)
        assert pairs == [Pair("0.png", "a")]
        assert problems == {"line 1": "no image or no caption on this line", "3": "no file name"}

    def test_further_captions_of_lists_and_lines_are_counted(self, tmp_path):
        for name in ("jsonl", "lines"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "0.png").write_bytes(png(0))
        row = json.dumps({"file_name": "0.png", "text": ["one", "", "two", "three"]})
        (tmp_path / "jsonl" / "metadata.jsonl").write_text(row)
        assert split(File(str(tmp_path / "jsonl"), "folder"))[0] == [Pair("0.png", "one", 2)]
        (tmp_path / "lines" / "0.txt").write_text("one\n\n two\r\nthree\n")
        pairs = split(File(str(tmp_path / "lines"), "folder"))[0]
        assert pairs == [Pair("0.png", "one\n\n two\nthree\n", 2)]

    def test_a_caption_beside_an_image_that_is_not_utf_8_is_a_problem(self, tmp_path):
        for i, caption in enumerate(("a café", "a cafe")):
            (tmp_path / f"{i}.png").write_bytes(png(i))
            (tmp_path / f"{i}.txt").write_bytes(caption.encode("latin-1"))
        file = File(str(tmp_path), "folder")
        assert split(file) == ([Pair("1.png", "a cafe")], {"0.png": "caption is not UTF-8"})
        pairs, problems = split(file, columns=Columns(encoding="latin-1"))
        assert ([pair.caption for pair in pairs], problems) == (["a café", "a cafe"], {})

    def test_half_a_character_in_json_is_not_replaced(self, tmp_path):
        (tmp_path / "0.png").write_bytes(png(0))
        (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "a smile \\ud83d"}')
        assert split(File(str(tmp_path), "folder")) == ([], {"0.png": "caption is not UTF-8"})

    def test_captions_csv(self, tmp_path):
        (tmp_path / "0.png").write_bytes(png(0))
        (tmp_path / "captions.csv").write_text("image,caption\n0.png,zero\n")
        (file,) = find_files(str(tmp_path))
        assert file.kind == "folder"
        assert split(file)[0] == [Pair("0.png", "zero")]

    def test_empty_folder_is_rejected(self, tmp_path):
        with pytest.raises(SourceError) as caught:
            split(File(str(tmp_path), "folder"))
        assert caught.value.path == str(tmp_path)
