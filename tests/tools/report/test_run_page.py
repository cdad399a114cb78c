"""The page needs nothing but itself, shows foreign text as text, and is written whole or not at all."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from fastclip.run.folder import read_run
from fastclip.tools.report import output as output_module
from fastclip.tools.report.hard_pairs import HardPair, LikelyFalse, Samples
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


@pytest.fixture
def _quick_plots(monkeypatch):
    """Plots have tests of their own."""
    monkeypatch.setattr(output_module, "draw", lambda curve: "<svg></svg>")


def finds(query="a cat", caption="a cat", place=1):
    picture = Found(Thumbnail(DOT, caption), 0.5, own=True)
    other = Found(Thumbnail(DOT, "a dog"), 0.25, own=False)
    by_picture = Search(Thumbnail(DOT, caption), [Found(caption, 0.5, True)], place)
    return SearchExamples(2, 2, [Search(query, [picture, other], 1)], [by_picture])


def page_of(folder, found=None, **more):
    return render(read_run(folder), found, images="pictures", **more).html


def test_the_page_is_whole_html_with_headings_in_order(folder):
    tags = Tags(page_of(folder, finds()))
    assert tags.unbalanced == []
    assert tags.open == []
    levels = [int(tag[1]) for tag, _ in tags.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_the_page_is_self_contained(folder):
    write_results(folder, result("twemoji_words", 0.5))
    page = page_of(folder, finds())
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
def test_nothing_is_allowed_to_run_or_to_be_fetched(folder):
    rules = [at["content"] for at in Tags(page_of(folder)).all("meta") if "http-equiv" in at]
    assert rules == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


@pytest.mark.usefixtures("_quick_plots")
def test_what_comes_from_the_run_is_text_and_never_markup(tmp_path):
    folder = make_run(tmp_path / "<i>run")
    with (folder / "config.yaml").open("a") as file:
        file.write(f"# {EVIL}\n")
    write_results(folder, result(EVIL, 0.5, measure=EVIL), {"task": "b", "error": EVIL})
    page = page_of(folder, finds(EVIL, EVIL, place=7))
    tags = Tags(page)
    assert tags.text.count("<script>alert(1)</script>") >= 6
    assert not tags.all("script")
    assert "<i>run" in tags.text
    assert all("style" in at for at in tags.all("i"))  # the bars
    assert not any(name.startswith("on") for _, at in tags.tags for name in at)
    assert {at["alt"] for at in tags.all("img")} == {EVIL, "a dog"}


@pytest.mark.usefixtures("_quick_plots")
def test_a_reason_that_holds_markup_is_text(folder):
    assert not Tags(page_of(folder, None, no_finds=EVIL)).all("script")


@pytest.mark.usefixtures("_quick_plots")
def test_what_belongs_together_is_marked_and_not_by_colour_alone(folder):
    page = page_of(folder, finds())
    shown = page[page.index('<ol class="row">') :]
    own, other = re.findall(r"<li.*?</li>", shown[: shown.index("</ol>")], flags=re.S)
    assert 'class="own"' in own
    assert "✓" in own
    assert "✓" not in other
    assert "own" not in other
    captions = shown[shown.index('<ol class="captions">') :]
    assert "✓</span> a cat" in captions


def samples(words="a cat", equal=0):
    dot = Thumbnail(DOT, words)
    hard = HardPair(dot, 5.5, 1234, 7)
    likely = [LikelyFalse(dot, dot, 0.5, 0.25, same) for same in (True, False)]
    return Samples(10, 20, [hard], likely, equal, 3)


@pytest.mark.usefixtures("_quick_plots")
def test_hard_pairs_and_likely_false_negatives_are_shown(folder):
    text = " ".join(Tags(page_of(folder, finds(), samples=samples(equal=1))).text.split())
    assert "Among 10 of 20 pairs (pictures)" in text
    assert "log g 5.5 · its caption is number 1,234, its picture number 7" in text
    assert "1 pairs of samples have the very same caption. In 3 cases" in text
    assert "equal captions “a cat”" in text
    assert "0.50 “a cat” its own: 0.25 “a cat”" in text
    assert "No two samples have the same caption." in page_of(folder, finds(), samples=samples())


@pytest.mark.usefixtures("_quick_plots")
def test_words_of_hard_pairs_are_text_and_never_markup(folder):
    tags = Tags(page_of(folder, finds(), samples=samples(EVIL)))
    assert not tags.all("script")
    assert tags.unbalanced == []
    assert EVIL in {at["alt"] for at in tags.all("img")}


@pytest.mark.usefixtures("_quick_plots")
def test_bad_pairs_are_listed_without_who_logs_in(folder):
    state = folder / "checkpoints" / "last" / "state.json"
    saved = json.loads(state.read_text())
    bad = [[i, "https://me:secret@host/0.tar?token=abc", f"<b>{i}</b>"] for i in range(60)]
    state.write_text(json.dumps(saved | {"facts": saved["facts"] | {"bad": [*bad, "broken"]}}))
    page = page_of(folder)
    text = " ".join(Tags(page).text.split())
    assert "Pairs that could not be used: 60" in text
    assert "<b>49</b>" in text
    assert "<b>50</b>" not in text
    assert "and 10 more." in text
    assert "secret" not in page


@pytest.mark.usefixtures("_quick_plots")
def test_the_age_of_estimators_is_told(folder):
    assert "How old the estimators are" in page_of(folder)


@pytest.mark.usefixtures("_quick_plots")
def test_curves_against_samples_and_time_are_folded_away(folder):
    page = page_of(folder)
    folded = page[page.index("The same against samples and time") :]
    assert folded[: folded.index("</details>")].count("<svg") == 4


@pytest.mark.usefixtures("_quick_plots")
def test_missing_pictures_are_told_with_what_to_do(folder):
    text = Tags(page_of(folder, None, no_finds="data/x.tar does not exist.")).text
    assert "There are no pictures to search in. data/x.tar does not exist." in text
    assert f"fastclip report '{folder}' --images" in text


@pytest.mark.usefixtures("_quick_plots")
def test_missing_scores_are_told_with_the_command(folder):
    assert f"fastclip eval '{folder}' --tasks" in Tags(page_of(folder)).text


@pytest.mark.usefixtures("_quick_plots")
def test_scores_show_means_failures_and_partial_ones(folder):
    failed = {"task": "emojione_words", "error": "0.tar is torn."}
    write_results(folder, result("twemoji_words", 0.625), failed)
    text = " ".join(Tags(page_of(folder)).text.split())
    assert "Classification, partial: 1 of 9 tasks 62.5 %" in text
    assert "emojione words could not be scored: 0.tar is torn." in text
    assert "acc5 90.0 %" in text


@pytest.mark.usefixtures("_quick_plots")
def test_the_head_says_what_was_trained_and_how_far(folder):
    text = " ".join(Tags(page_of(folder)).text.split())
    assert "a run fastclip-v3 · vit-scenes · 640 pairs · global batch 64 · 4 epochs" in text
    assert "finished after 40 steps" in text
    assert all(value in text for value in VERSIONS.values())
    assert "algorithm: fastclip-v3" in text


@pytest.mark.usefixtures("_quick_plots")
def test_what_is_missing_is_listed(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("torn")
    assert "metrics.jsonl: the last line is torn and was left out." in Tags(page_of(folder)).text


@pytest.mark.usefixtures("_quick_plots")
def test_a_run_with_nothing_but_its_config_has_a_page(tmp_path):
    folder = make_run(tmp_path / "a", steps=0, evaluated=False)
    (folder / "metrics.jsonl").unlink()
    tags = Tags(page_of(folder))
    assert "no step has been recorded yet" in tags.text
    assert not tags.all("svg")


@pytest.mark.usefixtures("_quick_plots")
def test_the_same_run_gives_the_same_page(folder):
    assert page_of(folder, finds()) == page_of(folder, finds())


def told(folder):
    return " ".join(about_estimators(read_run(folder)))


def test_a_visit_comes_once_an_epoch_and_gamma_says_how_much_it_brings(tmp_path):
    found = told(make_run(tmp_path / "a"))
    assert "waits 10 steps for the next visit on average" in found
    assert "At most it waits 20 steps" in found
    assert "At γ = 0.2 each visit brings 20 % of an estimator" in found
    assert "halves in 3.1 visits, which are about 31 steps" in found
    assert "Every pair has been visited." in found


def test_what_was_not_visited_is_told(tmp_path):
    assert "50 % of the pairs have not been visited yet" in told(make_run(tmp_path / "a", steps=5))


def test_at_gamma_1_only_the_last_visit_counts(tmp_path):
    run = read_run(make_run(tmp_path / "a"))
    run.records[-1]["gamma"] = 1.0
    assert "nothing but its last visit" in " ".join(about_estimators(run))


@pytest.mark.parametrize("algorithm", ["openclip", "mbcl"])
def test_algorithms_without_estimators_say_nothing(tmp_path, algorithm):
    assert told(make_run(tmp_path / "a", algorithm)) == ""


def test_a_run_without_config_says_nothing(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").unlink()
    assert told(folder) == ""
