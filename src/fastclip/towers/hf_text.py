"""A text encoder of Hugging Face as a text tower: config, pooling, tokenizer and weights; never its code.

open_clip's `HFTextEncoder` runs it, so only model types that open_clip knows are possible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from open_clip.hf_configs import arch_dict
from open_clip.hf_model import HFTextEncoder
from open_clip.tokenizer import HFTokenizer

from fastclip.config.tower_options import HF
from fastclip.data.remote import RemoteError
from fastclip.errors import OptionError, PathError

_POOLERS = {  # of sentence-transformers' 1_Pooling/config.json, to open_clip's
    "mean": "mean_pooler",
    "cls": "cls_last_hidden_state_pooler",  # its "cls_pooler" has a further layer, which theirs do not use
}
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_source(text: str) -> str:
    """Where `model.text` is: the absolute path of a folder, or an id on the hub."""
    _require_transformers(text)
    name = text.removeprefix(HF)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            problem = "has no config.json. Pass a folder that transformers' save_pretrained wrote."
            raise PathError(folder, problem)
        return str(folder.resolve())
    if folder.is_file() or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise OptionError("model.text", text, "is neither a folder nor a name on the Hugging Face Hub")
    return name


def text_config(source: str, projection: str, context_length: int | None, usual: int) -> dict[str, Any]:
    """The `text_cfg` of open_clip for an encoder; `usual` is the context length unless one is asked for."""
    config = read_encoder_config(source)
    longest = _longest_context(config, source)
    if context_length is not None and context_length > longest:
        rule = f"must not exceed the {longest} tokens of {HF}{source}, whose positions are not resized"
        raise OptionError("model.context_length", context_length, rule, example=longest)
    return {
        "hf_model_name": source,
        "hf_tokenizer_name": source,
        "hf_pooler_type": _find_pooler(source) or arch_dict[config["model_type"]]["pooler"],
        "hf_proj_type": projection,
        "context_length": context_length or min(usual, longest),
    }


def read_encoder_config(source: str) -> dict[str, Any]:
    """config.json of an encoder; OptionError if open_clip cannot run its type, which might need code."""
    import transformers

    try:
        config = transformers.PretrainedConfig.get_config_dict(source)[0]
    except Exception as error:
        raise _unreadable(source, "config.json", error) from error
    kind = config.get("model_type")
    if kind not in arch_dict:
        rule = f"is an encoder of type {kind!r}, which open_clip's HFTextEncoder does not support"
        advice = f"It supports: {', '.join(sorted(arch_dict))}."
        raise OptionError("model.text", f"{HF}{source}", rule, advice=advice)
    return config


def load_tokenizer(source: str, text_cfg: dict[str, Any]) -> HFTokenizer:
    """open_clip's wrapper of the encoder's tokenizer."""
    kwargs = (text_cfg.get("tokenizer_kwargs") or {}) | {"trust_remote_code": False}
    try:
        return HFTokenizer(
            source,
            context_length=text_cfg["context_length"],
            tokenizer_mode=text_cfg.get("tokenizer_mode"),
            **kwargs,
        )
    except Exception as error:  # transformers raises many kinds
        raise PathError(source, f"has no tokenizer that can be loaded: {_first_line(error)}") from error


class CountingTokenizer(NamedTuple):
    """Counts the tokens of captions before they are cut, for `fastclip data check`."""

    tokenizer: HFTokenizer
    context_length: int

    def encode(self, caption: str) -> list[int]:
        """All tokens but two, as CLIP's own tokenizer leaves out its first and last."""
        return self.tokenizer.tokenizer(self.tokenizer.clean_fn(caption)).input_ids[2:]


def without_mask(tower: HFTextEncoder) -> None:
    """Let the encoder read padding too: on the meta device transformers cannot look at its mask.

    What it saves for the backward pass is the same.
    """
    forward = tower.transformer.forward
    tower.transformer.forward = lambda input_ids, attention_mask=None: forward(input_ids=input_ids)


def load_encoder(tower: HFTextEncoder, source: str) -> None:
    """Copy the encoder's own weights into the tower; every one of its tensors must be there."""
    import transformers

    options: dict[str, Any] = {"trust_remote_code": False, "output_loading_info": True}
    if not getattr(tower.config, "is_encoder_decoder", False):
        options["add_pooling_layer"] = getattr(tower.transformer, "pooler", None) is not None
    with _quiet():
        try:
            encoder, found = transformers.AutoModel.from_pretrained(source, **options)
        except Exception as error:
            raise _unreadable(source, "weights", error) from error
    part = "encoder." if getattr(tower.config, "is_encoder_decoder", False) else ""
    missing = sorted(key for key in found["missing_keys"] if key.startswith(part))
    if missing:
        listed = f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}"
        problem = f"has weights of another architecture than its config: {len(missing)} missing ({listed})."
        raise PathError(source, problem)
    state = (encoder.encoder if part else encoder).float().state_dict()
    tower.transformer.load_state_dict(state)


def check_tokenizer(tokenizer: HFTokenizer, config: Any, source: str) -> None:
    """PathError unless the tokens are the encoder's: it would train, with wrong words or masks."""
    words = tokenizer.tokenizer
    if len(words) <= len(words.all_special_tokens):
        problem = (
            "has no tokenizer. Copy its files (tokenizer.json, or vocab.txt or a sentencepiece model, and "
            "tokenizer_config.json) into the folder."
        )
        raise PathError(source, problem)
    if len(words) > config.vocab_size:
        problem = f"has a tokenizer of {len(words):,} words, but an encoder of {config.vocab_size:,}."
        raise PathError(source, problem)
    if words.pad_token_id != config.pad_token_id:
        problem = (
            f"pads with token {words.pad_token_id}, but its encoder masks token {config.pad_token_id}. "
            "Set pad_token_id in config.json to the tokenizer's."
        )
        raise PathError(source, problem)


def write_text_tower(folder: Path, tower: HFTextEncoder, tokenizer: HFTokenizer | None) -> None:
    """Write what is needed to build the tower without its weights: config and tokenizer."""
    config = json.loads(tower.config.to_json_string(use_diff=False))
    for key in ("auto_map", "_name_or_path"):  # code, and a folder of this machine
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _longest_context(config: dict[str, Any], source: str) -> int:
    """Tokens that the encoder takes; RoBERTa's positions begin after that of its padding token."""
    import transformers

    whole = transformers.AutoConfig.for_model(**config)  # with the defaults of its type
    longest = getattr(whole, "max_position_embeddings", None) or 10**9
    if config["model_type"] in ("roberta", "xlm-roberta"):
        longest -= whole.pad_token_id + 1
    return longest


def _find_pooler(source: str) -> str | None:
    """open_clip's pooler for the pooling that 1_Pooling/config.json names; None if there is no such file."""
    from transformers.utils import cached_file

    missing_is_none = {
        f"_raise_exceptions_for_{what}": False
        for what in ("missing_entries", "connection_errors", "gated_repo")
    }
    try:
        file = cached_file(source, "config.json", subfolder="1_Pooling", **missing_is_none)
    except OSError:
        file = None
    if file is None:
        return None
    pooling = json.loads(Path(file).read_text(encoding="utf-8"))
    modes = [mode for key, mode in _MODES.items() if pooling.get(key)]
    named = pooling.get("pooling_mode")  # in newer files
    modes = modes or ([named] if isinstance(named, str) else list(named or []))
    if len(modes) != 1 or modes[0] not in _POOLERS:
        raise PathError(
            file,
            f"names the pooling {' + '.join(modes) or 'none'}, which open_clip cannot compute; "
            f"it can: {', '.join(_POOLERS)}.",
        )
    return _POOLERS[modes[0]]


def _require_transformers(text: str) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        advice = "Run pip install 'fastclip[hf]'."
        rule = "requires transformers, which is not installed"
        raise OptionError("model.text", text, rule, advice=advice) from None


def _unreadable(source: str, what: str, error: Exception) -> ValueError | RemoteError:
    if Path(source).is_dir():
        return PathError(source, f"has no {what} that can be loaded: {_first_line(error)}")
    return RemoteError(f"model.text={HF}{source}: its {what} could not be downloaded: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and its report of tensors that are not needed."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.device("cpu"):
            yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
