"""Write out model-local functions at their calls.

Recursive functions, and functions that multiply (thirty that each call the next twice are a billion nodes), are refused
with the numbers before ONNX's inliner gets a model.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import onnx
from onnx import defs, inliner

from dask_ferro.graph.ir.messages import all_nodes, domain_of

Key = tuple[str, str, str]

# ONNX's inliner stops at 100 nested calls.
_MOST_DEPTH = 90


def call(node: onnx.NodeProto) -> Key:
    """Return the key of the function that `node` would call."""
    return domain_of(node.domain), node.op_type, node.overload


def key(function: onnx.FunctionProto) -> Key:
    """Return the key by which nodes call `function`."""
    return domain_of(function.domain), function.name, function.overload


def _name(function: Key) -> str:
    return "::".join(filter(None, function))


def problems(proto: onnx.ModelProto, most_nodes: int) -> Iterator[str]:
    """Yield why the functions of `proto` cannot be written out, as sentences."""
    functions = {key(function): function for function in proto.functions}
    for name, count in Counter(map(key, proto.functions)).items():
        if count > 1:
            yield f"function {_name(name)} is defined more than once; keep one"
        # Engines disagree whether it replaces the operator.
        if not name[0] and defs.has(name[1]):
            yield (
                f"function {_name(name)} has the name of ONNX's own operator, which ONNX Runtime computes"
                " instead; give the function a domain of its own"
            )
    for node in all_nodes(chain(proto.graph.node, *(function.node for function in proto.functions))):
        called = functions.get(call(node))
        if called and (len(node.input) > len(called.input) or len(node.output) > len(called.output)):
            yield (
                f"node {node.name!r} calls {_name(call(node))}, which has {len(called.input)} inputs and "
                f"{len(called.output)} outputs, with {len(node.input)} inputs and {len(node.output)} outputs"
            )
    calls = {k: _calls(function.node, functions) for k, function in functions.items()}
    try:
        order = list(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as error:
        circle = " calls ".join(_name(k) for k in error.args[1][::-1])
        yield f"functions call each other in a circle ({circle}); ONNX has no recursion, use Loop"
        return
    nodes: dict[Key, int] = {}
    depth: dict[Key, int] = {}
    for k in order:
        own = sum(1 for _ in all_nodes(functions[k].node))
        nodes[k] = own + sum(count * nodes[callee] for callee, count in calls[k].items())
        depth[k] = 1 + max((depth[callee] for callee in calls[k]), default=0)
    main = _calls(proto.graph.node, functions)
    if (total := sum(count * nodes[k] for k, count in main.items())) > most_nodes:
        worst = max(main, key=lambda k: main[k] * nodes[k])
        yield (
            f"written out, its functions are about 10^{len(str(total)) - 1} nodes, most of them by calls of "
            f"{_name(worst)}; {most_nodes} are allowed (Limits.nodes)"
        )
    if (deepest := max((depth[k] for k in main), default=0)) > _MOST_DEPTH:
        yield f"its functions call each other {deepest} deep; at most {_MOST_DEPTH} are allowed"


def inline_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with every call of a local function replaced by the function's nodes.

    ONNX's inliner forgets the defaults of a function's attributes, and onnx_ir's takes the square of the calls of one
    (4,000: 10 s).  So the functions are written out in order, callers first, and before each step the calls that are
    then in the graph get the defaults that they lack.  Functions of another opset are converted where ONNX can.
    """
    functions = {key(function): function for function in proto.functions}
    if _mixes_opsets(proto):
        # All in one call: the inliner converts only then.
        for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
            _fill_defaults(nodes, functions)
        return inliner.inline_local_functions(proto, convert_version=True)
    calls = {k: _calls(function.node, functions) for k, function in functions.items()}
    level = dict.fromkeys(_calls(proto.graph.node, functions), 0)
    for k in reversed(list(graphlib.TopologicalSorter(calls).static_order())):
        for callee in calls[k] if k in level else ():
            level[callee] = max(level.get(callee, 0), level[k] + 1)
    for step in range(1 + max(level.values(), default=-1)):
        _fill_defaults(proto.graph.node, functions)
        proto = inliner.inline_selected_functions(proto, sorted({k[:2] for k in level if level[k] == step}))
    proto.ClearField("functions")
    return proto


def _mixes_opsets(proto: onnx.ModelProto) -> bool:
    versions = {domain_of(entry.domain): entry.version for entry in proto.opset_import}
    entries = chain.from_iterable(function.opset_import for function in proto.functions)
    return any(versions.get(domain_of(entry.domain), entry.version) != entry.version for entry in entries)


def _fill_defaults(nodes: Iterable[onnx.NodeProto], functions: Mapping[Key, onnx.FunctionProto]) -> None:
    for node in all_nodes(nodes):
        if (function := functions.get(call(node))) is not None:
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(a for a in function.attribute_proto if a.name not in given)


def _calls(nodes: Iterable[onnx.NodeProto], functions: Mapping[Key, object]) -> Counter[Key]:
    return Counter(k for k in map(call, all_nodes(nodes)) if k in functions)
