"""The command line: one table of commands, one parser. A command's module is imported when it runs.

A command is a function. Its signature is its options, its docstring is its help: parameters listed in
`positions` are positional, a list may be given several times, a bool is a switch, and `a__b` is spelled
--a.b. `train_options` takes all other arguments, for `config.parse`; `command` is the command line itself.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser, HelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import Parameter, getdoc, signature
from pathlib import Path
from shlex import join
from shutil import get_terminal_size
from textwrap import fill
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from fastclip import __version__
from fastclip.config.renamed import report_new_name
from fastclip.errors import UnknownOption
from fastclip.text import nearest


class Command(NamedTuple):
    """A row of the table."""

    function: str
    about: str
    positions: tuple[str, ...] = ()
    """Positional parameters, in order."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """Options by their old name: they keep working."""


COMMANDS = {
    "train": Command(
        "fastclip.training.train_commands.train", "train a model from a recipe, or resume a run"
    ),
    "export": Command(
        "fastclip.training.train_commands.export", "export a run's model for open_clip", ("run", "out")
    ),
    "verify": Command("fastclip.run.verify.verify", "find damaged files of a run", ("run",)),
    "eval": Command(
        "fastclip.evaluation.eval_command.evaluate", "score a model on zero-shot tasks", ("model",)
    ),
    "compare": Command(
        "fastclip.tools.study.compare_command.compare", "train a grid of runs and compare them"
    ),
    "search": Command(
        "fastclip.tools.search.search_command.search",
        "find images by text, or by another image",
        ("model", "images", "text"),
    ),
    "report": Command(
        "fastclip.tools.report.report_command.report", "write a page about runs or a study", ("runs",)
    ),
    "profile": Command(
        "fastclip.tools.profiling.profile_command.profile",
        "measure where the time of a training step goes",
        renamed={"sizes": "ranks"},
    ),
    "plan": Command(
        "fastclip.tools.profiling.plan_command.plan",
        "estimate memory, traffic and step time on more machines",
        renamed={"pairs": "num_pairs"},
    ),
    "demo": Command(
        "fastclip.tools.demo.demo_command.demo", "serve a web page to try out a model", ("model",)
    ),
    "data get": Command(
        "fastclip.datasets.get_command.get", "download or generate pairs and evaluation tasks", ("name",)
    ),
    "data index": Command(
        "fastclip.data.data_commands.index",
        "index a collection of pairs (training does so as needed)",
        ("path",),
    ),
    "data check": Command(
        "fastclip.data.data_commands.check",
        "check a collection before a long run",
        ("path",),
        renamed={"most": "limit"},
    ),
}


_PRINT = "only print"
_DEBUG = "--debug"  # of every command: it is removed before its options are parsed
_DEBUG_HELP = f"{_DEBUG}: show the traceback of an error, not only its message."
_EXTRAS = {"gradio": "demo", "resvg_py": "icons", "tensorboard": "tensorboard", "wandb": "wandb"}
_ON_PYPI = {"open_clip": "open_clip_torch", "PIL": "pillow", "yaml": "pyyaml"}  # where names differ
_OTHERS = {"SafetensorError"}  # by name: nothing of safetensors is imported here


def main(arguments: list[str] | None = None) -> int:
    """Find the command and run it; an error is one line, see `_one_line`, or a traceback with --debug.

    What keeps its traceback is shown by torchrun's report of a failed rank too.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return _main(arguments)
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(_main)(arguments) or 0


def _main(arguments: list[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    debug, words = _DEBUG in words, [word for word in words if word != _DEBUG]
    if words[:1] == ["--version"]:
        print(f"fastclip {__version__}")
        return 0
    name = next((name for name in COMMANDS if words[: name.count(" ") + 1] == name.split()), None)
    if name is None:
        return _overview(words)
    from fastclip.terminal import LogFormatter, say  # with rich, which --help does without

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("fastclip").setLevel(logging.INFO)
    try:
        call(name, words[name.count(" ") + 1 :])
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except Exception as error:
        line = _one_line(error)
        if debug or line is None:
            raise
        say(f"fastclip {name}: {line}", file=sys.stderr)
        return 1
    return 0


def _one_line(error: Exception) -> str | None:
    """An error for users; None if it says little without its traceback.

    Errors of ours, of the system, and packages that are missing are explained. What wrong content of a file
    can raise is named with its type. RuntimeErrors of torch, failed assertions and the like are bugs.
    """
    kind = type(error)
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("fastclip"):
        package = str(error.name).partition(".")[0]
        wanted = f"'fastclip[{_EXTRAS[package]}]'" if package in _EXTRAS else _ON_PYPI.get(package, package)
        return f"The package {package} is not installed. Run pip install {wanted}."
    if isinstance(error, OSError | ValueError | MemoryError) or kind.__module__.startswith("fastclip."):
        return str(error) or kind.__name__
    if isinstance(error, ImportError | LookupError | TypeError | AttributeError) or kind.__name__ in _OTHERS:
        text = f"{kind.__name__}: {error}".rstrip(".")
        return f"{text}. This is a bug, or input that is not checked; {_DEBUG} shows where."
    return None


def call(name: str, words: list[str]) -> None:
    """Run a command with these arguments."""
    module, _, function = COMMANDS[name].function.rpartition(".")
    run = getattr(import_module(module), function)
    given = _arguments(name, run, words)
    if given.pop(_PRINT, False):
        _print_options(given)
    else:
        run(**given)


def _arguments(name: str, run: Callable, words: list[str]) -> dict[str, Any]:
    """Parse a command's arguments; `--help` prints its help and exits."""
    parameters = signature(run).parameters
    if [*parameters] == ["train_options"]:  # `config.parse` parses them, --help included
        return {"train_options": words}
    parser = _Parser(name, run)
    takes_more = "train_options" in parameters
    known, rest = parser.parse_known_args(words) if takes_more else parser.parse_known_intermixed_args(words)
    given = vars(known) | {
        place: _one_or_several(value)
        for place in COMMANDS[name].positions
        if isinstance(value := getattr(known, place), list)
    }
    if "command" in parameters:
        given["command"] = join(["fastclip", *name.split(), *words])
    if takes_more:
        _check_misspelled(rest, parser)
        return given | {"train_options": rest}
    if rest and rest[0].startswith("-"):
        raise parser.unknown(rest[0])
    if rest:
        parser.error(f"{rest[0]!r} does not belong to an option")
    return given


def _check_misspelled(rest: list[str], parser: _Parser) -> None:
    """An option for `fastclip train` that is nearly one of the command's own: --stpes is --steps."""
    from fastclip.config.options import TrainConfig

    for word in rest:
        option = word.partition("=")[0]
        of_train = "." in option or option[2:] in TrainConfig.__dataclass_fields__
        if option.startswith("--") and not of_train and nearest(option, parser.options, cutoff=0.8):
            raise parser.unknown(word)


class _Parser(ArgumentParser):
    """Built from a command's signature and docstring; errors are ValueErrors."""

    def __init__(self, name: str, run: Callable):
        text, helps = _documented(run)
        self.positions, parameters = COMMANDS[name].positions, signature(run).parameters
        self.renamed = COMMANDS[name].renamed
        shown = " ".join(_shown(parameters[place]) for place in self.positions)
        super().__init__(
            prog=f"fastclip {name}",
            usage=f"fastclip {name}{' ' + shown if shown else ''} [--OPTION VALUE …]",
            description=text,
            epilog=_DEBUG_HELP,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        kinds = get_type_hints(run)
        for parameter in parameters.values():
            if parameter.name not in ("train_options", "command"):
                option = _options_of(parameter, kinds[parameter.name], parameter.name in self.positions)
                flag = parameter.name if parameter.name in self.positions else _flag(parameter.name)
                self.add_argument(flag, help=_help(helps.get(parameter.name, ""), parameter), **option)
        if not {"train_options", "print_config"} & parameters.keys():
            self.add_argument(
                "--print_config", dest=_PRINT, action="store_true", help="print the options and exit"
            )
        self.options = [flag for action in self._actions for flag in action.option_strings[-1:]][1:]

    def _parse_optional(self, arg_string: str) -> Any:
        """Options under old names, and with hyphens: --batch-per-gpu is --batch_per_gpu."""
        flag, equals, value = arg_string.partition("=")
        name = flag[2:].replace("-", "_")
        if flag.startswith("--") and name in self.positions:
            self.error(f"{name.upper()} is positional: `{self.usage}`")
        current = "--" + self.renamed.get(name, name)
        if not flag.startswith("--") or current not in self._option_string_actions:
            return super()._parse_optional(arg_string)
        if current != flag:
            report_new_name(flag, current)
        return super()._parse_optional(current + equals + value)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        raise ValueError(f"{message}{end} {self.advice}")

    def unknown(self, word: str) -> UnknownOption:
        option = word.partition("=")[0]
        near = nearest(option, self.options)
        return UnknownOption(option.lstrip("-"), [near[2:]] if near else [], self.advice)

    @property
    def advice(self) -> str:
        return f"`{self.prog} --help` shows options and examples."


class _Help(RawDescriptionHelpFormatter):
    """Keeps the layout of examples; at most 110 columns wide."""

    def __init__(self, prog: str):
        HelpFormatter.__init__(self, prog, max_help_position=28, width=min(110, get_terminal_size().columns))


def _one_or_several(values: list[str]) -> str | list[str]:
    """One path, also a pattern such as [0-9].tar; several paths, or [a, b], are a list."""
    if len(values) > 1:
        return values
    if values[0].startswith("[") and values[0].endswith("]"):
        import yaml

        from fastclip.config.yaml_text import read_yaml

        with suppress(yaml.YAMLError):
            return read_yaml(values[0])
    return values[0]


def _shown(position: Parameter) -> str:
    name = position.name.upper() + (" …" if "list" in str(position.annotation) else "")
    return name if position.default is Parameter.empty else f"[{name}]"


def _flag(parameter: str) -> str:
    return "--" + parameter.replace("__", ".")


def _help(text: str, parameter: Parameter) -> str:
    """Help with the default, if there is one."""
    if parameter.default not in (Parameter.empty, None, False, ()):
        text += f" (default: {parameter.default})"
    return text.replace("%", "%%")


def _options_of(parameter: Parameter, kind: Any, position: bool) -> dict[str, Any]:
    """A parameter's arguments for `add_argument`."""
    kinds = [one for one in (get_args(kind) or (kind,)) if one is not NoneType]
    if get_origin(kind) is Literal or get_origin(kinds[0]) is Literal:
        choices = get_args(kind if get_origin(kind) is Literal else kinds[0])
        return {"choices": choices, "default": parameter.default}
    many = any(get_origin(one) in (list, Sequence) for one in (kind, *kinds))
    left_out = parameter.default is not Parameter.empty
    if position and many:
        return {"nargs": "+", "metavar": parameter.name}
    if position:
        return {"type": kinds[0]} | ({"nargs": "?", "default": parameter.default} if left_out else {})
    if kind is bool:
        return {"action": "store_true"}
    found: dict[str, Any] = {"dest": parameter.name, "default": parameter.default, "metavar": "VALUE"}
    if many:
        return found | {"action": "append", "default": []}
    return found | {"type": kinds[0]} | ({} if left_out else {"required": True, "default": None})


def _documented(run: Callable) -> tuple[str, dict[str, str]]:
    """A docstring's text, wrapped to the terminal (indented parts are not), and its Args."""
    width = min(110, get_terminal_size().columns) - 2
    text, _, arguments = (getdoc(run) or "").partition("\nArgs:\n")
    paragraphs = [
        part if part.startswith(" ") else fill(part, width, break_on_hyphens=False)
        for part in text.rstrip().split("\n\n")
    ]
    helps: dict[str, str] = {}
    for line in arguments.splitlines():
        if line.startswith("    ") and line[4:5] != " ":
            name, _, text_of_it = line.strip().partition(": ")
            helps[name] = text_of_it
        elif line.strip() and helps:
            helps[name] += f" {line.strip()}"
    return "\n\n".join(paragraphs), helps


def _print_options(given: dict[str, Any]) -> None:
    import yaml

    plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")


def _overview(words: list[str]) -> int:
    """Print the commands: for `fastclip`, `fastclip --help`, `fastclip data`, and mistyped commands."""
    name = " ".join(word for word in words[:2] if not word.startswith("-"))
    family = [command for command in COMMANDS if command.split()[0] == name.split(" ")[0]]
    known = not name or name in {command.split()[0] for command in COMMANDS}
    if not known:
        near = nearest(name, COMMANDS, cutoff=0.3)
        hint = f" Did you mean `fastclip {near}`?" if near else ""
        print(f"fastclip: there is no command {name!r}.{hint}\n", file=sys.stderr)
    print("fastclip: CLIP training with global contrastive losses\n\ncommands (each has its own --help):")
    for command in family or COMMANDS:
        print(f"  fastclip {command:12s} {COMMANDS[command].about}")
    print(f"\nfor all commands:\n  {_DEBUG_HELP}")
    return 0 if known else 2
