"""Recalls equal those of a plain loop on any input, for any tile, with ties in a defined order."""

from math import fsum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastclip.errors import InputError
from fastclip.evaluation.retrieval import recalls

KS = (1, 2, 5, 10, 100)


def plain_recalls(image_bd, text_md, image_of_text, ks):
    """Sort all candidates of every query by similarity, then by index."""
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
    """b images and m texts somewhat similar to them; with `distinct`, only that many different vectors."""
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
    """Random vectors, or vectors of few values, which often have equal similarities."""
    b, m = draw(st.integers(1, 12)), draw(st.integers(1, 24))
    own = torch.tensor(draw(st.lists(st.integers(0, b - 1), min_size=m, max_size=m)))
    if draw(st.booleans()):
        return *pairs(b, m, d=draw(st.integers(2, 9)), seed=draw(st.integers(0, 99)))[:2], own
    signs = st.lists(st.sampled_from([-0.5, 0.5]), min_size=4, max_size=4)
    vectors = signs | st.sampled_from(torch.eye(4).tolist())
    image, text = (torch.tensor([draw(vectors) for _ in range(rows)]) for rows in (b, m))
    return image, text, own


@given(inputs=small_inputs(), tile=st.integers(1, 30))
def test_recalls_equal_those_of_a_plain_loop(inputs, tile):
    assert recalls(*inputs, KS, tile) == plain_recalls(*inputs, KS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("distinct", [None, 3, 17])
def test_larger_and_tied_inputs_of_every_dtype(dtype, distinct):
    image, text, own = pairs(40, 90, d=24, distinct=distinct)
    image, text = image.to(dtype), text.to(dtype)
    assert recalls(image, text, own, KS, 32) == plain_recalls(image, text, own, KS)


def test_recalls_without_ties_equal_those_of_topk():
    image, text, own = pairs(50, 200)
    s, positive = text @ image.T, own[:, None] == torch.arange(50)
    ours = recalls(image, text, own)
    for k in (1, 5, 10):
        of_texts = positive.gather(1, s.topk(k, dim=1).indices).any(1)
        of_images = positive.T.gather(1, s.T.topk(k, dim=1).indices).any(1)[positive.any(0)]
        assert ours[f"image_retrieval_recall@{k}"] == pytest.approx(of_texts.double().mean().item())
        assert ours[f"text_retrieval_recall@{k}"] == pytest.approx(of_images.double().mean().item())
    assert 0 < ours["image_retrieval_recall@1"] < ours["image_retrieval_recall@10"] < 1


def test_one_caption_per_image_in_shuffled_order():
    image, own = random_features(30, 8, 0), torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert set(recalls(image, image[own], own, tile=7).values()) == {1.0}
    shifted = recalls(image, image[own], (own + 1) % 30, tile=7)
    assert shifted["mean_recall@1"] == 0


def test_a_single_image_has_recall_1_in_both_directions():
    image, text = random_features(1, 4, 0), random_features(5, 4, 1)
    assert set(recalls(image, text, torch.zeros(5, dtype=torch.int64)).values()) == {1.0}


def test_any_text_of_an_image_counts_as_a_hit():
    """The first text of image 0 is its opposite, the second is the image itself."""
    image = torch.eye(3)
    text = torch.stack([-image[0], image[0], image[1], image[2]])
    result = recalls(image, text, torch.tensor([0, 0, 1, 2]), ks=(1,))
    assert result["text_retrieval_recall@1"] == 1
    assert result["image_retrieval_recall@1"] == 3 / 4
    assert result["mean_recall@1"] == (1 + 3 / 4) / 2


def test_an_image_without_texts_is_a_candidate_but_not_a_query():
    """Images 0 and 1 are the same; only 1 has a text, which ranks 0 first."""
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    result = recalls(image, image[1:], torch.tensor([1, 2]), ks=(1, 2))
    assert result["text_retrieval_recall@1"] == 1  # of two images, not of three
    assert result["image_retrieval_recall@1"] == 1 / 2
    assert result["image_retrieval_recall@2"] == 1


def test_ties_go_to_the_lower_index():
    """All features are the same, so text t ranks image own[t] at own[t]."""
    same = torch.full((8, 16), 0.25)
    result = recalls(same, same[:4], torch.tensor([0, 1, 1, 6]), ks=range(1, 9), tile=3)
    assert [result[f"image_retrieval_recall@{k}"] * 4 for k in range(1, 9)] == [1, 3, 3, 3, 3, 3, 4, 4]
    # the best texts of the images 0, 1, 6 are 0, 1, 3
    assert [result[f"text_retrieval_recall@{k}"] * 3 for k in (1, 2, 3, 4)] == pytest.approx([1, 2, 2, 3])


@pytest.mark.slow
def test_every_tile_gives_the_same_ranks():
    """Wide features and many duplicates: rounded products would break ties differently by shape."""
    image, text, own = pairs(97, 203, d=512, distinct=20)
    every_rank = range(1, 204)
    untiled = recalls(image, text, own, every_rank, tile=4096)
    for tile in (1, 5, 16, 33, 100, 203):
        assert recalls(image, text, own, every_rank, tile) == untiled


def test_autocast_does_not_change_recalls():
    image, text, own = pairs(60, 120, d=64)
    expected = recalls(image, text, own, KS)
    with torch.autocast("cpu", torch.bfloat16):
        assert recalls(image, text, own, KS) == expected


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.slow
def test_no_tensor_is_larger_than_the_features_or_a_tile():
    image, text, own = pairs(1000, 3000, d=8)
    with LargestTensor() as largest:
        recalls(image, text, own, tile=64)
    assert largest.elements <= text.numel()
    with LargestTensor() as largest:
        recalls(image, text, own, tile=2000)
    assert largest.elements == 1000 * 2000  # so the mode does see the tiles


@pytest.mark.parametrize(
    ("change", "argument", "facts"),
    [
        ({"text_md": torch.ones(4, 5)}, "text_md", ["(4, 5)", "(3, 4)"]),
        ({"text_md": torch.zeros(0, 4), "image_of_text": torch.zeros(0).long()}, "text_md", ["no rows"]),
        ({"image_of_text": torch.tensor([0, 1])}, "image_of_text", ["(2,)", "4 texts"]),
        ({"image_of_text": torch.tensor([0, 1, 2, 3])}, "image_of_text", ["0 to 3", "[0, 2]"]),
        ({"image_of_text": torch.tensor([0, -1, 2, 0])}, "image_of_text", ["-1 to 2", "[0, 2]"]),
        ({"image_bd": torch.full((3, 4), 0.6)}, "image_bd", ["off by 0.2"]),
        ({"text_md": torch.full((4, 4), torch.nan)}, "text_md", ["off by nan"]),
        ({"ks": (0, 1)}, "ks", ["(0, 1)", "at least 1"]),
        ({"tile": 0}, "tile", ["0", "at least 1"]),
    ],
)
def test_invalid_arguments_are_rejected(change, argument, facts):
    valid = {"image_bd": torch.full((3, 4), 0.5), "text_md": torch.full((4, 4), 0.5)}
    valid["image_of_text"] = torch.tensor([0, 1, 2, 2])
    recalls(**valid)
    with pytest.raises(InputError) as caught:
        recalls(**valid | change)
    assert caught.value.argument == argument
    assert all(fact in caught.value.problem for fact in facts)
