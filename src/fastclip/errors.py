"""Errors that a person can fix: the message says what is wrong, where, and what to do.

Each one also carries what it is about as a field, for programs and tests. All are ValueErrors, except
CommandError and its like: a RuntimeError defined in fastclip is printed in one line, others with a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from os import PathLike

from fastclip.text import did_you_mean


class OptionError(ValueError):
    """An option whose value breaks a rule: "data.max_bad=2 must be in [0, 1), e.g. 0.01."

    Args:
        option: its full name, as typed on the command line after the dashes.
        value: as it was given; None or "" if it was not.
        rule: what the value must be, or why it cannot be used.
        example: a value that works.
        advice: sentences on what to do instead.
    """

    def __init__(self, option: str, value: object, rule: str, *, example: object = None, advice: str = ""):
        self.option, self.value, self.rule, self.example, self.advice = option, value, rule, example, advice
        instead = "" if example is None else f", e.g. {example}"
        shown = option if value in (None, "") else f"{option}={value}"
        super().__init__(f"{shown} {rule}{instead}.{' ' if advice else ''}{advice}")

    @classmethod
    def unknown(cls, option: str, value: object, choices: Iterable[str]) -> OptionError:
        """The value is not one of the choices; the nearest is suggested."""
        choices = list(choices)
        hint = did_you_mean(value, choices).strip()
        return cls(option, value, f"must be one of: {', '.join(choices)}", advice=hint)

    def within(self, section: str) -> OptionError:
        """The same error of an option of this section: gamma becomes loss.gamma."""
        return OptionError(
            f"{section}.{self.option}", self.value, self.rule, example=self.example, advice=self.advice
        )

    def __reduce__(self):
        made = partial(type(self), example=self.example, advice=self.advice)
        return made, (self.option, self.value, self.rule)


class UnknownOption(ValueError):
    """A name that is not an option: "There is no option lr. Did you mean optim.lr?"

    Args:
        option: as it was typed, without dashes.
        suggestions: options that may be meant.
        otherwise: what to do if there is no suggestion.
    """

    def __init__(self, option: str, suggestions: Iterable[str] = (), otherwise: str = ""):
        self.option, self.suggestions, self.otherwise = option, list(suggestions), otherwise
        hint = f"Did you mean {' or '.join(self.suggestions)}?" if self.suggestions else otherwise
        super().__init__(f"There is no option {option}. {hint}".strip())

    def __reduce__(self):
        return type(self), (self.option, self.suggestions, self.otherwise)


class PathError(ValueError):
    """A file or folder that cannot be used as it is: "pairs.csv has no column for the image. …"

    Args:
        path: the file or folder.
        problem: the rest of the sentence, and what to do; it may begin with ":" or ",".
    """

    def __init__(self, path: str | PathLike[str], problem: str):
        self.path, self.problem = str(path), problem
        super().__init__(f"{path}{'' if problem.startswith((':', ',')) else ' '}{problem}")

    def __reduce__(self):
        return type(self), (self.path, self.problem)


class InputError(ValueError):
    """An argument of a function that cannot be used: "index has shape (3,), …"

    Args:
        argument: its name.
        problem: the rest of the sentence, and what to do.
    """

    def __init__(self, argument: str, problem: str):
        self.argument, self.problem = argument, problem
        super().__init__(f"{argument} {problem}")

    def __reduce__(self):
        return type(self), (self.argument, self.problem)


class CommandError(RuntimeError):
    """A command that could not do its work, for the reason and with the advice in the message."""
