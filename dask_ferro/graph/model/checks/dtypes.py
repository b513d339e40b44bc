"""Do the dtypes that meet at a node fit its operator?

The facts are ONNX's type constraints: which types an operand may have, and which operands must agree.  Asked
after inference, of the main graph, and only of types that are known.  Problems are sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import onnx
from onnx import defs

from dask_ferro.graph.ir.order import bodies
from dask_ferro.graph.model.checks import operators
from dask_ferro.graph.model.functions import domain_of


class Operand(NamedTuple):
    """What an operator asks of one input: its types, and the letter of those that must agree, if any."""

    name: str
    allowed: frozenset[str]
    shared: str | None


class Result(NamedTuple):
    """What an operator says of one output: the types that it may have, and their letter."""

    allowed: frozenset[str]
    letter: str


def problems(proto: onnx.ModelProto, types: Mapping[str, onnx.TypeProto]) -> Iterator[str]:
    """Where a node of the main graph gets a type that its operator does not take, `types` by value; and where any
    node's output is declared as a type that its operator never gives.
    """
    opsets = {domain_of(entry.domain): entry.version for entry in proto.opset_import}
    for node in proto.graph.node:
        if node.domain in operators.DOMAINS and node.domain in opsets:
            key = (node.domain, node.op_type, opsets[node.domain])
            yield from _node_problems(node, operands(*key), results(*key), types)
    yield from _declared_problems(proto.graph, opsets)


def _declared_problems(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> Iterator[str]:
    """Where a graph, or a body in it, declares an output as what its operator never gives (a float Shape)."""
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
    """What the operator asks of its inputs; the last stands for all further ones, if it takes any number."""
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
    """The types of each output, and their letter, which it shares with inputs of that letter."""
    try:
        schema = defs.get_schema(op_type, opset, domain)
    except defs.SchemaError:
        return ()
    variadic = defs.OpSchema.FormalParameterOption.Variadic
    return tuple(Result(frozenset(p.types), p.type_str) for p in schema.outputs if p.option != variadic)


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
    """Where an output is declared as something else than what its inputs or the attribute of a Cast make it."""
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
    """The type as ONNX's schemas write it, for tensors of known dtype."""
    number = type_.tensor_type.elem_type
    return f"tensor({_words()[number]})" if type_.HasField("tensor_type") and number in _words() else None


@lru_cache(maxsize=1)
def _words() -> dict[int, str]:
    names = onnx.TensorProto.DataType.items()
    return {number: name.lower() for name, number in names if number}


def _list(allowed: frozenset[str]) -> str:
    words = sorted(word.removeprefix("tensor(").removesuffix(")") for word in allowed if "seq" not in word)
    return ", ".join(words[:6]) + (", ..." if len(words) > 6 else "")
