"""The choice of an engine for each node of a bundle on a device, by projected seconds.

Nodes run in topological order as runs of one engine each, so the best choice is a shortest path over (node, engine):

    node        0       1       2            an edge within an engine costs the node's seconds;
    array       o ----- o ----- o            an edge into another engine also the start of a run there and, between
                  \\   /                      device and host, the copy of the values that are alive at the cut
    session     o ----- o ----- o

The bundle's values come from the device and return to it.  All costs are given as seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import onnx_ir as ir

from dask_ferro.engines import array
from dask_ferro.engines.onnxruntime.support import has_kernel, onnxruntime_supports
from dask_ferro.engines.selection import Engine, reference_supports
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.dtypes import NAMES

# Engines that read the host's copy of a value.
ON_HOST: frozenset[Engine] = frozenset(("onnxruntime", "reference"))
# Seconds of starting a run.  A session on the device needs its binding and two waits for streams: part `calls` of
# `benchmarks/gpu.py` on an H100.  An engine on the host needs one wait and the latency of a copy each way: estimates.
START_S: Mapping[Engine, float] = {
    "array": 0.0,
    "onnxruntime-device": 160e-6,
    "onnxruntime": 60e-6,
    "reference": 60e-6,
}


def device_engines(
    node: ir.Node, opsets: dict[str, int], provider: str | None, held: frozenset[str]
) -> tuple[Engine, ...]:
    """Return the engines that compute `node` correctly for a bundle on a device; host engines only if it has no other.

    A node that the device supports stays there even where the host would be faster.  Whether a small bundle should run
    on a device at all is the scheduler's decision, which depends on the tasks before and after it.

    Parameters
    ----------
    provider : str or None
        ONNX Runtime's provider on the device; None without a working one.
    held : frozenset of str
        Names of the dtypes that the device supports.
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
    # The last choice, because its values are copied to the host and back.
    host: tuple[tuple[Engine, bool], ...] = (
        ("onnxruntime", session),
        ("reference", reference_supports(node, opsets)),
    )
    return tuple(engine for engine, computes in host if computes)


def _lies_on_device(node: ir.Node, held: frozenset[str]) -> bool:
    """Return whether all values of a node that have known types are tensors of dtypes that the device supports."""
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.type is not None]
    return all(isinstance(v.type, ir.TensorType) and NAMES.get(v.type.dtype) in held for v in values)


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
        For each node, its seconds on each engine that supports it; of two equal engines the earlier one is taken.
    cut_bytes : sequence of float
        The bytes of the values that are alive before each node, and after the last one.
    bytes_per_s : float
        Bandwidth between device and host.
    start_s : mapping of engine to float
        Seconds of starting a run of each engine.

    Examples
    --------
    >>> slow_fast = {"array": 3e-3, "onnxruntime-device": 1e-3}
    >>> device_route([slow_fast, {"array": 1e-3}], [8.0, 8.0, 8.0], bytes_per_s=1e9)
    (('onnxruntime-device', 1), ('array', 1))
    """
    # By current engine; None before the first node, where all values are on the device.
    best: dict[Engine | None, float] = {None: 0.0}
    # By node and engine: the previous engine on the best path.
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
    # The results belong on the device, so the cost of a path that ends on the host includes their upload.
    back = cut_bytes[len(seconds)] / bytes_per_s
    last = min(best, key=lambda engine: best[engine] + (back if engine in ON_HOST else 0.0))
    path: list[Engine] = []
    for froms in reversed(came):
        assert last is not None
        path.append(last)
        last = froms[last]
    return runs_of(reversed(path))


def _change(before: Engine | None, after: Engine, start_s: Mapping[Engine, float], moved: float) -> float:
    crosses = (before in ON_HOST) != (after in ON_HOST)
    return (0.0 if before == after else start_s[after]) + (moved if crosses else 0.0)


def runs_of(engines: Iterable[Engine]) -> tuple[tuple[Engine, int], ...]:
    """Return the engines of nodes as runs: (engine, number of nodes)."""
    return tuple((engine, len(list(run))) for engine, run in groupby(engines))
