"""The three errors that dask_ferro raises on purpose; each says who has to act.

`ModelError`: the file is wrong, its author must mend it.  `UnsupportedOp`: we lack something.  `ConfigError`:
the call or the site is wrong.  All problems that one look finds are reported at once, and always before a task
is submitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def _join(headline: str, problems: tuple[str, ...]) -> str:
    if not problems:
        return headline
    return "\n".join([f"{headline}:", *(f"  - {p}" for p in problems)])


class _Problems(Exception):
    """An error with a line for each problem.

    Parameters
    ----------
    headline : str
        What was being read.
    problems : iterable of str
        One line each: what, where (node or value name), got, wanted, remedy.
    """

    def __init__(self, headline: str, problems: Iterable[str] = ()) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__(_join(headline, self.problems))

    def __reduce__(self) -> tuple[type[_Problems], tuple[str, tuple[str, ...]], dict[str, Any]]:
        # Notes are in the dictionary: a worker's would be lost on the way to the client.
        return type(self), (self.headline, self.problems), self.__dict__


class ModelError(_Problems, ValueError):
    """The model file is wrong: unreadable, inconsistent, or unsafe to load."""


class UnsupportedOp(_Problems, NotImplementedError):
    """The model is fine, and no engine here computes one of its nodes."""


class ConfigError(ValueError):
    """The call, the configuration or the site is wrong: bad input, a missing extra, an unreadable path."""
