"""Tiny models with text towers of all kinds, and captions of all lengths."""

import json

import torch

VISION = {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8}
TEXT = {"context_length": 21, "vocab_size": 200, "width": 16, "heads": 2, "layers": 2}
CAUSAL = {
    "clip": {"text_cfg": TEXT},
    "custom": {"text_cfg": TEXT, "custom_text": True},
    "custom-eos": {"text_cfg": TEXT | {"pool_type": "eos", "eos_id": 199}, "custom_text": True},
    "custom-projection": {"text_cfg": TEXT | {"proj_bias": True}, "custom_text": True},
}
READ_PADDING = {
    "not-causal": {"text_cfg": TEXT | {"no_causal_mask": True, "pool_type": "last"}, "custom_text": True},
    "last": {"text_cfg": TEXT | {"pool_type": "last"}, "custom_text": True},
    "class-token": {"text_cfg": TEXT | {"embed_cls": True}, "custom_text": True},
}


def write_config(folder, name):
    """The path of an open_clip config of this name; "bert" is a Hugging Face encoder without dropout."""
    config = write_bert(folder / "bert") if name == "bert" else (CAUSAL | READ_PADDING)[name]
    path = folder / f"text-{name}-{folder.name}.json"  # open_clip knows models by their file's name
    path.write_text(json.dumps({"embed_dim": 8, "vision_cfg": VISION} | config))
    return str(path)


def write_bert(folder):
    """Save a tiny encoder in a folder; returns the part of open_clip's config that names it."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=200, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    config.save_pretrained(folder)
    text = {"hf_model_name": str(folder), "hf_pooler_type": "mean_pooler", "hf_proj_type": "linear"}
    return {"text_cfg": text | {"context_length": 21}, "custom_text": True}


def captions(ends, lengths, seed=0):
    """Random tokens of these lengths, padded to the context."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 150, (len(lengths), ends.longest), generator=generator)
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
        if ends.rule != "padding":
            tokens[row, length - 1] = ends.token
    return tokens
