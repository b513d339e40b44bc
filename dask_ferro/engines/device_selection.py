"""The choice of an engine for each node of a bundle on a device, by operator.

A run of nodes that ONNX Runtime has kernels for is one session if it has an operator of which the array table makes
several calls (a norm, a softmax, attention, pooling), a convolution, or many nodes.  A run of few products and
elementwise operators stays with the array table, which computes it by the same libraries without a session's start and
without its copy of the weights.  A node that neither has goes to an engine on the host, by copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import onnx_ir as ir

from dask_ferro.engines import array
from dask_ferro.engines.onnxruntime.support import has_kernel, onnxruntime_supports
from dask_ferro.engines.selection import Engine, reference_supports
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.dtypes import NAMES

# The array table makes 3 to 24 calls of each, and unrolls convolutions: 8 us a call, and a pass over memory each.
_SESSIONS = frozenset(
    {"Conv", "ConvTranspose", "Attention", "GRU", "LSTM", "RNN", "Softmax", "LogSoftmax", "AveragePool", "MaxPool"}
    | {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"}
    | {"GlobalAveragePool", "GlobalMaxPool", "LRN"}
)  # fmt: skip
_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum"})
# A node in a session takes 4 us less than a call, and the session's start 160 us (`benchmarks/gpu.py`, H100).
_MANY = 40


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
    nodes: Sequence[ir.Node], opsets: dict[str, int], provider: str | None, held: frozenset[str]
) -> tuple[tuple[Engine, int], ...]:
    """Return the engines of a bundle as runs (engine, number of nodes), for nodes in topological order.

    The parameters are those of `device_engines`.
    """
    able = [(node, device_engines(node, opsets, provider, held)) for node in nodes]
    picked: list[Engine] = []
    for has_session, group in groupby(able, lambda pair: "onnxruntime-device" in pair[1]):
        run = list(group)
        is_session = has_session and _gains([node for node, _ in run])
        picked += ["onnxruntime-device" if is_session else engines[0] for _, engines in run]
    return tuple((engine, len(list(run))) for engine, run in groupby(picked))


def _gains(nodes: Iterable[ir.Node]) -> bool:
    """Return whether a session makes up for its start."""
    others = [node.op_type for node in nodes if node.op_type not in _PRODUCTS]
    return len(others) >= _MANY or not _SESSIONS.isdisjoint(others)
