"""Training with patch dropout: the same weights however the batch is split; whole images after `until`."""

import json
from functools import partial

import open_clip
import pytest
import torch

from fastclip.config.options import BatchConfig, ModelConfig, OptimOptions, PatchDropout, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.data.joining import Batch
from fastclip.data.order import Order, Samples
from fastclip.distributed.world import World
from fastclip.evaluation.features import Encoder
from fastclip.run.folder import read_run
from fastclip.training.build import build_step, build_towers
from fastclip.training.export import export
from tests.data.collections import png
from tests.ranks import run_ranks
from tests.training.runs import Lab, assert_same_run

N, B, STEPS, SEED = 40, 12, 8, 5  # 8 steps are 2.4 epochs
VISION = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 16}
TEXT = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
ALONE, DROPOUT = World.alone(), PatchDropout(0.5)
WHOLE, HALF = 1 + 16, 1 + 8  # tokens: the class and the patches


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "patch-dropout.json"
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}))
    return str(path)


def build(model, world, micro=None, dropout=DROPOUT, **options):
    config = resolve(
        TrainConfig(
            precision="float64",
            seed=SEED,
            epochs=STEPS * B / N,
            model=ModelConfig(model, patch_dropout=dropout, **options),
            batch=BatchConfig(B, micro),
            optim=OptimOptions(lr=1e-3),
        )
    )
    return build_step(config, build_towers(config, world), N, world)


def batch(step, train_step):
    """This rank's part of a step, as the loader makes it; captions are one token and its end."""
    world, keep = train_step.world, train_step.towers.keep_patches
    ids, epochs = Order(N, B, SEED).local_batch(step, world.rank, world.size)
    draws = [torch.Generator().manual_seed(int(number)) for number in ids]
    images = torch.stack([torch.randn(3, 16, 16, generator=draw) for draw in draws])
    tokens = torch.stack([torch.tensor([int(number) % 60 + 1, 63, *[0] * 6]) for number in ids])
    patches = None if keep is None else keep.choice.draw(SEED, Samples(ids, epochs))
    index = torch.from_numpy(ids)
    return Batch(step, step * B // N, images, tokens, None, index, index, [], patches)


def trained(model, micro, world=ALONE, **options):
    """All tensors after the run."""
    train_step = build(model, world, micro, **options)
    for step in range(STEPS):
        assert train_step(batch(step, train_step)).finite
    return {
        name: getattr(tensor, "full_tensor", lambda t=tensor: t)().clone()
        for name, tensor in train_step.tensors().items()
    }


def trained_on_ranks(rank, world_size, model):
    world = World(rank, world_size, rank, torch.device("cpu"), None)
    return {micro: trained(model, micro, world) for micro in (None, 4)}


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def whole_batch(model):
    return trained(model, micro=None)


def tokens_seen(train_step):
    """A list that grows by the number of tokens of each image that the tower encodes."""
    seen = []
    train_step.towers.clip.visual.transformer.register_forward_hook(
        lambda module, given, out: seen.append(given[0].shape[1])
    )
    return seen


@pytest.mark.parametrize("micro", [4, 5])
def test_micro_batches_give_the_weights_of_the_whole_batch(micro, model, whole_batch):
    assert_same_weights(trained(model, micro), whole_batch)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_give_the_weights_of_one_with_and_without_micro_batches(model, whole_batch):
    for rank in run_ranks(trained_on_ranks, 2, model):
        for found in rank.values():
            assert_same_weights(found, whole_batch)


def test_gradient_checkpointing_gives_the_same_weights(model, whole_batch):
    assert_same_weights(trained(model, None, gradient_checkpointing=True), whole_batch)


def test_other_patches_give_other_weights(model, whole_batch):
    whole_images = trained(model, None, dropout=PatchDropout())
    weight = "model.clip.visual.conv1.weight"
    assert (whole_images[weight] - whole_batch[weight]).abs().max() > 1e-4


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize(("until", "dropping"), [(1.0, 8), (0.75, 6), (0.5, 4), (0.01, 0)])
def test_images_are_whole_after_their_fraction_of_the_run(until, dropping, micro, model):
    train_step = build(model, ALONE, micro, PatchDropout(0.5, until))
    seen = tokens_seen(train_step)
    for step in range(STEPS):
        train_step(batch(step, train_step))
    per_step = 1 if micro is None else 2 * B // micro
    assert seen == [HALF] * dropping * per_step + [WHOLE] * (STEPS - dropping) * per_step


class Pictures(list):
    """Images by number, as files."""

    image = list.__getitem__

    def where(self, number):
        return str(number)


def test_evaluation_between_steps_sees_whole_images(model):
    train_step = build(model, ALONE)
    seen = tokens_seen(train_step)
    train_step(batch(0, train_step))
    Encoder(train_step.towers, ALONE, workers=0).images(Pictures([png(0), png(1)]))
    train_step(batch(1, train_step))
    assert seen == [HALF, WHOLE, HALF]


def test_open_clip_loads_an_export_with_the_features_that_evaluation_sees(model, tmp_path):
    train_step = build(model, ALONE)
    train_step(batch(0, train_step))
    towers = train_step.towers.float().eval()
    folder = export(towers, tmp_path / "out", tau=0.05)
    assert "patch_dropout" not in (folder / "open_clip_config.json").read_text()
    theirs = open_clip.create_model(f"local-dir:{folder}").eval()
    images = batch(1, train_step).images
    with torch.no_grad():
        assert torch.equal(theirs.encode_image(images), towers.clip.encode_image(images))


@pytest.mark.slow
def test_compiled_towers_give_the_same_weights_with_one_more_graph_for_whole_images(model, monkeypatch):
    graphs, counts = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    dropout = PatchDropout(0.5, until=0.5)
    expected = trained(model, None, dropout=dropout)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    train_step = build(model, ALONE, dropout=dropout, compile=True)
    for step in range(STEPS):
        train_step(batch(step, train_step))
        counts.append(len(graphs))
    weights = {f"model.{name}": tensor for name, tensor in train_step.towers.state_dict().items()}
    assert_same_weights(weights, {name: expected[name] for name in weights})
    assert counts[3] == counts[1]
    assert counts[-1] == counts[4] == counts[3] + 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_run_resumes_bit_for_bit_and_refuses_another_share(tmp_path):
    lab, dropout = Lab(tmp_path, epochs=2), "{share: 0.5, until: 0.75}"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    lab.start(whole, model__patch_dropout=dropout).finish()
    run = lab.start(killed, model__patch_dropout=dropout)
    run.wait_for_step(6)
    run.kill()
    lab.start(killed, model__patch_dropout=dropout, data__workers=0, batch__micro=16).finish()
    assert_same_run(killed, whole)
    assert read_run(whole).config.model.patch_dropout == PatchDropout(0.5, 0.75)
    assert "patch_dropout" not in (whole / "model" / "open_clip_config.json").read_text()
    other = lab.start(killed, model__patch_dropout=0.25)
    assert other.wait() == [1]
    assert "model.patch_dropout.share: 0.5 in the run, 0.25 now" in other.output()
