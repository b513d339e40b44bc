"""Named regions of a graph: nodes written inside `with signal("layer1"):` carry that name.

Regions nest ("layer1/attention") and belong to the thread or task that entered them (a context variable), so
two clients in one process do not see each other's.  A node carries its region, and the phase that autodiff
gives it, in its ONNX metadata: whatever reads a model later (a plan, a table, another process) finds them
there, and a model from elsewhere gets them by patterns over its node names.  Placement and splitting of
a region are decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.errors import ConfigError

# Keys of a node's metadata_props.
REGION_KEY, PHASE_KEY = "dask_ferro.signal", "dask_ferro.phase"
# Of a node that repeats a forward node during the backward.
REMAT_KEY = "dask_ferro.remat"
BACKWARD = "backward"


class Region(NamedTuple):
    """The region of a node: the path of signals, and the phase ("" for the user's own nodes)."""

    path: str = ""
    phase: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in self if part)

    def metadata(self) -> dict[str, str]:
        """Return the region as entries of a node's `metadata_props`."""
        return {k: v for k, v in ((REGION_KEY, self.path), (PHASE_KEY, self.phase)) if v}


# A context variable, not a global: threads and tasks of one process write graphs at the same time.
_CURRENT: ContextVar[Region] = ContextVar("dask_ferro.signal", default=Region())  # noqa: B039 - immutable, a NamedTuple


@contextmanager
def signal(name: str) -> Iterator[str]:
    """Open the region `name` within the current one, for all nodes written inside the context.

    Parameters
    ----------
    name : str
        Not empty, and without "/", which joins nested names.

    Yields
    ------
    str
        The whole path.

    Raises
    ------
    ConfigError
        The name is empty, holds a "/", or is no string.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> with ff.signal("layer1"), ff.signal("attention") as path:
    ...     path
    'layer1/attention'
    """
    if not isinstance(name, str) or not name.strip() or "/" in name:
        raise ConfigError(
            f"signal: a name is a string that is not empty and has no '/', got {name!r}; nest signals"
        )
    around = _CURRENT.get()
    token = _CURRENT.set(around._replace(path=f"{around.path}/{name}" if around.path else name))
    try:
        yield _CURRENT.get().path
    finally:
        _CURRENT.reset(token)


def current() -> Region:
    """Return the current region."""
    return _CURRENT.get()


@contextmanager
def written_in(region: Region) -> Iterator[None]:
    """Set the current region for the time of the context, whatever region is around it."""
    token = _CURRENT.set(region)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def region_of(node: ir.Node) -> Region:
    """Return the region of a model's node."""
    return Region(node.metadata_props.get(REGION_KEY, ""), node.metadata_props.get(PHASE_KEY, ""))


def with_regions(model: ir.Model, patterns: Mapping[str, str]) -> ir.Model:
    """Return a copy of `model` whose nodes have regions by patterns over their names; weights are shared.

    Parameters
    ----------
    model : onnx_ir.Model
        Not changed.
    patterns : mapping of str to str
        Shell pattern over node names (``*`` also matches "/") to region; of several that match, the first.

    Raises
    ------
    ConfigError
        A pattern that no node's name matches, or an empty region.
    """
    _check_patterns(model, patterns)
    named = model.clone()
    for node in named.graph:
        found = next((p for p in patterns if fnmatchcase(node.name or "", p)), None)
        if found is not None:
            node.metadata_props[REGION_KEY] = patterns[found]
    return named


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _check_patterns(model: ir.Model, patterns: Mapping[str, str]) -> None:
    empty = [pattern for pattern, region in patterns.items() if not region]
    if empty:
        raise ConfigError(f"signal: pattern {empty[0]!r} has an empty region; give it a name")
    names = [node.name or "" for node in model.graph]
    unmatched = [pattern for pattern in patterns if not _matches(pattern, names)]
    if unmatched:
        raise ConfigError(
            f"signal: no node's name matches {', '.join(map(repr, unmatched))}; "
            f"the model's names are like {', '.join(map(repr, names[:4]))}"
        )
