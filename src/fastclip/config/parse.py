"""From a command line to a config: recipes by name, YAML files, single options, and helpful errors."""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter
from collections.abc import Collection
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import (
    ActionConfigFile,
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    Namespace,
    set_parsing_settings,
)

from fastclip.config.options import SECTIONS, TABLES, TrainConfig
from fastclip.config.renamed import current_name, report_new_name, with_current_names
from fastclip.text import did_you_mean

RECIPES = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """A YAML file of this path, or else the recipe of this name."""
    path = Path(name)
    if path.is_file():
        return path
    if name in recipe_names():
        return RECIPES / f"{name}.yaml"
    if path.is_dir():
        inside = sorted(path.glob("*.yaml"))
        hint = f": {inside[0]}" if inside else f", or a recipe: {', '.join(recipe_names())}"
        raise ValueError(f"--config {name} is a folder. Give a YAML file{hint}.")
    hint = did_you_mean(name, recipe_names())
    raise ValueError(
        f"--config {name}: there is no such file or recipe.{hint} Recipes: {', '.join(recipe_names())}."
    )


def parse(words: list[str], prog: str = "fastclip train") -> TrainConfig:
    """The config that a command line asks for; `--help` prints the options and ends the program."""
    parser = _parser(prog)
    words, source = _configs_first(words, _options(parser))
    try:
        parsed = parser.parse_args(words)
        for name in SECTIONS:
            if not isinstance(parsed[name], Namespace):  # `batch: 64` in a file
                raise ValueError(_not_a_section(name, parsed[name]))
        values = vars(parser.instantiate(parsed))
    except ArgumentError as error:
        raise ValueError(_in_words(str(error), parser)) from None
    del values["config"]
    config = TrainConfig(**values)
    if config.out is None:
        config = replace(config, out=f"runs/{source.stem if source else 'train'}-{config.algorithm}")
    return config


_DESCRIPTION = """\
Train a CLIP model with a global contrastive loss.

  fastclip train --config emoji                           a recipe by its name, or a YAML file
  fastclip train --config emoji --algorithm fastclip-v1   another algorithm, with the recipe's values for it
  fastclip train --config cc3m-medium --data.train 'shards/*.tar' --out runs/mine
  torchrun --nproc-per-node 8 -m fastclip train --config cc12m-large --data.train 'shards/*.tar'

Recipes: RECIPES.
Options win over files, and a later file over an earlier one. A file has the same names as the options.
The run's folder holds config.yaml (train from it to repeat the run), metrics.jsonl, checkpoints and the
exported model. The same command again goes on from the newest checkpoint.

Exit codes: 0 trained to the end; 75 stopped by SIGTERM or Ctrl-C, and saved: call again to go on; 1 an
error, told in a line."""


class _Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Examples stay as they are, options have their defaults; without what is for files only."""

    def _get_help_string(self, action: Action) -> str:
        if action.default in (None, SUPPRESS, {}) or action.default is False:
            return action.help or ""
        return f"{action.help or ''} (default: %(default)s)"

    def _format_action(self, action: Action) -> str:
        section = action.dest.removesuffix(".help")
        return "" if section in SECTIONS or section in TABLES else super()._format_action(action)


@cache
def _parser(prog: str) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=prog,
        exit_on_error=False,
        usage=f"{prog} --config RECIPE [--OPTION VALUE …]",
        description=_DESCRIPTION.replace("RECIPES", ", ".join(recipe_names())),
        formatter_class=_Help,
    )
    parser.add_argument("--config", action=ActionConfigFile, help="a recipe's name, or a YAML file")
    parser.add_class_arguments(TrainConfig)
    for action in parser._actions:
        if "--print_config" in action.option_strings:
            action.help = "print all settings as YAML, to start a file of one's own, and exit"
    return parser


def _options(parser: ArgumentParser) -> dict[str, None]:
    """All of them with their dashes, in the order of --help."""
    return {option: None for action in parser._actions for option in action.option_strings}


def _configs_first(words: list[str], known: Collection[str]) -> tuple[list[str], Path | None]:
    """Every --config, then all other words with the options' current names; and the last config's file.

    Files come first so that options win over them, wherever they stand.
    """
    files: list[Path] = []
    configs: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option != "--config":
            others.append(_current_option(option, known) + equals + value)
            continue
        name = value if equals else next(rest, "")
        if not name or name.startswith("--"):
            raise ValueError(f"--config needs a YAML file or a recipe: {', '.join(recipe_names())}.")
        files.append(find_recipe(name))
        configs.append(f"--config={_config_source(files[-1])}")
    return configs + others, files[-1] if files else None


def _current_option(word: str, known: Collection[str]) -> str:
    """--log.every is --log.every_steps, and --data.max-bad is --data.max_bad; other words stay as they are."""
    if not word.startswith("--"):
        return word
    spelt = "--" + word[2:].replace("-", "_")
    if word not in known and spelt in known:
        report_new_name(word, spelt)
        return spelt
    return "--" + current_name(word[2:])


def _config_source(path: Path) -> str:
    """The file itself, or its content where it says old names."""
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} holds no settings; its lines should read like `epochs: 30`.")
    current = with_current_names(content)
    return str(path) if current == content else yaml.safe_dump(current)


def _in_words(message: str, parser: ArgumentParser) -> str:
    """The parser's error for a person: a misspelt name gets a suggestion, a wrong value the right kind."""
    options = [option[2:] for option in _options(parser) if option[2:] not in SECTIONS]
    if found := re.search(r"unrecognized arguments: (\S+)", message):
        if found[1].startswith("--"):
            return _no_option(found[1][2:].partition("=")[0], options)
        return (
            f"{found[1]!r} belongs to no option. Several paths are a list: --data.train '[a.tar, b.tar]'; "
            "a pattern needs quotes: 'shards/*.tar'."
        )
    if found := re.search(r"Group '([\w.]+)' does not accept option '([^']+)'", message):
        return _no_option(f"{found[1]}.{found[2]}", options)
    keys = re.findall(r'Parser key "([^"]+)":\s', message)
    if found := re.search(r"Option '([^']+)' is not accepted", message):
        row = TABLES.get(keys[0]) if keys else None
        return _no_option(found[1], [field.name for field in fields(row)] if row else options)
    if found := re.search(r"argument --([\w.]+)[^:]*: expected one argument", message):
        return f"--{found[1]} needs a value: {_kind(_type_of(found[1]))}."
    value = re.search(r"(?:Got|Given) value: (.*)|Unable to load config '(.*)'", message)
    if not keys or not value:
        return message
    if value[2] is not None:
        return _not_a_section(keys[0], value[2])
    shown, kind = value[1], _type_of(*keys)
    hint = did_you_mean(shown, _choices(kind))
    return f"{'.'.join(keys)}={shown} is not possible: it must be {_kind(kind)}.{hint}"


def _no_option(name: str, options: list[str]) -> str:
    """--tau is short for nothing, but loss.tau is meant."""
    near = [option for option in options if option.rpartition(".")[2] == name.rpartition(".")[2]]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    hint = hint or did_you_mean(name.replace("-", "_"), options, cutoff=0.6)
    hint = hint or " `fastclip train --help` lists them all."
    return f"There is no option {name}.{hint}"


def _not_a_section(name: str, value: object) -> str:
    main = fields(SECTIONS[name])[0].name
    return f"{name}={value} is not possible: it is a section. Did you mean {name}.{main}={value}?"


def _type_of(*keys: str) -> Any:
    """The type of a field, by its dotted name, or by a table and the name in one of its rows."""
    kind: Any = TrainConfig
    for name in ".".join(keys).split("."):
        kind = get_type_hints(kind)[name]
        kind = TABLES.get(name, kind) if len(keys) > 1 else kind
    return kind


def _choices(kind: Any) -> list[str]:
    """The values of a Literal, alone or beside None."""
    literals = [kind, *get_args(kind)]
    return [value for literal in literals if get_origin(literal) is Literal for value in get_args(literal)]


def _kind(kind: Any) -> str:
    """A type in words."""
    if choices := _choices(kind):
        return f"one of {', '.join(choices)}"
    inner = [arg for arg in get_args(kind) if arg is not NoneType]
    if get_origin(kind) is tuple or (len(inner) == 1 and get_origin(inner[0]) is tuple):
        return "two numbers, e.g. [0.9, 0.98]"
    if get_origin(kind) is dict:
        return "a table, {name: value} with a blank after the colon"
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    return words.get(inner[0] if len(inner) == 1 else kind, "a path, or a list of them")
