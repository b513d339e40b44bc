"""One test over many like cases: it checks all of them, and its message has every failure by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def each(cases: Iterable[T], check: Callable[[T], object], name: Callable[[T], str] = str) -> None:
    """Check every case, also after one that fails.

    Parameters
    ----------
    cases : iterable
    check : callable (case)
        Raises an error if the case fails.
    name : callable (case) -> str, optional
        The name of a case in the message.

    Raises
    ------
    AssertionError
        If a case failed, or there is none; its cause is the first failure, with that one's traceback.
    """
    count, failures = 0, []
    for count, case in enumerate(cases, 1):  # noqa: B007 - the number of cases
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - reported below
            failures.append((name(case), error))
    assert count, "no case"
    if failures:
        lines = [f"{len(failures)} of {count} cases fail"]
        lines += [f"{title}: {type(error).__name__}: {error}" for title, error in failures]
        raise AssertionError("\n".join(lines)) from failures[0][1]


def every(
    names: str | Sequence[str],
    rows: Iterable[Any],
    ids: Callable[[Any], object] | Sequence[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator like ``pytest.mark.parametrize``, of which all rows are one test; rows share its fixtures.

    Parameters
    ----------
    names : str or sequence of str
        The arguments that a row gives.
    rows : iterable
        Values, tuples of values, or ``pytest.param`` without marks.
    ids : callable (value) -> str, or iterable of str, optional
        The names of rows in the message.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(rows)
    titles = [None] * len(rows) if ids is None else map(ids, rows) if callable(ids) else ids
    cases = [(_values(row, len(names)), _title(row, t)) for row, t in zip(rows, titles, strict=True)]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def tested(**fixtures: Any) -> None:
            each(
                cases, lambda case: test(**fixtures, **dict(zip(names, case[0], strict=True))), lambda c: c[1]
            )

        rest = [p.replace(kind=p.KEYWORD_ONLY) for n, p in signature.parameters.items() if n not in names]
        tested.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return tested

    return decorate


def _values(row: Any, count: int) -> Sequence[Any]:
    if isinstance(row, type(pytest.param())):
        assert not row.marks, "a row with marks is a test of its own"
        return row.values
    return row if count > 1 else (row,)


def _title(row: Any, title: object) -> str:
    named = getattr(row, "id", None) if isinstance(row, type(pytest.param())) else title
    return str(row if named is None else named)[:200]
