"""From a command line to a config: recipes, YAML files and options, with errors that say what to do."""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping
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

from fastclip.config.options import INNER_SECTIONS, SECTIONS, TABLES, TrainConfig
from fastclip.config.renamed import current_name, report_new_name, with_current_names
from fastclip.config.yaml_text import HostileYaml, check_structure, read_yaml
from fastclip.errors import OptionError, PathError, UnknownOption
from fastclip.text import did_you_mean, nearest

RECIPES = Path(__file__).parent / "recipes"
TRAIN = "fastclip train"
DRY_RUN = ("--dry_run", "--dry-run")


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """The YAML file at this path, or else the recipe of this name."""
    path = Path(name)
    if path.is_file():
        return path
    if name in recipe_names():
        return RECIPES / f"{name}.yaml"
    if path.is_dir():
        inside = sorted(path.glob("*.yaml"))
        example = inside[0] if inside else recipe_names()[0]
        raise OptionError("config", name, "is a folder; it must be a YAML file or a recipe", example=example)
    recipes = f"Recipes: {', '.join(recipe_names())}."
    hint = f"{did_you_mean(name, recipe_names())} {recipes}".strip()
    raise OptionError("config", name, "must be an existing YAML file or the name of a recipe", advice=hint)


def parse(words: list[str], prog: str = TRAIN, defaults: Mapping[str, Any] | None = None) -> TrainConfig:
    """The config of a command line; `--help` prints the options and exits.

    Args:
        defaults: as in a config.yaml, which files and options override.
    """
    parser = _parser(prog)
    words, source = _configs_first(words, _options(parser))
    words = _with_first_options(words)
    _check_values(words)
    if defaults is not None:
        words = [f"--config={yaml.safe_dump(with_current_names(defaults))}", *words]
    try:
        parsed = parser.parse_args(words)
        for name in (*SECTIONS, *INNER_SECTIONS):
            if not isinstance(parsed[name], Namespace):  # `batch: 64` in a file
                raise _not_a_value(name, parsed[name])
        values = vars(parser.instantiate(parsed))
    except ArgumentError as error:
        raise _readable(str(error), parser) from None
    del values["config"]
    if values.pop("from", None) is not None:  # `run.start_from` has taken it
        raise UnknownOption("from", otherwise="Only `fastclip train` has it.")
    for name, value in values.items():
        if value is None and NoneType not in get_args(_type_of(name)):  # `epochs:` alone in a file
            raise OptionError(name, "null", f"must be {_kind(_type_of(name))}")
    values.pop("dry_run", None)  # for `fastclip train`, which looks for it itself
    config = TrainConfig(**values)
    if config.out is None:
        config = replace(config, out=f"runs/{source.stem if source else 'train'}-{config.algorithm}")
    return config


_DESCRIPTION = """\
Train a CLIP model with a global contrastive loss.

  fastclip train --config emoji                           a recipe's name, or a YAML file
  fastclip train --config emoji --algorithm fastclip-v1   another algorithm, with the recipe's values for it
  fastclip train --config cc3m-medium --data.train 'shards/*.tar' --out runs/mine
  torchrun --nproc-per-node 8 -m fastclip train --config cc12m-large --data.train 'shards/*.tar'
  fastclip train --from runs/mine/checkpoints/step-00001200 --optim.lr 5e-4 --out runs/mine-2

Recipes: RECIPES.
Options override files, and later files override earlier ones. Files use the same names as options.
The run's folder holds config.yaml (train from it to repeat the run), metrics.jsonl, checkpoints and the
exported model. Run the same command again to resume from the newest checkpoint. To go on from a checkpoint
with other values, as after a divergence, pass it as --from: weights, moments, estimators, temperature and
step are carried over.

Exit codes: 0 training finished; 75 stopped by SIGTERM or Ctrl-C and saved, run it again to resume; 1 error,
explained in one line; --debug shows its traceback."""


_FROM = (
    "start a new run, in a new --out, from this checkpoint of another run (or from the newest trusted one of "
    "the run in this folder), whose options are the defaults"
)


class _Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the layout of examples, shows defaults, and hides what only files can set."""

    def _get_help_string(self, action: Action) -> str:
        if action.default in (None, SUPPRESS, {}) or action.default is False:
            return action.help or ""
        return f"{action.help or ''} (default: %(default)s)"

    def _format_action(self, action: Action) -> str:
        section = action.dest.removesuffix(".help")
        hidden = section in SECTIONS or section in TABLES or section.startswith("start.")
        return "" if hidden else super()._format_action(action)


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
    parser.add_argument("--from", metavar="CHECKPOINT", default=SUPPRESS, help=_FROM)
    if prog == TRAIN:
        parser.add_argument(
            *DRY_RUN,
            action="store_true",
            help="print which parameters train, at which rate and decay, and exit",
        )
    parser.add_class_arguments(TrainConfig)
    for action in parser._actions:
        if "--print_config" in action.option_strings:
            action.help = "print all settings as YAML, as a start for your own file, and exit"
        if action.dest in INNER_SECTIONS:
            first = _first_option(action.dest)
            action.help, action.metavar = f"The {first} alone, or {_EXAMPLES[action.dest]}.", first.upper()
    return parser


def _options(parser: ArgumentParser) -> dict[str, None]:
    """All of them with their dashes, in the order of --help."""
    return {option: None for action in parser._actions for option in action.option_strings}


def _configs_first(words: list[str], known: Collection[str]) -> tuple[list[str], Path | None]:
    """Every --config first, then all other arguments under their current names; and the last config's path.

    Files come first so that options override them, wherever they are.
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
            raise OptionError("config", "", f"must be a YAML file or a recipe: {', '.join(recipe_names())}")
        files.append(find_recipe(name))
        configs.append(f"--config={_config_source(files[-1])}")
    return configs + others, files[-1] if files else None


def _current_option(word: str, known: Collection[str]) -> str:
    """The current spelling: --log.every is --log.every_steps, and --data.max-bad is --data.max_bad."""
    if not word.startswith("--"):
        return word
    spelled = "--" + word[2:].replace("-", "_")
    if word not in known and spelled in known:
        report_new_name(word, spelled)
        return spelled
    return "--" + current_name(word[2:])


def _config_source(path: Path) -> str:
    """The path of a config file, or its content if it has old names of options."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PathError(path, f"is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise PathError(path, "has no settings; its lines should read like `epochs: 30`.")
    current = with_current_names(content)
    for inner in INNER_SECTIONS:
        section, _, name = inner.partition(".")
        options = current.get(section)
        if isinstance(options, dict) and not isinstance(options.get(name, {}), dict):
            current[section] = options | {name: {_first_option(inner): options[name]}}
    return str(path) if current == content else yaml.safe_dump(current)


def _with_first_options(words: list[str]) -> list[str]:
    """Write `--model.patch_dropout 0.5` as `--model.patch_dropout.share 0.5`."""
    written = []
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        given = value if equals else "".join(words[position + 1 : position + 2])
        if option[2:] in INNER_SECTIONS and not given.startswith("{"):
            option += f".{_first_option(option[2:])}"
        written.append(option + equals + value)
    return written


def _check_values(words: list[str]) -> None:
    """Refuse values that the parser's own YAML reader, which has no limits, could not survive."""
    option = ""
    for word in words:
        if word.startswith("--"):
            option, _, word = word.removeprefix("--").partition("=")
        try:
            check_structure(word)
        except HostileYaml as error:
            raise OptionError(option, f"{word[:20]}…", f"cannot be read: {error}") from None


_EXAMPLES = {
    "model.patch_dropout": "{share: 0.5, until: 0.9}",
    "model.lora": "{rank: 8, alpha: 16}",
}


def _first_option(section: str) -> str:
    return fields(INNER_SECTIONS[section])[0].name


def _readable(message: str, parser: ArgumentParser) -> ValueError:
    """The parser's error for users: a misspelled name gets a suggestion, a wrong value the expected type."""
    options = [option[2:] for option in _options(parser) if option[2:] not in SECTIONS]
    if found := re.search(r"unrecognized arguments: (\S+)", message):
        if found[1].startswith("--"):
            return _unknown(found[1][2:].partition("=")[0], options)
        return ValueError(
            f"{found[1]!r} does not belong to an option. Pass several paths as a list: "
            "--data.train '[a.tar, b.tar]', and quote patterns: 'shards/*.tar'."
        )
    if found := re.search(r"Group '([\w.]+)' does not accept option '([^']+)'", message):
        return _unknown(f"{found[1]}.{found[2]}", options)
    keys = re.findall(r'Parser key "([^"]+)":\s', message)
    if found := re.search(r"Option '([^']+)' is not accepted", message):
        row = TABLES.get(keys[0]) if keys else None
        return _unknown(found[1], [field.name for field in fields(row)] if row else options)
    if found := re.search(r"argument --([\w.]+)[^:]*: expected one argument", message):
        return OptionError(found[1], "", f"needs a value: {_kind(_type_of(found[1]))}")
    value = re.search(r"(?:Got|Given) value: (.*)|Unable to load config '(.*)'", message)
    if not keys or not value:
        return ValueError(message)
    if value[2] is not None:
        return _not_a_value(keys[0], value[2])
    option, kind = ".".join(keys), _type_of(*keys)
    hint = did_you_mean(value[1], _choices(kind)).strip()
    return OptionError(option, value[1], f"must be {_kind(kind)}", advice=hint)


def _unknown(name: str, options: list[str]) -> UnknownOption:
    """`--tau` is not an option, but loss.tau may be meant."""
    near = [option for option in options if option.rpartition(".")[2] == name.rpartition(".")[2]]
    if not near and (nearest_one := nearest(name.replace("-", "_"), options, cutoff=0.6)):
        near = [nearest_one]
    return UnknownOption(name, near, "`fastclip train --help` lists all options.")


def _not_a_value(section: str, value: object) -> OptionError:
    if section in INNER_SECTIONS:
        return OptionError(section, value, "must be a number or a table", example=_EXAMPLES[section])
    main = fields(SECTIONS[section])[0].name
    advice = f"Did you mean {section}.{main}={value}?"
    return OptionError(section, value, "is not possible, as it is a section of options", advice=advice)


def _type_of(*keys: str) -> Any:
    """The type of a field given by its dotted name, or by a table and a name in its rows."""
    kind: Any = TrainConfig
    for name in ".".join(keys).split("."):
        kind = get_type_hints(kind)[name]
        kind = TABLES.get(name, kind) if len(keys) > 1 else kind
    return kind


def _choices(kind: Any) -> list[str]:
    """The values of a Literal or an optional Literal."""
    literals = [kind, *get_args(kind)]
    return [value for literal in literals if get_origin(literal) is Literal for value in get_args(literal)]


def _kind(kind: Any) -> str:
    """A type, described for users."""
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    inner = [arg for arg in get_args(kind) if arg is not NoneType]
    if choices := _choices(kind):
        number = names.get(inner[0])  # of a union such as int | Literal["auto"]
        return f"{number} or {choices[0]}" if number else f"one of {', '.join(choices)}"
    if get_origin(kind) is tuple or (len(inner) == 1 and get_origin(inner[0]) is tuple):
        return "two numbers, e.g. [0.9, 0.98]"
    if get_origin(kind) is dict:
        return "a table, {name: value}, with a space after the colon"
    return names.get(inner[0] if len(inner) == 1 else kind, "a path or a list of paths")
