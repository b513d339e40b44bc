"""Add examples to functions, and document functions that a factory creates from the rows of a table.

The example of a docstring is written in the line above the function.  A factory and its rows are in one module, where
doctest looks for the functions; `docs/rows.py` makes pages of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def example(call: str, shown: str) -> Callable[[_F], _F]:
    """Return a decorator that appends an example to a docstring: the call `ft.` + `call`, and its output."""

    def with_example(function: _F) -> _F:
        text = inspect.cleandoc(function.__doc__ or "")
        lines = (
            text,
            "",
            "Examples",
            "--------",
            ">>> import dask_ferro.tensor as ft",
            f">>> ft.{call}",
            shown,
            "",
        )
        function.__doc__ = "\n".join(lines)
        return function

    return with_example


def row(name: str, says: str, call: str, shown: str) -> Callable[[_F], _F]:
    """Return a decorator that names a factory's function of a row and documents its result."""

    def named(function: _F) -> _F:
        function.__name__ = function.__qualname__ = name
        first, *rest = says.split("\n")
        function.__doc__ = "\n".join([f"Return {first}.", *rest])
        return example(call, shown)(function)

    return named
