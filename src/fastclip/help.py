"""How --help looks: examples stay as they are, options have their defaults, Python's types stay out."""

from __future__ import annotations

from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter

from jsonargparse import DefaultHelpFormatter


class Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """A formatter for jsonargparse's parsers."""

    def _get_help_string(self, action: Action) -> str:
        if action.default in (None, SUPPRESS, {}) or action.default is False:
            return action.help or ""
        return f"{action.help or ''} (default: %(default)s)"
