"""Models made by this process: only in these may a Sleep node (`ai.dask_ferro.Sleep`) take any time.

A mark inside a file could be forged, so a `ModelProto` is known by the digest of its bytes, remembered where it was
made.  A model in memory (`onnx_ir.Model`) that `load` checked or `build` wrote has a mark in its `meta`, which no file
can set.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from dask_ferro.errors import ModelError
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.nodes import attribute_of
from dask_ferro.graph.model.digest import of_bytes
from dask_ferro.graph.model.guards import sleep_problem

_ACCEPTED = "ferro.accepted"
# Models remembered, 100 bytes each, the oldest first.
_MOST = 4096
_made: dict[str, None] = {}


def made_here(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model after adding it to those made here."""
    _made[of_bytes(proto.SerializeToString())] = None
    for digest in list(_made)[:-_MOST]:
        _made.pop(digest, None)
    return proto


def is_ours(content: memoryview | bytes) -> bool:
    """Return whether these bytes are a model that `made_here` has seen in this process."""
    return of_bytes(content) in _made


def accepted(model: ir.Model) -> ir.Model:
    """Return a model in memory, marked as one that may sleep as it does."""
    model.meta[_ACCEPTED] = True
    return model


def is_accepted(model: ir.Model) -> bool:
    """Return whether a model in memory has the mark."""
    return _ACCEPTED in model.meta


def check_accepted(model: ir.Model, longest: float = 0.0) -> ir.Model:
    """Return a model that a caller handed over; its Sleeps may take `longest` seconds, unless it is marked.

    Raises
    ------
    ModelError
        Naming every node that sleeps for longer.
    """
    nodes = () if is_accepted(model) else ir.traversal.RecursiveGraphIterator(model.graph)
    problems = [
        f"node {node.name!r} (Sleep): {problem}"
        for node in nodes
        if (node.domain, node.op_type) == (OWN_DOMAIN, "Sleep")
        and (problem := sleep_problem(attribute_of(node, "seconds", float("nan")), longest)) is not None
    ]
    if problems:
        raise ModelError(f"cannot take the model {model.graph.name!r}", problems)
    return model
