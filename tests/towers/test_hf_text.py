"""Text encoders of Hugging Face as towers: pooling, tokenizer, weights; and folders that cannot be used."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastclip.data.remote import RemoteError
from fastclip.errors import OptionError, PathError
from fastclip.model import build_model
from fastclip.towers.design import Parts
from fastclip.towers.hf_text import CountingTokenizer
from tests.towers.encoders import minilm, write_encoder

CAPTIONS = ["a red heart", "a photo of two very long dogs in the garden of a friend, at night"]
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def build(source, name="vit-scenes", **parts):
    return build_model(name, device="cpu", parts=Parts(text=f"hf:{source}", **parts)).eval()


def test_minilm_as_a_tower_gives_its_own_sentence_features_before_the_projection():
    import transformers

    tower = build(minilm(), context_length=64)
    tokens = tower.tokenizer()(CAPTIONS)
    encoder = transformers.AutoModel.from_pretrained(minilm()).eval()
    mask = (tokens != 0).long()
    with torch.no_grad():
        hidden = encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        sentence = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        expected = tower.clip.text.proj(sentence)
        torch.testing.assert_close(tower.clip.text(tokens), expected)
    assert tower.unpadded is not None  # it is exact without padding
    words = transformers.AutoTokenizer.from_pretrained(minilm())
    assert tokens[0].tolist()[:6] == [*words(CAPTIONS[0]).input_ids, 0]
    assert tower.model_cfg["text_cfg"]["hf_model_name"] == "text_tower"


def test_new_weights_come_from_the_seed_and_the_projection_is_the_same(tmp_path):
    source = write_encoder(tmp_path)
    own, new, again = build(source), build(source, text_weights="none"), build(source, text_weights="none")
    file = load_file(source / "model.safetensors")
    embedding = "embeddings.word_embeddings.weight"
    assert torch.equal(own.clip.text.transformer.state_dict()[embedding], file[embedding])
    assert not torch.equal(new.clip.text.transformer.state_dict()[embedding], file[embedding])
    assert torch.equal(own.clip.text.proj.weight, new.clip.text.proj.weight)
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in new.state_dict().items())


@pytest.mark.parametrize(
    ("pooling", "pooler"),
    [
        (MEAN, "MeanPooler"),
        ({"pooling_mode_cls_token": True}, "ClsLastHiddenStatePooler"),
        ({"pooling_mode": "mean"}, "MeanPooler"),
        (None, "ClsPooler"),  # open_clip's choice for BERT
    ],
)
def test_the_pooling_is_the_one_that_the_folder_names(tmp_path, pooling, pooler):
    tower = build(write_encoder(tmp_path, pooling))
    assert type(tower.clip.text.pooler).__name__ == pooler
    assert (tower.clip.text.transformer.pooler is not None) == (pooler == "ClsPooler")


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode_max_tokens": True}, MEAN | {"pooling_mode_max_tokens": True}, {}]
)
def test_a_pooling_that_open_clip_cannot_compute_is_refused(tmp_path, pooling):
    with pytest.raises(PathError) as caught:
        build(write_encoder(tmp_path, pooling))
    assert caught.value.path == str(tmp_path / "1_Pooling" / "config.json")
    assert "mean, cls" in caught.value.problem


@pytest.mark.parametrize(("projection", "layers"), [("linear", 1), ("mlp", 2), (None, 1)])
def test_the_projection_is_as_asked(tmp_path, projection, layers):
    tower = build(write_encoder(tmp_path), projection=projection, embed_dim=24)
    matrices = [p for p in tower.clip.text.proj.parameters() if p.ndim == 2]
    assert (len(matrices), matrices[-1].shape[0]) == (layers, 24)
    assert tower.clip.visual.output_dim == 24


def test_the_context_is_the_models_and_at_most_the_encoders(tmp_path):
    source = write_encoder(tmp_path, max_position_embeddings=12)
    assert build(source).context_length == 12  # vit-scenes has more
    assert build(source, context_length=7).tokenizer()(CAPTIONS).shape == (2, 7)
    with pytest.raises(OptionError) as caught:
        build(source, context_length=13)
    assert (caught.value.option, caught.value.example) == ("model.context_length", 12)


def test_a_type_that_open_clip_does_not_know_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "distilbert"}))
    with pytest.raises(OptionError) as caught:
        build(tmp_path)
    assert caught.value.option == "model.text"
    assert "'distilbert'" in caught.value.rule
    assert "bert" in caught.value.advice


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(PathError) as caught:
        build(write_encoder(tmp_path, tokenizer=False))
    assert (caught.value.path, "tokenizer" in caught.value.problem) == (str(tmp_path), True)


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 9), ("pad_token_id", 1)])
def test_a_tokenizer_of_another_encoder_is_refused(tmp_path, key, value):
    with pytest.raises(PathError) as caught:
        build(write_encoder(tmp_path, **{key: value}))
    assert caught.value.path == str(tmp_path)


def test_weights_of_another_architecture_are_refused_with_the_first_tensors(tmp_path):
    source = write_encoder(tmp_path, MEAN)
    state = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if ".layer.1." not in name}
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PathError) as caught:
        build(source)
    assert "encoder.layer.1." in caught.value.problem


def test_a_pickle_with_code_is_not_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    source = write_encoder(tmp_path, MEAN)
    (source / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Hostile()}, source / "pytorch_model.bin")
    with pytest.raises(PathError) as caught:
        build(source)
    assert caught.value.path == str(source)
    assert not (tmp_path / "ran").exists()


def test_code_beside_the_weights_is_not_run(tmp_path):
    source = write_encoder(tmp_path, MEAN)
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    build(source)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["hf:./nowhere", "hf:a/b/c", "hf:/nowhere/at/all"])
def test_what_is_neither_a_folder_nor_a_hub_name_is_refused(text):
    with pytest.raises(OptionError) as caught:
        build_model("vit-scenes", device="cpu", parts=Parts(text=text))
    assert (caught.value.option, caught.value.value) == ("model.text", text)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(PathError) as caught:
        build(tmp_path)
    assert "config.json" in caught.value.problem


def test_a_name_that_is_not_in_the_cache_is_an_error_of_the_network():
    with pytest.raises(RemoteError) as caught:
        build("someone/no-such-encoder")
    assert "someone/no-such-encoder" in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(OptionError) as caught:
        build("someone/encoder")
    assert "fastclip[hf]" in caught.value.advice


def test_tokens_are_counted_before_captions_are_cut():
    words = build(minilm(), text_weights="none", context_length=6).tokenizer()
    counted = CountingTokenizer(words, words.context_length)
    assert [len(counted.encode(caption)) + 2 for caption in CAPTIONS] == [5, 18]
    assert counted.context_length == 6
