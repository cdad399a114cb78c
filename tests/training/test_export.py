"""Exported folders: open_clip loads the same model, and no other files are lost."""

from __future__ import annotations

import errno
import json
import os
import stat
from itertools import count
from math import log

import open_clip
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

from fastclip.errors import InputError, PathError
from fastclip.model import build_model
from fastclip.run.load import load_exported
from fastclip.training import export as export_module
from fastclip.training.export import NotReplaceable, export
from tests.ranks import run_ranks
from tests.test_files import Kills

TEXT = {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
VISION = {
    "resnet": {"layers": [1, 1, 1, 1], "width": 8, "head_width": 64, "image_size": 64},
    "vit": {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16},
}
IMAGE = Image.effect_mandelbrot((90, 50), (-2, -1.5, 1, 1.5), 50)
CAPTIONS = ["a dog", "two very long captions that do not fit into a short context, so they are cut"]
FILES = ["open_clip_config.json", "open_clip_model.pt", "open_clip_model.safetensors"]


def build(kind, tmp_path, **options):
    """A model whose weights come from no seed, as after training."""
    if kind in VISION:
        path = tmp_path / f"{tmp_path.name}.json"
        config = {"embed_dim": 16, "vision_cfg": VISION[kind], "text_cfg": TEXT, "quick_gelu": True}
        path.write_text(json.dumps(config))
        kind = str(path)
    model = build_model(kind, device="cpu", **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.clip.state_dict().items():
            if tensor.is_floating_point() and not name.startswith("logit"):
                tensor.add_(0.01 * torch.rand(tensor.shape, generator=generator))
    return model


def features(clip, images, tokens):
    clip.eval()
    with torch.no_grad():
        return clip.encode_image(images, normalize=True), clip.encode_text(tokens, normalize=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit-scenes", "vit-emoji", "vit-icons", "vit", "resnet"])
def test_open_clip_loads_the_same_model(tmp_path, kind):
    model = build(kind, tmp_path)
    model.clip.visual.preprocess_cfg |= {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
    folder = export(model, tmp_path / "out", tau=0.02)
    assert sorted(path.name for path in folder.iterdir()) == FILES

    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    image, tokens = preprocess(IMAGE)[None], tokenizer(CAPTIONS)
    assert torch.equal(image[0], model.eval_transform()(IMAGE))
    assert image.shape == (1, 3, model.image_size, model.image_size)
    assert torch.equal(tokens, model.tokenizer()(CAPTIONS))
    assert tokens.shape == (2, model.context_length)
    for ours, loaded in zip(
        features(model.clip, image, tokens), features(theirs, image, tokens), strict=True
    ):
        assert torch.equal(ours, loaded)
    assert theirs.logit_scale.item() == pytest.approx(log(50))
    assert model.clip.logit_scale.item() == pytest.approx(log(1 / 0.07))  # ours is unchanged
    assert theirs.logit_bias is None
    assert theirs.visual.preprocess_cfg["mean"] == [0.1, 0.2, 0.3]


def test_the_torch_file_has_the_same_tensors_as_safetensors(tmp_path):
    folder = export(build("resnet", tmp_path), tmp_path / "out", tau=None)
    content = torch.load(folder / "open_clip_model.pt", weights_only=True)
    state, safe = content["state_dict"], load_file(folder / "open_clip_model.safetensors")
    assert list(content) == ["state_dict"]
    assert state.keys() == safe.keys()
    assert all(torch.equal(state[key], safe[key]) for key in safe)


def test_without_tau_the_models_scale_and_bias_are_kept(tmp_path):
    model = build("vit", tmp_path, logit_bias=True, tau=0.25)
    with torch.no_grad():
        model.clip.logit_bias.fill_(-3)
    folder = export(model, tmp_path / "out", tau=None)
    theirs = open_clip.create_model(f"local-dir:{folder}")
    for clip in (theirs, load_exported(folder).clip):
        assert clip.logit_scale.item() == pytest.approx(log(4))
        assert clip.logit_bias.item() == -3


def test_any_layout_and_precision_is_written_as_contiguous_float32(tmp_path):
    model = build("resnet", tmp_path, channels_last=True, dtype=torch.float64)
    folder = export(model, tmp_path / "out", tau=None)
    loaded = torch.load(folder / "open_clip_model.pt", weights_only=True)["state_dict"]
    for name, tensor in model.clip.state_dict().items():
        assert loaded[name].is_contiguous()
        assert loaded[name].dtype == (torch.float32 if tensor.is_floating_point() else tensor.dtype)
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"freeze": "image"}, {"batch_norm": "frozen"}])
def test_frozen_parts_are_exported_with_all_their_keys(tmp_path, options):
    folder = export(build("resnet", tmp_path, **options), tmp_path / "out", tau=None)
    open_clip.create_model(f"local-dir:{folder}")  # strict


@pytest.mark.slow
def test_load_exported_gives_the_same_model_in_eval_mode(tmp_path):
    model = build("resnet", tmp_path)
    model.clip.visual.preprocess_cfg |= {"mean": (0.1, 0.2, 0.3), "resize_mode": "squash"}
    loaded = load_exported(export(model, tmp_path / "out", tau=0.5))
    assert not loaded.training
    assert not loaded.clip.visual.training
    assert loaded.preprocess_cfg == model.preprocess_cfg
    assert loaded.model_cfg == model.model_cfg
    assert loaded.clip.logit_scale.item() == pytest.approx(log(2))
    images, tokens = torch.rand(2, 3, 64, 64), model.tokenizer()(CAPTIONS)
    for a, b in zip(model.eval()(images, tokens), loaded(images, tokens), strict=True):
        assert torch.equal(a, b)
    again = export(loaded, tmp_path / "again", tau=None)
    before, after = (load_file(f / "open_clip_model.safetensors") for f in (tmp_path / "out", again))
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_folder_that_is_not_an_export_is_not_loaded(tmp_path):
    with pytest.raises(PathError) as caught:
        load_exported(tmp_path)
    assert caught.value.path == str(tmp_path / "open_clip_config.json")


@pytest.mark.slow
def test_an_earlier_export_is_replaced_with_its_card(tmp_path):
    model = build("vit", tmp_path)
    export(model, tmp_path / "out", tau=0.5, card="# First\n")
    assert (tmp_path / "out" / "README.md").read_text() == "# First\n"
    (tmp_path / "link").symlink_to(tmp_path / "out")
    folder = export(model, tmp_path / "link", tau=0.25)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert (tmp_path / "link").is_symlink()
    assert load_exported(tmp_path / "link").clip.logit_scale.item() == pytest.approx(log(4))


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (["thesis.tex"], "out"),
        (["README.md"], "out"),
        (["open_clip_config.json", "thesis.tex"], "out/thesis.tex"),
    ],
)
def test_other_files_are_not_overwritten(tmp_path, names, path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("precious")
    with pytest.raises(NotReplaceable) as caught:
        export(build("vit", tmp_path), folder, tau=None)
    assert isinstance(caught.value, FileExistsError)
    assert caught.value.path == str(tmp_path / path)
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(names, "precious")
    assert not folder.with_name("out.part").exists()


def test_a_file_is_refused_and_an_empty_folder_is_used(tmp_path):
    model = build("vit", tmp_path)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(NotReplaceable) as caught:
        export(model, tmp_path / "file", tau=None)
    assert caught.value.path == str(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert len(list(export(model, tmp_path / "empty", tau=None).iterdir())) == 3


def test_a_full_disk_leaves_the_earlier_export_complete(tmp_path, monkeypatch):
    model = build("vit", tmp_path)
    folder = export(model, tmp_path / "out", tau=0.5)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export_module.torch, "save", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        export(model, folder, tau=0.25)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert load_exported(folder).clip.logit_scale.item() == pytest.approx(log(2))
    assert not folder.with_name("out.part").exists()


def kill_at_every_operation(rank, size, tmp_path):
    """Replace an export, killed after each number of file operations; return how many there are."""
    kills, folder, model = Kills(), tmp_path / "model", build("vit", tmp_path)
    weights = {"logit_scale": torch.zeros(())}  # the others take long to write
    export_module._plain_state = lambda model, tau: weights
    for operations in count():
        export(model, folder, tau=None, card="old")
        killed = kills.kill(operations, lambda: export(model, folder, tau=None, card="new"))
        complete = folder if folder.exists() else folder.with_name(".model.old")
        assert sorted(path.name for path in complete.iterdir()) == ["README.md", *FILES]
        assert (complete / "README.md").read_text() in ("old", "new")
        if not killed:
            return operations
        assert export(model, folder, tau=None, card="next") == folder
        assert (folder / "README.md").read_text() == "next"
        assert not [path for path in tmp_path.iterdir() if path.suffix in (".old", ".part")]


@pytest.mark.slow
def test_an_export_killed_at_any_moment_is_the_old_or_the_new_one_and_can_be_repeated(tmp_path):
    (operations,) = run_ranks(kill_at_every_operation, 1, tmp_path)
    assert operations > 10


def test_all_files_have_the_same_permissions(tmp_path):
    folder = export(build("vit", tmp_path), tmp_path / "out", tau=None)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {stat.S_IMODE((folder / "open_clip_config.json").stat().st_mode)}


def test_files_of_a_hub_tokenizer_are_exported(tmp_path):
    class HubTokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    model = build("vit", tmp_path)
    model.model_cfg["text_cfg"]["hf_tokenizer_name"] = "someone/tokenizer"
    model.tokenizer = HubTokenizer
    for _ in range(2):  # the second replaces the first
        folder = export(model, tmp_path / "out", tau=None)
        assert sorted(path.name for path in folder.iterdir()) == [*FILES, "tokenizer.json"]


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0, -1, float("inf"), float("nan")])
def test_a_temperature_must_be_positive(tmp_path, tau):
    with pytest.raises(InputError) as caught:
        export(build("vit", tmp_path), tmp_path / "out", tau=tau)
    assert caught.value.argument == "tau"
    assert str(tau) in caught.value.problem


@pytest.mark.parametrize(("value", "named"), [(float("nan"), "not finite, first of all"), (1e38, "features")])
def test_a_model_that_is_not_finite_is_not_exported(tmp_path, value, named):
    model = build("vit", tmp_path)
    folder = export(model, tmp_path / "out", tau=0.5)
    before = (folder / "open_clip_model.safetensors").read_bytes()
    for parameter in model.clip.visual.parameters():
        parameter.data.fill_(value)
    with pytest.raises(export_module.NonFiniteModel) as caught:
        export(model, folder, tau=0.5)
    assert named in str(caught.value)
    assert (folder / "open_clip_model.safetensors").read_bytes() == before


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_the_error_of_a_full_disk_names_the_folder(tmp_path, monkeypatch, kind):
    """As safetensors words it; and torch's writer, which replaces the error of the file by its own."""

    def full(*_, **__):
        if kind == "safetensors":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    place = (export_module, "save_file") if kind == "safetensors" else (export_module.torch, "save")
    monkeypatch.setattr(*place, full)
    with pytest.raises(export_module.NotWritten, match="No space left") as caught:
        export(build("vit", tmp_path), tmp_path / "out", tau=0.5)
    assert caught.value.path == str(tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
