"""From queries to results, without a browser."""

import re
from types import SimpleNamespace

import pytest
import torch

from fastclip.tools.demo.answers import Answers
from fastclip.tools.demo.limits import RejectedInput
from tests.evaluation import replica
from tests.tools.demo.collection import EVIL, caption, open_index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return open_index(tmp_path_factory.mktemp("answers"))


@pytest.fixture
def answers(index, tmp_path):
    return Answers(index, tmp_path)


@pytest.fixture
def upload(tmp_path):
    (tmp_path / "sent.png").write_bytes(replica.png(3))
    return {"path": str(tmp_path / "sent.png")}


@pytest.fixture
def photos(tmp_path):
    """A folder of three images without captions."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.png").write_bytes(replica.png(i))
    return folder


def names(html):
    return re.findall(r'<li title="([^"]*)"', html)


def scores(html):
    return [float(score) for score in re.findall(r'class="score">([^<]*)<', html)]


def texts(html):
    return re.findall(r'class="words">([^<]*)<', html)


def test_a_text_shows_the_images_that_the_index_finds(answers, index):
    html = answers.images(" a red heart ", 5)
    matches = index.by_text("a red heart", 5)
    assert names(html) == [match.name.split("/")[-1] for match in matches]
    assert scores(html) == [round(match.score, 3) for match in matches]
    assert html.count("data:image/webp;base64,") == 5


def test_cards_show_the_captions_of_their_images(answers):
    html = answers.images("anything", 30)
    for name, text in zip(names(html), texts(html), strict=True):
        number = int(name.removesuffix(".png"))
        assert text == caption(number) if number != 7 else "&lt;img" in text


def test_an_image_shows_captions_and_similar_images(answers, index, upload, tmp_path):
    captions, images = answers.captions_and_images(upload, 4)
    expected = index.captions_for(tmp_path / "sent.png", 4)
    assert scores(captions) == [round(match.score, 3) for match in expected]
    assert all(match.text in captions for match in expected if match.text != EVIL)
    assert names(images)[0] == "003.png"
    assert scores(images)[0] == 1


def test_images_without_captions_are_shown_by_name(photos, tmp_path):
    answers = Answers(open_index(tmp_path, photos), photos)
    captions, images = answers.captions_and_images({"path": str(photos / "1.png")}, 12)
    assert captions == ""
    assert texts(images)[0] == "1.png"
    assert answers.examples() == []


def test_probabilities_are_those_of_the_model_and_sum_to_one(answers, index, upload, tmp_path):
    probabilities = answers.probabilities(upload, "cat, dog\nred heart")
    assert [*probabilities] == ["cat", "dog", "red heart"]
    assert sum(probabilities.values()) == pytest.approx(1)
    model = index.model
    cosines = model.similarity(tmp_path / "sent.png", [*probabilities])[0]
    expected = torch.softmax(cosines * model.towers.clip.logit_scale.detach().exp(), 0)
    assert [*probabilities.values()] == pytest.approx(expected.tolist())


def test_examples_are_short_captions_from_across_the_collection_without_commas(answers, index):
    examples = answers.examples(4)
    assert len(examples) == 4
    assert {*examples} < {*index.captions}
    assert EVIL not in examples
    numbers = [int(text.split()[-1]) for text in examples]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 20


def test_a_deleted_image_is_skipped(photos, tmp_path):
    answers = Answers(open_index(tmp_path, photos), tmp_path)
    (photos / "1.png").unlink()
    assert sorted(names(answers.images("a cat", 3))) == ["0.png", "2.png"]


def test_input_is_checked_before_the_index_is_used(upload, tmp_path):
    answers = Answers(SimpleNamespace(formats=()), uploads=tmp_path)
    for field, ask in (
        ("query", lambda: answers.images("", 12)),
        ("top", lambda: answers.images("cat", 49)),
        ("upload", lambda: answers.captions_and_images(None, 12)),
        ("labels", lambda: answers.probabilities(upload, "one")),
    ):
        with pytest.raises(RejectedInput) as caught:
            ask()
        assert caught.value.field == field
