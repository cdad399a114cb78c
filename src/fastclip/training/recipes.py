"""From a command line to a config: recipes by name, YAML files, single options, and helpful errors."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, set_parsing_settings

from fastclip.training.config import TrainConfig, as_dict

RECIPES = Path(__file__).parent.parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """A YAML file of this path, or else the recipe of this name."""
    if Path(name).is_file():
        return Path(name)
    if Path(name).is_dir():
        raise ValueError(f"--config {name} is a folder. Give the YAML file in it: {name}/config.yaml.")
    if name in recipe_names():
        return RECIPES / f"{name}.yaml"
    near = get_close_matches(name, recipe_names(), n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"--config {name}: there is no such file or recipe.{hint} Recipes: {', '.join(recipe_names())}."
    )


def parse(words: list[str], prog: str = "fastclip train") -> TrainConfig:
    """The config that a command line asks for; `--help` prints the options and ends the program."""
    parser = _parser(prog)
    words = _with_recipe_paths(words)
    try:
        parsed = parser.instantiate(parser.parse_args(words))
    except ArgumentError as error:
        raise ValueError(_with_nearest(str(error), parser)) from None
    values = {name: value for name, value in vars(parsed).items() if name != "config"}
    config = TrainConfig(**values)
    source = Path(str(parsed.config[-1])) if parsed.config else None
    if config.out is None:
        config.out = f"runs/{source.stem if source else 'train'}-{config.algorithm}"
    return config


def write_config(config: TrainConfig, path: Path) -> None:
    """A YAML file from which the same run can be trained."""
    path.write_text(yaml.safe_dump(as_dict(config), sort_keys=False, allow_unicode=True))


def _parser(prog: str) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=prog, exit_on_error=False, usage=f"{prog} --config RECIPE [--OPTION VALUE …]"
    )
    parser.add_argument(
        "--config",
        action=ActionConfigFile,
        help=f"a YAML file, or one of the recipes: {', '.join(recipe_names())}",
    )
    parser.add_class_arguments(TrainConfig)
    return parser


def _with_recipe_paths(words: list[str]) -> list[str]:
    """The word after each --config, a recipe's name perhaps, becomes the path of its file."""
    found = list(words)
    for i, word in enumerate(words):
        if word == "--config" and i + 1 < len(words):
            found[i + 1] = str(find_recipe(words[i + 1]))
        elif word.startswith("--config="):
            found[i] = f"--config={find_recipe(word.removeprefix('--config='))}"
    return found


def _with_nearest(message: str, parser: ArgumentParser) -> str:
    """A mistyped option or key gets a suggestion; a value of another kind is told in words."""
    unknown = re.search(r"unrecognized arguments: --([\w.]+)|Option '([\w.-]+)' is not accepted", message)
    if not unknown:
        wrong = re.search(r'Parser key "([^"]+)":\s*(.*)', message, re.DOTALL)
        return f"{wrong[1]}: {' '.join(wrong[2].split())}" if wrong else message
    name = unknown[1] or unknown[2]
    options = [option[2:] for action in parser._actions for option in action.option_strings]
    near = get_close_matches(name, options, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else " `fastclip train --help` lists them all."
    return f"There is no option {name}.{hint}"
