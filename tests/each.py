"""One test over many like cases: it checks all of them, and its message has every failure by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

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
