"""The command line: verbs only. A verb's module is imported when the verb runs, so `--help` is instant.

A verb is a function; its signature is its options, and its docstring is its help.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from inspect import getdoc
from itertools import islice
from shutil import get_terminal_size
from textwrap import fill

from fastclip import __version__

VERBS = {
    "train": ("fastclip.training.commands", "train", "train a model from a recipe, or go on with a run"),
    "export": ("fastclip.training.commands", "export", "write a run's model as a folder for open_clip"),
    "eval": ("fastclip.evaluation.commands", "evaluate", "score a model on tasks it was not trained for"),
    "compare": ("fastclip.tools.study.commands", "compare", "train a grid of runs and compare them"),
    "search": ("fastclip.tools.search.commands", "search", "find pictures by words, or by a picture"),
    "report": ("fastclip.tools.report.commands", "report", "a page about a run, several, or a study"),
    "profile": (
        "fastclip.tools.profiling.profile_command",
        "profile",
        "where the time of a training step goes",
    ),
    "plan": (
        "fastclip.tools.profiling.plan_command",
        "plan",
        "foretell memory, bytes and time on more machines",
    ),
    "demo": (
        "fastclip.tools.demo.commands",
        "demo",
        "a page to play with a model: type words, drop pictures",
    ),
    "data get": (
        "fastclip.data.commands",
        "get",
        "get pairs and tasks to train and test on: emoji, icons, scenes",
    ),
    "data index": (
        "fastclip.data.commands",
        "index",
        "index a collection of pairs (training does it by itself)",
    ),
    "data check": ("fastclip.data.commands", "check", "a doctor's page of a collection, before a long run"),
}
MANY_PATHS = ("data index", "data check", "report")
POSITIONS = {  # words without a name, in order
    "eval": ("model",),
    "search": ("model", "images", "text"),
    "demo": ("model",),
}
OWN_OPTIONS = ("train", "compare", "profile", "plan")  # these read their words themselves


def main(arguments: list[str] | None = None) -> int:
    """Find the verb, run it, and turn an error that a person can mend into one line."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--version"]:
        print(f"fastclip {__version__}")
        return 0
    verb = next((v for v in VERBS if words[: v.count(" ") + 1] == v.split()), None)
    if verb is None:
        return _overview(words)
    module, function, _ = VERBS[verb]
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("fastclip").setLevel(logging.INFO)
    run = getattr(import_module(module), function)
    rest = words[verb.count(" ") + 1 :]
    try:
        if verb in OWN_OPTIONS:
            run(rest)
            return 0
        rest = _joined_paths(rest) if verb in MANY_PATHS else _named(rest, POSITIONS.get(verb, ()))
        _run_with_options(verb, run, rest)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        print(f"fastclip {verb}: {error}", file=sys.stderr)
        return 1
    return 0


def _run_with_options(verb: str, run: Callable, words: list[str]) -> None:
    from jsonargparse import auto_cli

    from fastclip.help import Help

    names = POSITIONS.get(verb, ())
    given = " ".join(name.upper() for name in names) or ("PATH …" if verb in MANY_PATHS else "")
    usage = f"fastclip {verb} {given} [--option value …]" if given else None
    auto_cli(
        run,
        args=words,
        prog=f"fastclip {verb}",
        usage=usage,
        description=_description(run),
        formatter_class=Help,
        as_positional=not names,
    )


def _description(run: Callable) -> str:
    """A verb's docstring without its options, as wide as the terminal; what is indented stays as it is."""
    width = min(110, get_terminal_size().columns) - 2
    paragraphs = (getdoc(run) or "").split("\nArgs:")[0].rstrip().split("\n\n")
    return "\n\n".join(
        part if part.startswith(" ") else fill(part, width, break_on_hyphens=False) for part in paragraphs
    )


def _joined_paths(words: list[str]) -> list[str]:
    """Several paths, as a shell makes of *.tar, become one list."""
    paths, options = _split(words)
    joined = [json.dumps(paths)] if len(paths) > 1 else paths
    return joined + options


def _named(words: list[str], names: tuple[str, ...]) -> list[str]:
    """The first words become options of these names; what is more stays, to be refused."""
    plain, options = _split(words)
    named = [f"--{name}={word}" for name, word in zip(names, plain, strict=False)]
    return named + plain[len(names) :] + options


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Plain words, and options with their values; a bare --json or --list means true."""
    plain, options, rest = [], [], iter(words)
    for word in rest:
        if word in ("--json", "--list"):
            options.append(f"{word}=true")
        elif word in ("-h", "--help", "--print_config") or (word.startswith("--") and "=" in word):
            options.append(word)
        elif word.startswith("--"):
            options += [word, *islice(rest, 1)]
        else:
            plain.append(word)
    return plain, options


def _overview(words: list[str]) -> int:
    """What `fastclip`, `fastclip --help`, a family of verbs alone, and a mistyped verb print."""
    name = " ".join(word for word in words[:2] if not word.startswith("-"))
    family = [verb for verb in VERBS if verb.split()[0] == name.split(" ")[0]]
    known = not name or name in {verb.split()[0] for verb in VERBS}
    if not known:
        near = get_close_matches(name, VERBS, n=1, cutoff=0.3)
        hint = f" Did you mean `fastclip {near[0]}`?" if near else ""
        print(f"fastclip: there is no verb {name!r}.{hint}\n", file=sys.stderr)
    print("fastclip: CLIP training with global contrastive losses\n\nverbs (each has its own --help):")
    for verb in family or VERBS:
        print(f"  fastclip {verb:12s} {VERBS[verb][2]}")
    return 0 if known else 2
