"""Models made by this process: only in these may a Sleep node (`ai.dask_ferro.Sleep`) take any time.

A mark inside a file could be forged, so a model is known by the digest of its bytes, remembered where it was made.  A
model in memory (`onnx_ir.Model`) that `load` checked or `build` wrote has a mark in its `meta`, which no file can set;
one that was read from a file by other means has none, and is checked where it is handed over.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import onnx
import onnx_ir as ir

from dask_ferro.errors import ModelError
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.model.checks.attribute_values import sleep_problem
from dask_ferro.graph.model.digest import of_bytes

_ACCEPTED = "ferro.accepted"
# Models remembered, 100 bytes each.
_MOST = 4096
_made: OrderedDict[str, None] = OrderedDict()
_lock = Lock()


def made_here(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model after adding it to those made here."""
    digest = of_bytes(proto.SerializeToString())
    with _lock:
        _made[digest] = None
        while len(_made) > _MOST:
            _made.popitem(last=False)
    return proto


def is_ours(content: memoryview | bytes) -> bool:
    """Return whether these bytes are a model that `made_here` has seen in this process."""
    # Without the lock: one look-up in a dict, and a model that is added meanwhile is another one.
    return of_bytes(content) in _made


def accepted(model: ir.Model) -> ir.Model:
    """Return a model in memory, marked as one that may sleep as it does."""
    model.meta[_ACCEPTED] = True
    return model


def check_accepted(model: ir.Model, longest: float = 0.0) -> ir.Model:
    """Return a model that a caller handed over; its Sleeps may take `longest` seconds, unless it is marked.

    Raises
    ------
    ModelError
        Naming every node that sleeps for longer.
    """
    if _ACCEPTED in model.meta:
        return model
    problems = [
        f"node {node.name!r} (Sleep): {problem}"
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if node.domain == OWN_DOMAIN
        and node.op_type == "Sleep"
        and (problem := sleep_problem(_seconds(node), longest)) is not None
    ]
    if problems:
        raise ModelError(f"cannot take the model {model.graph.name!r}", problems)
    return model


def _seconds(node: ir.Node) -> float:
    found = node.attributes.get("seconds")
    return float("nan") if found is None or found.is_ref() else float(found.value)
