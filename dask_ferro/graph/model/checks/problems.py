"""Checks of a parsed model: all problems of a file in one pass, in words that say what, where, got and wanted.

Looks at names (each defined once, none undefined, no cycle), nodes against their operators, tensors against
their dimensions, declared types, opsets, local functions and depth.  External data is `graph.model.external_data`'s,
sizes of what the graph will compute are `graph.model.checks.value_sizes`'.  Changes nothing and opens nothing.

A body (If, Loop, Scan) sees the names of the graphs around it; main graph and bodies may be in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import onnx
from onnx import TensorProto

from dask_ferro.errors import ModelError, UnsupportedOp
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.order import order
from dask_ferro.graph.model import functions
from dask_ferro.graph.model.checks import operators, tensors
from dask_ferro.graph.model.checks.attribute_values import sleep_problems
from dask_ferro.graph.model.checks.limits import Limits
from dask_ferro.graph.model.checks.texts import undecodable
from dask_ferro.graph.model.functions import domain_of
from dask_ferro.words import at_most

# A reader needs no more lines; the rest is counted, up to a thousand.
SHOWN = 40
COUNTED = 1000
# A file may have a name of a megabyte.
LINE = 600


@dataclass
class Findings:
    """Problems in the order of the file: faults of the file, and operators that ONNX does not define."""

    wrong: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    def raise_any(self, headline: str) -> None:
        """Raise `ModelError` if the file is wrong, `UnsupportedOp` if ONNX only lacks its operators."""
        if self.wrong:
            raise ModelError(headline, shown([*self.wrong, *self.unsupported]))
        if self.unsupported:
            raise UnsupportedOp(headline, shown(self.unsupported))


def shown(problems: list[str]) -> list[str]:
    """Return problems as an error lists them: each once, no more and none longer than one reads."""
    lines = (p if len(p) <= LINE else f"{p[: LINE // 2]} ... {p[-LINE // 2 :]}" for p in problems)
    return at_most(SHOWN, dict.fromkeys(lines), before="and ")


def check(proto: onnx.ModelProto, limits: Limits) -> Findings:
    """Return the problems of `proto` as it was parsed: functions are not inlined, nodes not sorted."""
    found = Findings()
    # Alone, since protobuf gives such texts as bytes, and all other checks expect strings.
    found.wrong += [f"the text {text!r} is not UTF-8; the file is damaged" for text in undecodable(proto)]
    if found.wrong:
        return found
    found.wrong += _opset_problems(proto.opset_import, "the model")
    if not proto.HasField("graph"):
        found.wrong.append("it has no graph; the file is cut off, damaged or no ONNX model")
        return found
    if proto.ir_version > onnx.IR_VERSION:
        found.wrong.append(
            f"its format is IR version {proto.ir_version}, and ONNX {onnx.__version__} reads up to "
            f"{onnx.IR_VERSION}; update onnx or export for an older version"
        )
    if proto.ir_version < 1:
        found.wrong.append(
            f"its IR version is {proto.ir_version or 'missing'}; the file is damaged, export it again"
        )
    graphs = _Graphs(proto, limits, found)
    graphs.main()
    for function in proto.functions:
        graphs.function(function)
    # Only calls that fit their function can be counted.
    if proto.functions and not found.wrong:
        found.wrong += functions.problems(proto, max_nodes=limits.nodes, max_bytes=limits.inlined_bytes)
    return found


def _opset_problems(imports: Iterable[onnx.OperatorSetIdProto], whose: str) -> Iterator[str]:
    versions: dict[str, int] = {}
    for entry in imports:
        domain = domain_of(entry.domain)
        if versions.setdefault(domain, entry.version) != entry.version:
            yield f"{whose} imports domain {domain!r} as {versions[domain]} and {entry.version}; keep one"
        if domain not in operators.DOMAINS:
            continue
        newest = operators.newest(domain)
        if not 1 <= entry.version <= newest:
            what = f"of domain {domain!r}" if domain else "of ONNX"
            yield (
                f"{whose} imports opset {entry.version} {what}, and onnx {onnx.__version__} has 1 to "
                f"{newest}; export for one of these"
            )
    if not versions:
        yield f"{whose} imports no opset, so its operators are undefined; add opset_import"


class _Graphs:
    """A walk over the main graph, the functions, and the bodies in both."""

    def __init__(self, proto: onnx.ModelProto, limits: Limits, found: Findings) -> None:
        self.proto, self.limits, self.found = proto, limits, found
        self.functions = {functions.key(f): f for f in proto.functions}
        self.opsets = {domain_of(entry.domain): entry.version for entry in proto.opset_import}
        self.nodes = 0
        self.in_function = False

    def main(self) -> None:
        graph = self.proto.graph
        if not graph.output:
            self.found.wrong.append("its graph has no outputs; name at least one")
        self.say(_initialized_input_problems(graph))
        self.graph(graph, (), "", 0)

    def function(self, function: onnx.FunctionProto) -> None:
        where = f" of function {functions.name(functions.key(function))}"
        opsets = {domain_of(entry.domain): entry.version for entry in function.opset_import}
        self.say(
            _opset_problems(function.opset_import, f"function {functions.name(functions.key(function))}")
        )
        self.say(_standing_problems(function, self.opsets))
        outer, self.opsets, self.in_function = self.opsets, opsets, True
        body = onnx.GraphProto(node=function.node)
        body.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
        body.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
        self.graph(body, (), where, 0)
        self.opsets, self.in_function = outer, False

    def graph(self, graph: onnx.GraphProto, outer: tuple[set[str], ...], where: str, depth: int) -> None:
        """Check one graph; `outer` holds the names of the graphs around it, `where` says which one it is."""
        if depth > self.limits.nesting:
            self.found.wrong.append(
                f"bodies nest deeper than {self.limits.nesting} levels{where} (Limits.nesting)"
            )
            return
        self.nodes += len(graph.node)
        if self.nodes > self.limits.nodes:
            # Once, not for each graph that follows.
            if self.nodes - len(graph.node) <= self.limits.nodes:
                self.found.wrong.append(f"it has more than {self.limits.nodes} nodes (Limits.nodes)")
            return
        self.tensors(graph, where)
        for what, infos in (("input", graph.input), ("output", graph.output), ("value", graph.value_info)):
            for info in infos:
                # Inputs of bodies and functions need no type.
                if what != "input" or not where or info.HasField("type"):
                    self.say(_type_problems(info, what))
        names = self.defined(graph, where)
        scopes = (*outer, names)
        for i, node in enumerate(graph.node):
            self.node(node, i, scopes, where, depth)
            if len(self.found.wrong) + len(self.found.unsupported) > COUNTED:
                return
        for info in graph.output:
            if not _is_defined(info.name, scopes):
                self.found.wrong.append(
                    f"output {info.name!r}{where} is computed by no node; remove it or mend its name"
                )
        self.cycle(graph, where)

    def say(self, problems: Iterable[str], prefix: str = "") -> None:
        self.found.wrong.extend(prefix + problem for problem in problems)

    def tensors(self, graph: onnx.GraphProto, where: str) -> None:
        for tensor in graph.initializer:
            self.say(tensors.problems(tensor), f"initializer {tensor.name!r}{where}: ")
        for sparse in graph.sparse_initializer:
            name = f"sparse initializer {sparse.values.name!r}{where}: "
            self.say(tensors.sparse_problems(sparse, self.limits.value_bytes), name)

    def defined(self, graph: onnx.GraphProto, where: str) -> set[str]:
        """Return the names that the graph defines, and report those defined twice."""
        inputs = [info.name for info in graph.input]
        stored = [tensor.name for tensor in graph.initializer]
        stored += [sparse.values.name for sparse in graph.sparse_initializer]
        computed = list(filter(None, chain.from_iterable(node.output for node in graph.node)))
        self.once(inputs, "input", where)
        self.once(stored, "initializer", where)
        self.once([info.name for info in graph.output], "output", where)
        names = {*inputs, *stored}
        if "" in names:
            self.found.wrong.append(f"an input or initializer{where} has no name; give it one")
        for name, count in Counter(computed).items():
            if count > 1:
                self.found.wrong.append(
                    f"value {name!r}{where} is computed by {count} nodes; a name is defined once"
                )
            elif name in names:
                self.found.wrong.append(
                    f"value {name!r}{where} is computed by a node and is an input or initializer too"
                )
        return names.union(computed)

    def once(self, names: list[str], what: str, where: str) -> None:
        for name, count in Counter(names).items():
            if count > 1:
                self.found.wrong.append(
                    f"{what} {name!r}{where} is listed {count} times; a name is defined once"
                )

    def cycle(self, graph: onnx.GraphProto, where: str) -> None:
        cycle = order(graph.node)[1]
        if cycle:
            names = [_label(graph.node[i], i) for i in cycle[:6]]
            more = f" -> ... ({len(cycle)} nodes)" if len(cycle) > 6 else f" -> {names[0]}"
            self.found.wrong.append(
                f"nodes{where} wait for each other in a circle: {' -> '.join(names)}{more}"
            )

    def node(
        self, node: onnx.NodeProto, i: int, scopes: tuple[set[str], ...], where: str, depth: int
    ) -> None:
        problems = list(operators.attribute_form_faults(node, in_function=self.in_function))
        problems += [
            f"its input {name!r} is defined nowhere; the file lost a node, or the name is wrong"
            for name in node.input
            if name and not _is_defined(name, scopes)
        ]
        if not any(node.output):
            problems.append("it has no outputs, so it computes nothing; remove it")
        unsupported: list[str] = []
        for fault in self.operator(node):
            (unsupported if fault.unsupported else problems).append(fault.text)
        for attribute in node.attribute:
            problems.extend(self.attribute(attribute))
        if problems or unsupported:
            label = f"node {_label(node, i)}{where}: "
            self.found.wrong.extend(label + problem for problem in problems)
            self.found.unsupported.extend(label + problem for problem in unsupported)
        for attribute in node.attribute:
            for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                inside = f" in {attribute.name!r} of node {_label(node, i)}{where}"
                self.graph(body, scopes, inside, depth + 1)

    def operator(self, node: onnx.NodeProto) -> Iterator[operators.Fault]:
        domain = domain_of(node.domain)
        function = self.functions.get(functions.call(node))
        if function is not None:
            yield from map(operators.Fault, _call_problems(node, function))
        elif domain not in self.opsets:
            yield operators.Fault(
                f"its domain {domain!r} is not among the imported opsets {sorted(self.opsets)}"
            )
        elif domain == OWN_DOMAIN and node.op_type == "Sleep":
            yield from map(operators.Fault, sleep_problems(node, self.limits.sleep_seconds))
        elif domain in operators.DOMAINS and 1 <= self.opsets[domain] <= operators.newest(domain):
            yield from operators.faults(node, domain, self.opsets[domain])

    def attribute(self, attribute: onnx.AttributeProto) -> Iterator[str]:
        held = [attribute.t] if attribute.HasField("t") else attribute.tensors
        for tensor in held:
            for problem in tensors.problems(tensor):
                yield f"attribute {attribute.name!r}: {problem}"
        sparse = (
            [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else attribute.sparse_tensors
        )
        for each in sparse:
            for problem in tensors.sparse_problems(each, self.limits.value_bytes):
                yield f"attribute {attribute.name!r}: {problem}"


def _is_defined(name: str, scopes: tuple[set[str], ...]) -> bool:
    # The innermost first: in a graph of 500 nodes it has all names but those that bodies take from outside.
    return name in scopes[-1] or any(name in scope for scope in scopes)


def _standing_problems(function: onnx.FunctionProto, opsets: dict[str, int]) -> Iterator[str]:
    """Yield why a function may not have its name: engines disagree whether it replaces a standard operator."""
    domain = domain_of(function.domain)
    if domain in operators.DOMAINS and operators.schema(
        domain, function.name, opsets.get(domain, operators.newest(domain))
    ):
        yield (
            f"function {functions.name(functions.key(function))} has the name of ONNX's own operator {function.name},"
            " which ONNX Runtime computes in its place; give the function a domain of its own"
        )


def _label(node: onnx.NodeProto, i: int) -> str:
    if node.name:
        return f"{node.name!r} ({node.op_type})"
    output = next(iter(node.output), None)
    return f"{i} ({node.op_type}, computing {output!r})"


def _call_problems(node: onnx.NodeProto, function: onnx.FunctionProto) -> Iterator[str]:
    if len(node.input) > len(function.input):
        yield f"it passes {len(node.input)} inputs to a function that takes {len(function.input)}"
    if len(node.output) > len(function.output):
        yield f"it takes {len(node.output)} outputs of a function that gives {len(function.output)}"


# Declared types, by themselves and against the weights.


def _initialized_input_problems(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield where an input's type differs from the initializer of its name, which is its value (IR version 3)."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for info in graph.input:
        tensor = stored.get(info.name)
        declared = info.type.tensor_type
        if tensor is None or not info.type.HasField("tensor_type"):
            continue
        dims = [d.dim_value if d.HasField("dim_value") else None for d in declared.shape.dim]
        fits = not declared.HasField("shape") or (
            len(dims) == len(tensor.dims)
            and all(d in (None, t) for d, t in zip(dims, tensor.dims, strict=True))
        )
        if not fits or declared.elem_type not in (TensorProto.UNDEFINED, tensor.data_type):
            yield (
                f"input {info.name!r} is declared {_declared(declared)} and its initializer is "
                f"{_dtype(tensor.data_type)}{list(tensor.dims)}; make them equal"
            )


def _declared(tensor: onnx.TypeProto.Tensor) -> str:
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim]
    return f"{_dtype(tensor.elem_type)}{dims}"


def _dtype(number: int) -> str:
    return str(TensorProto.DataType.Name(number)).lower() if tensors.is_known(number) else f"dtype {number}"


def _type_problems(info: onnx.ValueInfoProto, what: str) -> Iterator[str]:
    """Yield the problems of the declared type of `info`; an input's type must be complete."""
    if what == "input" and info.type.WhichOneof("value") is None:
        yield f"input {info.name!r} has no type; declare its dtype"
    for type_ in _tensor_types(info.type):
        kind = type_.WhichOneof("value")
        if kind is None:
            yield f"{what} {info.name!r} has a type that does not say of what it is made; declare all of it"
            return
        tensor = getattr(type_, kind)
        number = tensor.elem_type
        if not tensors.is_known(number) and (number or what == "input"):
            known = f"onnx {onnx.__version__}"
            yield f"{what} {info.name!r} has dtype number {number}, which {known} does not know"
        for i, dim in enumerate(tensor.shape.dim):
            # Exporters write -1 for an open size, which the normal form leaves out.
            if dim.dim_value < -1:
                yield (
                    f"{what} {info.name!r} has the size {dim.dim_value} in dimension {i}; "
                    "name a dimension of any size instead (dim_param), or leave it out"
                )


def _tensor_types(type_: onnx.TypeProto) -> Iterator[onnx.TypeProto]:
    """Yield the tensor types within a declared type; an empty one stands for a missing one."""
    kind = type_.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        yield type_
    elif kind == "map_type":
        yield from _inner(type_.map_type.value_type)
    # Opaque types belong to other domains, which know what is in them.
    elif kind is not None and kind != "opaque_type":
        yield from _inner(getattr(type_, kind).elem_type)


def _inner(type_: onnx.TypeProto) -> Iterator[onnx.TypeProto]:
    if type_.WhichOneof("value") is None:
        yield type_
    else:
        yield from _tensor_types(type_)
