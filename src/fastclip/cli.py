"""The command line: verbs only. A verb's module is imported when the verb runs, so `--help` is instant.

A verb is a function; its signature is its options, and its docstring is its help.
"""

from __future__ import annotations

import json
import logging
import sys
from difflib import get_close_matches
from importlib import import_module

from fastclip import __version__

VERBS = {
    "train": ("fastclip.training.commands", "train", "train a model from a recipe, or go on with a run"),
    "export": ("fastclip.training.commands", "export", "write a run's model as a folder for open_clip"),
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
MANY_PATHS = ("data index", "data check")
OWN_OPTIONS = ("train",)  # these read their words themselves


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
        from jsonargparse import auto_cli

        auto_cli(run, args=_joined_paths(rest) if verb in MANY_PATHS else rest, prog=f"fastclip {verb}")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        print(f"fastclip {verb}: {error}", file=sys.stderr)
        return 1
    return 0


def _joined_paths(words: list[str]) -> list[str]:
    """Several paths, as a shell makes of *.tar, become one list; a bare --json means true."""
    first_option = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    paths, options = words[:first_option], words[first_option:]
    joined = [json.dumps(paths)] if len(paths) > 1 else paths
    return joined + ["--json=true" if word == "--json" else word for word in options]


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
