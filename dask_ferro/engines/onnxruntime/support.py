"""Support of ONNX Runtime for nodes: its own declarations, less its known defects.

ONNX Runtime publishes its kernel registry (operator, version range, types per type parameter), so support is
looked up and never tried.  An operator without a kernel but with a function body in the standard is supported
when every operator of the body has a kernel.  `known_defects` lists the cases in which a kernel exists but its result
differs from the standard's own example, or in which it refuses nodes of its declaration; the test of the backend suite
verifies that list.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple

import onnx
import onnx_ir as ir

from dask_ferro.engines.onnxruntime import HOST, declared
from dask_ferro.engines.onnxruntime.known_defects import ONNXRUNTIME, is_affected
from dask_ferro.graph.ir.dtypes import SESSION
from dask_ferro.graph.ir.nodes import bodies

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
_Declared = tuple[str, str, int, int, Mapping[str, Sequence[str]]]

logger = logging.getLogger(__name__)


class KernelRow(NamedTuple):
    """One row of ONNX Runtime's kernel registry."""

    first: int
    last: int
    types: dict[str, frozenset[str]]


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


@cache
def registry(provider: str = HOST) -> dict[tuple[str, str], tuple[KernelRow, ...]]:
    """Return the kernels of the installed ONNX Runtime for a provider, by (domain, operator)."""
    rows: defaultdict[tuple[str, str], list[KernelRow]] = defaultdict(list)
    for domain, op, first, last, allowed in _declared(provider):
        types = {name: frozenset(kinds) for name, kinds in allowed.items()}
        rows["" if domain == "ai.onnx" else domain, op].append(KernelRow(first, last, types))
    return {key: tuple(found) for key, found in rows.items()}


def _declared(provider: str) -> Sequence[_Declared]:
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
            [sys.executable, "-P", declared.__file__, provider, library],
            capture_output=True,
            text=True,
            check=True,
            timeout=_ANSWER_S,
        ).stdout
        return list(json.loads(told.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning(
            "dask_ferro: ONNX Runtime does not tell which kernels its %s has: %s", provider, reason
        )
        return ()


def schema_of(op: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """Return the standard's schema of an operator at an opset, or None where the standard has none."""
    try:
        return onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None


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
