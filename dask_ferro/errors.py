"""The four errors that dask_ferro raises on purpose; the type says what has to change.

`ModelError`: the model file is wrong and has to be repaired.  `UnsupportedOpError`: no engine of dask_ferro computes an
operator.  `InputError`: a call got what it cannot use.  `ConfigError`, which is an `InputError`: the configuration or
the site is wrong.  All problems that one check finds are reported together, and always before a task is submitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeGuard


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
        lines = [f"{headline}:", *(f"  - {p}" for p in self.problems)] if self.problems else [headline]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[_Problems], tuple[str, tuple[str, ...]], dict[str, Any]]:
        # The dictionary holds the exception's notes, which would otherwise be lost between worker and client.
        return type(self), (self.headline, self.problems), self.__dict__


class ModelError(_Problems, ValueError):
    """The model file is wrong: unreadable, inconsistent, or unsafe to load.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> try:
    ...     ff.from_onnx(b"")
    ... except ff.ModelError as error:
    ...     print(error)
    cannot load the model in memory:
      - it is empty; was the export interrupted?
    """


class UnsupportedOpError(_Problems, NotImplementedError):
    """The model is valid, but no engine of dask_ferro computes one of its nodes.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> print(ff.UnsupportedOpError("cannot run 'm'", ["node 'n': no engine computes com.example::Fancy"]))
    cannot run 'm':
      - node 'n': no engine computes com.example::Fancy
    """


class InputError(ValueError):
    """A call got what it cannot use: a wrong value, shape, dtype or path, or an extra is missing.

    Examples
    --------
    >>> import dask_ferro.tensor as ft
    >>> from dask_ferro import InputError
    >>> try:
    ...     ft.input("", (3,))
    ... except InputError as error:
    ...     print(error)
    input: the name must be a non-empty string, got ''
    """


class ConfigError(InputError):
    """Dask's configuration or the configuration of a site is wrong: an unknown option, or a value of the wrong kind.

    Examples
    --------
    >>> import dask
    >>> import dask_ferro as ff
    >>> with dask.config.set({"ferro.cache.byte": 1}):
    ...     try:
    ...         ff.from_onnx("mlp.onnx")
    ...     except ff.ConfigError as error:
    ...         print(error)
    configuration: unknown key ferro.cache.byte, did you mean bytes?; docs/options.md lists all options
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ", did you mean ...?" with the closest known word, or "" if none is close.

    >>> did_you_mean("tresh", ["threshold", "tick"]), did_you_mean("zzz", ["tick"])
    (', did you mean threshold?', '')
    """
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least `least`; a bool is not, though Python's is an int."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
