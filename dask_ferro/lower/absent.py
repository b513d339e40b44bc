"""One sentence for a scheduler or workers that cannot import dask_ferro, made of the error that this caused.

An error costs nothing until there is one: no graph is submitted with a question ahead of it.  A task that comes to a
worker which joined later and cannot load it has such a sentence as its error (`portable`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from dask_ferro.errors import ConfigError

# What a process got that cannot import it.
NONE = "none that can be imported"
# The sentence of a task that a worker cannot load (`portable`).
_OF_TASK = re.compile(r"(worker \S+|the scheduler): dask_ferro: got .*")
# Python's words; Dask sends some errors as text alone.
_WORDS = re.compile(r"No module named \\?'(dask_ferro[\w.]*)")


def remedy(wanted: str) -> str:
    """Return the remedy for processes without dask_ferro."""
    return f"install it in the environment that starts these processes: pip install dask-ferro=={wanted}"


def own_version() -> str:
    """Return the version of this dask_ferro; "": it is run from its source, without metadata."""
    try:
        return version("dask-ferro")
    except PackageNotFoundError:
        return ""


def absence(error: BaseException, where: str) -> ConfigError | None:
    """Return the error to raise in place of one from a cluster whose `where` lacks dask_ferro; None: it does not."""
    if told := next(filter(None, (_OF_TASK.search(str(one)) for one in _chain(error))), None):
        return ConfigError(told[0])
    found = next(filter(None, (_WORDS.search(str(one)) for one in _chain(error))), None)
    if found is None:
        return None
    wanted, module = own_version(), found[1]
    # One that lacks a part of it has another release.
    got = NONE if module == "dask_ferro" else f"a release without {module}"
    return ConfigError(
        f"{where}: dask_ferro: got {got}, wanted {wanted}; {remedy(wanted)}; ff.check(client) names all such processes"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that caused it; Dask adds one of its own to an error of the scheduler."""
    seen: set[int] = set()
    # An error that is raised from itself, as after a retry, is its own cause.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
