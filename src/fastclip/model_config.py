"""Model configs that others wrote: checked before anything is built, and built without the network.

A config in a local file or folder is data. What it names must be here already: timm's own architectures, a
folder, or a model that the Hugging Face cache holds. What it asks for must have the size of a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import open_clip
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from fastclip.errors import OptionError, PathError

LOCAL_DIR = "local-dir:"
IMAGE_FOLDER, TEXT_FOLDER = "image_tower", "text_tower"
"""Subfolders of a run or an export with what open_clip's config cannot say of a tower."""

registered: set[str] = set()
"""Names under which open_clip knows configs of users."""

MOST_PARAMETERS = 20_000_000_000  # open_clip's largest model has 5 billion
_LARGEST = {  # values that determine a model's size; an upper bound of each, far above open_clip's own models
    "embed_dim": 65_536,
    "layers": 512,
    "width": 65_536,
    "heads": 1_024,
    "head_width": 65_536,
    "dim_head": 65_536,
    "mlp_ratio": 256,
    "patch_size": 4_096,
    "image_size": 8_192,
    "context_length": 16_384,  # the causal mask has its square
    "vocab_size": 10_000_000,
    "n_queries": 65_536,
    "attn_pooler_queries": 65_536,
    "attn_pooler_heads": 1_024,
}
_TOKENIZER_KWARGS = {"clean", "strip_sep_token", "language", "additional_special_tokens"}
_SECTIONS = ("vision_cfg", "text_cfg", "multimodal_cfg")


def read_config(path: Path) -> dict[str, Any]:
    """An open_clip JSON config, bare or below "model_cfg"; PathError if it is none, or unsafe to build."""
    config = _read_json(path)
    model_cfg = config.get("model_cfg", config) if isinstance(config, dict) else None
    if not isinstance(model_cfg, dict) or not (
        "embed_dim" in model_cfg
        and isinstance(model_cfg.get("vision_cfg"), dict)
        and isinstance(model_cfg.get("text_cfg"), dict)
    ):
        raise PathError(
            path,
            "is not an open_clip model config, which has embed_dim, vision_cfg and text_cfg; "
            "models/vit-emoji.json in fastclip's folder is an example.",
        )
    _check_sizes(path, "", model_cfg)
    for section in _SECTIONS:
        _check_sizes(path, f"{section}.", model_cfg.get(section) or {})
    _check_patches(path, model_cfg["vision_cfg"])
    _check_image_tower(path, model_cfg["vision_cfg"])
    _check_tokenizer(path, model_cfg["text_cfg"])
    if name := model_cfg["text_cfg"].get("hf_model_name"):
        _check_text_model(path, name)
    _check_preprocessing(path, config.get("preprocess_cfg") or {})
    return config


def is_local(name: str) -> bool:
    """Whether open_clip's model of this name comes from a local file or folder."""
    return name.startswith(LOCAL_DIR) or name in registered


def downloads_if_asked(name: str) -> AbstractContextManager[None]:
    """open_clip's own models may download what they name; configs in local files and folders never do."""
    return without_network() if is_local(name) else nullcontext()


def get_tokenizer(name: str, **options: Any) -> Any:
    """open_clip's tokenizer of a model that `find_model` found."""
    try:
        with downloads_if_asked(name):
            return open_clip.get_tokenizer(name, **options)
    except Exception as error:  # transformers raises its own
        rule = f"has a tokenizer that cannot be loaded: {reason(error)}"
        raise OptionError("model.name", name.removeprefix(LOCAL_DIR), rule) from error


def reason(error: Exception) -> str:
    """One line; a package that is missing is named with the way to get it."""
    if package := missing_package(error):
        return f"it requires {package}: pip install {package}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def without_network() -> Iterator[None]:
    """Let Hugging Face's libraries read their cache only, as with HF_HUB_OFFLINE=1."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def missing_package(error: BaseException) -> str | None:
    """The package that an error is about, if it says that one is not installed."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ModuleNotFoundError) and seen.name:
            return seen.name.partition(".")[0]
        seen = seen.__cause__ or seen.__context__
    return None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise PathError(path, f"cannot be read as JSON: {error}") from error
    except RecursionError:
        raise PathError(path, "cannot be read as JSON: it is nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _check_sizes(path: Path, section: str, values: Any) -> None:
    if not isinstance(values, dict):
        raise PathError(path, f"has no mapping in {section[:-1]}.")
    for name, most in _LARGEST.items():
        value = values.get(name)
        if value is None:
            continue
        numbers = value if isinstance(value, list) and 0 < len(value) <= 4 else [value]
        kinds = (int, float) if name == "mlp_ratio" else (int,)
        if not all(isinstance(n, kinds) and not isinstance(n, bool) and 0 < n <= most for n in numbers):
            shown = str(value) if len(str(value)) < 50 else f"{str(value)[:50]}…"
            raise PathError(path, f"has {section}{name}={shown}, which must be from 1 to {most:,}.")


def _check_patches(path: Path, vision_cfg: dict) -> None:
    """The embedding of all positions is made at once, in memory."""
    sizes = [vision_cfg.get("image_size") or 224, vision_cfg.get("patch_size") or 16]
    image, patch = (max(size) if isinstance(size, list) else size for size in sizes)
    values = (image // patch) ** 2 * (vision_cfg.get("width") or 768)
    if values > MOST_PARAMETERS // 10:
        raise PathError(path, f"has {(image // patch) ** 2:,} patches of {patch} pixels: too many.")


def _check_image_tower(path: Path, vision_cfg: dict) -> None:
    """Timm also takes names of the hub and of folders, whose own configs would be built unchecked."""
    name = vision_cfg.get("timm_model_name")
    if name == f"{LOCAL_DIR}{IMAGE_FOLDER}":  # only the name of an architecture of timm is read there
        return
    if name is not None and (not isinstance(name, str) or any(sign in name for sign in ":/\\")):
        raise PathError(
            path,
            f"names timm_model_name={name!r}, which may have to be downloaded. A local config may name "
            "timm's own models only, without hf-hub: or a path.",
        )


def _check_tokenizer(path: Path, text_cfg: dict) -> None:
    kwargs = text_cfg.get("tokenizer_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise PathError(path, "has tokenizer_kwargs that are not a mapping.")
    if kwargs.get("trust_remote_code"):
        raise PathError(path, "sets trust_remote_code, which runs downloaded code. Remove it.")
    if other := sorted(kwargs.keys() - _TOKENIZER_KWARGS):
        allowed = ", ".join(sorted(_TOKENIZER_KWARGS))
        raise PathError(path, f"has tokenizer_kwargs.{other[0]}; a local config may set: {allowed}.")
    if name := text_cfg.get("hf_tokenizer_name"):
        _need_transformers(path, "hf_tokenizer_name", name)
        for folder in (path.parent, path.parent / TEXT_FOLDER, Path(str(name))):
            for file in (folder / "tokenizer_config.json", folder / "config.json"):
                if file.is_file():
                    _refuse_code(file, _read_json(file))


def _check_text_model(path: Path, name: Any) -> None:
    """A Hugging Face encoder: its own config must be here, and have the size of a model."""
    _need_transformers(path, "hf_model_name", name)
    places = [folder / "config.json" for folder in (path.parent / TEXT_FOLDER, Path(str(name)))]
    file = next((place for place in places if place.is_file()), places[0])
    if not file.is_file():
        if name == TEXT_FOLDER:
            problem = "is missing: it has the text encoder's config and tokenizer. Export the model again."
            raise PathError(path.parent / TEXT_FOLDER, problem)
        try:
            cached = try_to_load_from_cache(str(name), "config.json")
        except HFValidationError:
            cached = None
        if not isinstance(cached, str):
            raise PathError(
                path,
                f"names hf_model_name={name!r}, which is neither a folder nor in the Hugging Face cache. "
                f"A local config downloads nothing: `hf download {name}` fetches it.",
            )
        file = Path(cached)
    config = _read_json(file)
    if not isinstance(config, dict):
        raise PathError(file, "is not the config of a model.")
    _refuse_code(file, config)
    for key, value in _whole_numbers(config):
        most = _LARGEST["layers"] if "layer" in key else _LARGEST["vocab_size"]
        if value > most:
            raise PathError(file, f"has {key}={str(value)[:50]}, which must be at most {most:,}.")


def _need_transformers(path: Path, key: str, name: Any) -> None:
    if find_spec("transformers") is None:
        raise PathError(path, f"has {key}={name!r}, which requires transformers: pip install transformers")


def _refuse_code(file: Path, config: Any) -> None:
    if isinstance(config, dict) and "auto_map" in config:
        raise PathError(file, "has an auto_map, which names code to run. Remove it.")


def _whole_numbers(config: dict) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _whole_numbers(value)
        elif isinstance(value, int):
            yield key, value


def _check_preprocessing(path: Path, preprocess_cfg: Any) -> None:
    if not isinstance(preprocess_cfg, dict):
        raise PathError(path, "has a preprocess_cfg that is not a mapping.")
    for name in ("mean", "std"):
        values = preprocess_cfg.get(name)
        if values is None:
            continue
        listed = values if isinstance(values, list) else [values]
        numbers = [v for v in listed if isinstance(v, int | float) and not isinstance(v, bool)]
        least = math.ulp(0.0) if name == "std" else -math.inf
        if (
            len(listed) not in (1, 3)
            or len(numbers) != len(listed)
            or not least <= min(numbers) <= max(numbers) < math.inf
        ):
            raise PathError(
                path, f"has preprocess_cfg.{name}={str(values)[:50]}, which must be like [0.5, 0.5, 0.5]."
            )
