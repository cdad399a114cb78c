"""LoRA: the adapted model starts as the pretrained one, its frozen weights never move, merging is exact."""

import pytest
import torch
from torch import nn

from fastclip.config.options import LoraOptions
from fastclip.config.parse import parse
from fastclip.config.resolved import resolve
from fastclip.errors import OptionError
from fastclip.lora import is_adapter, merged_state
from fastclip.tools.profiling.memory import towers_on_meta
from tests.test_layers import EFFICIENTNET, TIMM, VIT, build
from tests.test_model import batch

KINDS = {"clip": (VIT, "clip"), "custom": (VIT, "custom"), "hugging-face": (TIMM, "bert")}


def adapters(model):
    return {name: parameter for name, parameter in model.clip.named_parameters() if is_adapter(name)}


def features(model, b=4):
    with torch.no_grad():
        return torch.stack(model(*batch(model, b=b)))


def step(model, seed=0):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    images, texts = model(*batch(model, b=4, seed=seed))
    nn.functional.cross_entropy(10 * images @ texts.T, torch.arange(4)).backward()
    optimizer.step()


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def test_the_adapted_model_starts_as_the_plain_one_and_merges_into_it(tmp_path, kind):
    plain = build(tmp_path, *kind).eval()
    model = build(tmp_path, *kind, lora=LoraOptions(rank=2)).eval()
    torch.testing.assert_close(features(model), features(plain), rtol=0, atol=0)
    step(model)
    step(model, seed=1)
    after = features(model)
    assert (after - features(plain)).abs().max() > 1e-3
    plain.clip.load_state_dict(merged_state(model.clip))
    torch.testing.assert_close(features(plain), after, rtol=0, atol=2e-6)


def test_only_adapters_and_projections_train_and_nothing_else_moves(tmp_path, kind):
    model = build(tmp_path, *kind, lora=LoraOptions(rank=2))
    model.freeze_logit_scale()
    trained = {name for name, parameter in model.clip.named_parameters() if parameter.requires_grad}
    projections = {name for name in trained if not is_adapter(name)}
    assert all("proj" in name for name in projections)
    assert len(projections) == 2
    before = {name: tensor.clone() for name, tensor in model.clip.state_dict().items()}
    for seed in range(3):  # after the first step B is not zero, and A moves too
        step(model, seed)
    moved = {
        name for name, tensor in model.clip.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert moved == trained


def test_base_weights_are_those_without_adapters(tmp_path, kind):
    plain, model = build(tmp_path, *kind), build(tmp_path, *kind, lora=LoraOptions(rank=2))
    step(model)
    base, wanted = merged_state(model.clip, merge=False), plain.clip.state_dict()
    assert base.keys() == wanted.keys()
    changed = {name for name in base if not torch.equal(base[name], wanted[name])}
    assert all("proj" in name for name in changed - {"logit_scale"})


def test_a_checkpoint_holds_what_trains(tmp_path):
    model = build(tmp_path, lora=LoraOptions(rank=2))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {*model.checkpoint_state()} == trained
    assert len(build(tmp_path).checkpoint_state()) > len(trained)


def test_adapters_depend_on_the_seed_alone(tmp_path):
    torch.manual_seed(1)
    one, state = build(tmp_path, lora=LoraOptions(rank=2), seed=5), torch.get_rng_state()
    other = build(tmp_path, lora=LoraOptions(rank=2), seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in adapters(one).items():
        assert torch.equal(parameter, adapters(other)[name])


def test_adapters_are_scaled_by_alpha_over_rank(tmp_path):
    models = [build(tmp_path, lora=LoraOptions(rank=2, alpha=alpha)).eval() for alpha in (2, 6)]
    plain = merged_state(build(tmp_path).clip)
    for model in models:
        for parameter in adapters(model).values():
            nn.init.constant_(parameter, 0.1)
    one, three = (merged_state(model.clip) for model in models)
    for name, tensor in plain.items():
        torch.testing.assert_close(three[name] - tensor, 3 * (one[name] - tensor), rtol=1e-4, atol=1e-6)


def test_targets_select_layers_by_a_part_of_their_names(tmp_path):
    attention = adapters(build(tmp_path, lora=LoraOptions(rank=2, targets=["attn"])))
    first = adapters(build(tmp_path, lora=LoraOptions(rank=2, targets=["mlp.c_fc", "attn"])))
    assert all(".attn." in name for name in attention)
    assert len(attention) == (3 + 2) * 4
    assert len(first) == (3 + 2) * 6


def test_frozen_towers_get_no_adapters(tmp_path):
    model = build(tmp_path, freeze="image", lora=LoraOptions(rank=2))
    assert model.adapted == ["text"]
    assert not any(name.startswith("visual") for name in adapters(model))
    assert not any(parameter.requires_grad for parameter in model.clip.visual.parameters())
    with pytest.raises(OptionError) as caught:
        build(tmp_path, freeze="trunks", lora=LoraOptions(rank=2))
    assert caught.value.option == "model.lora"


def test_targets_that_match_nothing_and_towers_without_layers_are_refused(tmp_path):
    with pytest.raises(OptionError) as caught:
        build(tmp_path, lora=LoraOptions(rank=2, targets=["attn", "qkv"]))
    assert caught.value.option == "model.lora.targets"
    assert "'qkv'" in caught.value.rule
    with pytest.raises(OptionError) as caught:
        build(tmp_path, EFFICIENTNET | {"timm_model_name": "test_resnet"}, lora=LoraOptions(rank=2))
    assert caught.value.option == "model.lora"


@pytest.mark.parametrize(
    "options", [{"rank": -1}, {"rank": 2, "alpha": 0.0}, {"alpha": 4.0}, {"rank": 2, "targets": []}]
)
def test_invalid_options_are_refused(options):
    with pytest.raises(OptionError) as caught:
        LoraOptions(**options)
    assert caught.value.option.startswith("model.lora.")


def test_gradient_checkpointing_gives_the_same_gradients(tmp_path):
    models = [build(tmp_path, lora=LoraOptions(rank=2), gradient_checkpointing=on) for on in (False, True)]
    for model in models:
        for parameter in adapters(model).values():
            nn.init.constant_(parameter, 0.1)
        images, texts = model(*batch(model))
        (images * texts).sum().backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if one.requires_grad and "logit" not in name:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-7)


def test_a_checkpoint_of_vit_b_32_is_a_fiftieth_of_the_whole():
    sizes = []
    for rank in ("8", "0"):
        model = towers_on_meta(
            resolve(parse(["--model.name", "ViT-B-32", "--model.lora", rank, "--model.pretrained", "x.pt"]))
        )
        sizes.append(sum(tensor.nbytes for tensor in model.checkpoint_state().values()))
    assert sizes[0] / sizes[1] < 0.02
