"""The page of a run is self-contained, and shows text from the run as text."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from fastclip.run.folder import read_run
from fastclip.run.state_file import write_state
from fastclip.tools.report.hard_pairs import ConfusedPair, HardPair, HardPairs
from fastclip.tools.report.run_page import about_estimators, render
from fastclip.tools.report.search_examples import Found, Search, SearchExamples, Thumbnail
from tests.tools.report.folders import VERSIONS, make_run, result, write_results

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'"
DOT = "data:image/webp;base64,AAAA"


class Tags(HTMLParser):
    """Every tag with its attributes, and the text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.open, self.unbalanced = [], "", [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        self.text += data

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "a run")


def examples(query="a cat", caption="a cat", place=1):
    image = Found(Thumbnail(DOT, caption), 0.5, own=True)
    other = Found(Thumbnail(DOT, "a dog"), 0.25, own=False)
    by_image = Search(Thumbnail(DOT, caption), [Found(caption, 0.5, True)], place)
    return SearchExamples(2, 2, [Search(query, [image, other], 1)], [by_image])


def page_of(folder, found=None, **more):
    return render(read_run(folder), found, images="photos.tar", **more).html


def text_of(page):
    return " ".join(Tags(page).text.split())


@pytest.mark.slow
def test_tags_are_balanced_and_headings_in_order(folder):
    tags = Tags(page_of(folder, examples()))
    assert tags.unbalanced == []
    assert tags.open == []
    levels = [int(tag[1]) for tag, _ in tags.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


@pytest.mark.slow
def test_the_page_is_self_contained(folder):
    write_results(folder, result("twemoji_words", 0.5))
    page = page_of(folder, examples())
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    tags = Tags(page)
    assert not {"script", "link", "iframe", "object", "embed"} & {tag for tag, _ in tags.tags}
    sources = [at[name] for _, at in tags.tags for name in ("src", "srcset", "poster") if name in at]
    assert len(sources) == 3
    assert all(source.startswith("data:image/") for source in sources)
    links = [value for _, at in tags.tags for name, value in at.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links)
    assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)\)", page))


@pytest.mark.usefixtures("_quick_plots")
def test_the_policy_allows_no_scripts_and_no_requests(folder):
    rules = [at["content"] for at in Tags(page_of(folder)).all("meta") if "http-equiv" in at]
    assert rules == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


@pytest.mark.usefixtures("_quick_plots")
def test_text_from_the_run_is_never_markup(tmp_path):
    folder = make_run(tmp_path / "<i>run")
    with (folder / "config.yaml").open("a") as file:
        file.write(f"# {EVIL}\n")
    write_results(folder, result(EVIL, 0.5, measure=EVIL), {"task": "b", "error": EVIL})
    page = page_of(folder, examples(EVIL, EVIL, place=7))
    tags = Tags(page)
    assert tags.text.count("<script>alert(1)</script>") >= 6
    assert not tags.all("script")
    assert "<i>run" in tags.text
    assert all("style" in at for at in tags.all("i"))  # the bars
    assert not any(name.startswith("on") for _, at in tags.tags for name in at)
    assert {at["alt"] for at in tags.all("img")} == {EVIL, "a dog"}


@pytest.mark.usefixtures("_quick_plots")
def test_control_characters_are_visible(folder):
    text = Tags(page_of(folder, None, why_no_examples="a\x1b[2J\u202eb")).text
    assert r"a\x1b[2J\u202eb" in text


@pytest.mark.usefixtures("_quick_plots")
def test_a_reason_is_never_markup(folder):
    tags = Tags(page_of(folder, None, why_no_examples=EVIL))
    assert EVIL in tags.text
    assert not tags.all("script")


@pytest.mark.usefixtures("_quick_plots")
def test_correct_results_are_marked_and_not_by_colour_alone(folder):
    page = page_of(folder, examples())
    shown = page[page.index('<ol class="row">') :]
    own, other = re.findall(r"<li.*?</li>", shown[: shown.index("</ol>")], flags=re.S)
    assert 'class="own"' in own
    assert "✓" in own
    assert "✓" not in other
    assert "own" not in other
    captions = shown[shown.index('<ol class="captions">') :]
    assert "✓</span> a cat" in captions


def hard_pairs(caption="a cat", equal=0):
    dot = Thumbnail(DOT, caption)
    hard = HardPair(dot, 5.5, 1234, 7)
    confused = [ConfusedPair(dot, dot, 0.5, 0.25, same) for same in (True, False)]
    return HardPairs(10, 20, [hard], confused, equal, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_hard_and_confused_pairs_are_shown(folder):
    text = text_of(page_of(folder, examples(), hard_pairs=hard_pairs(equal=1)))
    assert "10 of 20 pairs (photos.tar)" in text
    assert re.search(r"log g 5\.5 .* 1,234, .* 7\b", text)
    assert "same caption: 1." in text
    assert "own: 3;" in text
    assert "same caption “a cat”" in text
    assert re.search("0\\.50 “a cat” .*0\\.25 “a cat”", text)
    assert "same caption: 0." in text_of(page_of(folder, examples(), hard_pairs=hard_pairs()))


@pytest.mark.usefixtures("_quick_plots")
def test_only_equal_captions_are_called_false_negatives(folder):
    """A model's mistakes between different captions are not the data's."""
    for equal in (0, 1):
        text = text_of(page_of(folder, examples(), hard_pairs=hard_pairs(equal=equal)))
        assert "Most confused pairs" in text
        assert ("false negatives" in text) == bool(equal)


@pytest.mark.usefixtures("_quick_plots")
def test_captions_of_hard_pairs_are_never_markup(folder):
    tags = Tags(page_of(folder, examples(), hard_pairs=hard_pairs(EVIL)))
    assert not tags.all("script")
    assert tags.unbalanced == []
    assert EVIL in {at["alt"] for at in tags.all("img")}


@pytest.mark.usefixtures("_quick_plots")
def test_bad_pairs_are_listed_without_credentials(folder):
    newest = folder / "checkpoints" / "last"
    saved = json.loads((newest / "state.json").read_text())
    bad = [[i, "https://me:secret@host/0.tar?token=abc", f"<b>{i}</b>"] for i in range(60)]
    write_state(newest, saved["facts"] | {"bad": [*bad, "damaged"]}, saved["files"], saved["digests"])
    page = page_of(folder)
    text = text_of(page)
    assert re.search("Bad pairs.*: 60", text)
    assert "<b>49</b>" in text
    assert "<b>50</b>" not in text
    assert "10 more" in text
    assert "secret" not in page


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_the_age_of_estimators_is_shown(folder):
    text = text_of(page_of(folder))
    assert all(sentence in text for sentence in about_estimators(read_run(folder)))


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_curves_against_samples_and_time_are_collapsed(folder):
    page = page_of(folder)
    collapsed = page[page.index('<details class="more">') :]
    assert collapsed[: collapsed.index("</details>")].count("<svg") == 4


@pytest.mark.usefixtures("_quick_plots")
def test_missing_images_are_reported_with_the_command_to_run(folder):
    text = Tags(page_of(folder, None, why_no_examples="data/x.tar does not exist.")).text
    assert "data/x.tar does not exist." in text
    assert f"fastclip report '{folder}' --images" in text


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_missing_scores_are_reported_with_the_command_to_run(folder):
    assert f"fastclip eval '{folder}' --tasks" in Tags(page_of(folder)).text


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_scores_show_means_partial_means_and_failures(folder):
    failed = {"task": "emojione_words", "error": "0.tar is damaged."}
    write_results(folder, result("twemoji_words", 0.625), failed)
    text = text_of(page_of(folder))
    assert "Classification, partial: 1 of 9 tasks 62.5 %" in text
    assert re.search(r"emojione words .*: 0\.tar is damaged\.", text)
    assert "acc5 90.0 %" in text


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_the_header_shows_the_settings_and_the_state(folder):
    text = text_of(page_of(folder))
    assert "a run fastclip-v3 · vit-scenes · 640 pairs · global batch 64 · 4 epochs" in text
    assert read_run(folder).state().words in text
    assert all(value in text for value in VERSIONS.values())
    assert "algorithm: fastclip-v3" in text


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_missing_data_is_listed(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("torn")
    (sentence,) = read_run(folder).missing
    assert sentence in Tags(page_of(folder)).text


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_a_run_with_only_a_config_has_a_page(tmp_path):
    folder = make_run(tmp_path / "a", steps=0, evaluated=False)
    (folder / "metrics.jsonl").unlink()
    tags = Tags(page_of(folder))
    assert read_run(folder).state().words in tags.text
    assert not tags.all("svg")


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plots")
def test_a_page_is_reproducible(folder):
    assert page_of(folder, examples()) == page_of(folder, examples())


def estimators(folder):
    return " ".join(about_estimators(read_run(folder)))


@pytest.mark.slow
def test_the_age_of_estimators_follows_from_epochs_and_gamma(tmp_path):
    text = estimators(make_run(tmp_path / "a"))
    # the average and the longest interval; gamma, its share, and the half-life in visits and steps
    expected = ["10 steps", "20 steps", "0.2", "20 %", "3.1 visits", "31 steps"]
    assert re.findall(r"\d[\d.]*(?: steps| visits| %)?", text) == expected


@pytest.mark.slow
def test_unvisited_pairs_are_reported(tmp_path):
    assert "50 % of the pairs" in estimators(make_run(tmp_path / "a", steps=5))
    assert "% of the pairs" not in estimators(make_run(tmp_path / "b"))


@pytest.mark.slow
def test_at_gamma_1_only_the_last_visit_counts(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    run.records[-1]["gamma"] = 1.0
    (sentence,) = (sentence for sentence in about_estimators(run) if "γ" in sentence)
    assert "γ = 1 " in sentence
    assert "last visit" in sentence


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["openclip", "mbcl"])
def test_algorithms_without_estimators_have_no_such_text(tmp_path, algorithm):
    assert estimators(make_run(tmp_path / "a", algorithm)) == ""


def test_a_run_without_config_has_no_such_text(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").unlink()
    assert estimators(folder) == ""
