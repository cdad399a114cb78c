"""From questions to results, without a browser."""

import re

import pytest
import torch

from fastclip.tools.demo.answers import Answers
from fastclip.tools.demo.limits import Refused
from tests.evaluation import replica
from tests.tools.demo.collection import EVIL, caption, open_index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return open_index(tmp_path_factory.mktemp("answers"))


@pytest.fixture
def answers(index, tmp_path):
    return Answers(index, tmp_path)


@pytest.fixture
def sent(tmp_path):
    (tmp_path / "sent.png").write_bytes(replica.png(3))
    return {"path": str(tmp_path / "sent.png")}


def names(html):
    return re.findall(r'<li title="([^"]*)"', html)


def scores(html):
    return [float(score) for score in re.findall(r'class="score">([^<]*)<', html)]


def test_words_show_the_pictures_that_the_index_finds(answers, index):
    html = answers.pictures(" a red heart ", 5)
    found = index.by_text("a red heart", 5)
    assert names(html) == [match.name.split("/")[-1] for match in found]
    assert scores(html) == [round(match.score, 3) for match in found]
    assert html.count("data:image/webp;base64,") == 5


def test_cards_bear_the_captions_of_their_pictures(answers):
    html = answers.pictures("anything", 30)
    for name, words in zip(names(html), re.findall(r'class="words">([^<]*)<', html), strict=True):
        number = int(name.removesuffix(".png"))
        assert words == caption(number) if number != 7 else "&lt;img" in words


def test_a_picture_shows_captions_and_pictures_like_it(answers, index, sent, tmp_path):
    captions, pictures = answers.captions_and_pictures(sent, 4)
    expected = index.captions_for(tmp_path / "sent.png", 4)
    assert scores(captions) == [round(match.score, 3) for match in expected]
    assert [match.text in captions for match in expected if match.text != EVIL]
    assert names(pictures)[0] == "003.png"
    assert scores(pictures)[0] == 1


def test_pictures_without_captions_are_found_by_name(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(3):
        (photos / f"{i}.png").write_bytes(replica.png(i))
    answers = Answers(open_index(tmp_path, photos), photos)
    captions, pictures = answers.captions_and_pictures({"path": str(photos / "1.png")}, 12)
    assert captions == ""
    assert re.findall(r'class="words">([^<]*)<', pictures)[0] == "1.png"
    assert answers.examples() == []


def test_probabilities_are_those_of_the_model_and_sum_to_one(answers, index, sent, tmp_path):
    found = answers.probabilities(sent, "cat, dog\nred heart")
    assert [*found] == ["cat", "dog", "red heart"]
    assert sum(found.values()) == pytest.approx(1)
    model = index.model
    cosines = model.similarity(tmp_path / "sent.png", [*found])[0]
    expected = torch.softmax(cosines * model.towers.clip.logit_scale.detach().exp(), 0)
    assert [*found.values()] == pytest.approx(expected.tolist())


def test_examples_are_short_captions_from_all_over_without_commas(answers, index):
    examples = answers.examples(4)
    assert len(examples) == 4
    assert {*examples} < {*index.captions}
    assert EVIL not in examples
    numbers = [int(text.split()[-1]) for text in examples]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 20


def test_a_picture_that_is_gone_is_left_out(index, tmp_path, monkeypatch):
    read = index.pictures.image
    gone = index.by_text("a cat", 3)[1].number

    def image(number):
        if number == gone:
            raise FileNotFoundError
        return read(number)

    monkeypatch.setattr(index.pictures, "image", image)
    assert len(names(Answers(index, tmp_path).pictures("a cat", 3))) == 2


def test_refusals_come_before_the_model_is_asked(answers, sent, monkeypatch):
    monkeypatch.setattr(answers.index.model, "encode_text", lambda *_: pytest.fail("was asked"))
    for ask in (
        lambda: answers.pictures("", 12),
        lambda: answers.pictures("cat", 49),
        lambda: answers.captions_and_pictures(None, 12),
        lambda: answers.probabilities(sent, "one"),
    ):
        with pytest.raises(Refused):
            ask()
