"""Text without padding: the cheapest chunks, and the features and gradients of the padded tower."""

from itertools import pairwise
from types import SimpleNamespace

import open_clip
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fastclip import unpadded_text
from fastclip.data.tokenize import TextEnds
from fastclip.model import build_model
from fastclip.unpadded_text import UnpaddedText, plan_chunks
from tests.text_models import CAUSAL, READ_PADDING, captions, write_config


def model(tmp_path, name, **options):
    path = write_config(tmp_path, name)
    return build_model(path, device="cpu", dtype=torch.float64, seed=3, **options)


LENGTHS = [3, 21, 8, 9, 2, 17, 16, 5, 20, 12]


@pytest.mark.parametrize("name", [*CAUSAL, "bert"])
def test_features_and_gradients_are_those_of_the_padded_tower(name, tmp_path, monkeypatch):
    towers = model(tmp_path, name)
    assert towers.unpadded is not None
    monkeypatch.setitem(unpadded_text.CHUNK_COST, "cpu", 1)  # several chunks
    ends = towers.unpadded.ends
    tokens = captions(ends, LENGTHS)
    lengths = ends.lengths(tokens)
    assert lengths == LENGTHS
    weights = [p for n, p in towers.clip.named_parameters() if "visual" not in n and "logit" not in n]
    direction = torch.randn(len(LENGTHS), 8, dtype=torch.float64)
    features, gradients = [], []
    for given_tokens, given_lengths in ((tokens, None), (ends.cut(tokens, lengths), lengths)):
        out = towers._encode_tokens(given_tokens, given_lengths)
        features.append(out.detach())
        gradients.append(torch.autograd.grad((out * direction).sum(), weights, allow_unused=True))
    assert (features[0] - features[1]).abs().max() < 1e-12
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).abs().max() < 1e-10


@pytest.mark.parametrize("name", READ_PADDING)
def test_towers_that_read_their_padding_keep_it(name, tmp_path, caplog):
    caplog.set_level("INFO", logger="fastclip.unpadded_text")
    assert model(tmp_path, name).unpadded is None
    assert [record.message.startswith("Captions are encoded with padding") for record in caplog.records] == [
        True
    ]


def test_a_tower_whose_features_depend_on_padding_is_found_by_the_check(tmp_path, monkeypatch):
    """With a mask that is not causal, but has the attribute."""
    towers = model(tmp_path, "custom")
    towers.clip.text.attn_mask.zero_()
    assert unpadded_text.find(towers.clip, towers.context_length) is None


def test_siglip_and_coca_keep_their_padding():
    for name in ("ViT-B-16-SigLIP", "coca_ViT-B-32"):
        clip = open_clip.create_model(name, device="meta", load_weights=False, pretrained_text=False)
        assert unpadded_text._find_tower(clip, 77)[0] is None, name


def test_a_hugging_face_encoder_that_returns_its_tokens_keeps_its_padding(tmp_path):
    """As in CoCa."""
    towers = model(tmp_path, "bert")
    towers.clip.text.output_tokens = True
    assert unpadded_text.find(towers.clip, towers.context_length) is None


def test_torchs_default_device_does_not_matter(tmp_path):
    torch.set_default_device("meta")
    try:
        towers = model(tmp_path, "clip").eval()
    finally:
        torch.set_default_device("cpu")
    assert towers.unpadded is not None


def test_padding_is_kept_on_request(tmp_path):
    assert model(tmp_path, "clip", text_padding="keep").unpadded is None


def test_text_on_the_host_is_encoded_without_its_padding(tmp_path):
    towers = model(tmp_path, "clip").eval()
    tokens = captions(towers.unpadded.ends, [3, 8, 5])
    seen = []
    towers.unpadded.tower.tower.token_embedding.register_forward_hook(
        lambda m, args, out: seen.append(args[0])
    )
    ours = towers.encode_text(tokens)
    assert seen[0].numel() == 3 * 8
    assert (ours - towers.clip.encode_text(tokens, normalize=True)).abs().max() < 1e-12


def test_one_look_up_serves_all_chunks(tmp_path, monkeypatch):
    monkeypatch.setitem(unpadded_text.CHUNK_COST, "cpu", 1)
    towers = model(tmp_path, "clip")
    calls = []
    towers.clip.token_embedding.register_forward_hook(lambda *_: calls.append(1))
    tokens = captions(towers.unpadded.ends, LENGTHS)
    towers.unpadded.encode(tokens, LENGTHS)
    assert len(calls) == 1


# Plans

lengths_st = st.lists(st.sampled_from([8, 16, 24, 32, 40]), min_size=1, max_size=30)


@given(lengths=lengths_st, cost=st.integers(0, 400))
def test_a_plan_has_every_caption_once_in_a_chunk_that_is_long_enough(lengths, cost):
    plan = plan_chunks(lengths, cost)
    assert sorted(plan.order) == list(range(len(lengths)))
    assert [c.start for c in plan.chunks] == [0, *(c.stop for c in plan.chunks[:-1])]
    assert plan.chunks[-1].stop == len(lengths)
    assert all(a.length < b.length for a, b in pairwise(plan.chunks))
    for chunk in plan.chunks:
        held = [lengths[i] for i in plan.order[chunk.start : chunk.stop]]
        assert max(held) == chunk.length


def cost_of(plan, cost):
    return sum((c.stop - c.start) * c.length + cost for c in plan.chunks)


@given(lengths=lengths_st, cost=st.integers(0, 400))
def test_no_other_choice_of_chunks_is_cheaper(lengths, cost):
    sizes, found = sorted(set(lengths)), cost_of(plan_chunks(lengths, cost), cost)
    for kept in range(1 << (len(sizes) - 1)):  # every set of sizes that ends with the largest
        ends = [size for i, size in enumerate(sizes[:-1]) if kept >> i & 1] + [sizes[-1]]
        tokens = sum(min(end for end in ends if end >= length) for length in lengths)
        used = {min(end for end in ends if end >= length) for length in lengths}
        assert found <= tokens + cost * len(used)


def test_a_costly_chunk_is_not_used():
    assert len(plan_chunks([8, 40], cost=0).chunks) == 2
    assert len(plan_chunks([8, 40], cost=33).chunks) == 1


# Ends


def test_a_caption_ends_at_its_first_end_token():
    tokens = torch.tensor([[5, 9, 3, 9, 0, 0], [1, 2, 3, 4, 5, 9], [9, 0, 0, 0, 0, 0]])
    assert TextEnds("highest", 9, 6).lengths(tokens) == [2, 6, 1]
    assert TextEnds("first", 9, 6).lengths(tokens) == [2, 6, 1]
    assert TextEnds("padding", 0, 6).lengths(tokens) == [4, 6, 1]


@pytest.mark.parametrize(
    ("longest", "lengths", "cut"),
    [
        (77, [3, 9], 16),
        (77, [3, 77], 77),
        (77, [1, 1], 8),
        (21, [3, 9], 10),
        (21, [2, 21], 21),
        (10, [3, 5], 5),
    ],
)
def test_tokens_are_cut_to_one_of_few_lengths_within_the_context(longest, lengths, cut):
    ends = TextEnds("highest", 9, longest)
    assert ends.cut(torch.ones(2, longest, dtype=torch.int64), lengths).shape == (2, cut)
    assert len({ends.rounded(length) for length in range(1, longest + 1)}) <= 12


def test_a_gpu_is_never_waited_for(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # fake ones cannot be pinned
    with FakeTensorMode(), torch.device("cuda"):
        text = open_clip.transformer.TextTransformer(
            context_length=77, width=64, heads=2, layers=2, output_dim=32
        )
        tower, _ = unpadded_text._find_tower(SimpleNamespace(text=text), 77)
        tokens = torch.ones(4, 16, dtype=torch.int64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert UnpaddedText(tower).encode(tokens, [3, 9, 16, 4]).shape == (4, 32)
