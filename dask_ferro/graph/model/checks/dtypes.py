"""Checks of operand dtypes against each operator's type constraints.

The constraints are ONNX's: which types an operand may have, and which operands must agree.  They are checked
after inference, in the main graph, where types are known.  Problems are sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import onnx
import onnx_ir as ir
from onnx import defs

from dask_ferro.graph.ir.order import bodies
from dask_ferro.graph.model.checks import operators


class Operand(NamedTuple):
    """An operator's parameter: the types it takes, and the type variable that it shares with others, if any."""

    name: str
    allowed: frozenset[str]
    shared: str | None


class Result(NamedTuple):
    """An operator's output: the types it may have, and their type variable."""

    allowed: frozenset[str]
    letter: str


def problems(proto: onnx.ModelProto, types: Mapping[str, onnx.TypeProto]) -> Iterator[str]:
    """Yield operands of types that their operator does not take, and outputs declared as types that it never gives."""
    # By hand, as ONNX's own check of types (`infer_shapes(check_type=True)`) ends at the first problem of a file.
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    for node in proto.graph.node:
        if node.domain in operators.DOMAINS and node.domain in opsets:
            key = (node.domain, node.op_type, opsets[node.domain])
            yield from _node_problems(node, operands(*key), results(*key), types)
    yield from _declared_problems(proto.graph, opsets)


def _declared_problems(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> Iterator[str]:
    """Yield outputs declared as types that their operator never gives (a float Shape), those in bodies included."""
    declared = {info.name: info.type for info in [*graph.value_info, *graph.output]}
    for node in graph.node:
        if node.domain in opsets and node.domain in operators.DOMAINS:
            given = results(node.domain, node.op_type, opsets[node.domain])
            for name, result in zip(node.output, given, strict=False):
                got = _name(declared[name]) if name in declared else None
                if got is not None and got not in result.allowed:
                    yield (
                        f"node {node.name!r} ({node.op_type}): its output {name!r} is declared {got}, and it gives "
                        f"{_list(result.allowed)}; declare that, or put a Cast behind it"
                    )
        for body in bodies(node):
            yield from _declared_problems(body, opsets)


@lru_cache(maxsize=4096)
def operands(domain: str, op_type: str, opset: int) -> tuple[Operand, ...]:
    """Return the operator's parameters; the last one stands for all further operands of a variadic operator."""
    try:
        schema = defs.get_schema(op_type, opset, domain)
    except defs.SchemaError:
        return ()
    letters = {constraint.type_param_str for constraint in schema.type_constraints}
    return tuple(
        Operand(
            parameter.name,
            frozenset(parameter.types),
            parameter.type_str if parameter.type_str in letters and parameter.is_homogeneous else None,
        )
        for parameter in schema.inputs
    )


@lru_cache(maxsize=4096)
def results(domain: str, op_type: str, opset: int) -> tuple[Result, ...]:
    """Return the operator's outputs; one with the type variable of an input has that input's type."""
    try:
        schema = defs.get_schema(op_type, opset, domain)
    except defs.SchemaError:
        return ()
    variadic = defs.OpSchema.FormalParameterOption.Variadic
    return tuple(Result(frozenset(p.types), p.type_str) for p in schema.outputs if p.option != variadic)


def takes(domain: str, op_type: str, opset: int, given: Sequence[ir.DataType | None]) -> bool:
    """Return whether an operator has a form for operands of these dtypes; None is an operand that is left out.

    An operator that ONNX does not know takes all.
    """
    known = operands(domain, op_type, opset)
    return not known or all(
        dtype is None or f"tensor({dtype.name.lower()})" in known[min(i, len(known) - 1)].allowed
        for i, dtype in enumerate(given)
    )


def _node_problems(
    node: onnx.NodeProto,
    asked: tuple[Operand, ...],
    made: tuple[Result, ...],
    types: Mapping[str, onnx.TypeProto],
) -> Iterator[str]:
    where = f"node {node.name!r} ({node.op_type})"
    agreed: dict[str, tuple[str, str]] = {}
    for i, name in enumerate(node.input):
        got = _name(types[name]) if name in types and asked else None
        if got is None:
            continue
        operand = asked[min(i, len(asked) - 1)]
        if got not in operand.allowed:
            yield (
                f"{where}: its input {name!r} is {got}, and {operand.name!r} takes "
                f"{_list(operand.allowed)}; put a Cast before it"
            )
        elif operand.shared is not None:
            other, wanted = agreed.setdefault(operand.shared, (name, got))
            if wanted != got:
                yield (
                    f"{where}: its inputs {other!r} and {name!r} are {wanted} and "
                    f"{got}, and must be of one type; put a Cast before one"
                )
    yield from _output_problems(node, made, {letter: got for letter, (_, got) in agreed.items()}, types)


def _output_problems(
    node: onnx.NodeProto,
    made: tuple[Result, ...],
    agreed: Mapping[str, str],
    types: Mapping[str, onnx.TypeProto],
) -> Iterator[str]:
    """Yield outputs declared as another type than their inputs, or a Cast's attribute, give them."""
    for name, (_, letter) in zip(node.output, made, strict=False):
        got = _name(types[name]) if name in types else None
        wanted = agreed.get(letter)
        if node.op_type == "Cast":
            wanted = next(
                (f"tensor({_words().get(a.i, '')})" for a in node.attribute if a.name == "to"), None
            )
        if got is not None and wanted is not None and got != wanted:
            yield (
                f"node {node.name!r} ({node.op_type}): its output {name!r} is declared {got}, and it computes "
                f"{wanted}; declare that, or put a Cast behind it"
            )


def _name(type_: onnx.TypeProto) -> str | None:
    """Return the type as ONNX's schemas write it, None for other types than tensors of known dtype."""
    number = type_.tensor_type.elem_type
    return f"tensor({_words()[number]})" if type_.HasField("tensor_type") and number in _words() else None


@lru_cache(maxsize=1)
def _words() -> dict[int, str]:
    names = onnx.TensorProto.DataType.items()
    return {number: name.lower() for name, number in names if number}


def _list(allowed: frozenset[str]) -> str:
    words = sorted(word.removeprefix("tensor(").removesuffix(")") for word in allowed if "seq" not in word)
    # Some operators take thirty types.
    return ", ".join(words[:6]) + (", ..." if len(words) > 6 else "")
