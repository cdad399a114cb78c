"""Collections by name: reproducible to the byte, held-out sets never in training, and no network."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from fastclip.config.collections import COLLECTIONS
from fastclip.datasets import (
    DataUnavailable,
    FolderInUse,
    captions,
    get,
    iconify,
    icons,
    render,
    scenes,
    tasks,
)
from fastclip.errors import OptionError, PathError

pytest.importorskip("resvg_py")

THINGS = [f"{word}-{thing}" for thing in ("face", "heart") for word in ("red", "blue", "happy", "old", "big")]
PEOPLE = [f"cook-{tone}-skin-tone" for tone in ("light", "medium-light", "medium", "medium-dark", "dark")]


def drawing(seed: str) -> str:
    """A different drawing for each seed."""
    rng = random.Random(seed)
    x, y, w, h = (rng.randint(1, 8) for _ in range(4))
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="#{rng.randrange(1 << 23):06x}"/>'


def icon_set(prefix: str, names: list[str], **more: object) -> dict[str, object]:
    licence = {"title": "CC BY 4.0", "spdx": "CC-BY-4.0", "url": "https://example.org/licence"}
    info = {"name": f"The {prefix} set", "author": {"name": f"Ann of {prefix}"}, "license": licence}
    drawn = {name: {"body": drawing(f"{prefix}:{name}")} for name in names}
    return {"prefix": prefix, "info": info, "icons": drawn} | more


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a tiny package: ten emoji sets, four held-out icon sets, two more."""
    sets = {p: icon_set(p, THINGS + PEOPLE) for p in (*icons.EMOJI_TRAIN, *COLLECTIONS["emoji"].held_out)}
    icon_sets = [p for p in COLLECTIONS["icons"].held_out if p not in sets]
    sets |= {p: icon_set(p, [*THINGS, "bell", "bell-2"]) for p in (*icon_sets, "lucide", "famicons")}
    sets["noto"]["icons"] |= {  # type: ignore[operator]
        "ghost": {"body": '<rect width="9" height="9" fill="#fff"/>'},
        "damaged": {"body": "<rect"},
        "withdrawn": {"body": drawing("withdrawn"), "hidden": True},
    }
    sets["noto"]["aliases"] = {
        "scarlet-heart": {"parent": "red-heart"},
        "heart-turned": {"parent": "red-heart", "rotate": 1},
    }
    sets["lucide"]["icons"]["stolen"] = sets["mdi"]["icons"]["bell"]  # type: ignore[index]
    sets["twemoji"]["categories"] = {"Smileys": THINGS[:5], "Symbols": THINGS[5:], "People": PEOPLE}
    folder = tmp_path_factory.mktemp("cache")
    with tarfile.open(folder / "iconify-json-9.10.0.tgz", "w:gz") as package:
        for prefix, data in sets.items():
            content = json.dumps(data).encode()
            header = tarfile.TarInfo(f"package/json/{prefix}.json")
            header.size = len(content)
            package.addfile(header, io.BytesIO(content))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _small_package(cache: Path) -> Iterator[None]:
    """Use the tiny package, and make tasks of its few examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCLIP_CACHE", str(cache))
        patch.setattr(tasks, "LEAST", 3)
        patch.setattr(tasks, "LEAST_WORDS", 2)
        yield


@pytest.fixture(scope="module")
def emoji(_small_package: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return get("emoji", tmp_path_factory.mktemp("emoji"), jobs=1, progress=False)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def members(tar: Path) -> dict[str, bytes]:
    with tarfile.open(tar) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def train_pairs(out: Path) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for tar in sorted((out / "train").glob("*.tar")):
        pairs |= {n.removesuffix(".txt"): c.decode() for n, c in members(tar).items() if n.endswith(".txt")}
    return pairs


def test_shards_have_complete_pairs_of_small_rgb_images(emoji: Path) -> None:
    tars = sorted((emoji / "train").iterdir())
    assert [tar.name for tar in tars] == [f"{i:05d}.tar" for i in range(8)]
    for tar in tars:
        names = list(members(tar))
        assert names[::2] == [name.replace(".txt", ".png") for name in names[1::2]]
        image = Image.open(io.BytesIO(members(tar)[names[0]]))
        assert (image.mode, image.size, image.getpixel((63, 63))) == ("RGB", (64, 64), (255, 255, 255))
        with tarfile.open(tar) as opened:
            assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in opened} == {(0, 0, 0, 0o644, "")}


@pytest.mark.slow
def test_two_processes_build_the_same_bytes_as_one(emoji: Path, tmp_path: Path) -> None:
    assert tree(get("emoji", tmp_path / "new", jobs=2, progress=True)) == tree(emoji)


@pytest.mark.slow
@pytest.mark.parametrize("images", [0, 20, 81, 120])
def test_interrupted_build_resumes_to_the_same_bytes(
    emoji: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: int
) -> None:
    remaining = iter(range(images))

    def interrupt() -> None:
        if next(remaining, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(render, "tick", interrupt)
        with pytest.raises(KeyboardInterrupt):
            get("emoji", tmp_path, jobs=1, progress=False)
    assert not (tmp_path / "complete.json").exists()
    leftover = tmp_path / "tasks" / "twemoji_words.7.part" / "test"  # of a process killed within a task
    leftover.mkdir(parents=True)
    (leftover / "0.tar.7.part").touch()
    assert tree(get("emoji", tmp_path, jobs=1, progress=False)) == tree(emoji)


@pytest.mark.slow
def test_killed_build_resumes_and_keeps_its_finished_shards(emoji: Path, tmp_path: Path) -> None:
    slow = (
        "import time; from fastclip.datasets import get, render, tasks\n"
        "tasks.LEAST, tasks.LEAST_WORDS, fast = 3, 2, render.render\n"
        "render.render = lambda svg: (time.sleep(0.005), fast(svg))[1]\n"
        f"get('emoji', {str(tmp_path)!r}, jobs=1, progress=False)"
    )
    process = subprocess.Popen([sys.executable, "-c", slow])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / ".records" / "shard-00001.json").exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    first = tmp_path / "train" / "00000.tar"
    written = first.stat().st_mtime_ns
    assert tree(get("emoji", tmp_path, jobs=1, progress=False)) == tree(emoji)
    assert first.stat().st_mtime_ns == written


def test_complete_folder_is_unchanged(
    emoji: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = {path: path.stat().st_mtime_ns for path in emoji.rglob("*")}
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path))  # without the package
    monkeypatch.setenv("PATH", "")
    with caplog.at_level("INFO"):
        get("emoji", emoji)
    assert [record.args[0] for record in caplog.records if record.args] == [emoji]
    assert {path: path.stat().st_mtime_ns for path in emoji.rglob("*")} == before


def test_build_started_with_another_package_starts_again(
    emoji: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".records").mkdir()
    (tmp_path / ".records" / "plan.json").write_text('{"name": "emoji", "package": "1.0.0"}')
    (tmp_path / ".records" / "shard-00000.json").write_text("{}")
    assert tree(get("emoji", tmp_path, jobs=1, progress=False)) == tree(emoji)
    assert [record.args for record in caplog.records if record.levelname == "WARNING"] == [(tmp_path,)]


def test_held_out_sets_are_never_in_training(emoji: Path, tmp_path: Path) -> None:
    assert {key.split("_")[0] for key in train_pairs(emoji)} == set(icons.EMOJI_TRAIN)
    out = get("icons", tmp_path, jobs=1, progress=False)
    pairs = train_pairs(out)
    assert {key.split("_")[0] for key in pairs} == {*icons.EMOJI_TRAIN, "lucide"}
    assert "lucide_bell" in pairs
    assert "lucide_stolen" not in pairs  # the same image as mdi's bell
    tested = {path.name.split("_")[0] for path in (out / "tasks").glob("*_retrieval")}
    assert tested == {*COLLECTIONS["icons"].held_out}
    summary = json.loads((out / "complete.json").read_text())
    assert summary["left_out"]["same picture as one of a held-out set"] == 1
    assert summary["left_out"]["sets that copy a held-out one"] == ["famicons"]


def test_hidden_blank_damaged_and_merely_renamed_icons_are_skipped_and_counted(emoji: Path) -> None:
    pairs = train_pairs(emoji)
    assert pairs["noto_heart-turned"] == "heart turned"
    assert not {f"noto_{n}" for n in ("ghost", "damaged", "withdrawn", "scarlet-heart")} & set(pairs)
    summary = json.loads((emoji / "complete.json").read_text())
    assert summary["pairs"] == len(pairs) == 5 * 15 + 1
    assert summary["skipped"]["noto_ghost"] == "blank"
    assert summary["skipped"]["noto_damaged"].startswith("cannot be rendered")
    assert summary["left_out"]["hidden by their makers"] == 1


def test_tasks_have_the_layout_of_clip_benchmark(emoji: Path) -> None:
    names = {path.name for path in (emoji / "tasks").iterdir()}
    assert {"twemoji_retrieval", "twemoji_words", "hard_twemoji_categories"} <= names
    for name in names:
        folder = emoji / "tasks" / name
        kind = (folder / "dataset_type.txt").read_text().strip()
        assert (folder / "test" / "nshards.txt").read_text().strip() == "1"
        content = members(folder / "test" / "0.tar")
        assert kind == ("retrieval" if name.endswith("_retrieval") else "classification")
        answers = {n.split(".")[0]: c.decode() for n, c in content.items() if not n.endswith(".png")}
        assert {n.split(".")[0] for n in content if n.endswith(".png")} == set(answers)
        if kind == "retrieval":
            assert len(set(answers.values())) == len(answers)
            assert not any("skin tone" in caption for caption in answers.values())
            continue
        classes = (folder / "classnames.txt").read_text().splitlines()
        assert {int(answer) for answer in answers.values()} == set(range(len(classes)))
        assert all(
            "{c}" in t for t in (folder / "zeroshot_classification_templates.txt").read_text().splitlines()
        )
    words = members(emoji / "tasks" / "twemoji_words" / "test" / "0.tar")
    assert (emoji / "tasks" / "twemoji_words" / "classnames.txt").read_text() == "face\nheart\n"
    assert words["twemoji_red-heart.cls"] == b"1"


def test_all_sets_are_listed_with_their_licences(emoji: Path) -> None:
    text = (emoji / "LICENSES.md").read_text()
    for prefix in (*icons.EMOJI_TRAIN, *COLLECTIONS["emoji"].held_out):
        line = next(line for line in text.splitlines() if line.startswith(f"| {prefix} |"))
        assert f"The {prefix} set" in line
        assert f"Ann of {prefix}" in line
        assert "[CC BY 4.0 (CC-BY-4.0)](https://example.org/licence)" in line
    card = (emoji / "README.md").read_text()
    assert "fastclip data get emoji" in card
    assert "@iconify/json 9.10.0" in card


def test_error_without_npm_explains_how_to_get_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataUnavailable) as caught:
        get("emoji", tmp_path / "out")
    assert caught.value.path == tmp_path / "empty"
    for text in ("iconify-json-*.tgz", "Node.js", "`npm pack @iconify/json`", "`fastclip data get scenes`"):
        assert text in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="needs a shell script")
def test_output_of_a_failing_npm_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'network is unreachable' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataUnavailable) as caught:
        get("icons", tmp_path / "out")
    assert "network is unreachable" in str(caught.value)
    assert caught.value.path == tmp_path / "cache"
    assert list((tmp_path / "cache").iterdir()) == []


def test_truncated_package_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    package = (cache / "iconify-json-9.10.0.tgz").read_bytes()
    (tmp_path / "iconify-json-1.0.0.tgz").write_bytes(package[: len(package) // 2])
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path))
    with pytest.raises(DataUnavailable) as caught:
        get("emoji", tmp_path / "out")
    assert caught.value.path == tmp_path / "iconify-json-1.0.0.tgz"


def test_cached_package_is_the_wanted_version_or_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path))
    for version in ("2.9.0", "2.10.0", "2.2.5"):
        (tmp_path / f"iconify-json-{version}.tgz").touch()
    assert iconify.version_of(iconify.fetch()) == "2.10.0"
    assert iconify.version_of(iconify.fetch(wanted="2.2.5")) == "2.2.5"
    assert iconify.version_of(iconify.fetch(wanted="1.0.0")) == "2.10.0"


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("grinning-face", "grinning face"),
        ("heart-outline", "heart outline"),
        ("access-time-24-filled", "access time filled"),
        ("home-24-regular", "home"),
        ("alert-fill-16", "alert fill"),
        ("baseline-home", "home"),
        ("outline-home", "outline home"),
        ("cook-medium-dark-skin-tone", "cook medium dark skin tone"),
        ("terminal-2", "terminal"),  # a second drawing
        ("flag-03", "flag"),
        ("dice-5", "dice 5"),  # part of the image
        ("battery-30", "battery 30"),
        ("clock-24", "clock"),  # a size, as declared by the set
        ("star-alt", "star"),
        ("flag-for-flag-germany", "flag germany"),
        ("flag-for-germany", "flag germany"),
        ("flag-for-white-flag", "white flag"),
    ],
)
def test_captions_are_cleaned_names(name: str, caption: str) -> None:
    names = [name, "terminal", "dice", "dice-1", "battery"]
    suffixes = {"16": "", "24": "", "24-filled": "", "24-regular": ""}
    data = icon_set("some", names, suffixes=suffixes, prefixes={"baseline": "", "outline": ""})
    made = captions.captioner(iconify.parse("some", data))(name)
    assert made == caption
    assert not Counter(made.split()) - Counter(name.split("-"))  # nothing is invented


def test_joined_words_are_split_where_all_of_them_are_known() -> None:
    vocabulary = Counter({"up": 5, "pointing": 4, "red": 9, "triangle": 2, "clock": 3, "thirty": 3, "tri": 1})
    assert captions.split_words("uppointingredtriangle", vocabulary) == ["up", "pointing", "red", "triangle"]
    assert captions.split_words("clock3thirty", vocabulary) == ["clock", "3", "thirty"]
    assert captions.split_words("redtrisngle", vocabulary) == ["redtrisngle"]


@pytest.mark.parametrize(
    ("change", "corner"),  # where a mark in the top left ends up
    [
        *(({}, (0, 0)), ({"hFlip": True}, (1, 0)), ({"vFlip": True}, (0, 1)), ({"rotate": 1}, (1, 0))),
        *(({"rotate": 2}, (1, 1)), ({"rotate": 3}, (0, 1)), ({"rotate": 1, "hFlip": True}, (1, 1))),
    ],
)
def test_aliases_are_flipped_then_turned(change: dict[str, object], corner: tuple[int, int]) -> None:
    data = {
        "icons": {"mark": {"body": '<path d="M10 20h4v4h-4z"/>'}},
        "aliases": {"other": {"parent": "mark"} | change, "twice": {"parent": "other", "vFlip": True}},
        **{"left": 10, "top": 20, "width": 8, "height": 8},
    }
    drawn = {icon.name: icon for icon in iconify.parse("some", data).icons}
    assert ("other" in drawn) == bool(change)  # the same drawing under another name is skipped
    png = render.render(drawn["other" if change else "mark"].svg(64))
    assert isinstance(png, bytes)
    image = Image.open(io.BytesIO(png))
    black = [
        (x, y) for x in (0, 1) for y in (0, 1) if image.getpixel((16 + 32 * x, 16 + 32 * y)) == (0, 0, 0)
    ]
    assert black == [corner]


def test_words_flags_and_tones_become_classes() -> None:
    named = [tasks.Named(f"{i}", caption) for i, caption in enumerate(_emoji_captions())]
    made = {task.name: task for task in tasks.tasks_of("x", named, emoji=True)}
    assert made["x_words"].classes == ("button", "face")
    answers = {named[int(key)].caption: label for key, label in made["x_words"].items}
    assert answers["smiling face with hearts"] == "face"
    assert "face button" not in answers  # either class would be right
    assert made["x_flags"].classes == ("chad", "peru", "togo")
    assert [c.removesuffix(" skin tone") for c in made["x_skin_tones"].classes] == [
        *("light", "medium light", "medium", "medium dark", "dark")
    ]
    assert len(made["x_skin_tones"].items) == 15  # not the one with two tones
    first = {task.name: task for task in tasks.tasks_of("y", named, emoji=False)}
    assert "y_flags" not in first


def _emoji_captions() -> list[str]:
    faces = ["smiling face with hearts", "sad face", "big face", "face button"]
    buttons = ["on button", "off button", "red button"]
    tones = [
        f"{who} {t.replace('-', ' ')} skin tone" for t in captions.TONES for who in ("cook", "man", "elf")
    ]
    two = ["kiss light skin tone dark skin tone"]
    return [*faces, *buttons, "flag chad", "flag peru", "flag togo", "flag in hole", *tones, *two]


@pytest.fixture
def small_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "TRAIN", 400)
    monkeypatch.setattr(scenes, "TEST", 60)


@pytest.mark.slow
@pytest.mark.usefixtures("small_scenes")
def test_scenes_are_reproducible_and_hold_out_compositions_for_the_tasks(tmp_path: Path) -> None:
    one, two = (get("scenes", tmp_path / name, jobs=1, progress=False) for name in "ab")
    assert tree(one) == tree(two)
    pairs = train_pairs(one)
    assert len(pairs) == 400
    held_out = [f"{colour} {shape}" for colour, shape in scenes.HELD_OUT]
    assert len(held_out) == 8
    assert not [caption for caption in pairs.values() if any(text in caption for text in held_out)]
    retrieval = members(one / "tasks" / "scenes_retrieval" / "test" / "0.tar")
    sentences = [text.decode() for name, text in retrieval.items() if name.endswith(".txt")]
    assert len(set(sentences)) == 60
    assert all(any(text in sentence for text in held_out) for sentence in sentences)
    classes = {
        t: (one / "tasks" / f"scenes_{t}" / "classnames.txt").read_text().split("\n")[:-1] for t in _CLASSES
    }
    assert {task: len(names) for task, names in classes.items()} == _CLASSES


_CLASSES = {"colour": 8, "shape": 8, "relation": 4}


def test_scene_matches_its_caption() -> None:
    thing = scenes.Thing("large", "red", "circle")
    assert thing.phrase() == "a large red circle"
    other = scenes.Thing("small", "orange", "square")
    assert other.phrase(size=False) == "an orange square"
    png = scenes.draw(random.Random(0), list(zip((thing, other), scenes.RELATIONS["above"], strict=True)))
    image = Image.open(io.BytesIO(png))
    assert image.getpixel((32, 16)) == (0xD6, 0x27, 0x28)
    assert image.getpixel((32, 48)) == (0xFF, 0x8C, 0x1A)


def test_unknown_name_is_rejected_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        get("emojis", tmp_path)
    assert (caught.value.option, caught.value.value) == ("name", "emojis")
    assert "emoji, icons, scenes" in caught.value.rule
    assert "emoji?" in caught.value.advice


def test_number_of_jobs_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        get("scenes", tmp_path, jobs=0)
    assert (caught.value.option, caught.value.value) == ("jobs", 0)


def test_folder_in_use_is_rejected(tmp_path: Path, emoji: Path) -> None:
    (tmp_path / "notes.txt").touch()
    started = tmp_path / "started"
    (started / ".records").mkdir(parents=True)
    (started / ".records" / "plan.json").write_text('{"name": "icons"}')
    in_use = (("icons", emoji), ("scenes", tmp_path), ("scenes", tmp_path / "notes.txt"), ("emoji", started))
    for name, folder in in_use:
        with pytest.raises(FolderInUse) as caught:
            get(name, folder)
        assert caught.value.path == str(folder)
        assert isinstance(caught.value, FileExistsError)


@pytest.mark.slow
@pytest.mark.usefixtures("small_scenes")
def test_complete_folder_that_lost_a_shard_is_rebuilt(tmp_path: Path) -> None:
    complete = tree(get("scenes", tmp_path, jobs=1, progress=False))
    (tmp_path / "train" / "00003.tar").unlink()
    assert tree(get("scenes", tmp_path, jobs=1, progress=False)) == complete


@pytest.mark.parametrize("content", ["[1]", "{", "null", '{"a": 1}', '{"name": "scenes", "shards": 3}'])
def test_a_damaged_record_of_a_collection_is_named(tmp_path, content):
    (tmp_path / "complete.json").write_text(content)
    with pytest.raises(PathError) as caught:
        get("scenes", tmp_path, progress=False)
    assert caught.value.path == str(tmp_path / "complete.json")
