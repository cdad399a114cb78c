"""Collections by name: the same bytes each time, nothing held out in training, and no network here."""

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
from pathlib import Path

import pytest
from PIL import Image

from fastclip.config.collections import COLLECTIONS
from fastclip.datasets import DataUnavailable, captions, get, iconify, icons, render, scenes, tasks

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
    """A cache that holds a tiny package: ten emoji sets, four icon sets to hold out, three more."""
    sets = {p: icon_set(p, THINGS + PEOPLE) for p in (*icons.EMOJI_TRAIN, *COLLECTIONS["emoji"].held_out)}
    icon_sets = [p for p in COLLECTIONS["icons"].held_out if p not in sets]
    sets |= {p: icon_set(p, [*THINGS, "bell", "bell-2"]) for p in (*icon_sets, "lucide", "famicons")}
    sets["noto"]["icons"] |= {  # type: ignore[operator]
        "ghost": {"body": '<rect width="9" height="9" fill="#fff"/>'},
        "broken": {"body": "<rect"},
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


@pytest.fixture(autouse=True)
def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCLIP_CACHE", str(cache))
    monkeypatch.setattr(tasks, "LEAST", 3)
    monkeypatch.setattr(tasks, "LEAST_WORDS", 2)


@pytest.fixture(scope="module")
def emoji(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCLIP_CACHE", str(cache))
        patch.setattr(tasks, "LEAST", 3)
        patch.setattr(tasks, "LEAST_WORDS", 2)
        return get("emoji", tmp_path_factory.mktemp("emoji"), jobs=1, progress=False)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def members(tar: Path) -> dict[str, bytes]:
    with tarfile.open(tar) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def train_pairs(out: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for tar in sorted((out / "train").glob("*.tar")):
        found |= {n.removesuffix(".txt"): c.decode() for n, c in members(tar).items() if n.endswith(".txt")}
    return found


def test_shards_hold_whole_pairs_of_small_rgb_pictures(emoji: Path) -> None:
    tars = sorted((emoji / "train").iterdir())
    assert [tar.name for tar in tars] == [f"{i:05d}.tar" for i in range(8)]
    for tar in tars:
        names = list(members(tar))
        assert names[::2] == [name.replace(".txt", ".png") for name in names[1::2]]
        picture = Image.open(io.BytesIO(members(tar)[names[0]]))
        assert (picture.mode, picture.size, picture.getpixel((63, 63))) == ("RGB", (64, 64), (255, 255, 255))
        with tarfile.open(tar) as opened:
            assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in opened} == {(0, 0, 0, 0o644, "")}


def test_two_processes_make_the_same_bytes_as_one(emoji: Path, tmp_path: Path) -> None:
    assert tree(get("emoji", tmp_path / "new", jobs=2, progress=True)) == tree(emoji)


@pytest.mark.parametrize("pictures", [0, 20, 81, 120])
def test_a_run_stopped_anywhere_is_continued_to_the_same_bytes(
    emoji: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: int
) -> None:
    left = iter(range(pictures))

    def stop_after_some() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(render, "tick", stop_after_some)
        with pytest.raises(KeyboardInterrupt):
            get("emoji", tmp_path, jobs=1, progress=False)
    assert not (tmp_path / "complete.json").exists()
    half = tmp_path / "tasks" / "twemoji_words.7.part" / "test"  # as a kill within a task leaves it
    half.mkdir(parents=True)
    (half / "0.tar.7.part").touch()
    assert tree(get("emoji", tmp_path, jobs=1, progress=False)) == tree(emoji)


def test_a_killed_run_is_continued_and_keeps_its_finished_shards(emoji: Path, tmp_path: Path) -> None:
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


def test_a_complete_folder_is_left_alone(
    emoji: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = {path: path.stat().st_mtime_ns for path in emoji.rglob("*")}
    monkeypatch.setattr(iconify, "fetch", lambda **_: pytest.fail("nothing is to be read"))
    with caplog.at_level("INFO"):
        get("emoji", emoji)
    assert "complete already" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in emoji.rglob("*")} == before


def test_what_was_begun_with_another_package_is_begun_again(
    emoji: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".records").mkdir()
    (tmp_path / ".records" / "plan.json").write_text('{"name": "emoji", "package": "1.0.0"}')
    (tmp_path / ".records" / "shard-00000.json").write_text("{}")
    assert tree(get("emoji", tmp_path, jobs=1, progress=False)) == tree(emoji)
    assert "starting again" in caplog.text


def test_held_out_sets_are_never_in_training(emoji: Path, tmp_path: Path) -> None:
    assert {key.split("_")[0] for key in train_pairs(emoji)} == set(icons.EMOJI_TRAIN)
    out = get("icons", tmp_path, jobs=1, progress=False)
    pairs = train_pairs(out)
    assert {key.split("_")[0] for key in pairs} == {*icons.EMOJI_TRAIN, "lucide"}
    assert "lucide_bell" in pairs
    assert "lucide_stolen" not in pairs  # the same picture as mdi's bell
    tested = {path.name.split("_")[0] for path in (out / "tasks").glob("*_retrieval")}
    assert tested == {*COLLECTIONS["icons"].held_out}
    summary = json.loads((out / "complete.json").read_text())
    assert summary["left_out"]["same picture as one of a held-out set"] == 1
    assert summary["left_out"]["sets that copy a held-out one"] == ["famicons"]


def test_hidden_blank_broken_and_merely_renamed_icons_are_left_out_and_counted(emoji: Path) -> None:
    pairs = train_pairs(emoji)
    assert pairs["noto_heart-turned"] == "heart turned"
    assert not {f"noto_{n}" for n in ("ghost", "broken", "withdrawn", "scarlet-heart")} & set(pairs)
    summary = json.loads((emoji / "complete.json").read_text())
    assert summary["pairs"] == len(pairs) == 5 * 15 + 1
    assert summary["skipped"]["noto_ghost"] == "blank"
    assert summary["skipped"]["noto_broken"].startswith("cannot be rendered")
    assert summary["left_out"]["hidden by their makers"] == 1


def test_tasks_have_the_layout_that_clip_benchmark_reads(emoji: Path) -> None:
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


def test_licences_of_all_sets_are_listed(emoji: Path) -> None:
    text = (emoji / "LICENSES.md").read_text()
    for prefix in (*icons.EMOJI_TRAIN, *COLLECTIONS["emoji"].held_out):
        line = next(line for line in text.splitlines() if line.startswith(f"| {prefix} |"))
        assert f"The {prefix} set" in line
        assert f"Ann of {prefix}" in line
        assert "[CC BY 4.0 (CC-BY-4.0)](https://example.org/licence)" in line
    card = (emoji / "README.md").read_text()
    assert "fastclip data get emoji" in card
    assert "@iconify/json 9.10.0" in card


def test_without_npm_the_message_says_how_to_get_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataUnavailable, match=r"npm was not found.*no iconify-json-.*Node\.js.*scenes"):
        get("emoji", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="needs a shell script")
def test_when_npm_fails_its_words_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'network is unreachable' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataUnavailable, match=r"network is unreachable.*scenes"):
        get("icons", tmp_path / "out")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_truncated_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    whole = (cache / "iconify-json-9.10.0.tgz").read_bytes()
    (tmp_path / "iconify-json-1.0.0.tgz").write_bytes(whole[: len(whole) // 2])
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path))
    with pytest.raises(DataUnavailable, match=r"iconify-json-1\.0\.0\.tgz cannot be read.*Delete it"):
        get("emoji", tmp_path / "out")


def test_the_newest_package_in_the_cache_is_taken_or_the_one_that_was_begun_with(
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
        ("dice-5", "dice 5"),  # what the picture shows
        ("battery-30", "battery 30"),
        ("clock-24", "clock"),  # a size, for the set declares it
        ("star-alt", "star"),
        ("flag-for-flag-germany", "flag germany"),
        ("flag-for-germany", "flag germany"),
        ("flag-for-white-flag", "white flag"),
    ],
)
def test_captions_are_the_cleaned_names(name: str, caption: str) -> None:
    names = [name, "terminal", "dice", "dice-1", "battery"]
    suffixes = {"16": "", "24": "", "24-filled": "", "24-regular": ""}
    data = icon_set("some", names, suffixes=suffixes, prefixes={"baseline": "", "outline": ""})
    found = captions.captioner(iconify.parse("some", data))(name)
    assert found == caption
    assert not Counter(found.split()) - Counter(name.split("-"))  # nothing is invented


def test_joined_words_are_parted_where_all_of_them_are_known() -> None:
    vocabulary = Counter({"up": 5, "pointing": 4, "red": 9, "triangle": 2, "clock": 3, "thirty": 3, "tri": 1})
    assert captions.part_words("uppointingredtriangle", vocabulary) == ["up", "pointing", "red", "triangle"]
    assert captions.part_words("clock3thirty", vocabulary) == ["clock", "3", "thirty"]
    assert captions.part_words("redtrisngle", vocabulary) == ["redtrisngle"]


@pytest.mark.parametrize(
    ("how", "corner"),  # where a mark in the top left goes
    [
        *(({}, (0, 0)), ({"hFlip": True}, (1, 0)), ({"vFlip": True}, (0, 1)), ({"rotate": 1}, (1, 0))),
        *(({"rotate": 2}, (1, 1)), ({"rotate": 3}, (0, 1)), ({"rotate": 1, "hFlip": True}, (1, 1))),
    ],
)
def test_aliases_are_flipped_then_turned(how: dict[str, object], corner: tuple[int, int]) -> None:
    data = {
        "icons": {"mark": {"body": '<path d="M10 20h4v4h-4z"/>'}},
        "aliases": {"other": {"parent": "mark"} | how, "twice": {"parent": "other", "vFlip": True}},
        **{"left": 10, "top": 20, "width": 8, "height": 8},
    }
    drawn = {icon.name: icon for icon in iconify.parse("some", data).icons}
    assert ("other" in drawn) == bool(how)  # the same picture under another name is no pair
    png = render.render(drawn["other" if how else "mark"].svg(64))
    assert isinstance(png, bytes)
    picture = Image.open(io.BytesIO(png))
    black = [
        (x, y) for x in (0, 1) for y in (0, 1) if picture.getpixel((16 + 32 * x, 16 + 32 * y)) == (0, 0, 0)
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
    assert len(made["x_skin_tones"].items) == 15  # not the pair of two tones
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


@pytest.mark.usefixtures("small_scenes")
def test_scenes_are_the_same_each_time_and_keep_compositions_for_the_tasks(tmp_path: Path) -> None:
    one, two = (get("scenes", tmp_path / name, jobs=1, progress=False) for name in "ab")
    assert tree(one) == tree(two)
    pairs = train_pairs(one)
    assert len(pairs) == 400
    kept = [f"{colour} {shape}" for colour, shape in scenes.HELD_OUT]
    assert len(kept) == 8
    assert not [caption for caption in pairs.values() if any(composition in caption for composition in kept)]
    asked = members(one / "tasks" / "scenes_retrieval" / "test" / "0.tar")
    sentences = [text.decode() for name, text in asked.items() if name.endswith(".txt")]
    assert len(set(sentences)) == 60
    assert all(any(composition in sentence for composition in kept) for sentence in sentences)
    classes = {
        t: (one / "tasks" / f"scenes_{t}" / "classnames.txt").read_text().split("\n")[:-1] for t in _ASKED
    }
    assert {task: len(names) for task, names in classes.items()} == _ASKED


_ASKED = {"colour": 8, "shape": 8, "relation": 4}


def test_a_scene_shows_what_its_caption_says() -> None:
    thing = scenes.Thing("large", "red", "circle")
    assert thing.words() == "a large red circle"
    other = scenes.Thing("small", "orange", "square")
    assert other.words(size=False) == "an orange square"
    png = scenes.draw(random.Random(0), list(zip((thing, other), scenes.RELATIONS["above"], strict=True)))
    picture = Image.open(io.BytesIO(png))
    assert picture.getpixel((32, 16)) == (0xD6, 0x27, 0x28)
    assert picture.getpixel((32, 48)) == (0xFF, 0x8C, 0x1A)


def test_an_unknown_name_and_a_folder_in_use_are_refused(tmp_path: Path, emoji: Path) -> None:
    with pytest.raises(ValueError, match=r"emoji, icons, scenes\. Did you mean emoji\?"):
        get("emojis", tmp_path)
    with pytest.raises(FileExistsError, match="holds 'emoji', not 'icons'"):
        get("icons", emoji)
    (tmp_path / "notes.txt").touch()
    for taken in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(FileExistsError, match="something else"):
            get("scenes", taken)
    begun = tmp_path / "begun"
    (begun / ".records").mkdir(parents=True)
    (begun / ".records" / "plan.json").write_text('{"name": "icons"}')
    with pytest.raises(FileExistsError, match="a part of 'icons'"):
        get("emoji", begun)


@pytest.mark.usefixtures("small_scenes")
def test_a_complete_folder_that_lost_a_shard_is_built_again(tmp_path: Path) -> None:
    whole = tree(get("scenes", tmp_path, jobs=1, progress=False))
    (tmp_path / "train" / "00003.tar").unlink()
    assert tree(get("scenes", tmp_path, jobs=1, progress=False)) == whole
