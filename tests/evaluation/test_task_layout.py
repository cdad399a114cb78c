"""Every layout of a task on disk, and everything that can be wrong with it: the error names the file."""

import io
import json
import os
import pickle
import shutil
import time

import fsspec
import numpy as np
import pytest

from fastclip.evaluation.task_layout import TaskError, find_tasks, open_pairs_task, open_task
from tests.data.collections import encode, picture, png, write_shards, write_tar

NAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"


def npy(values, **options):
    out = io.BytesIO()
    np.save(out, np.asarray(values), **options)
    return out.getvalue()


def write_task(
    folder, shards, kind=None, names="cat\ndog\nred panda\n", templates="a {c}.\na photo of {c}\n"
):
    """Write a task of shards; a shard is a list of samples, a sample is {extension: bytes}."""
    (folder / "test").mkdir(parents=True)
    if kind is not None:
        (folder / "dataset_type.txt").write_text(kind)
    if kind is None or "retrieval" not in kind:
        (folder / NAMES).write_text(names)
        (folder / TEMPLATES).write_text(templates)
    (folder / "test" / "nshards.txt").write_text(f"{len(shards)}\n")
    for number, samples in enumerate(shards):
        members = [
            (f"s{number}_{i}.{extension}", data)
            for i, sample in enumerate(samples)
            for extension, data in sample.items()
        ]
        write_tar(folder / "test" / f"{number}.tar", members)
    return folder


def labelled(*labels, start=0):
    return [{"png": png(start + i), "cls": f"{label}".encode()} for i, label in enumerate(labels)]


@pytest.fixture
def folder(tmp_path):
    """A valid classification task with two shards."""
    return write_task(tmp_path / "pets", [labelled(0, 2, 1), labelled(2, 2, start=3)])


def assert_rejected(folder, path, *facts):
    """Opening the task raises a TaskError about this file or folder, whose problem states these facts."""
    with pytest.raises(TaskError) as caught:
        open_task(folder.name, folder)
    assert caught.value.path == str(path)
    for fact in facts:
        assert fact in caught.value.problem


# Layouts


@pytest.mark.parametrize("kind", [None, "classification", " Classification\n"])
def test_classification_in_shards(tmp_path, kind):
    folder = write_task(tmp_path / "pets", [labelled(0, 2, 1), labelled(2, 2, start=3)], kind)
    task = open_task("pets", folder)
    assert (task.name, task.kind, len(task)) == ("pets", "classification", 5)
    assert task.classnames == ["cat", "dog", "red panda"]
    assert task.templates == ["a {c}.", "a photo of {c}"]
    assert task.labels.tolist() == [0, 2, 1, 2, 2]
    assert task.groups is None
    assert [task.image(i) for i in range(5)] == [png(i) for i in range(5)]
    assert task.where(4) == str(folder / "test" / "1.tar")


def test_shards_are_read_in_numeric_order(tmp_path):
    folder = write_task(tmp_path / "many", [labelled(i % 3, start=i) for i in range(12)])
    assert open_task("many", folder).labels.tolist() == [i % 3 for i in range(12)]


def test_members_of_a_sample_may_be_apart_and_other_files_are_ignored(tmp_path):
    folder = write_task(tmp_path / "pets", [[]])
    members = [("a.cls", b" 1\n"), ("b.cls", b"2"), ("b.json", b"{}"), ("a.jpeg", b"A"), ("b.webp", b"B")]
    write_tar(folder / "test" / "0.tar", [*members, ("README.md", b"hello"), ("sub/._a.jpg", b"")])
    task = open_task("pets", folder)
    assert task.labels.tolist() == [1, 2]
    assert [task.image(0), task.image(1)] == [b"A", b"B"]


def test_class_names_may_have_a_byte_order_mark_windows_line_ends_and_unicode_spaces(folder):
    (folder / NAMES).write_bytes("\ufeffcat\r\ndog\u2028s\r\nred\x0bpanda\r\n\r\n".encode())
    assert open_task("pets", folder).classnames == ["cat", "dog\u2028s", "red\x0bpanda"]


def test_multilabel(tmp_path):
    rows = [[1, 0, 1], [0, 0, 0], [1, 1, 1]]
    kinds = [np.int64, np.float32, bool]
    samples = [
        {"png": png(i), "npy": npy(np.array(row, dtype))}
        for i, (row, dtype) in enumerate(zip(rows, kinds, strict=True))
    ]
    task = open_task("voc", write_task(tmp_path / "voc", [samples], "multilabel"))
    assert task.kind == "multilabel"
    assert task.labels.tolist() == rows
    assert task.groups is None


def test_retrieval_with_several_captions_per_image(tmp_path):
    texts = ["a cat\na small cat\n", "a dog", "\n ein Bär \r\n\r\nun ours\nещё\n"]
    samples = [{"png": png(i), "txt": text.encode()} for i, text in enumerate(texts)]
    folder = write_task(tmp_path / "coco", [samples[:2], samples[2:]], "retrieval")
    task = open_task("coco", folder)
    assert task.kind == "retrieval"
    assert task.captions == [["a cat", "a small cat"], ["a dog"], ["ein Bär", "un ours", "ещё"]]
    assert task.classnames == []


def test_groups_of_images(tmp_path):
    rows = [np.array([3, 2011, 0]), np.array([0, 2012, 1]), np.array([5, 2011, 2])]
    samples = [sample | {"npy": npy(row)} for sample, row in zip(labelled(0, 1, 2), rows, strict=True)]
    task = open_task("fmow", write_task(tmp_path / "fmow", [samples]))
    assert task.kind == "classification"
    assert task.groups.tolist() == [[3, 2011, 0], [0, 2012, 1], [5, 2011, 2]]


def test_a_single_group_may_be_a_bare_number(tmp_path):
    samples = [sample | {"npy": npy(i + 7)} for i, sample in enumerate(labelled(0, 1))]
    assert open_task("geode", write_task(tmp_path / "geode", [samples])).groups.tolist() == [[7], [8]]


def class_folders(folder, counts):
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            (folder / name / f"{i}.PNG").write_bytes(png(100 * number + i))
    return folder


def test_class_folders(tmp_path):
    folder = class_folders(tmp_path / "mine", {"red_panda": 2, "test": 1, "cat": 3})
    (folder / "notes").mkdir()
    (folder / "notes" / "read.me").write_text("not a class")
    (folder / "cat" / "Thumbs.db").write_text("not an image")
    task = open_task("mine", folder)
    assert task.kind == "classification"
    assert task.classnames == ["cat", "red panda", "test"]  # a class may be called test
    assert task.labels.tolist() == [0, 0, 0, 1, 1, 2]
    assert task.templates == ["a photo of a {c}."]
    assert task.image(3) == png(0)
    assert task.where(5).endswith("test/0.PNG")


def test_class_folders_with_class_names_and_templates(tmp_path):
    folder = class_folders(tmp_path / "mine", {"n01": 1, "n02": 1})
    (folder / NAMES).write_text("tench\ngoldfish")
    (folder / TEMPLATES).write_text("itap of a {c}.\n")
    task = open_task("mine", folder)
    assert task.classnames == ["tench", "goldfish"]
    assert task.templates == ["itap of a {c}."]


CUES = [
    {
        "cue": "pack",
        "candidates": ["wolf.png", "cat.png", "bag.png"],
        "associations": ["bag.png", "wolf.png"],
    },
    {"cue": "café", "candidates": ["cat.png", "cup.png"], "associations": ["cup.png"]},
]


@pytest.fixture
def winogavil(tmp_path):
    folder = tmp_path / "winogavil"
    (folder / "images").mkdir(parents=True)
    for i, name in enumerate(("wolf", "cat", "bag", "cup")):
        (folder / "images" / f"{name}.png").write_bytes(png(i))
    lines = [json.dumps(cue, ensure_ascii=False) for cue in CUES]
    (folder / "associations.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def test_associations(winogavil):
    task = open_task("winogavil", winogavil)
    assert task.kind == "associations"
    assert [task.image(i) for i in range(4)] == [png(i) for i in range(4)]
    assert task.cues[0] == ("pack", [0, 1, 2], [True, False, True])
    assert task.cues[1] == ("café", [1, 3], [False, True])


def test_pairs_of_any_source_are_a_retrieval_task(tmp_path):
    shards = write_shards(tmp_path / "shards", n=5, shards=2)
    (tmp_path / "table").mkdir()
    for i in range(3):
        (tmp_path / "table" / f"{i}.png").write_bytes(png(i))
    (tmp_path / "table" / "pairs.csv").write_text(
        'filepath,title\n0.png,one\n1.png,"two\ntwo again"\n2.png,three\n'
    )
    task = open_pairs_task(f"{shards}/")
    assert (task.name, task.kind, len(task)) == ("shards", "retrieval", 5)
    assert task.captions == [[f"picture {i}"] for i in range(5)]
    task = open_pairs_task(str(tmp_path / "table" / "pairs.csv"))
    assert task.captions == [["one"], ["two", "two again"], ["three"]]
    assert [task.image(i) for i in range(3)] == [png(i) for i in range(3)]
    assert task.where(1) == str(tmp_path / "table" / "1.png")


def test_pairs_with_a_blank_caption_are_skipped(tmp_path, caplog):
    members = [("a.png", png(0)), ("a.txt", b" \n "), ("b.png", png(1)), ("b.txt", b"two")]
    path = str(write_tar(tmp_path / "pairs.tar", members))
    task = open_pairs_task(path)
    assert task.captions == [["two"]]
    assert task.image(0) == png(1)
    assert [record.args for record in caplog.records if "task_layout" in record.name] == [(path, 1, 2)]
    os.unlink(path)
    write_tar(tmp_path / "pairs.tar", members[:2])
    with pytest.raises(TaskError) as caught:
        open_pairs_task(path)
    assert caught.value.path == path


# Finding


def test_tasks_are_found_in_a_folder_sorted_by_name(tmp_path, winogavil, folder):
    class_folders(tmp_path / "mine", {"a": 1, "b": 1})
    write_task(tmp_path / "coco", [[]], "retrieval")
    shutil.rmtree(tmp_path / "coco" / "test")  # opening it will report the missing shards
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert find_tasks(tmp_path) == {name: tmp_path / name for name in ("coco", "mine", "pets", "winogavil")}


def test_one_task_is_found_by_its_own_folder(tmp_path, winogavil, folder):
    mine = class_folders(tmp_path / "mine", {"a": 1, "b": 1})
    for path in (winogavil, folder, mine):
        assert find_tasks(path) == {path.name: path}


def test_pairs_are_not_mistaken_for_class_folders(tmp_path):
    """Images in folders beside a table of captions, or each with its caption."""
    for name in ("metadata.jsonl", "pairs.csv", "0.tar"):
        folder = class_folders(tmp_path / name.replace(".", "_"), {"images": 2, "more": 2})
        (folder / name).write_text("")
        assert find_tasks(folder) == {}
    folder = class_folders(tmp_path / "sidecars", {"images": 2, "more": 2})
    for image in folder.glob("*/*.PNG"):
        image.with_suffix(".txt").write_text("a caption")
    assert find_tasks(folder) == {}


# Errors


def test_a_missing_shard(folder):
    (folder / "test" / "0.tar").unlink()
    assert_rejected(folder, folder / "test" / "0.tar", "nshards.txt says 2")


@pytest.mark.parametrize(
    ("stated", "name", "facts"),
    [
        ("3", "2.tar", ["nshards.txt says 3"]),
        ("1000000000000000", "2.tar", []),
        ("1", "nshards.txt", ["says 1", "2 shards"]),
        ("0", "nshards.txt", ["says 0", "2 shards"]),
        ("-1", "nshards.txt", ["says -1"]),
        ("two", "nshards.txt", []),
        ("", "nshards.txt", []),
        ("1.5", "nshards.txt", []),
        (None, "nshards.txt", ["0.tar, 1.tar"]),
    ],
)
def test_a_wrong_number_of_shards(folder, stated, name, facts):
    file = folder / "test" / "nshards.txt"
    file.unlink() if stated is None else file.write_text(stated)
    assert_rejected(folder, folder / "test" / name, *facts)


def test_an_empty_folder(tmp_path):
    assert_rejected(tmp_path, tmp_path / "test" / "nshards.txt")


def test_an_empty_shard(folder):
    write_tar(folder / "test" / "1.tar", [("notes.md", b"nothing here")])
    assert_rejected(folder, folder / "test" / "1.tar")
    write_tar(folder / "test" / "1.tar", [])
    assert_rejected(folder, folder / "test" / "1.tar")
    (folder / "test" / "1.tar").write_bytes(b"")
    assert_rejected(folder, folder / "test" / "1.tar")


@pytest.mark.parametrize("cut", ["in an image", "in the last label", "before the closing blocks"])
def test_a_truncated_shard(folder, cut):
    file = folder / "test" / "0.tar"
    content = len(file.read_bytes().rstrip(b"\0"))  # the rest is zero padding
    kept = {"in an image": 3000, "in the last label": content - 1}
    os.truncate(file, kept.get(cut, -(-content // 512) * 512))
    assert_rejected(folder, file, "truncated")


def test_a_git_lfs_pointer_instead_of_a_shard(folder):
    file = folder / "test" / "0.tar"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    assert_rejected(folder, file, "git lfs pull")


@pytest.mark.parametrize("label", [3, 99, -1, 10**30])
def test_a_label_without_a_class_name(tmp_path, label):
    folder = write_task(tmp_path / "pets", [labelled(0, 2), labelled(1, label)])
    assert_rejected(folder, folder / "test" / "1.tar", f"s1_1.cls says {label}", "classnames.txt, 0 to 2")


@pytest.mark.parametrize("label", ["cat", "", "1.0", "1 2", "\ufffd"])
def test_a_label_that_is_not_a_number(tmp_path, label):
    folder = write_task(tmp_path / "pets", [labelled(0, label)])
    assert_rejected(folder, folder / "test" / "0.tar", "s0_1.cls", repr(label.encode()))


def test_an_image_without_its_label_and_a_label_without_its_image(tmp_path):
    folder = write_task(tmp_path / "a", [[*labelled(0), {"png": png(1)}]])
    assert_rejected(folder, folder / "test" / "0.tar", "s0_1", ".cls", "dataset_type.txt")
    folder = write_task(tmp_path / "b", [[*labelled(0), {"gif": b"GIF8", "cls": b"1"}]])
    assert_rejected(folder, folder / "test" / "0.tar", "s0_1.cls", "(jpg, jpeg, png, webp)")


def test_two_images_of_the_same_name(folder):
    members = [("a.png", png(0)), ("a.cls", b"0"), ("a.png", png(1)), ("a.cls", b"1")]
    write_tar(folder / "test" / "0.tar", members)
    assert_rejected(folder, folder / "test" / "0.tar", "a.png")


@pytest.mark.parametrize("name", [NAMES, TEMPLATES])
@pytest.mark.parametrize("content", [None, "", " \n\n"])
def test_missing_or_empty_class_names_and_templates(folder, name, content):
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    assert_rejected(folder, folder / name)


@pytest.mark.parametrize(("name", "line"), [(NAMES, 2), (TEMPLATES, 2)])
def test_an_empty_line_that_would_shift_the_labels(folder, name, line):
    (folder / name).write_text("the {c}\n\na {c}\nno {c}\n")
    assert_rejected(folder, folder / name, f"line {line}")


def test_an_empty_first_line(folder):
    (folder / NAMES).write_text("\ncat\ndog\n")
    assert_rejected(folder, folder / NAMES, "line 1")


def test_a_template_without_the_class(folder):
    (folder / TEMPLATES).write_text("a photo of a {c}.\na photo of a {}.\n")
    assert_rejected(folder, folder / TEMPLATES, "'a photo of a {}.'", "{c}")


def test_class_names_that_are_not_utf8(folder):
    (folder / NAMES).write_bytes("Bär\nHund\nKatze".encode("latin-1"))
    assert_rejected(folder, folder / NAMES, "UTF-8")


@pytest.mark.parametrize("kind", ["captioning", "", "classification retrieval"])
def test_an_unknown_kind_of_task(tmp_path, kind):
    folder = write_task(tmp_path / "pets", [labelled(0)], kind)
    assert_rejected(folder, folder / "dataset_type.txt", repr(kind), "classification, multilabel, retrieval")


@pytest.mark.parametrize("text", [b"", b" \n\n "])
def test_an_empty_caption(tmp_path, text):
    samples = [{"png": png(0), "txt": b"one"}, {"png": png(1), "txt": text}]
    folder = write_task(tmp_path / "coco", [samples], "retrieval")
    assert_rejected(folder, folder / "test" / "0.tar", "s0_1.txt")


def test_a_missing_caption(tmp_path):
    folder = write_task(tmp_path / "coco", [[{"png": png(0), "txt": b"one"}, {"png": png(1)}]], "retrieval")
    assert_rejected(folder, folder / "test" / "0.tar", "s0_1", ".txt")


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", [None, "multilabel"])
def test_a_pickle_in_an_array_is_never_executed(tmp_path, kind):
    sprung = tmp_path / "sprung"
    trapped = npy(np.array([Trap(sprung)], dtype=object), allow_pickle=True)
    for number, data in enumerate((trapped, pickle.dumps(Trap(sprung)))):
        folder = write_task(tmp_path / f"{number}", [[{"png": png(0), "cls": b"0", "npy": data}]], kind)
        assert_rejected(folder, folder / "test" / "0.tar", "s0_0.npy")
    assert not sprung.exists()
    np.load(io.BytesIO(trapped), allow_pickle=True)
    assert sprung.exists()  # the trap does work


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04", npy([1, 0, 1])[:-3], npy([1, 0, 1])[:20], npy(["a", "b", "c"]), npy(1j)],
)
@pytest.mark.parametrize("kind", [None, "multilabel"])
def test_an_array_that_is_damaged_or_not_numeric(tmp_path, kind, data):
    folder = write_task(tmp_path / "task", [[{"png": png(0), "cls": b"0", "npy": data}]], kind)
    assert_rejected(folder, folder / "test" / "0.tar", "s0_0.npy")


@pytest.mark.parametrize("row", [[1, 0], [1, 0, 0, 1], [[1, 0, 0]], [0, 2, 0], [0, -1, 1], [0, np.nan, 1]])
def test_multilabel_rows_that_are_not_0_or_1_for_each_class(tmp_path, row):
    folder = write_task(tmp_path / "voc", [[{"png": png(0), "npy": npy(row)}]], "multilabel")
    assert_rejected(folder, folder / "test" / "0.tar", "s0_0.npy", "3 lines", NAMES)


@pytest.mark.parametrize("rows", [([1, 2], None), (None, [1, 2]), ([1, 2], [1])])
def test_groups_of_some_images_only(tmp_path, rows):
    """Without this error the groups would be dropped, and the task scored by another metric or none."""
    samples = labelled(0, 1)
    for sample, row in zip(samples, rows, strict=True):
        if row is not None:
            sample["npy"] = npy(row)
    folder = write_task(tmp_path / "fmow", [samples])
    assert_rejected(folder, folder / "test" / "0.tar", "s0_1")


@pytest.mark.parametrize("row", [[], [[1, 2]], [np.nan, 1]])
def test_groups_that_are_not_a_row_of_numbers(tmp_path, row):
    folder = write_task(tmp_path / "fmow", [[labelled(0)[0] | {"npy": npy(row)}]])
    assert_rejected(folder, folder / "test" / "0.tar", "s0_0.npy")


def test_a_single_class_folder_and_class_names_that_do_not_match_the_folders(tmp_path):
    assert_rejected(class_folders(tmp_path / "one", {"cat": 2}), tmp_path / "one", "1 folders")
    folder = class_folders(tmp_path / "two", {"cat": 2, "dog": 1})
    (folder / NAMES).write_text("a cat\na dog\na bird\n")
    assert_rejected(folder, folder, "2 folders", "3 class names", NAMES)
    (folder / NAMES).write_text("a cat\n\na dog\n")
    assert_rejected(folder, folder / NAMES, "line 2")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("", "cue"),
        ("{", "cue"),
        ("[1, 2]", "cue"),
        ('{"cue": "a", "candidates": ["cat.png"]}', "'associations'"),
        (json.dumps(CUES[0] | {"cue": 3}), "cue"),
        (json.dumps(CUES[0] | {"cue": ""}), "cue"),
        (json.dumps(CUES[0] | {"candidates": "cat.png"}), "candidates"),
        (json.dumps(CUES[0] | {"candidates": [["cat.png"]]}), "candidates"),
        (json.dumps(CUES[0] | {"associations": [1]}), "associations"),
        (json.dumps(CUES[0] | {"associations": []}), "associations"),
        (json.dumps(CUES[0] | {"associations": ["cup.png"]}), "associations"),
    ],
)
def test_an_invalid_cue(winogavil, line, key):
    path = winogavil / "associations.jsonl"
    path.write_text(f"{json.dumps(CUES[1])}\n{line}\n{json.dumps(CUES[1])}\n")
    assert_rejected(winogavil, path, "line 2", key)


def test_a_missing_image_of_a_cue(winogavil):
    (winogavil / "images" / "bag.png").unlink()
    assert_rejected(winogavil, winogavil / "images" / "bag.png", "associations.jsonl")


def test_an_empty_file_of_cues(winogavil):
    (winogavil / "associations.jsonl").write_text("")
    assert_rejected(winogavil, winogavil / "associations.jsonl", "line 1")


# The fingerprint


def fingerprint(folder):
    return open_task("task", folder).fingerprint


def test_the_fingerprint_changes_with_class_names_templates_and_shards_only(folder):
    seen = [fingerprint(folder)]
    assert fingerprint(folder) == seen[0]
    (folder / "notes.txt").write_text("not read")
    assert fingerprint(folder) == seen[0]
    for change in (
        lambda: (folder / NAMES).write_text("cat\nhound\nred panda\n"),
        lambda: (folder / TEMPLATES).write_text("one {c}.\na photo of {c}\n"),
        lambda: (folder / TEMPLATES).write_text("one {c}.\n"),
        lambda: write_tar(folder / "test" / "1.tar", labelled_members(2, 1)),
        lambda: write_tar(folder / "test" / "1.tar", labelled_members(1, 2)),  # as large as before
    ):
        change()
        seen.append(fingerprint(folder))
    assert len(set(seen)) == 6


def labelled_members(*labels):
    return [(f"{i}.{part}", data) for i, one in enumerate(labelled(*labels)) for part, data in one.items()]


def test_the_fingerprint_changes_with_class_folders_and_cues(tmp_path, winogavil):
    folder = class_folders(tmp_path / "mine", {"a": 1, "b": 1})
    seen = [fingerprint(folder)]
    (folder / "a" / "0.PNG").write_bytes(png(7))
    seen.append(fingerprint(folder))
    (folder / "a" / "0.PNG").rename(folder / "b" / "1.PNG")
    (folder / "c").mkdir()
    (folder / "b" / "0.PNG").rename(folder / "c" / "0.PNG")
    seen.append(fingerprint(folder))
    seen.append(fingerprint(winogavil))
    (winogavil / "associations.jsonl").write_text(json.dumps(CUES[0] | {"associations": ["cat.png"]}))
    seen.append(fingerprint(winogavil))
    assert len(set(seen)) == 5


def test_the_fingerprint_of_pairs_changes_with_captions_and_images(tmp_path):
    """File sizes stay the same, and so does the table."""
    members = [("a.png", png(0)), ("a.txt", b"one"), ("b.png", png(1)), ("b.txt", b"two")]
    path = write_tar(tmp_path / "pairs.tar", members)
    seen = [open_pairs_task(str(path)).fingerprint]
    assert open_pairs_task(str(path)).fingerprint == seen[0]
    write_tar(path, [members[0], ("a.txt", b"eno"), *members[2:]])
    seen.append(open_pairs_task(str(path)).fingerprint)
    (tmp_path / "1.png").write_bytes(png(0))
    (tmp_path / "pairs.csv").write_text("filepath,title\n1.png,one\n")
    seen.append(open_pairs_task(str(tmp_path / "pairs.csv")).fingerprint)
    (tmp_path / "1.png").write_bytes(bytes(len(png(0))))
    seen.append(open_pairs_task(str(tmp_path / "pairs.csv")).fingerprint)
    assert len(set(seen)) == 4


def test_the_fingerprint_of_remote_pairs_changes_with_the_version_of_the_shard(tmp_path, monkeypatch):
    members = [(f"{i}.{part}", data) for i in range(9) for part, data in (("png", png(i)), ("txt", b"one"))]
    remote, seen = fsspec.filesystem("memory"), []
    for number in (4, 5):  # another image of the same size, far from both ends of the shard
        members[8] = ("4.png", encode(picture(number), "BMP"))
        path = write_tar(tmp_path / "pairs.tar", members)
        remote.pipe("/layout/pairs.tar", path.read_bytes())
        stamp = [f"{path.stat().st_size}", f"version {number}"]  # fsspec's memory file system has no versions
        monkeypatch.setattr("fastclip.data.stamps.remote_stamp", lambda _, stamp=stamp: stamp)
        seen += [open_pairs_task("memory://layout/pairs.tar") for _ in range(2)]
    assert [task.fingerprint for task in seen[::2]] == [task.fingerprint for task in seen[1::2]]
    assert seen[0].fingerprint != seen[2].fingerprint
    assert seen[0].images_fingerprint != seen[2].images_fingerprint


def test_the_fingerprint_of_images_ignores_class_names_and_templates(folder):
    before = open_task("pets", folder)
    (folder / TEMPLATES).write_text("one {c}.\n")
    (folder / NAMES).write_text("cat\nhound\nred panda\n")
    after = open_task("pets", folder)
    assert after.images_fingerprint == before.images_fingerprint
    assert after.fingerprint != before.fingerprint
    write_tar(folder / "test" / "1.tar", labelled_members(2, 1))
    assert open_task("pets", folder).images_fingerprint != before.images_fingerprint


@pytest.mark.slow
def test_thousands_of_small_shards_are_read_quickly(tmp_path):
    folder = write_task(tmp_path / "pets", [[]])
    write_tar(folder / "test" / "0.tar", [("a.png", b"x"), ("a.cls", b"1"), ("b.png", b"y"), ("b.cls", b"0")])
    shard = (folder / "test" / "0.tar").read_bytes()
    for number in range(1, 3000):
        (folder / "test" / f"{number}.tar").write_bytes(shard)
    (folder / "test" / "nshards.txt").write_text("3000")
    start = time.process_time()
    assert len(open_task("pets", folder)) == 6000
    assert time.process_time() - start < 10  # about 1 s
