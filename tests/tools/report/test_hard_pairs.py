"""Hard pairs and most confused pairs agree with a plain loop at any tile size."""

from math import exp, log

import pytest
import torch

from fastclip.tools.report.hard_pairs import CONFUSED, compare, find_hard_pairs
from tests.tools.report.test_search_examples import FakeIndex

TAU = 0.1


def features(n=13, d=6, seed=0, same=()):
    """Random features of images and captions; `same` lists pairs with equal captions."""
    random = torch.Generator().manual_seed(seed)
    image, text = (
        torch.nn.functional.normalize(torch.randn(n, d, generator=random), dim=1) for _ in range(2)
    )
    code = torch.arange(n)
    for one, other in same:
        text[other], code[other] = text[one], code[one]
    return image, text, code


def reference(image, text, code):
    """log g, places, and by how much other captions fit better, as a plain loop."""
    n, s = len(code), (image @ text.T).tolist()
    log_g, caption_place, image_place, better = [], [], [], []
    for i in range(n):
        others = [j for j in range(n) if code[j] != code[i]]
        forth = sum(exp((s[i][j] - s[i][i]) / TAU) for j in others) / len(others)
        back = sum(exp((s[j][i] - s[i][i]) / TAU) for j in others) / len(others)
        log_g.append((log(forth) + log(back)) / 2)
        caption_place.append(1 + sum(s[i][j] > s[i][i] for j in others))
        image_place.append(1 + sum(s[j][i] > s[i][i] for j in others))
        better += [(s[i][j] - s[i][i], s[j][i] - s[j][j]) for j in others if s[i][j] > s[i][i]]
    return log_g, caption_place, image_place, better


@pytest.mark.parametrize("tile", [1, 4, 13, 100])
def test_comparison_agrees_with_a_plain_loop_at_any_tile_size(tile):
    image, text, code = features(same=[(1, 5), (1, 9), (2, 3)])
    log_g, caption_place, image_place, better = reference(image, text, code)
    found = compare(image, text, code, TAU, tile)
    assert found.log_g_b.tolist() == pytest.approx(log_g, abs=1e-4)
    assert found.caption_place_b.tolist() == caption_place
    assert found.image_place_b.tolist() == image_place
    assert found.exceeding == len(better)
    s = image @ text.T
    mutual = [min(s[i, j] - s[i, i], s[j, i] - s[j, j]).item() for i, j in found.better_pairs]
    expected = sorted((back for forth, back in better if back <= forth), reverse=True)[:CONFUSED]
    assert mutual == pytest.approx(expected, abs=1e-5)
    assert len({tuple(sorted(pair)) for pair in found.better_pairs}) == len(expected)
    assert found.equal == 4
    assert set(found.equal_pairs) == {(1, 5), (1, 9), (5, 9), (2, 3)}


class Index(FakeIndex):
    """An index with these features of images and captions."""

    def __init__(self, captions, image, text):
        super().__init__(captions)
        self.features.image_bd, self.text = image, text
        scale = torch.tensor(1 / TAU).log()
        self.model = type("Model", (), {})()
        self.model.towers = type("Towers", (), {"clip": type("Clip", (), {"logit_scale": scale})})()

    def caption_features(self):
        """NaN for any but the first caption of an image: only the first may be used."""
        unused = torch.full_like(self.features.image_bd[0], torch.nan)
        return torch.stack([self.text.get(caption, unused) for caption in self.captions])


def index(captions):
    image, text, _ = features(len(captions))
    by_caption = {own[0]: text[number] for number, own in enumerate(captions) if own}
    return Index(captions, image, by_caption)


def hard_pairs(captions, **options):
    return find_hard_pairs(index(captions), lambda done, total: None, **options)


def test_hardest_pairs_come_first_with_their_captions():
    found = hard_pairs([[f"caption {i}", "another"] for i in range(20)])
    assert (found.pairs, found.total, len(found.hardest)) == (20, 20, 12)
    log_g = [pair.log_g for pair in found.hardest]
    assert log_g == sorted(log_g, reverse=True)
    assert found.hardest[0].thumbnail.text.startswith("caption ")


def test_equal_captions_come_first_among_confused_pairs():
    found = hard_pairs([[f"caption {i % 18}"] for i in range(20)])
    assert found.equal == 2
    assert [pair.equal for pair in found.confused][:3] == [True, True, False]
    assert all(pair.similarity > pair.own for pair in found.confused[2:])
    assert found.confused[0].image.text == found.confused[0].other.text


def test_pairs_that_fit_each_other_come_before_an_image_that_fits_everything():
    image, text = torch.eye(6), torch.eye(6)
    text[[0, 1]] = text[[1, 0]]  # each has the other's caption
    text[5] = -image[5]  # any other caption fits better
    found = compare(image, text, torch.arange(6), TAU)
    assert found.better_pairs[0] in [(0, 1), (1, 0)]


def test_images_without_captions_are_skipped():
    found = hard_pairs([["a"], [], ["b"], ["c"]])
    assert (found.pairs, found.total) == (3, 3)
    assert hard_pairs([["a"], []]) is None


def test_only_the_first_pairs_are_compared_if_there_are_too_many():
    found = hard_pairs([[f"c{i}"] for i in range(9)], most=5)
    assert (found.pairs, found.total) == (5, 9)
