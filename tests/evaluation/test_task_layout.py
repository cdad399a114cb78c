"""Every form a task has on the disk, and every way in which it can be wrong: told, with the file."""

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
    """A task of shards; a shard is a list of samples, a sample the members {extension: bytes} of a key."""
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
    """A good task of classification with two shards."""
    return write_task(tmp_path / "pets", [labelled(0, 2, 1), labelled(2, 2, start=3)])


def wrong(folder, *words):
    """The task is refused, with all these words."""
    with pytest.raises(TaskError) as caught:
        open_task(folder.name, folder)
    for word in words:
        assert word in str(caught.value), caught.value


# Forms


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


def test_shards_are_read_by_number_and_not_by_name(tmp_path):
    folder = write_task(tmp_path / "many", [labelled(i % 3, start=i) for i in range(12)])
    assert open_task("many", folder).labels.tolist() == [i % 3 for i in range(12)]


def test_parts_of_a_sample_may_stand_apart_and_others_are_left_alone(tmp_path):
    folder = write_task(tmp_path / "pets", [[]])
    members = [("a.cls", b" 1\n"), ("b.cls", b"2"), ("b.json", b"{}"), ("a.jpeg", b"A"), ("b.webp", b"B")]
    write_tar(folder / "test" / "0.tar", [*members, ("README.md", b"hello"), ("sub/._a.jpg", b"")])
    task = open_task("pets", folder)
    assert task.labels.tolist() == [1, 2]
    assert [task.image(0), task.image(1)] == [b"A", b"B"]


def test_names_may_have_a_byte_order_mark_the_line_ends_of_windows_and_odd_spaces(folder):
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


def test_retrieval_with_several_captions_an_image(tmp_path):
    texts = ["a cat\na small cat\n", "a dog", "\n ein Bär \r\n\r\nun ours\nещё\n"]
    samples = [{"png": png(i), "txt": text.encode()} for i, text in enumerate(texts)]
    folder = write_task(tmp_path / "coco", [samples[:2], samples[2:]], "retrieval")
    task = open_task("coco", folder)
    assert task.kind == "retrieval"
    assert task.captions == [["a cat", "a small cat"], ["a dog"], ["ein Bär", "un ours", "ещё"]]
    assert task.classnames == []


def test_groups_of_images(tmp_path):
    rows = [np.array([3, 2011, 0]), np.array([0, 2012, 1]), np.array([5, 2011, 2])]
    samples = [one | {"npy": npy(row)} for one, row in zip(labelled(0, 1, 2), rows, strict=True)]
    task = open_task("fmow", write_task(tmp_path / "fmow", [samples]))
    assert task.kind == "classification"
    assert task.groups.tolist() == [[3, 2011, 0], [0, 2012, 1], [5, 2011, 2]]


def test_a_single_group_may_be_a_bare_number(tmp_path):
    samples = [one | {"npy": npy(i + 7)} for i, one in enumerate(labelled(0, 1))]
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


def test_class_folders_with_names_and_templates_of_their_own(tmp_path):
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


def test_pairs_with_a_blank_caption_are_left_out(tmp_path, caplog):
    members = [("a.png", png(0)), ("a.txt", b" \n "), ("b.png", png(1)), ("b.txt", b"two")]
    task = open_pairs_task(str(write_tar(tmp_path / "pairs.tar", members)))
    assert task.captions == [["two"]]
    assert task.image(0) == png(1)
    assert "1 of 2 images are left out, for blank captions" in caplog.text
    (tmp_path / "pairs.tar").unlink()
    with pytest.raises(TaskError, match=r"pairs\.tar holds no caption that is not blank"):
        open_pairs_task(str(write_tar(tmp_path / "pairs.tar", members[:2])))


# Finding


def test_tasks_are_found_in_a_folder_in_the_order_of_their_names(tmp_path, winogavil, folder):
    class_folders(tmp_path / "mine", {"a": 1, "b": 1})
    write_task(tmp_path / "coco", [[]], "retrieval")
    shutil.rmtree(tmp_path / "coco" / "test")  # it will be said that the shards are missing
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert find_tasks(tmp_path) == {name: tmp_path / name for name in ("coco", "mine", "pets", "winogavil")}


def test_one_task_is_found_by_its_own_folder(tmp_path, winogavil, folder):
    mine = class_folders(tmp_path / "mine", {"a": 1, "b": 1})
    for one in (winogavil, folder, mine):
        assert find_tasks(one) == {one.name: one}


def test_pairs_are_not_taken_for_classes(tmp_path):
    """Images in folders beside a table of captions, or each with its caption."""
    for name in ("metadata.jsonl", "pairs.csv", "0.tar"):
        folder = class_folders(tmp_path / name.replace(".", "_"), {"images": 2, "more": 2})
        (folder / name).write_text("")
        assert find_tasks(folder) == {}
    folder = class_folders(tmp_path / "sidecars", {"images": 2, "more": 2})
    for image in folder.glob("*/*.PNG"):
        image.with_suffix(".txt").write_text("a caption")
    assert find_tasks(folder) == {}


# What is wrong


def test_a_missing_shard(folder):
    (folder / "test" / "0.tar").unlink()
    wrong(folder, str(folder / "test" / "0.tar"), "is missing, and nshards.txt says 2", "Get the task again")


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("3", ("2.tar", "is missing, and nshards.txt says 3")),
        ("1000000000000000", ("2.tar", "is missing")),
        ("1", ("nshards.txt says 1, and there are 2 shards", "mend it")),
        ("0", ("nshards.txt says 0, and there are 2 shards",)),
        ("-1", ("nshards.txt says -1",)),
        ("two", ("nshards.txt must hold one number",)),
        ("", ("nshards.txt must hold one number",)),
        ("1.5", ("nshards.txt must hold one number",)),
        (None, ("nshards.txt is missing", "0.tar, 1.tar and so on")),
    ],
)
def test_a_wrong_number_of_shards(folder, stated, words):
    file = folder / "test" / "nshards.txt"
    file.unlink() if stated is None else file.write_text(stated)
    wrong(folder, str(folder / "test"), *words)


def test_a_folder_without_anything_in_it(tmp_path):
    wrong(tmp_path, str(tmp_path / "test" / "nshards.txt"), "is missing")


def test_an_empty_shard(folder):
    write_tar(folder / "test" / "1.tar", [("notes.md", b"nothing here")])
    wrong(folder, str(folder / "test" / "1.tar"), "holds no image")
    write_tar(folder / "test" / "1.tar", [])
    wrong(folder, str(folder / "test" / "1.tar"), "Get it again")
    (folder / "test" / "1.tar").write_bytes(b"")
    wrong(folder, str(folder / "test" / "1.tar"), "Get it again")


@pytest.mark.parametrize("cut", ["in an image", "in the last label", "before the closing blocks"])
def test_a_truncated_shard(folder, cut):
    file = folder / "test" / "0.tar"
    content = len(file.read_bytes().rstrip(b"\0"))  # the rest is filled with zeros
    kept = {"in an image": 3000, "in the last label": content - 1}
    os.truncate(file, kept.get(cut, -(-content // 512) * 512))
    wrong(folder, str(file), "truncated or damaged tar", "Get it again")


def test_a_pointer_of_git_lfs_instead_of_a_shard(folder):
    file = folder / "test" / "0.tar"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    wrong(folder, str(file), "git lfs pull")


@pytest.mark.parametrize("label", [3, 99, -1, 10**30])
def test_a_class_id_outside_the_names(tmp_path, label):
    folder = write_task(tmp_path / "pets", [labelled(0, 2), labelled(1, label)])
    wrong(folder, str(folder / "test" / "1.tar"), f"s1_1.cls says {label}", "classnames.txt has 3 lines")


@pytest.mark.parametrize("label", ["cat", "", "1.0", "1 2", "\ufffd"])
def test_a_label_that_is_not_a_number(tmp_path, label):
    folder = write_task(tmp_path / "pets", [labelled(0, label)])
    wrong(folder, str(folder / "test" / "0.tar"), "s0_1.cls holds ", "not a class's number")


def test_an_image_without_its_label_and_a_label_without_its_image(tmp_path):
    folder = write_task(tmp_path / "a", [[*labelled(0), {"png": png(1)}]])
    wrong(folder, str(folder / "test" / "0.tar"), "image s0_1 has no .cls", "dataset_type.txt")
    folder = write_task(tmp_path / "b", [[*labelled(0), {"gif": b"GIF8", "cls": b"1"}]])
    wrong(folder, str(folder / "test" / "0.tar"), "s0_1.cls has no image (jpg, jpeg, png, webp) beside it")


def test_two_images_of_the_same_name(folder):
    members = [("a.png", png(0)), ("a.cls", b"0"), ("a.png", png(1)), ("a.cls", b"1")]
    write_tar(folder / "test" / "0.tar", members)
    wrong(folder, str(folder / "test" / "0.tar"), "a.png is there twice")


@pytest.mark.parametrize("name", [NAMES, TEMPLATES])
@pytest.mark.parametrize("content", [None, "", " \n\n"])
def test_names_or_templates_are_missing(folder, name, content):
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    wrong(folder, str(folder / name), "is missing or empty; it holds", "a line")


@pytest.mark.parametrize(("name", "line"), [(NAMES, 2), (TEMPLATES, 2)])
def test_an_empty_line_in_between_would_shift_labels(folder, name, line):
    (folder / name).write_text("the {c}\n\na {c}\nno {c}\n")
    wrong(folder, str(folder / name), f"line {line} is empty")


def test_an_empty_first_line_would_too(folder):
    (folder / NAMES).write_text("\ncat\ndog\n")
    wrong(folder, str(folder / NAMES), "line 1 is empty")


def test_a_template_without_the_class(folder):
    (folder / TEMPLATES).write_text("a photo of a {c}.\na photo of a {}.\n")
    wrong(folder, str(folder / TEMPLATES), "'a photo of a {}.' has no {c} in the place of the class")


def test_names_that_are_not_utf8(folder):
    (folder / NAMES).write_bytes("Bär\nHund\nKatze".encode("latin-1"))
    wrong(folder, str(folder / NAMES), "is not text in UTF-8")


@pytest.mark.parametrize("kind", ["captioning", "", "classification retrieval"])
def test_an_unknown_kind_of_task(tmp_path, kind):
    folder = write_task(tmp_path / "pets", [labelled(0)], kind)
    wrong(folder, str(folder / "dataset_type.txt"), "must be one of classification, multilabel, retrieval")


@pytest.mark.parametrize("text", [b"", b" \n\n "])
def test_an_empty_caption(tmp_path, text):
    samples = [{"png": png(0), "txt": b"one"}, {"png": png(1), "txt": text}]
    folder = write_task(tmp_path / "coco", [samples], "retrieval")
    wrong(folder, str(folder / "test" / "0.tar"), "s0_1.txt is empty; every image needs a caption")


def test_a_missing_caption(tmp_path):
    folder = write_task(tmp_path / "coco", [[{"png": png(0), "txt": b"one"}, {"png": png(1)}]], "retrieval")
    wrong(folder, str(folder / "test" / "0.tar"), "image s0_1 has no .txt")


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", [None, "multilabel"])
def test_a_pickle_in_an_array_is_never_run(tmp_path, kind):
    sprung = tmp_path / "sprung"
    trapped = npy(np.array([Trap(sprung)], dtype=object), allow_pickle=True)
    for number, data in enumerate((trapped, pickle.dumps(Trap(sprung)))):
        folder = write_task(tmp_path / f"{number}", [[{"png": png(0), "cls": b"0", "npy": data}]], kind)
        wrong(folder, str(folder / "test" / "0.tar"), "s0_0.npy cannot be read")
    assert not sprung.exists()
    np.load(io.BytesIO(trapped), allow_pickle=True)
    assert sprung.exists()  # the trap does work


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04", npy([1, 0, 1])[:-3], npy([1, 0, 1])[:20], npy(["a", "b", "c"]), npy(1j)],
)
@pytest.mark.parametrize("kind", [None, "multilabel"])
def test_an_array_that_is_damaged_or_holds_no_numbers(tmp_path, kind, data):
    folder = write_task(tmp_path / "task", [[{"png": png(0), "cls": b"0", "npy": data}]], kind)
    wrong(folder, str(folder / "test" / "0.tar"), "s0_0.npy")


@pytest.mark.parametrize("row", [[1, 0], [1, 0, 0, 1], [[1, 0, 0]], [0, 2, 0], [0, -1, 1], [0, np.nan, 1]])
def test_labels_that_are_not_one_for_each_class(tmp_path, row):
    folder = write_task(tmp_path / "voc", [[{"png": png(0), "npy": npy(row)}]], "multilabel")
    wrong(folder, str(folder / "test" / "0.tar"), "s0_0.npy must hold 0 or 1 for each of the 3 lines")


@pytest.mark.parametrize("rows", [([1, 2], None), (None, [1, 2]), ([1, 2], [1])])
def test_groups_of_some_images_only(tmp_path, rows):
    """They would be left out, and the task judged by another number, or by none."""
    samples = labelled(0, 1)
    for sample, row in zip(samples, rows, strict=True):
        if row is not None:
            sample["npy"] = npy(row)
    folder = write_task(tmp_path / "fmow", [samples])
    wrong(folder, str(folder / "test" / "0.tar"), "s0_1", "every image needs as many groups")


@pytest.mark.parametrize("row", [[], [[1, 2]], [np.nan, 1]])
def test_groups_that_are_no_row_of_numbers(tmp_path, row):
    folder = write_task(tmp_path / "fmow", [[labelled(0)[0] | {"npy": npy(row)}]])
    wrong(folder, str(folder / "test" / "0.tar"), "s0_0.npy must hold the numbers of the image's groups")


def test_a_single_class_folder_and_names_that_do_not_fit_the_folders(tmp_path):
    wrong(class_folders(tmp_path / "one", {"cat": 2}), str(tmp_path / "one"), "1 folders of images")
    folder = class_folders(tmp_path / "two", {"cat": 2, "dog": 1})
    (folder / NAMES).write_text("a cat\na dog\na bird\n")
    wrong(folder, str(folder), "2 folders of images and 3 class names", NAMES)
    (folder / NAMES).write_text("a cat\n\na dog\n")
    wrong(folder, str(folder / NAMES), "line 2 is empty")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "needs cue, candidates and associations"),
        ("{", "needs cue, candidates and associations"),
        ("[1, 2]", "needs cue, candidates and associations"),
        (
            '{"cue": "a", "candidates": ["cat.png"]}',
            "needs cue, candidates and associations ('associations')",
        ),
        (json.dumps(CUES[0] | {"cue": 3}), "the cue must be text"),
        (json.dumps(CUES[0] | {"cue": ""}), "the cue must be text"),
        (json.dumps(CUES[0] | {"candidates": "cat.png"}), "lists of names of files"),
        (json.dumps(CUES[0] | {"candidates": [["cat.png"]]}), "lists of names of files"),
        (json.dumps(CUES[0] | {"associations": [1]}), "lists of names of files"),
        (json.dumps(CUES[0] | {"associations": []}), "associations must be some of the candidates"),
        (json.dumps(CUES[0] | {"associations": ["cup.png"]}), "associations must be some of the candidates"),
    ],
)
def test_a_cue_that_cannot_be_read(winogavil, line, words):
    path = winogavil / "associations.jsonl"
    path.write_text(f"{json.dumps(CUES[1])}\n{line}\n{json.dumps(CUES[1])}\n")
    wrong(winogavil, f"{path}, line 2: ", words)


def test_a_missing_image_of_a_cue(winogavil):
    (winogavil / "images" / "bag.png").unlink()
    wrong(winogavil, str(winogavil / "images" / "bag.png"), "is missing, which associations.jsonl names")


def test_no_cue_at_all(winogavil):
    (winogavil / "associations.jsonl").write_text("")
    wrong(winogavil, str(winogavil / "associations.jsonl"), "needs cue, candidates and associations")


# The fingerprint


def fingerprint(folder):
    return open_task("task", folder).fingerprint


def test_the_fingerprint_stays_while_nothing_changes_and_follows_names_templates_and_shards(folder):
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


def test_the_fingerprint_follows_class_folders_and_cues(tmp_path, winogavil):
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


def test_the_fingerprint_of_pairs_follows_captions_and_images(tmp_path):
    """Of the same sizes, and with a table that stays as it is."""
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


def test_the_fingerprint_of_remote_pairs_follows_the_shards_version(tmp_path, monkeypatch):
    members = [(f"{i}.{part}", data) for i in range(9) for part, data in (("png", png(i)), ("txt", b"one"))]
    remote, seen = fsspec.filesystem("memory"), []
    for number in (4, 5):  # another image of the same size, far from both ends of the shard
        members[8] = ("4.png", encode(picture(number), "BMP"))
        path = write_tar(tmp_path / "pairs.tar", members)
        remote.pipe("/layout/pairs.tar", path.read_bytes())
        stamp = [f"{path.stat().st_size}", f"version {number}"]  # fsspec's memory tells no version
        monkeypatch.setattr("fastclip.data.manifest.remote_stamp", lambda _, stamp=stamp: stamp)
        seen += [open_pairs_task("memory://layout/pairs.tar") for _ in range(2)]
    assert [task.fingerprint for task in seen[::2]] == [task.fingerprint for task in seen[1::2]]
    assert seen[0].fingerprint != seen[2].fingerprint
    assert seen[0].images_fingerprint != seen[2].images_fingerprint


def test_features_of_images_outlast_a_change_of_the_words(folder):
    before = open_task("pets", folder)
    (folder / TEMPLATES).write_text("one {c}.\n")
    (folder / NAMES).write_text("cat\nhound\nred panda\n")
    after = open_task("pets", folder)
    assert after.images_fingerprint == before.images_fingerprint
    assert after.fingerprint != before.fingerprint
    write_tar(folder / "test" / "1.tar", labelled_members(2, 1))
    assert open_task("pets", folder).images_fingerprint != before.images_fingerprint


def test_thousands_of_small_shards_are_read_in_no_time(tmp_path):
    folder = write_task(tmp_path / "pets", [[]])
    write_tar(folder / "test" / "0.tar", [("a.png", b"x"), ("a.cls", b"1"), ("b.png", b"y"), ("b.cls", b"0")])
    shard = (folder / "test" / "0.tar").read_bytes()
    for number in range(1, 3000):
        (folder / "test" / f"{number}.tar").write_bytes(shard)
    (folder / "test" / "nshards.txt").write_text("3000")
    start = time.process_time()
    assert len(open_task("pets", folder)) == 6000
    assert time.process_time() - start < 10  # about 1 s
