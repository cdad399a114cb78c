"""Recalls: the plain loop's on any input, whatever the tile, with equals in a defined order."""

from math import fsum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastclip.evaluation.retrieval import recalls

KS = (1, 2, 5, 10, 100)


def plain_recalls(image_bd, text_md, image_of_text, ks):
    """Every query sorts all candidates, by similarity and then by index."""
    images, texts, own = image_bd.tolist(), text_md.tolist(), image_of_text.tolist()

    def first(query, candidates, k):
        s = [fsum(x * y for x, y in zip(query, candidate, strict=True)) for candidate in candidates]
        return sorted(range(len(candidates)), key=lambda j: (-s[j], j))[:k]

    result = {}
    for k in ks:
        hits = [own[t] in first(text, images, k) for t, text in enumerate(texts)]
        result[f"image_retrieval_recall@{k}"] = sum(hits) / len(hits)
        described = sorted(set(own))
        hits = [any(own[t] == i for t in first(images[i], texts, k)) for i in described]
        result[f"text_retrieval_recall@{k}"] = sum(hits) / len(hits)
    result["mean_recall@1"] = (result["image_retrieval_recall@1"] + result["text_retrieval_recall@1"]) / 2
    return result


def random_features(rows, d, seed, dtype=torch.float32):
    features = torch.randn(rows, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (features / features.norm(dim=1, keepdim=True)).to(dtype)


def pairs(b, m, d=16, seed=0, distinct=None):
    """b images and m texts that resemble their images a little, of `distinct` different vectors."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(b, (m,), generator=generator)
    image, noise = random_features(b, d, seed), random_features(m, d, seed + 1)
    text = torch.nn.functional.normalize(image[own] + 1.5 * noise)
    if distinct:
        pool = random_features(distinct, d, seed + 2)
        image = pool[torch.randint(distinct, (b,), generator=generator)]
        text = pool[torch.randint(distinct, (m,), generator=generator)]
    return image, text, own


@st.composite
def small_inputs(draw):
    """Vectors of few values, whose similarities are often equal though they are not, or random ones."""
    b, m = draw(st.integers(1, 12)), draw(st.integers(1, 24))
    own = torch.tensor(draw(st.lists(st.integers(0, b - 1), min_size=m, max_size=m)))
    if draw(st.booleans()):
        return *pairs(b, m, d=draw(st.integers(2, 9)), seed=draw(st.integers(0, 99)))[:2], own
    signs = st.lists(st.sampled_from([-0.5, 0.5]), min_size=4, max_size=4)
    vectors = signs | st.sampled_from(torch.eye(4).tolist())
    image, text = (torch.tensor([draw(vectors) for _ in range(rows)]) for rows in (b, m))
    return image, text, own


@given(inputs=small_inputs(), tile=st.integers(1, 30))
def test_recalls_are_those_of_a_plain_loop(inputs, tile):
    assert recalls(*inputs, KS, tile) == plain_recalls(*inputs, KS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("distinct", [None, 3, 17])
def test_larger_and_tied_inputs_in_every_type(dtype, distinct):
    image, text, own = pairs(40, 90, d=24, distinct=distinct)
    image, text = image.to(dtype), text.to(dtype)
    assert recalls(image, text, own, KS, 32) == plain_recalls(image, text, own, KS)


def test_without_ties_they_are_those_of_topk():
    image, text, own = pairs(50, 200)
    s, positive = text @ image.T, own[:, None] == torch.arange(50)
    ours = recalls(image, text, own)
    for k in (1, 5, 10):
        of_texts = positive.gather(1, s.topk(k, dim=1).indices).any(1)
        of_images = positive.T.gather(1, s.T.topk(k, dim=1).indices).any(1)[positive.any(0)]
        assert ours[f"image_retrieval_recall@{k}"] == pytest.approx(of_texts.double().mean().item())
        assert ours[f"text_retrieval_recall@{k}"] == pytest.approx(of_images.double().mean().item())
    assert 0 < ours["image_retrieval_recall@1"] < ours["image_retrieval_recall@10"] < 1


def test_one_caption_an_image_in_another_order():
    image, own = random_features(30, 8, 0), torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert set(recalls(image, image[own], own, tile=7).values()) == {1.0}
    shifted = recalls(image, image[own], (own + 1) % 30, tile=7)
    assert shifted["mean_recall@1"] == 0


def test_a_single_image_finds_and_is_found():
    image, text = random_features(1, 4, 0), random_features(5, 4, 1)
    assert set(recalls(image, text, torch.zeros(5, dtype=torch.int64)).values()) == {1.0}


def test_any_text_of_an_image_will_do():
    """The image's first text is far off, its second is the image itself."""
    image = torch.eye(3)
    text = torch.stack([-image[0], image[0], image[1], image[2]])
    result = recalls(image, text, torch.tensor([0, 0, 1, 2]), ks=(1,))
    assert result["text_retrieval_recall@1"] == 1
    assert result["image_retrieval_recall@1"] == 3 / 4
    assert result["mean_recall@1"] == (1 + 3 / 4) / 2


def test_an_image_without_texts_is_a_candidate_but_no_query():
    """Images 0 and 1 are the same; only 1 has a text, which therefore finds 0 first."""
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    result = recalls(image, image[1:], torch.tensor([1, 2]), ks=(1, 2))
    assert result["text_retrieval_recall@1"] == 1  # of two images, not of three
    assert result["image_retrieval_recall@1"] == 1 / 2
    assert result["image_retrieval_recall@2"] == 1


def test_of_equals_the_lower_index_comes_first():
    """All features are the same, so text t finds image own[t] at rank own[t]."""
    same = torch.full((8, 16), 0.25)
    result = recalls(same, same[:4], torch.tensor([0, 1, 1, 6]), ks=range(1, 9), tile=3)
    assert [result[f"image_retrieval_recall@{k}"] * 4 for k in range(1, 9)] == [1, 3, 3, 3, 3, 3, 4, 4]
    # the best texts of the images 0, 1, 6 are 0, 1, 3
    assert [result[f"text_retrieval_recall@{k}"] * 3 for k in (1, 2, 3, 4)] == pytest.approx([1, 2, 2, 3])


def test_every_tile_gives_the_same_ranks():
    """Wide features and many duplicates: products that are rounded break their ties differently by shape."""
    image, text, own = pairs(97, 203, d=512, distinct=20)
    every_rank = range(1, 204)
    whole = recalls(image, text, own, every_rank, tile=4096)
    for tile in (1, 5, 16, 33, 100, 203):
        assert recalls(image, text, own, every_rank, tile) == whole


def test_a_caller_under_autocast_gets_the_same():
    image, text, own = pairs(60, 120, d=64)
    expected = recalls(image, text, own, KS)
    with torch.autocast("cpu", torch.bfloat16):
        assert recalls(image, text, own, KS) == expected


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *found])
        return out


def test_no_tensor_is_larger_than_the_features_or_a_tile():
    image, text, own = pairs(1000, 3000, d=8)
    with LargestTensor() as largest:
        recalls(image, text, own, tile=64)
    assert largest.elements <= text.numel()
    with LargestTensor() as largest:
        recalls(image, text, own, tile=2000)
    assert largest.elements == 1000 * 2000  # so it does look at the tiles


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_md": torch.ones(4, 5)}, "image_bd and text_md have shapes"),
        ({"text_md": torch.zeros(0, 4), "image_of_text": torch.zeros(0).long()}, "3 images and 0 texts"),
        ({"image_of_text": torch.tensor([0, 1])}, "one whole number for each of the 4 texts"),
        ({"image_of_text": torch.tensor([0, 1, 2, 3])}, "from 0 to 3; images have the rows 0 to 2"),
        ({"image_of_text": torch.tensor([0, -1, 2, 0])}, "from -1 to 2"),
        ({"image_bd": torch.full((3, 4), 0.6)}, "image_bd must have rows of unit length, .* off by 0.2"),
        ({"text_md": torch.full((4, 4), torch.nan)}, "text_md must have rows of unit length, .* off by nan"),
        ({"ks": (0, 1)}, r"ks=\(0, 1\) must be positive"),
        ({"tile": 0}, "tile=0 must be positive; try 4096"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, message):
    good = {"image_bd": torch.full((3, 4), 0.5), "text_md": torch.full((4, 4), 0.5)}
    good["image_of_text"] = torch.tensor([0, 1, 2, 2])
    recalls(**good)
    with pytest.raises(ValueError, match=message):
        recalls(**good | change)
