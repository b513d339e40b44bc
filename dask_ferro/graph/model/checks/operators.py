"""Checks of a node against the schema of its operator.

ONNX's checker judges by the schema of the opset that the model imports; the words here tell all that is wrong.
Problems are sentences about "it", sorted by who is at fault: the file, or operators that ONNX does not define
(`unsupported`).  Operators of domains that ONNX does not define are not judged.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import onnx
from onnx import AttributeProto, defs

from dask_ferro.graph.model.checks import attribute_values

# Domains whose every operator is in ONNX's tables.
DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")

NEWEST_OPSET: int = defs.onnx_opset_version()

_KIND = {number: name for name, number in AttributeProto.AttributeType.items()}
# Attribute kind -> the field of AttributeProto that holds it.
_FIELD = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}
# Kinds of attributes with which a node may be shown to ONNX's checker.
_PLAIN = frozenset(
    {
        AttributeProto.FLOAT,
        AttributeProto.FLOATS,
        AttributeProto.INT,
        AttributeProto.INTS,
        AttributeProto.STRING,
        AttributeProto.STRINGS,
    }
)
_VALUE_FIELDS = frozenset(_FIELD.values())
# Message kinds have no default: an attribute of these must hold one.
_MESSAGES = (
    AttributeProto.TENSOR,
    AttributeProto.GRAPH,
    AttributeProto.SPARSE_TENSOR,
    AttributeProto.TYPE_PROTO,
)


class Fault(NamedTuple):
    """One problem; `unsupported` if the file may be right and ONNX does not have what it asks for."""

    text: str
    unsupported: bool = False


class Schema(NamedTuple):
    """An operator's schema from `onnx.defs`, in Python's own types."""

    inputs: tuple[int, int]
    required: tuple[bool, ...]
    outputs: tuple[int, int]
    given: tuple[bool, ...]  # of each output whether it has to be named
    # Name -> kind, required.
    attributes: Mapping[str, tuple[int, bool]]
    deprecated: bool
    since: int


@lru_cache(maxsize=4096)
def schema(domain: str, op_type: str, opset: int) -> Schema | None:
    """Return the schema in force at `opset`, None if there is none."""
    try:
        found = defs.get_schema(op_type, opset, domain)
    except defs.SchemaError:
        return None
    single = defs.OpSchema.FormalParameterOption.Single
    return Schema(
        (found.min_input, found.max_input),
        tuple(parameter.option == single for parameter in found.inputs),
        (found.min_output, found.max_output),
        tuple(parameter.option == single for parameter in found.outputs),
        {name: (a.type.value, a.required) for name, a in found.attributes.items()},  # type: ignore[attr-defined]
        found.deprecated,
        found.since_version,
    )


def faults(node: onnx.NodeProto, domain: str, opset: int) -> Iterator[Fault]:
    """Yield what is wrong with `node` as an operator of `domain` (one of `DOMAINS`) at `opset`."""
    refusal = _refusal(node, domain, opset)
    if refusal != "" or _is_unknown_to_checker(node, domain, opset):
        explained = list(_explained(node, domain, opset))
        yield from explained
        if refusal and not explained:
            yield Fault(f"ONNX's checker refuses it: {refusal}")
    if node.attribute:
        yield from map(Fault, _text_faults(node))
        if not domain:
            yield from map(Fault, attribute_values.problems(node))


def _refusal(node: onnx.NodeProto, domain: str, opset: int) -> str | None:
    """Return why ONNX's checker refuses `node`: "" if it does not, None for a node that it is not shown."""
    # Of a tensor the checker looks for external data, of a body it wants sorted nodes and knows no names around, and
    # it has no operators under the standard's other name, "ai.onnx".
    if node.domain != domain or any(attribute.type not in _PLAIN for attribute in node.attribute):
        return None
    try:
        onnx.checker.check_node(node, _checked_opsets(domain, opset))
    except onnx.checker.ValidationError as error:
        return str(error).partition("\n")[0]
    return ""


def _is_unknown_to_checker(node: onnx.NodeProto, domain: str, opset: int) -> bool:
    """Whether the checker says nothing of what the schemas refuse.

    It lets pass operators that ONNX withdrew before they were final (Scale, Affine), any in a preview domain, and
    attributes whose names begin with two underscores.
    """
    facts = schema(domain, node.op_type, opset)
    return facts is None or any(attribute.name not in facts.attributes for attribute in node.attribute)


@lru_cache(maxsize=64)
def _checked_opsets(domain: str, opset: int) -> onnx.checker.C.CheckerContext:
    opsets = onnx.checker.C.CheckerContext()
    opsets.ir_version = onnx.IR_VERSION
    opsets.opset_imports = {domain: opset}
    return opsets


def _explained(node: onnx.NodeProto, domain: str, opset: int) -> Iterator[Fault]:
    """Yield all that is wrong with `node` by its schema, of which the checker tells the first."""
    facts = schema(domain, node.op_type, opset)
    if facts is None:
        yield _unknown(node, domain, opset)
        return
    if facts.deprecated:
        yield Fault(
            f"ONNX withdrew this operator in opset {facts.since}; the model imports {opset}, export it again"
        )
        return
    yield from map(Fault, _count("inputs", len(node.input), facts.inputs))
    yield from map(Fault, _count("outputs", len(node.output), facts.outputs))
    for i, (name, required) in enumerate(zip(node.input, facts.required, strict=False)):
        if required and not name:
            yield Fault(f"its input {i} is left out, and it is not optional")
    for i, (name, required) in enumerate(zip(node.output, facts.given, strict=False)):
        if required and not name:
            yield Fault(f"its output {i} has no name, and it is not optional; give it one")
    yield from map(Fault, _attribute_faults(node, facts, opset))


def _unknown(node: onnx.NodeProto, domain: str, opset: int) -> Fault:
    where = f"domain {domain!r}" if domain else "ONNX"
    try:
        since = _first_version(node.op_type, domain)
    except defs.SchemaError:
        elsewhere = [d for d in DOMAINS if node.op_type in _names(d)]
        if elsewhere:
            return Fault(f"{where} has no such operator; domain {elsewhere[0]!r} has, so name that one")
        close = difflib.get_close_matches(node.op_type, _names(domain), 1)
        hint = (
            f"; did you mean {close[0]}?"
            if close
            else "; export the model without it, or as a local function"
        )
        return Fault(
            f"{where} has no such operator (known up to opset {_newest(domain)}){hint}", unsupported=True
        )
    return Fault(
        f"{where} has this operator since opset {since}, and the model imports {opset}; export it again"
    )


def _first_version(op_type: str, domain: str) -> int:
    versions = [s.since_version for s in _history() if s.name == op_type and s.domain == domain]
    if not versions:
        raise defs.SchemaError(op_type)
    return int(min(versions))


@lru_cache(maxsize=1)
def _history() -> list[defs.OpSchema]:
    return list(defs.get_all_schemas_with_history())


@lru_cache(maxsize=8)
def _names(domain: str) -> list[str]:
    return sorted({s.name for s in _history() if s.domain == domain})


@lru_cache(maxsize=8)
def _newest(domain: str) -> int:
    return int(max((s.since_version for s in _history() if s.domain == domain), default=0))


def newest(domain: str) -> int:
    """Return the newest opset of one of `DOMAINS`."""
    return NEWEST_OPSET if domain == "" else _newest(domain)


def _count(what: str, got: int, bounds: tuple[int, int]) -> Iterator[str]:
    least, most = bounds
    if not least <= got <= most:
        wanted = (
            str(least) if least == most else f"{least} to {most}" if most < 1 << 30 else f"{least} or more"
        )
        yield f"it has {got} {what}, and this operator takes {wanted}"


def _attribute_faults(node: onnx.NodeProto, facts: Schema, opset: int) -> Iterator[str]:
    given = set()
    for attribute in node.attribute:
        given.add(attribute.name)
        if attribute.name not in facts.attributes:
            close = difflib.get_close_matches(str(attribute.name), facts.attributes, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield f"attribute {attribute.name!r} is not one of this operator at opset {opset}{hint}"
            continue
        wanted = facts.attributes[attribute.name][0]
        if wanted and attribute.type != wanted:
            got = _KIND.get(attribute.type, str(attribute.type))
            yield f"attribute {attribute.name!r} is {got}; wanted {_KIND.get(wanted, wanted)}"
    for name, (_, required) in facts.attributes.items():
        if required and name not in given:
            yield f"it lacks the attribute {name!r}, which this operator needs"


def _text_faults(node: onnx.NodeProto) -> Iterator[str]:
    for attribute in node.attribute:
        if not _is_text(attribute.s):
            yield f"attribute {attribute.name!r} is not UTF-8: {attribute.s[:20]!r}"
        if not all(map(_is_text, attribute.strings)):
            yield f"attribute {attribute.name!r} holds a text that is not UTF-8"


def _is_text(held: bytes) -> bool:
    try:
        held.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def attribute_form_faults(node: onnx.NodeProto, *, in_function: bool) -> Iterator[str]:
    """Yield the problems of a node's attributes that do not depend on its operator."""
    seen: set[str] = set()
    for attribute in node.attribute:
        name = attribute.name
        if name in seen:
            yield f"it has two attributes {name!r}"
        seen.add(name)
        if attribute.ref_attr_name:
            if not in_function:
                parameter = attribute.ref_attr_name
                yield f"attribute {name!r} refers to a function's parameter {parameter!r}, outside of one"
            continue
        field = _FIELD.get(attribute.type)
        if field is None:
            yield f"attribute {name!r} has kind {attribute.type}, which ONNX {onnx.__version__} does not know"
            continue
        held = {f.name for f, _ in attribute.ListFields()} & _VALUE_FIELDS
        kind = _KIND[attribute.type]
        if held - {field}:
            yield f"attribute {name!r} says that it is {kind} and holds {min(held - {field})!r}"
        elif attribute.type in _MESSAGES and not held:
            yield f"attribute {name!r} says that it is {kind} and holds nothing"
