"""The choice of an engine for each node of a bundle on a device, by projected seconds.

Nodes run in topological order as runs of one engine each, so the best choice is a shortest path over (node, engine):

    node        0       1       2            an edge within an engine costs the node's seconds;
    array       o ----- o ----- o            into another engine also the start of a run there and, between
                  \\   /                      device and host, the way of the values that are alive at the cut
    session     o ----- o ----- o

The bundle's values come from the device and go back to it.  Knows seconds and bytes as numbers, and nothing of cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import onnx_ir as ir

from dask_ferro.engines import array
from dask_ferro.engines.onnxruntime.support import has_kernel, onnxruntime_supports
from dask_ferro.engines.selection import Engine, reference_supports
from dask_ferro.graph.ir.domain import OWN_DOMAIN

# Engines that work on the host's copy of a value.
ON_HOST: frozenset[Engine] = frozenset(("onnxruntime", "reference"))
# Starting a run of an engine.  A session on the device: its binding, and two waits for streams.  On the host: one wait,
# and the latency of a copy each way.  Estimates, until a run on a card has measured them.
START_S: Mapping[Engine, float] = {
    "array": 0.0,
    "onnxruntime-device": 40e-6,
    "onnxruntime": 60e-6,
    "reference": 60e-6,
}


def device_engines(
    node: ir.Node, opsets: dict[str, int], provider: str | None, held: frozenset[str]
) -> tuple[Engine, ...]:
    """Return the engines that compute `node` rightly for a bundle on a device; the host's only where it has none.

    A node that the device computes stays there even where the host would be faster: whether so small a bundle should
    be on a device at all is for the scheduler, which sees what comes before and after it.

    Parameters
    ----------
    provider : str or None
        ONNX Runtime's provider on the device; None where none works.
    held : frozenset of str
        Names of the dtypes that the device's arrays have.
    """
    dtypes = [None if v is None else v.dtype for v in node.inputs]
    able: list[Engine] = []
    session = node.domain != OWN_DOMAIN and onnxruntime_supports(node, opsets)
    if _lies_on_device(node, held):
        if array.supports(node, opsets.get("", 1), dtypes):
            able.append("array")
        if session and provider is not None and has_kernel(node, opsets, provider):
            able.append("onnxruntime-device")
    if able:
        return tuple(able)
    # Its values come down for it: the last choice.
    host: tuple[tuple[Engine, bool], ...] = (
        ("onnxruntime", session),
        ("reference", reference_supports(node, opsets)),
    )
    return tuple(engine for engine, computes in host if computes)


def _lies_on_device(node: ir.Node, held: frozenset[str]) -> bool:
    """Return whether a node reads and writes tensors of dtypes that the device has alone, as far as types are known."""
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.type is not None]
    return all(isinstance(v.type, ir.TensorType) and _name(v.type.dtype) in held for v in values)


def _name(dtype: ir.DataType) -> str:
    unlike_numpy = (ir.DataType.STRING, ir.DataType.UNDEFINED)
    return dtype.name.lower() if dtype in unlike_numpy else dtype.numpy().name


def device_route(
    seconds: Sequence[Mapping[Engine, float]],
    cut_bytes: Sequence[float],
    *,
    bytes_per_s: float,
    start_s: Mapping[Engine, float] = START_S,
) -> tuple[tuple[Engine, int], ...]:
    """Return the engines of a bundle as runs (engine, number of nodes), in topological order.

    Parameters
    ----------
    seconds : sequence of mapping of engine to float
        Of each node, on each engine that computes it; of two that are as good the earlier is taken.
    cut_bytes : sequence of float
        Before each node, and after the last: the bytes of the values that are alive there.
    bytes_per_s : float
        Between device and host.
    start_s : mapping of engine to float
        Seconds of starting a run of an engine.

    Examples
    --------
    >>> slow_fast = {"array": 3e-3, "onnxruntime-device": 1e-3}
    >>> device_route([slow_fast, {"array": 1e-3}], [8.0, 8.0, 8.0], bytes_per_s=1e9)
    (('onnxruntime-device', 1), ('array', 1))
    """
    # By the engine that runs; None before the first node: nothing runs, and all values lie on the device.
    best: dict[Engine | None, float] = {None: 0.0}
    # By node and engine: the engine before it on the best path.
    came: list[dict[Engine, Engine | None]] = []
    for node, alive in zip(seconds, cut_bytes, strict=False):
        moved = alive / bytes_per_s
        froms: dict[Engine, Engine | None] = {}
        now: dict[Engine | None, float] = {}
        for engine, own in node.items():
            costs = {e: cost + _change(e, engine, start_s, moved) for e, cost in best.items()}
            froms[engine] = min(costs, key=costs.__getitem__)
            now[engine] = costs[froms[engine]] + own
        best = now
        came.append(froms)
    # The results belong on the device, so a path that ends on the host pays their way back.
    back = cut_bytes[len(seconds)] / bytes_per_s
    last = min(best, key=lambda engine: best[engine] + (back if engine in ON_HOST else 0.0))
    return _runs(last, came)


def _change(before: Engine | None, after: Engine, start_s: Mapping[Engine, float], moved: float) -> float:
    crosses = (before in ON_HOST) != (after in ON_HOST)
    return (0.0 if before == after else start_s[after]) + (moved if crosses else 0.0)


def _runs(
    last: Engine | None, came: Sequence[Mapping[Engine, Engine | None]]
) -> tuple[tuple[Engine, int], ...]:
    """Return the runs of equal engines on the path that ends in `last`."""
    path: list[Engine] = []
    for froms in reversed(came):
        assert last is not None
        path.append(last)
        last = froms[last]
    return tuple((engine, len(list(run))) for engine, run in groupby(reversed(path)))
