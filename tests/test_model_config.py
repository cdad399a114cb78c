"""Model configs of others: nothing is downloaded, run, or built beyond the size of a model."""

import importlib
import importlib.util
import json
import socket
import sys
from pathlib import Path

import open_clip
import pytest
from huggingface_hub import constants

from fastclip.config.options import ModelConfig, TrainConfig
from fastclip.config.resolved import resolve
from fastclip.errors import OptionError, PathError
from fastclip.model import build_model, find_model
from fastclip.model_config import get_tokenizer, missing_package, read_config, without_network
from fastclip.run.load import load
from fastclip.tools.profiling.memory import towers_on_meta
from tests import text_models

TEXT = {"context_length": 8, "vocab_size": 512, "width": 32, "heads": 2, "layers": 1}
VIT = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
OPEN_CLIPS = sorted((Path(open_clip.__file__).parent / "model_configs").glob("*.json"))


@pytest.fixture(autouse=True)
def network(monkeypatch, tmp_path):
    """Fails whatever looks up or connects to another host; the Hugging Face cache is empty."""
    reached = []

    def reach(*arguments, **_):
        reached.append(arguments)
        raise OSError("the network was reached")

    monkeypatch.setattr(socket, "getaddrinfo", reach)
    monkeypatch.setattr(socket.socket, "connect", reach)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield reached
    assert reached == []


def write(tmp_path, vision=None, text=None, folder=True, **other):
    """A config in a folder, or in a file alone."""
    model_cfg = {"embed_dim": 16, "vision_cfg": VIT | (vision or {}), "text_cfg": TEXT | (text or {})}
    preprocess = {"preprocess_cfg": other.pop("preprocess_cfg", {})}
    model_cfg |= other
    path = tmp_path / ("open_clip_config.json" if folder else f"{tmp_path.name}.json")
    path.write_text(json.dumps({"model_cfg": model_cfg} | preprocess if folder else model_cfg))
    return path


NAMES = {
    "timm-hub": {"vision": {"timm_model_name": "hf-hub:someone/model"}},
    "timm-old-hub": {"vision": {"timm_model_name": "hf_hub:someone/model"}},
    "timm-folder": {"vision": {"timm_model_name": "local-dir:/somewhere"}},
    "timm-list": {"vision": {"timm_model_name": ["resnet18"]}},
    "text-model": {"text": {"hf_model_name": "someone/model"}},
    "text-model-pretrained": {"text": {"hf_model_name": "roberta-base", "hf_model_pretrained": True}},
    "text-model-path": {"text": {"hf_model_name": "../../somewhere"}},
    "text-model-number": {"text": {"hf_model_name": 3}},
    "syntax": {"text": {"tokenizer_kwargs": {"reduction_mask": "syntax"}}},  # nltk.download
    "vocabulary": {"text": {"tokenizer_kwargs": {"bpe_path": "/etc/passwd"}}},
    "code": {"text": {"tokenizer_kwargs": {"trust_remote_code": True}}},
    "online": {"text": {"tokenizer_kwargs": {"local_files_only": False}}},
    "kwargs": {"text": {"tokenizer_kwargs": ["clean"]}},
}


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("config", NAMES.values(), ids=NAMES)
def test_a_local_config_that_names_a_download_or_code_is_refused(tmp_path, config, folder):
    path = write(tmp_path, folder=folder, **config)
    with pytest.raises(PathError) as caught:
        build_model(str(path), device="cpu")
    assert caught.value.path == str(path)


def test_a_downloaded_text_model_is_asked_for_by_a_command(tmp_path):
    with pytest.raises(PathError) as caught:
        find_model(str(write(tmp_path, text={"hf_model_name": "roberta-base"})))
    assert "hf download roberta-base" in caught.value.problem


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_a_tokenizer_that_is_not_here_is_one_line_and_no_download(tmp_path, folder):
    """For a folder, open_clip reads the tokenizer's files from it."""
    name = find_model(str(write(tmp_path, text={"hf_tokenizer_name": "someone/model"}, folder=folder)))
    with pytest.raises(OptionError) as caught:
        get_tokenizer(name)
    assert caught.value.option == "model.name"
    assert "\n" not in str(caught.value)


def test_pretrained_image_weights_are_never_downloaded(tmp_path):
    """open_clip itself ignores timm_model_pretrained unless it is asked to use it."""
    vision = {"timm_model_name": "test_vit", "timm_model_pretrained": True, "image_size": 160}
    path = write(tmp_path, vision=vision, folder=False)
    assert build_model(str(path), device="cpu").image_size == 160


def test_a_plan_of_a_local_config_stays_here_too(tmp_path):
    path = write(tmp_path, text={"hf_model_name": "someone/model"})
    with pytest.raises(PathError):
        towers_on_meta(resolve(TrainConfig(model=ModelConfig(str(path)))))


def test_a_text_model_in_a_folder_or_in_the_cache_is_used(tmp_path):
    text = text_models.write_bert(tmp_path / "bert")["text_cfg"]
    folder, cached = tmp_path / "a", tmp_path / "b"
    for path in (folder, cached):
        path.mkdir()
    assert build_model(str(write(folder, text=text)), device="cpu").context_length == 21
    snapshot = tmp_path / "hub" / "models--someone--bert" / "snapshots" / "1234"
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "bert").rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1234")
    path = write(cached, text=text | {"hf_model_name": "someone/bert"})
    assert build_model(str(path), device="cpu").context_length == 21


@pytest.mark.parametrize(
    "change",
    [
        {"auto_map": {"AutoModel": "code.Model"}},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"text_config": {"num_layers": 10**6}},
    ],
    ids=str,
)
def test_the_config_of_a_text_model_is_checked_too(tmp_path, change):
    text = text_models.write_bert(tmp_path / "bert")["text_cfg"]
    file = tmp_path / "bert" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(PathError) as caught:
        build_model(str(write(tmp_path, text=text)), device="cpu")
    assert caught.value.path == str(file)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_tokenizer_with_code_is_refused(tmp_path, name):
    (tmp_path / name).write_text('{"auto_map": {"AutoTokenizer": ["code.T", null]}}')
    with pytest.raises(PathError) as caught:
        find_model(str(write(tmp_path, text={"hf_tokenizer_name": "here"})))
    assert caught.value.path == str(tmp_path / name)


SIZES = {
    "layers": {"vision": {"layers": 10**9}},
    "resnet-layers": {"vision": {"layers": [1, 1, 10**9, 1]}},
    "many-stages": {"vision": {"layers": [1] * 1000}},
    "text-layers": {"text": {"layers": 10**9}},
    "width": {"vision": {"width": 10**9}},
    "no-width": {"vision": {"width": 0}},
    "negative": {"text": {"heads": -1}},
    "bool": {"text": {"layers": True}},
    "text-number": {"text": {"layers": "12"}},
    "fraction": {"text": {"layers": 1.5}},
    "overflow": {"text": {"mlp_ratio": 1e300}},
    "digits": {"text": {"layers": 10**4000}},
    "embed": {"embed_dim": 10**9},
    "vocabulary": {"text": {"vocab_size": 10**12}},
    "context": {"text": {"context_length": 10**6}},
    "pixels": {"vision": {"image_size": 10**6}},
    "patches": {"vision": {"image_size": 8192, "patch_size": 1}},
    "decoder": {"multimodal_cfg": {"layers": 10**9}, "custom_text": True},
    "no-decoder": {"multimodal_cfg": 3},
    "mean": {"preprocess_cfg": {"mean": "x"}},
    "deviation": {"preprocess_cfg": {"std": [0, 0, 0]}},
    "preprocess": {"preprocess_cfg": [1]},
}


@pytest.mark.parametrize("config", SIZES.values(), ids=SIZES)
def test_a_config_beyond_the_size_of_a_model_is_refused_before_it_is_built(tmp_path, config):
    path = write(tmp_path, **config)
    with pytest.raises(PathError) as caught:
        build_model(str(tmp_path), device="cpu")
    assert caught.value.path == str(path)
    assert len(str(caught.value)) < 400


def test_parameters_are_counted_before_there_is_memory_for_them(tmp_path):
    large = {"vision": {"width": 65_536, "head_width": 64, "layers": 2, "mlp_ratio": 4}}
    write(tmp_path, **large)
    with pytest.raises(OptionError) as caught:
        build_model(str(tmp_path), device="cpu")
    assert caught.value.option == "model.name"
    write(tmp_path, vision={"width": 16_384, "head_width": 64, "layers": 4})  # 13 billion parameters
    (tmp_path / "open_clip_model.safetensors").write_bytes(bytes(1000))
    with pytest.raises(PathError) as caught:
        load(tmp_path)
    assert caught.value.path == str(tmp_path / "open_clip_model.safetensors")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"embed_dim": NaN}', '{"a": ' + "9" * 5000 + "}", "\udcff", ""]
)
def test_what_is_not_a_config_is_refused_by_name(tmp_path, text):
    path = tmp_path / "open_clip_config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PathError) as caught:
        find_model(str(tmp_path))
    assert caught.value.path == str(path)


@pytest.mark.parametrize("path", OPEN_CLIPS, ids=lambda path: path.stem)
def test_every_model_of_open_clip_could_be_a_local_one(path):
    if "hf_model_name" not in path.read_text():
        assert read_config(path)
        return
    with pytest.raises(PathError) as caught:
        read_config(path)
    assert "hf download" in caught.value.problem  # its text model, once it is here


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "fastclip.model_config.find_spec", lambda name: None if name == "transformers" else real(name)
    )
    with pytest.raises(PathError) as caught:
        find_model(str(write(tmp_path, text={"hf_model_name": "bert"})))
    assert "pip install transformers" in caught.value.problem
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    with pytest.raises(OptionError) as caught:
        get_tokenizer("roberta-ViT-B-32")
    assert caught.value.value == "roberta-ViT-B-32"
    assert "pip install transformers" in str(caught.value)


def test_the_package_is_found_in_the_cause_of_an_error():
    with pytest.raises(ImportError) as caught:
        importlib.import_module("no_such_package.part")
    assert missing_package(caught.value) == "no_such_package"
    outer = RuntimeError("it failed")
    outer.__cause__ = caught.value
    assert missing_package(outer) == "no_such_package"
    assert missing_package(ValueError("other")) is None


def test_the_network_is_back_after_a_build():
    with without_network():
        assert constants.is_offline_mode()
    assert not constants.is_offline_mode()
