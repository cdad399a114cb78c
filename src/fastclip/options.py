"""The parser of a verb that takes any option of `fastclip train` besides its own."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import NoReturn


class VerbParser(ArgumentParser):
    """Its own options are named in full, for the rest are the trainer's; a mistake is a ValueError.

    Args:
        verb: such as `compare`.
        usage: what follows it in the first line of --help.
        description: examples and all; it is shown as it stands.
    """

    def __init__(self, verb: str, usage: str, description: str):
        super().__init__(
            prog=f"fastclip {verb}",
            usage=f"fastclip {verb} {usage}",
            description=description,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. `{self.prog} --help` shows examples.")
