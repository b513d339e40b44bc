"""Inlining of model-local functions.

Before ONNX's inliner gets a model, the calls are counted: recursive functions, and functions
that multiply (thirty that each call the next twice are a billion nodes), are refused with the numbers.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import onnx
from onnx import inliner

from dask_ferro.graph.ir.order import all_nodes

Key = tuple[str, str, str]

# ONNX's inliner stops at 100 nested calls.
MAX_CALL_DEPTH = 90

# Sums are capped here: exact ones may have as many digits as the file has functions.
_MOST = 1 << 60


def domain_of(domain: str) -> str:
    """Return a domain by the name used here: ONNX's own has two, "" and "ai.onnx"."""
    return "" if domain == "ai.onnx" else domain


def call(node: onnx.NodeProto) -> Key:
    """Return the key of the function that `node` would call."""
    return domain_of(node.domain), node.op_type, node.overload


def key(function: onnx.FunctionProto) -> Key:
    """Return the key by which nodes call `function`."""
    return domain_of(function.domain), function.name, function.overload


def name(function: Key) -> str:
    """Return the function's name as messages show it."""
    return "::".join(part for part in function if part)


def problems(proto: onnx.ModelProto, *, max_nodes: int, max_bytes: int) -> Iterator[str]:
    """Yield why the functions of `proto` cannot be inlined, as sentences."""
    functions = {key(function): function for function in proto.functions}
    if len(functions) < len(proto.functions):
        twice = [k for k, count in Counter(map(key, proto.functions)).items() if count > 1]
        yield f"function {name(twice[0])} is defined more than once; keep one"
        return
    calls = {k: _calls(function.node, functions) for k, function in functions.items()}
    try:
        order = list(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as error:
        circle = " calls ".join(name(k) for k in error.args[1][::-1])
        yield f"functions call each other in a circle ({circle}); ONNX has no recursion, use Loop"
        return
    yield from _growth(proto, functions, calls, order, max_nodes, max_bytes)


def _calls(nodes: Iterable[onnx.NodeProto], functions: Mapping[Key, object]) -> Counter[Key]:
    return Counter(k for k in map(call, all_nodes(nodes)) if k in functions)


def _growth(
    proto: onnx.ModelProto,
    functions: Mapping[Key, onnx.FunctionProto],
    calls: Mapping[Key, Counter[Key]],
    order: Iterable[Key],
    max_nodes: int,
    max_bytes: int,
) -> Iterator[str]:
    nodes: dict[Key, int] = {}
    size: dict[Key, int] = {}
    depth: dict[Key, int] = {}
    for k in order:
        inner = calls[k]
        nodes[k] = _total(inner, nodes, sum(1 for _ in all_nodes(functions[k].node)))
        size[k] = _total(inner, size, functions[k].ByteSize())
        depth[k] = 1 + max((depth[c] for c in inner), default=0)
    main = _calls(proto.graph.node, functions)
    if (total := _total(main, nodes, 0)) > max_nodes:
        worst = max(main, key=lambda c: nodes[c])
        yield (
            f"written out, its functions are {_about(total)} nodes, most of them by calls of {name(worst)}; "
            f"{max_nodes} are allowed (Limits.nodes)"
        )
    elif (total := _total(main, size, 0)) > max_bytes:
        yield (
            f"written out, its functions take {_about(total)} bytes; {max_bytes} are allowed "
            "(Limits.inlined_bytes); pass large constants as inputs of the function"
        )
    if (deepest := max((depth[c] for c in main), default=0)) > MAX_CALL_DEPTH:
        yield f"its functions call each other {deepest} deep; at most {MAX_CALL_DEPTH} are allowed"


def _total(calls: Mapping[Key, int], each: Mapping[Key, int], own: int) -> int:
    """Return the sum over all calls, at most `_MOST`."""
    return min(own + sum(count * each[callee] for callee, count in calls.items()), _MOST)


def _about(number: int) -> str:
    if number == _MOST:
        return "more than 10^18"
    return str(number) if number < 10**9 else f"10^{len(str(number)) - 1}"


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with every call of a local function replaced by the function's nodes.

    ONNX's inliner forgets the defaults of a function's attributes.  So the functions are written out in
    order, callers first, and before each step the calls that are then in the graph are given the defaults
    that they lack. Functions made for another opset than the model's are converted to the model's where ONNX
    can.
    """
    functions = {key(function): function for function in proto.functions}
    # One level a step, since a call gets the defaults that it lacks once it is in the graph.  With several opsets all
    # are inlined at once: the inliner converts those of another opset only then.
    steps = [] if _mixes_opsets(proto) else _callers_first(proto, functions)
    for step in steps:
        _fill_defaults(proto.graph.node, functions)
        proto = inliner.inline_selected_functions(proto, sorted({(k[0], k[1]) for k in step}))
    if not steps and functions:
        for function in proto.functions:
            _fill_defaults(function.node, functions)
        _fill_defaults(proto.graph.node, functions)
        proto = inliner.inline_local_functions(proto, convert_version=True)
    return proto


def _mixes_opsets(proto: onnx.ModelProto) -> bool:
    versions = {domain_of(entry.domain): entry.version for entry in proto.opset_import}
    entries = chain.from_iterable(function.opset_import for function in proto.functions)
    return any(versions.get(domain_of(entry.domain), entry.version) != entry.version for entry in entries)


def _callers_first(proto: onnx.ModelProto, functions: Mapping[Key, onnx.FunctionProto]) -> list[list[Key]]:
    """Return the functions in use in steps: each is called only by the graph and by functions of earlier steps."""
    calls = {k: _calls(function.node, functions) for k, function in functions.items()}
    callees_first = graphlib.TopologicalSorter(calls).static_order()
    level = dict.fromkeys(_calls(proto.graph.node, functions), 0)
    for k in reversed(list(callees_first)):
        for callee in calls[k] if k in level else ():
            level[callee] = max(level.get(callee, 0), level[k] + 1)
    steps: list[list[Key]] = [[] for _ in range(1 + max(level.values(), default=-1))]
    for k, step in level.items():
        steps[step].append(k)
    return steps


def _fill_defaults(nodes: Iterable[onnx.NodeProto], functions: Mapping[Key, onnx.FunctionProto]) -> None:
    for node in all_nodes(nodes):
        function = functions.get(call(node))
        if function is not None:
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(a for a in function.attribute_proto if a.name not in given)
