"""The choice of an engine for each node, ahead of time, from the engines' declarations.

The order of preference is ONNX Runtime (a run of nodes as one session), the array table, the reference operators; a
node of the domain `ai.dask_ferro` goes to the array table.  A very small bundle goes to the array table when the table
supports all of it: a session costs about 5 us per call and a millisecond to create, an array operator about one
microsecond.  This holds only for nodes that both compute alike, special values included, so that results do not depend
on where a model is cut.  No engine is tried and no exception is caught: a node that no engine declares is reported
before anything runs.

A value that has no elements inside a run is the engine's affair.

On a device, a run of nodes that ONNX Runtime has kernels for is one session if it has an operator of which the array
table makes several calls (a norm, a softmax, attention, pooling), a convolution, or many nodes.  A run of few products
and elementwise operators stays with the array table, which computes it by the same libraries without a session's start
and without its copy of the weights.  A node that neither has goes to an engine on the host, by copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from math import prod
from typing import Literal, NamedTuple

import onnx_ir as ir

from dask_ferro.engines import array
from dask_ferro.engines.onnxruntime.known_defects import REFERENCE, UNLIKE, is_affected
from dask_ferro.engines.onnxruntime.support import has_kernel, onnxruntime_supports, schema_of
from dask_ferro.errors import UnsupportedOp
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.dtypes import NAMES
from dask_ferro.graph.ir.nodes import attribute_of, bodies, input_of

# "onnxruntime-device" is a session on the device of the values; `device_route` chooses it.
Engine = Literal["onnxruntime", "array", "reference", "onnxruntime-device"]

# Up to this many nodes numpy is faster than a session (adding 1,000 floats takes 0.14 of its time).
_TINY_NODES = 3
_TINY_BYTES = 64 * 1024
# Patterns of words that exporters write; to RE2 they are the same.
_ASCII_WORDS = ("[a-zA-Z0-9_]+", r"\w+")

# The array table makes 3 to 24 calls of each, and unrolls convolutions: 8 us a call, and a pass over memory each.
_SESSIONS = frozenset(
    {"Conv", "ConvTranspose", "Attention", "GRU", "LSTM", "RNN", "Softmax", "LogSoftmax", "AveragePool", "MaxPool"}
    | {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"}
    | {"GlobalAveragePool", "GlobalMaxPool", "LRN"}
)  # fmt: skip
_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum"})
# A node in a session takes 4 us less than a call, and the session's start 160 us (`benchmarks/gpu.py`, H100).
_MANY = 40


class Support(NamedTuple):
    """The engines that declare a node of the main graph, best first, and the bytes that it touches (if known)."""

    node: str
    op: str
    engines: tuple[Engine, ...]
    touched_bytes: float
    problem: str
    # Whether its engines give the same results, special values included.
    alike: bool = True


def engines_for(node: ir.Node, opsets: dict[str, int]) -> tuple[Engine, ...]:
    """Return the engines that compute `node` correctly, in order of preference."""
    opset = opsets.get("", 1)
    able: list[Engine] = []
    if node.domain != OWN_DOMAIN and onnxruntime_supports(node, opsets):
        able.append("onnxruntime")
    if array.supports(node, opset):
        able.append("array")
    if reference_supports(node, opsets):
        able.append("reference")
    return tuple(able)


def reference_supports(node: ir.Node, opsets: dict[str, int]) -> bool:
    """Return whether the reference operators compute `node`, its bodies included."""
    version = opsets.get(node.domain, 1)
    if is_affected(REFERENCE, node, version) or schema_of(node.op_type, node.domain, version) is None:
        return False
    return all(reference_supports(inner, opsets) for inner in chain.from_iterable(bodies(node)))


def support(model: ir.Model) -> list[Support]:
    """Return, for each node of the main graph in order, the engines that declare it."""
    opsets = dict(model.opset_imports)
    rows = []
    for node in model.graph:
        engines = engines_for(node, opsets)
        problem = _words_out_of_reach(node) if engines else _problem(node, opsets)
        alike = not is_affected(UNLIKE, node, opsets.get(node.domain, 1))
        rows.append(Support(node.name or "", node.op_type, engines, _touched_bytes(node), problem, alike))
    return rows


def _problem(node: ir.Node, opsets: dict[str, int]) -> str:
    types = ", ".join("-" if v is None else str(v.type) for v in node.inputs)
    return (
        f"node {node.name!r}: no engine here computes {node.domain or 'ai.onnx'}.{node.op_type}"
        f" (opset {opsets.get(node.domain, '?')}) on ({types});"
        " rewrite it with other operators, or export the model at another opset"
    )


def _words_out_of_reach(node: ir.Node) -> str:
    """Return that a vocabulary has words that no text is split into; "" where there are none, or it is not known.

    skl2onnx writes a pattern of ASCII letters, so that `déjà` becomes the words `d` and `j`.
    """
    source = node if node.op_type == "TfIdfVectorizer" else None
    while source is not None and source.op_type != "Tokenizer":
        source = value.producer() if (value := input_of(source, 0)) is not None else None
    pattern = "" if source is None else str(attribute_of(source, "tokenexp", ""))
    if pattern not in _ASCII_WORDS:
        return ""
    pool: Sequence[str] = attribute_of(node, "pool_strings", ())
    lost = [word for word in pool if not re.fullmatch(_ASCII_WORDS[0], word)]
    problem = (
        f"node {node.name!r}: its vocabulary has {len(lost)} words that the Tokenizer's pattern {pattern!r} never gives"
        f" ({', '.join(map(repr, lost[:2]))}), so texts with them get other scores than before the export; export"
        r" the learner with a pattern of all letters, by skl2onnx's option 'tokenexp': r'[\p{L}0-9_]+'"
    )
    return problem if lost else ""


def check(headline: str, rows: Sequence[Support]) -> None:
    """Raise `UnsupportedOp` naming every node that no engine declares."""
    problems = [row.problem for row in rows if row.problem]
    if problems:
        raise UnsupportedOp(headline, problems)


def route(rows: Sequence[Support], nodes: Sequence[int]) -> tuple[tuple[Engine, int], ...]:
    """Return the engines of one bundle as runs: (engine, number of nodes) in topological order.

    Parameters
    ----------
    rows : sequence of Support
        `support(model)`, checked.
    nodes : sequence of int
        The bundle's nodes, by position in the main graph, ascending.
    """
    if nodes and _is_tiny([rows[i] for i in nodes]):
        return (("array", len(nodes)),)
    return first_engines(rows, nodes)


def _is_tiny(rows: Sequence[Support]) -> bool:
    return len(rows) <= _TINY_NODES and all(
        "array" in row.engines
        and (row.alike or row.engines[0] == "array")
        and row.touched_bytes <= _TINY_BYTES
        for row in rows
    )


def _touched_bytes(node: ir.Node) -> float:
    return sum(_known_bytes(v) for v in (*node.inputs, *node.outputs) if v is not None)


def _known_bytes(value: ir.Value) -> float:
    # Infinite where the size is unknown, so that such a bundle never counts as tiny.
    if value.dtype in (None, ir.DataType.STRING) or value.shape is None or not value.shape.is_static():
        return float("inf")
    assert value.dtype is not None
    return prod(value.shape.numpy()) * float(value.dtype.itemsize)


def first_engines(rows: Sequence[Support], nodes: Sequence[int]) -> tuple[tuple[Engine, int], ...]:
    """Return each node's first engine, in runs.

    Unlike `route` it ignores the rest of the bundle: a node has to give the same bits wherever the model is cut.
    """
    picked = [rows[i].engines[0] for i in nodes]
    return tuple((engine, len(list(run))) for engine, run in groupby(picked))


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
    able = engines_for(node, opsets)
    there: list[Engine] = []
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.type is not None]
    if all(isinstance(v.type, ir.TensorType) and NAMES.get(v.type.dtype) in held for v in values):
        if "array" in able:
            there.append("array")
        if provider is not None and "onnxruntime" in able and has_kernel(node, opsets, provider):
            there.append("onnxruntime-device")
    # The host is the last choice, because values are copied to it and back.
    return tuple(there) or tuple(engine for engine in able if engine != "array")


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
