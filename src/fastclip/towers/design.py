"""How a model is put together: an open_clip config from a model's name, other towers and other sizes.

A run's folder and an export keep what open_clip's config cannot say, in subfolders: the text encoder's config
and tokenizer in text_tower/, timm's config of an image tower of another size in image_tower/. So both can be
loaded without the folder or the hub that the towers came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import open_clip
from open_clip.hf_model import HFTextEncoder

from fastclip.config.options import ModelConfig
from fastclip.errors import OptionError, PathError
from fastclip.files import atomic_folder
from fastclip.model_config import IMAGE_FOLDER, LOCAL_DIR, TEXT_FOLDER, downloads_if_asked, get_tokenizer
from fastclip.towers.hf_text import (
    check_tokenizer,
    find_source,
    load_encoder,
    load_tokenizer,
    read_encoder_config,
    text_config,
    write_text_tower,
)
from fastclip.towers.sizes import check_image_size
from fastclip.towers.timm_image import ImageTower, find_image_tower, load_trunk


class Parts(NamedTuple):
    """What differs from the model of `model.name`: the options of these names."""

    image: str | None = None
    image_weights: str = "own"
    text: str | None = None
    text_weights: str = "own"
    embed_dim: int | None = None
    projection: str | None = None
    image_size: int | None = None
    context_length: int | None = None

    @classmethod
    def of(cls, model: ModelConfig) -> Parts:
        return cls(*(getattr(model, name) for name in cls._fields))

    @property
    def kept_side(self) -> str | None:
        """The tower of `model.name` that stays, if the other is replaced; None if both stay, or none does."""
        if (self.image is None) == (self.text is None):
            return None
        return "text" if self.text is None else "image"


class Design(NamedTuple):
    """A model to be built."""

    name: str
    """open_clip's name of `model.name`."""
    config: dict[str, Any]
    """open_clip's config, as a run or an export records it."""
    parts: Parts
    text_source: str | None = None
    """Where the text encoder's config and tokenizer are: an id on the hub, or an absolute path."""
    image: ImageTower | None = None
    """timm's model, if it is asked for or has another size."""

    @property
    def shown(self) -> str:
        """The name, for messages."""
        return self.name.removeprefix(LOCAL_DIR)

    def network(self) -> AbstractContextManager[None]:
        """Without the network, unless open_clip's own model or a tower of an option may need it."""
        asked = self.parts.image is not None or self.parts.text is not None
        return nullcontext() if asked else downloads_if_asked(self.name)

    @contextmanager
    def arguments(self) -> Iterator[dict[str, Any]]:
        """What open_clip's create_model needs besides the name; valid inside, as timm may read a folder."""
        if self.text_source is None and self.image is None and self.parts == Parts():
            yield {}
            return
        config = deepcopy(self.config)
        text, vision = config["text_cfg"], config["vision_cfg"]
        if "hf_model_name" in text:
            text |= {"hf_model_name": self.text_source or text["hf_model_name"], "hf_model_pretrained": False}
        with TemporaryDirectory() as folder:
            if self.image is not None and self.image.resized:
                (Path(folder) / "config.json").write_text(json.dumps(self.image.config))
                vision["timm_model_name"] = f"{LOCAL_DIR}{folder}"
            asked = {key: config[key] for key in ("embed_dim", "vision_cfg", "text_cfg")}
            yield asked | {"force_custom_text": "hf_model_name" in text}

    @property
    def context_length(self) -> int:
        return self.config["text_cfg"].get("context_length", open_clip.CLIPTextCfg.context_length)

    @property
    def preprocess(self) -> dict[str, Any]:
        """Of images, if the image tower is timm's by option."""
        return {} if self.parts.image is None or self.image is None else self.image.preprocess

    def tokenizer(self) -> Any:
        """Captions → token ids."""
        text = self.config["text_cfg"]
        if self.text_source is not None and text.get("hf_tokenizer_name"):
            return load_tokenizer(self.text_source, text | {"context_length": self.context_length})
        return get_tokenizer(self.name, context_length=self.context_length)

    def finish(self, clip: Any) -> None:
        """Check a model that was built, and load the towers' own weights into it."""
        parts = self.parts
        if parts.image_size not in (None, self._own_image_size()):
            check_image_size(clip.visual, parts.image_size)
        if parts.text is not None and self.text_source is not None:
            check_tokenizer(self.tokenizer(), clip.text.config, self.text_source)
            if parts.text_weights == "own":
                load_encoder(clip.text, self.text_source)
        if parts.image is not None and self.image is not None:
            load_trunk(clip.visual, self.image, parts.image_weights)

    def _own_image_size(self) -> int:
        """The size that it has unless another is asked for; some cut off the rest of their last patch."""
        if self.image is not None:
            return find_image_tower(self.image.name, None).size
        return open_clip.get_model_config(self.name)["vision_cfg"].get("image_size", 224)

    def write(self, folder: Path, clip: Any) -> None:
        """Write the subfolders from which the same towers can be built without their sources."""
        encoder = getattr(clip, "text", None)
        if isinstance(encoder, HFTextEncoder):
            tokenizer = self.tokenizer() if self.config["text_cfg"].get("hf_tokenizer_name") else None
            with atomic_folder(folder / TEXT_FOLDER) as part:
                write_text_tower(part, encoder, tokenizer)
        if self.image is not None and self.image.resized:
            with atomic_folder(folder / IMAGE_FOLDER) as part:
                (part / "config.json").write_text(json.dumps(self.image.config, indent=2) + "\n")

    def facts(self, clip: Any) -> dict[str, str]:
        """What must be the same on every rank and is not an option; DDP copies rank 0's weights to all."""
        if self.text_source is None:
            return {}
        words = sorted(self.tokenizer().tokenizer.get_vocab().items())
        encoder = clip.text.config.to_dict() | {"_name_or_path": None}
        content = json.dumps([encoder, words], sort_keys=True, default=str)
        return {"files of model.text": blake2b(content.encode(), digest_size=8).hexdigest()}

    @property
    def needs_its_folder(self) -> bool:
        """Whether open_clip finds a tower of an export only from inside the export's folder."""
        text, vision = self.config["text_cfg"], self.config["vision_cfg"]
        return text.get("hf_model_name") == TEXT_FOLDER or _is_resized(vision)


def design(name: str, parts: Parts) -> Design:
    """How to build the model that open_clip knows by this name, with these parts."""
    config = deepcopy(open_clip.get_model_config(name))
    folder = Path(name.removeprefix(LOCAL_DIR)) if name.startswith(LOCAL_DIR) else None
    _check_class(name, config, parts)
    if parts.embed_dim is not None:
        config["embed_dim"] = parts.embed_dim
    image = _design_image(config, parts, folder)
    text_source = _design_text(config, parts, folder)
    return Design(name, config, parts, text_source, image)


def _check_class(name: str, config: dict[str, Any], parts: Parts) -> None:
    option = next((one for one in ("image", "text", "embed_dim") if getattr(parts, one) is not None), None)
    if option is not None and "multimodal_cfg" in config:
        rule = f"is not possible with {name}, a CoCa model, whose decoder of captions needs its own towers"
        raise OptionError(f"model.{option}", getattr(parts, option), rule)


def _design_image(config: dict[str, Any], parts: Parts, folder: Path | None) -> ImageTower | None:
    """Change `vision_cfg` to the asked tower and size; the model of timm, if that is what it is."""
    vision = config["vision_cfg"]
    if parts.image is not None:
        image = find_image_tower(parts.image, parts.image_size)
        # With a bias: networks of ReLUs give zeros for blank images, and zeros have no direction
        vision = {"timm_pool": "", "timm_proj": parts.projection or "linear", "timm_proj_bias": True}
    elif _is_resized(vision):
        image = _read_image_tower(folder, parts.image_size or vision["image_size"])
    elif parts.image_size is not None and vision.get("timm_model_name"):
        image = find_image_tower(vision["timm_model_name"], parts.image_size, "model.name")
    else:
        if parts.image_size is not None:
            vision["image_size"] = parts.image_size
        return None
    name = f"{LOCAL_DIR}{IMAGE_FOLDER}" if image.resized else image.name
    config["vision_cfg"] = vision | {"timm_model_name": name, "image_size": image.size}
    return image


def _read_image_tower(folder: Path | None, size: int) -> ImageTower:
    """The image tower whose config a run's folder or an export keeps; its name is all that is read."""
    path = (folder or Path()) / IMAGE_FOLDER / "config.json"
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["architecture"]
        return find_image_tower(str(name), size)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PathError(path, f"does not name the image tower: {error}. Export the model again.") from error


def _is_resized(vision: dict[str, Any]) -> bool:
    return vision.get("timm_model_name") == f"{LOCAL_DIR}{IMAGE_FOLDER}"


def _design_text(config: dict[str, Any], parts: Parts, folder: Path | None) -> str | None:
    """Change `text_cfg` to the asked tower and size; where its encoder is, if it is of Hugging Face."""
    text = config["text_cfg"]
    usual = text.get("context_length", open_clip.CLIPTextCfg.context_length)
    if parts.text is not None:
        source = find_source(parts.text)
        config["text_cfg"] = text_config(source, parts.projection or "linear", parts.context_length, usual)
        _name_portably(config["text_cfg"])
        return source
    kept = None if folder is None else folder / TEXT_FOLDER
    is_kept = text.get("hf_model_name") and kept is not None and (kept / "config.json").is_file()
    found = str(kept) if is_kept else _named_folder(text)
    if found is not None:
        read_encoder_config(found)  # checks it
    elif text.get("hf_model_name") == TEXT_FOLDER:
        raise PathError(kept or TEXT_FOLDER, "is missing: it has the text encoder's config and tokenizer.")
    if parts.context_length is not None:
        if text.get("hf_model_name"):
            encoder = found or text["hf_model_name"]
            text_config(encoder, text.get("hf_proj_type", "mlp"), parts.context_length, usual)  # checks it
        text["context_length"] = parts.context_length
    return found


def _named_folder(text: dict[str, Any]) -> str | None:
    """The folder of an encoder that a JSON config names by its path; the config gets the portable name."""
    name, tokenizer = text.get("hf_model_name"), text.get("hf_tokenizer_name")
    if not name or name == TEXT_FOLDER or not Path(name).is_dir() or tokenizer not in (None, name):
        return None
    text["hf_model_name"] = TEXT_FOLDER
    if tokenizer:
        text["hf_tokenizer_name"] = TEXT_FOLDER
    return str(Path(name).resolve())


def _name_portably(text: dict[str, Any]) -> None:
    """An id on the hub stays; a folder becomes the subfolder that runs and exports have."""
    for key in ("hf_model_name", "hf_tokenizer_name"):
        if Path(text[key]).is_absolute():
            text[key] = TEXT_FOLDER
