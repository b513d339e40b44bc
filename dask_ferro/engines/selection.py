"""Choose an engine for each node, ahead of time, from the engines' declarations.

The order of preference is ONNX Runtime (a run of nodes as one session), the array table, the reference operators; a
node of the domain `ai.dask_ferro` goes to the array table.  A very small bundle goes to the array table when the table
supports all of it: a session costs about 5 us per call and a millisecond to create, an array operator about one
microsecond.  This holds only for nodes that both compute alike, special values included, so that results do not
depend on the places at which a model is cut.  No engine is tried and no exception is caught: a node that no engine
declares is reported before anything runs.

A value that has no elements inside a run is the engine's affair.

ONNX Runtime publishes its kernel registry (operator, version range, types per type parameter), so its support is
looked up and never tried.  An operator without a kernel but with a function body in the standard is supported when
every operator of the body has a kernel.  `known_defects` lists the cases in which a kernel exists but its result
differs from the standard's own example, or in which it refuses nodes of its declaration; the test of the backend suite
verifies that list.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, groupby
from math import prod
from typing import NamedTuple

import onnx
import onnx_ir as ir

from dask_ferro.engines import Engine, array
from dask_ferro.engines.onnxruntime import HOST, kernel_listing
from dask_ferro.engines.onnxruntime.known_defects import ONNXRUNTIME, REFERENCE, UNLIKE, Defects
from dask_ferro.errors import UnsupportedOpError
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.dtypes import SESSION
from dask_ferro.graph.ir.nodes import attribute_of, bodies, input_of

# Up to this many nodes numpy is faster than a session (adding 1,000 floats takes 0.14 of its time).
_TINY_NODES = 3
_TINY_BYTES = 64 * 1024
# Patterns of words that exporters write; to RE2 they are the same.
_ASCII_WORDS = ("[a-zA-Z0-9_]+", r"\w+")
# The newest opset of the default domain that the tested release reads; `executable.stamp` replaces newer ones.
NEWEST_OPSET = 26
# The last version of a kernel without an upper bound.
_OPEN_END = 2147483647
# The libraries of providers that are not in ONNX Runtime's own module, by platform.
_LIBRARIES = {
    "CUDAExecutionProvider": {
        "linux": "libonnxruntime_providers_cuda.so",
        "win32": "onnxruntime_providers_cuda.dll",
    }
}
# Seconds that a process may take to load such a library and answer; it takes one or two.
_ANSWER_S = 60
_KernelRow = tuple[str, str, int, int, Mapping[str, Sequence[str]]]

logger = logging.getLogger(__name__)


class Support(NamedTuple):
    """The engines that declare a node of the main graph, best first, and the bytes that it touches (if known)."""

    node: str
    op: str
    engines: tuple[Engine, ...]
    touched_bytes: float
    problem: str
    # Whether its engines give the same results, special values included.
    alike: bool = True


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


def check_support(model: ir.Model, headline: str) -> list[Support]:
    """Return `support(model)`, checked."""
    rows = support(model)
    check(headline, rows)
    return rows


def check(headline: str, rows: Sequence[Support]) -> None:
    """Raise `UnsupportedOpError` naming every node that no engine declares."""
    problems = [row.problem for row in rows if row.problem]
    if problems:
        raise UnsupportedOpError(headline, problems)


def _problem(node: ir.Node, opsets: dict[str, int]) -> str:
    types = ", ".join("-" if v is None else str(v.type) for v in node.inputs)
    return (
        f"node {node.name!r}: no engine here computes {node.domain or 'ai.onnx'}.{node.op_type}"
        f" (opset {opsets.get(node.domain, '?')}) on ({types});"
        " rewrite it with other operators, or export the model at another opset"
    )


def _words_out_of_reach(node: ir.Node) -> str:
    """Return the problem that a vocabulary has words that no text is split into; "" if it has none, or it is not known.

    skl2onnx writes a pattern of ASCII letters, with which `déjà` becomes the words `d` and `j`.
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
        f"node {node.name!r}: its vocabulary has {len(lost)} words that the Tokenizer's pattern {pattern!r}"
        f" never gives ({', '.join(map(repr, lost[:2]))}), so texts with them get other scores than before"
        " the export; export"
        r" the learner with a pattern of all letters, by skl2onnx's option 'tokenexp': r'[\p{L}0-9_]+'"
    )
    return problem if lost else ""


def route(rows: Sequence[Support], nodes: Sequence[int]) -> tuple[tuple[Engine, int], ...]:
    """Return the engines of one bundle as runs: (engine, number of nodes) in topological order.

    Parameters
    ----------
    rows : sequence of Support
        `support(model)`, checked.
    nodes : sequence of int
        The bundle's nodes, by position in the main graph, ascending.
    """
    if 0 < len(nodes) <= _TINY_NODES and _is_tiny([rows[i] for i in nodes]):
        return (("array", len(nodes)),)
    return first_engines(rows, nodes)


def _is_tiny(rows: Sequence[Support]) -> bool:
    return all(
        "array" in row.engines
        and (row.alike or row.engines[0] == "array")
        and row.touched_bytes <= _TINY_BYTES
        for row in rows
    )


def _touched_bytes(node: ir.Node) -> float:
    return sum(_known_bytes(v) for v in (*node.inputs, *node.outputs) if v is not None)


def _known_bytes(value: ir.Value) -> float:
    # Infinite if the size is unknown, so that such a bundle never counts as tiny.
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


# ---- which engines compute a node --------------------------------------------------------------------------


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


def onnxruntime_supports(node: ir.Node, opsets: dict[str, int], *, in_body: bool = False) -> bool:
    """Return whether ONNX Runtime computes `node`, its bodies included, correctly.

    Parameters
    ----------
    node : onnx_ir.Node
        A node with typed values (an unknown type is taken to fit).
    opsets : dict
        The model's opset imports: version by domain.
    in_body : bool
        Whether the node is in the body of another node.
    """
    return (
        (in_body or _crosses_a_session(node))
        and not is_affected(ONNXRUNTIME, node, opsets.get(node.domain, 1), in_body=in_body)
        and has_kernel(node, opsets)
        and all(onnxruntime_supports(n, opsets, in_body=True) for n in chain.from_iterable(bodies(node)))
    )


def type_name(kind: ir.TypeProtocol | None) -> str | None:
    """Return ONNX's name of a value's type, such as ``seq(tensor(float))``; None when it is unknown.

    >>> type_name(ir.SequenceType(ir.TensorType(ir.DataType.INT64)))
    'seq(tensor(int64))'
    """
    if isinstance(kind, ir.TensorType):
        return f"tensor({kind.dtype.name.lower()})"
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        inner = type_name(kind.elem_type)
        return inner and f"{'seq' if isinstance(kind, ir.SequenceType) else 'optional'}({inner})"
    return None


def crosses(kind: ir.TypeProtocol | None) -> bool:
    """Return whether a value of this type can enter and leave a session as numpy data."""
    if kind is None:
        return True
    if isinstance(kind, ir.SequenceType):
        return isinstance(kind.elem_type, ir.TensorType) and crosses(kind.elem_type)
    return isinstance(kind, ir.TensorType) and kind.dtype in SESSION


def _crosses_a_session(node: ir.Node) -> bool:
    # A session returns an optional as its element.
    made = (v.type.elem_type if isinstance(v.type, ir.OptionalType) else v.type for v in node.outputs)
    return all(crosses(v.type) for v in node.inputs if v is not None) and all(map(crosses, made))


def reference_supports(node: ir.Node, opsets: dict[str, int]) -> bool:
    """Return whether the reference operators compute `node`, its bodies included."""
    version = opsets.get(node.domain, 1)
    if is_affected(REFERENCE, node, version) or schema_of(node.op_type, node.domain, version) is None:
        return False
    return all(reference_supports(inner, opsets) for inner in chain.from_iterable(bodies(node)))


def is_affected(rows: Defects, node: ir.Node, opset: int, *, in_body: bool = False) -> bool:
    """Return whether one of some rows (`ONNXRUNTIME`, `REFERENCE`, `UNLIKE`) is about a node.

    Parameters
    ----------
    in_body : bool
        Whether the node is in the body of another node.
    """
    return any(
        opset < row.before and not (in_body and row.extremes) and row.when(node, opset)
        for row in rows.get((node.domain, node.op_type), ())
    )


def schema_of(op: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """Return the standard's schema of an operator at an opset, or None if the standard has none."""
    try:
        return onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None


# ---- ONNX Runtime's kernels --------------------------------------------------------------------------------


def has_kernel(node: ir.Node, opsets: dict[str, int], provider: str = HOST) -> bool:
    """Return whether a provider has a kernel for `node`, or one for every operator of its body in the standard."""
    inputs = tuple([None if v is None else type_name(v.type) for v in node.inputs])
    outputs = tuple([type_name(v.type) for v in node.outputs])
    return _has_kernel(node.op_type, node.domain, tuple(opsets.items()), inputs, outputs, provider)


@lru_cache(maxsize=4096)
def _has_kernel(
    op: str,
    domain: str,
    imports: tuple[tuple[str, int], ...],
    inputs: tuple[str | None, ...],
    outputs: tuple[str | None, ...],
    provider: str,
) -> bool:
    """Return `has_kernel` for an operator with types of inputs and outputs."""
    # Cached, because most nodes of a model have the same operators and types, and reading a schema takes 20 us.
    opsets = dict(imports)
    # Its body depends on the types: ONNX Runtime writes a Cast.
    if (op, domain) == ("CastLike", "") and "tensor(string)" in inputs:
        return _has_kernel("Cast", domain, imports, inputs[:1], inputs[1:], provider)
    schema = schema_of(op, domain, opsets.get(domain, 1))
    # An operator of ONNX Runtime's own domains: only its registry declares it.
    if schema is None:
        return (domain, op) in registry(provider)
    if op == "Constant" and domain == "":
        return True
    if domain == "" and schema.since_version > NEWEST_OPSET:
        return False
    bound = dict(_bind(schema, inputs, outputs))
    return _kernel_fits(domain, op, schema.since_version, bound, provider) or _body_fits(
        schema, opsets, bound, provider
    )


def _bind(
    schema: onnx.defs.OpSchema, inputs: Sequence[str | None], outputs: Sequence[str | None]
) -> Iterator[tuple[str, str]]:
    """Yield (type parameter or formal name, type) for each typed argument."""
    for formals, actuals in ((schema.inputs, inputs), (schema.outputs, outputs)):
        for position, actual in enumerate(actuals):
            if actual is None or not formals:
                continue
            formal = formals[min(position, len(formals) - 1)]
            yield formal.type_str, actual
            yield formal.name, actual


def _kernel_fits(domain: str, op: str, since: int, bound: dict[str, str], provider: str) -> bool:
    """Return whether a provider has a kernel, by ONNX Runtime's own rules."""
    return any(
        # A kernel without an upper bound supports only the version that it was written for: a later one may differ.
        (row.first == since or (row.first < since <= row.last and row.last != _OPEN_END))
        # An unbound type parameter is taken to fit.
        and all(bound[parameter] in types for parameter, types in row.types.items() if parameter in bound)
        for row in registry(provider).get((domain, op), ())
    )


def _body_fits(
    schema: onnx.defs.OpSchema, opsets: dict[str, int], bound: dict[str, str], provider: str
) -> bool:
    if not schema.has_function:  # type: ignore[attr-defined]  # missing from the stubs
        return False
    types = {f.name: bound[f.name] for f in (*schema.inputs, *schema.outputs) if f.name in bound}
    return all(_body_op_fits(inner, opsets, types, provider) for inner in schema.function_body.node)


def _body_op_fits(
    inner: onnx.NodeProto, opsets: dict[str, int], types: dict[str, str], provider: str
) -> bool:
    """Return whether an operator of a function body has a kernel for its inputs' types; adds its outputs' types.

    Types are propagated by the operator's type parameters; an unknown type is taken to fit.
    """
    if inner.op_type == "Constant":
        return True
    schema = schema_of(inner.op_type, inner.domain, opsets.get(inner.domain, 1))
    if schema is None:
        return False
    bound = dict(_bind(schema, [types.get(n) for n in inner.input], [types.get(n) for n in inner.output]))
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    if any(kind not in allowed[parameter] for parameter, kind in bound.items() if parameter in allowed):
        return False
    for name, formal in zip(inner.output, schema.outputs, strict=False):
        if formal.type_str in bound:
            types[name] = bound[formal.type_str]
    return _kernel_fits(inner.domain, inner.op_type, schema.since_version, bound, provider)


class KernelRow(NamedTuple):
    """One row of ONNX Runtime's kernel registry."""

    first: int
    last: int
    types: dict[str, frozenset[str]]


@cache
def registry(provider: str = HOST) -> dict[tuple[str, str], tuple[KernelRow, ...]]:
    """Return the kernels of the installed ONNX Runtime for a provider, by (domain, operator)."""
    rows: defaultdict[tuple[str, str], list[KernelRow]] = defaultdict(list)
    for domain, op, first, last, allowed in _read_registry(provider):
        types = {name: frozenset(kinds) for name, kinds in allowed.items()}
        rows["" if domain == "ai.onnx" else domain, op].append(KernelRow(first, last, types))
    return {key: tuple(found) for key, found in rows.items()}


def _read_registry(provider: str) -> Sequence[_KernelRow]:
    """Return (domain, operator, first version, last, types by parameter) of each kernel of a provider."""
    # Not `get_all_opkernel_def`, which starts every provider that was built in, and ends the process with a
    # segmentation fault if the library of one is missing: with onnxruntime-gpu wherever TensorRT is not installed.
    if provider == HOST:
        from onnxruntime.capi.onnxruntime_pybind11_state import get_registered_ep_kernel_defs

        return [
            (k.domain, k.op_name, *k.version_range, k.type_constraints)
            for k in get_registered_ep_kernel_defs(provider)
        ]
    library = _LIBRARIES.get(provider, {}).get(sys.platform)
    if library is None:
        return ()
    try:
        told = subprocess.run(
            [sys.executable, "-P", kernel_listing.__file__, provider, library],
            capture_output=True,
            text=True,
            check=True,
            timeout=_ANSWER_S,
        ).stdout
        return list(json.loads(told.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning("dask_ferro: ONNX Runtime does not report the kernels of its %s: %s", provider, reason)
        return ()
