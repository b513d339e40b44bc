"""Names for regions of a graph: `with signal("layer1"):` names what is written inside it, and does nothing else.

Regions nest ("layer1/attention") and belong to the thread or task that entered them (a context variable), so
two clients in one process do not see each other's.  A node carries its region, and the phase that autodiff
gives it, in its ONNX metadata: whatever reads a model later (a plan, a table, another process) finds them
there, and a model from elsewhere gets them by patterns over its node names.  What a region *means*, where it
runs and how it is split, is no business of this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.errors import ConfigError

REGION_KEY, PHASE_KEY = "dask_ferro.signal", "dask_ferro.phase"  # keys of a node's metadata_props
BACKWARD = "backward"


class Region(NamedTuple):
    """Where a node was written: the path of signals, and the phase ("" for what the user wrote)."""

    path: str = ""
    phase: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in self if part)

    def metadata(self) -> dict[str, str]:
        """What a node's `metadata_props` say of it."""
        return {k: v for k, v in ((REGION_KEY, self.path), (PHASE_KEY, self.phase)) if v}


_CURRENT: ContextVar[Region] = ContextVar("dask_ferro.signal", default=Region())  # noqa: B039 - a NamedTuple, which nobody can change


@contextmanager
def signal(name: str) -> Iterator[str]:
    """Everything written inside belongs to the region `name` of the region around it.

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
        The name is no such string.

    Examples
    --------
    >>> with signal("layer1"), signal("attention") as path:
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
    """The region in which a node would be written now."""
    return _CURRENT.get()


@contextmanager
def written_in(region: Region) -> Iterator[None]:
    """Everything written inside belongs to `region`, whatever is around it."""
    token = _CURRENT.set(region)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def region_of(node: ir.Node) -> Region:
    """The region that a node of a model carries."""
    return Region(node.metadata_props.get(REGION_KEY, ""), node.metadata_props.get(PHASE_KEY, ""))


def with_regions(model: ir.Model, patterns: Mapping[str, str]) -> ir.Model:
    """A copy of `model` whose nodes carry regions by their names; weights are shared.

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
