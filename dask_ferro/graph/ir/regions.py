"""Named regions of a graph: nodes written inside `with region("layer1"):` carry that name.

Regions nest ("layer1/attention") and belong to the thread or task that entered them (a context variable), so
two clients in one process do not see each other's.  A node carries its region, and the phase that autodiff
gives it, in its ONNX metadata: later readers of a model (a plan, a table, another process) find them there, and a
model from elsewhere gets them from patterns over its node names.  Placement and splitting of a region are decided
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.errors import InputError

# Keys of a node's metadata_props.
REGION_KEY, PHASE_KEY = "dask_ferro.region", "dask_ferro.phase"
# Phase of a node that repeats a forward node during the backward.
REMAT_KEY = "dask_ferro.remat"
BACKWARD = "backward"


class Region(NamedTuple):
    """The region of a node: the path of `region` blocks, and the phase ("" for the user's own nodes)."""

    path: str = ""
    phase: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in self if part)

    def metadata(self) -> dict[str, str]:
        return {k: v for k, v in ((REGION_KEY, self.path), (PHASE_KEY, self.phase)) if v}


# A context variable, not a global: threads and tasks of one process write graphs at the same time.
_CURRENT_REGION: ContextVar[Region] = ContextVar("dask_ferro.region", default=Region())  # noqa: B039 - immutable, a NamedTuple


@contextmanager
def region(name: str) -> Iterator[str]:
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
    InputError
        If the name is empty, contains a "/", or is not a string.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> with ft.region("layer1"), ft.region("attention") as path:
    ...     path
    'layer1/attention'
    """
    if not isinstance(name, str) or not name.strip() or "/" in name:
        raise InputError(
            f"region: the name must be a non-empty string without '/', got {name!r}; nest regions"
        )
    around = _CURRENT_REGION.get()
    token = _CURRENT_REGION.set(around._replace(path=f"{around.path}/{name}" if around.path else name))
    try:
        yield _CURRENT_REGION.get().path
    finally:
        _CURRENT_REGION.reset(token)


def current_region() -> Region:
    return _CURRENT_REGION.get()


@contextmanager
def set_region(region: Region) -> Iterator[None]:
    """Set the current region inside the context, whatever region is around it."""
    token = _CURRENT_REGION.set(region)
    try:
        yield
    finally:
        _CURRENT_REGION.reset(token)


def region_of(node: ir.Node) -> Region:
    return Region(node.metadata_props.get(REGION_KEY, ""), node.metadata_props.get(PHASE_KEY, ""))
