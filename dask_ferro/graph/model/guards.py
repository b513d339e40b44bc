"""Guards on a parsed model, before ONNX's own libraries read it: what they do not refuse, or would hang or die of.

    texts, tensors against their sizes, names listed twice, equations, functions               before `onnx.checker`
    sizes of what the graph will compute                                                       after inference

All else is left to `onnx.checker` and to strict inference (`model.check`).  Every problem that is told here is a
sentence with its node or tensor.  Sizes are bytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod

import onnx
import onnx_ir as ir
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import TensorProto, checker

from dask_ferro.graph.ir.domain import OWN_DOMAIN, STANDARD_DOMAINS
from dask_ferro.graph.ir.inference_limits import MOST_DIMS
from dask_ferro.graph.ir.messages import all_nodes, bodies
from dask_ferro.graph.ir.strip_weights import holds_map
from dask_ferro.graph.model import functions


@dataclass(frozen=True)
class Limits:
    """Bounds that a model must keep; each error that one causes names it.

    Parameters
    ----------
    value_bytes, mapped_above : int
        The options `ferro.limits.value-bytes` and `ferro.limits.mapped-above`.
    nodes : int
        All nodes, those of bodies included, with local functions written out.
    """

    value_bytes: int = 8 << 30
    nodes: int = 1_000_000
    mapped_above: int = 128 << 20


# Names around bodies: onnx_ir and inference copy them into each body, 45 ns each, with the interpreter's lock held.
# 100,000 branches in a row would be 15 minutes.
_NAMES = 100_000_000


def problems(proto: onnx.ModelProto, limits: Limits) -> Iterator[str]:
    """Yield the problems of a model as it was parsed."""
    if not proto.HasField("graph"):
        yield "it has no graph; the file is cut off, damaged or no ONNX model"
        return
    # Alone, since all other code expects strings.
    if damaged := list(_damaged(proto)):
        yield from (f"the text {text[:80]!r} is not UTF-8; the file is damaged" for text in damaged)
        return
    if not 1 <= proto.ir_version <= onnx.IR_VERSION:
        yield (
            f"its IR version is {proto.ir_version or 'missing'}, and ONNX {onnx.__version__} reads 1 to "
            f"{onnx.IR_VERSION}; export it again, or update onnx"
        )
    nodes = list(all_nodes(chain(proto.graph.node, *(function.node for function in proto.functions))))
    graphs = [proto.graph, *chain.from_iterable(map(bodies, nodes))]
    if (names := (len(graphs) - 1) * sum(len(node.output) for node in nodes)) > _NAMES:
        yield f"its bodies (If, Loop, Scan) see {names} names in all; {_NAMES} are allowed; use fewer bodies"
        return
    if not proto.graph.output:
        yield "its graph has no outputs; name at least one"
    if not proto.opset_import:
        yield "it imports no opset, so its operators are undefined; add opset_import"
    for name in (info.name for info in proto.graph.input if holds_map(info.type)):
        yield f"input {name!r} is a map, which no array holds; export the model without its DictVectorizer"
    for graph in graphs:
        yield from _doubled(graph)
        for tensor in graph.initializer:
            if problem := tensor_problem(tensor):
                yield f"initializer {tensor.name!r}: {problem}"
        for sparse in graph.sparse_initializer:
            if problem := sparse_problem(sparse):
                yield f"sparse initializer {sparse.values.name!r}: {problem}"
    for node in all_nodes(proto.graph.node):
        if outside := [attribute.name for attribute in node.attribute if attribute.ref_attr_name]:
            yield f"node {node.name!r} ({node.op_type}): attribute {outside[0]!r} is a parameter, outside of a function"
    for node in nodes:
        if node.attribute:
            yield from (f"node {node.name!r} ({node.op_type}): {p}" for p in _node_problems(node))
    yield from functions.problems(proto, limits.nodes)


# The data of tensors would be copied.
_TEXTS_OF_TENSORS = [TensorProto.DESCRIPTOR.fields_by_name[name] for name in ("name", "external_data")]


def _damaged(message: Message) -> Iterator[bytes]:
    """Yield the texts of a message, and of all inside it, that are not UTF-8: protobuf gives these as bytes."""
    is_tensor = isinstance(message, TensorProto)
    fields = [(f, getattr(message, f.name)) for f in _TEXTS_OF_TENSORS] if is_tensor else message.ListFields()
    for field, value in fields:
        if field.type == field.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                yield from _damaged(inner)
        elif field.type == field.TYPE_STRING:
            texts = [value] if isinstance(value, (str, bytes)) else value
            yield from (text for text in texts if isinstance(text, bytes))


def _doubled(graph: onnx.GraphProto) -> Iterator[str]:
    for what, infos in (("input", graph.input), ("initializer", graph.initializer), ("output", graph.output)):
        for name, count in Counter(info.name for info in infos).items():
            if count > 1 or not name:
                yield f"{what} {name!r} is listed {count} times; give each a name, and list it once"


# Tensors.

# Elements; beyond this a signed 64-bit count of bits overflows somewhere below us.
_MOST_ELEMENTS = 1 << 56


def is_known(data_type: int) -> bool:
    """Return whether `data_type` is a dtype that a tensor may have."""
    return data_type != TensorProto.UNDEFINED and data_type in ir.DataType.__members__.values()


def size(data_type: int, count: int) -> int:
    """Return the bytes of `count` packed elements; 0 for strings."""
    return 0 if data_type == TensorProto.STRING else (count * int(ir.DataType(data_type).bitwidth) + 7) // 8


def tensor_problem(tensor: TensorProto) -> str | None:
    """Return what is wrong with a tensor's data, by its dtype and dimensions; external data is not looked at."""
    if not is_known(tensor.data_type):
        return f"its dtype is number {tensor.data_type}, which ONNX {onnx.__version__} does not know"
    # Before they are multiplied: the product of 80,000 sizes takes 12 s.
    if len(tensor.dims) > MOST_DIMS:
        return f"it has {len(tensor.dims)} dimensions; engines compute at most {MOST_DIMS}"
    shown = f"{ir.DataType(tensor.data_type).name.lower()}{list(tensor.dims)[:8]}"
    # In Python's integers: a product of four sizes from a file may wrap around to 0 in 64 bits.
    if any(dim < 0 for dim in tensor.dims) or (count := prod(tensor.dims)) > _MOST_ELEMENTS:
        return f"its dimensions {shown} are negative, or more elements than any machine holds"
    if tensor.data_location == TensorProto.EXTERNAL:
        return None
    if tensor.raw_data:
        got, needed = len(tensor.raw_data), size(tensor.data_type, count)
        return None if got == needed else f"its raw_data has {got} bytes, and {shown} needs {needed}"
    try:
        onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        return f"its data are no {shown}: {error}"
    return None


def sparse_problem(sparse: onnx.SparseTensorProto) -> str | None:
    """Return what is wrong with a sparse tensor."""
    if TensorProto.EXTERNAL in (sparse.values.data_location, sparse.indices.data_location):
        return "a part of it is external; store it in the model"
    try:
        checker.check_sparse_tensor(sparse)
    except checker.ValidationError as error:
        return str(error)
    return None


# Attributes.  ONNX's inference never returns from some equations of Einsum ("....a->a"), and holds the interpreter's
# lock meanwhile.

# More letters have no use, and inference is cubic in them.
_TERM = re.compile(r"(?=.{0,55}$)[A-Za-z]*(?:\.\.\.)?[A-Za-z]*")
# Seconds; a longer sleep is taken for a typing error.
_LONGEST_SLEEP = 3600


def _node_problems(node: onnx.NodeProto) -> Iterator[str]:
    if node.op_type == "Sleep" and node.domain == OWN_DOMAIN:
        seconds = sum(a.f for a in node.attribute if a.name == "seconds")
        if not 0 <= seconds <= _LONGEST_SLEEP:
            yield f"it sleeps for {seconds:g} s; expected 0 to {_LONGEST_SLEEP} s"
    for attribute in node.attribute:
        name = attribute.name
        if not attribute.type:
            yield f"attribute {name!r} has kind 0, which ONNX does not know"
        for tensor in [attribute.t] if attribute.HasField("t") else attribute.tensors:
            problem = tensor_problem(tensor)
            if tensor.data_location == TensorProto.EXTERNAL:
                problem = (
                    "it has external data, which only initializers may; make it one, or store it in the model"
                )
            if problem:
                yield f"attribute {name!r}: {problem}"
        if attribute.HasField("sparse_tensor") and (problem := sparse_problem(attribute.sparse_tensor)):
            yield f"attribute {name!r}: {problem}"
        if node.domain not in STANDARD_DOMAINS or attribute.ref_attr_name:
            continue
        if name == "equation" and node.op_type == "Einsum":
            equation = attribute.s.decode("utf-8", "replace")
            left, _, right = equation.replace(" ", "").partition("->")
            if wrong := [term for term in (*left.split(","), right) if not _TERM.fullmatch(term)]:
                yield f"its equation {equation!r} has the term {wrong[0]!r}; expected letters and at most one '...'"


# Sizes of what the graph computes: a file of a few hundred bytes can ask for terabytes.

# Inference gives small negative sizes for branches that are never taken; these are products that overflowed.
_OVERFLOWN = -(1 << 31)
# A string is a pointer and a length at least.
_STRING_BYTES = 16


def size_problems(graph: onnx.GraphProto, value_bytes: int, where: str = "") -> Iterator[str]:
    """Yield the values of a graph with inferred types, and of its bodies, that are larger than `value_bytes`."""
    makers = {name: node for node in graph.node for name in node.output}
    for info in {i.name: i for i in [*graph.input, *graph.value_info, *graph.output]}.values():
        nbytes = _nbytes(info.type)
        if nbytes > value_bytes:
            node = makers.get(info.name)
            maker = f", of node {node.name!r} ({node.op_type})" if node is not None else ""
            yield (
                f"value {info.name!r}{maker}{where}, has {_short(nbytes)}, and {_short(value_bytes)} are allowed "
                "(Limits.value_bytes); raise the limit if that is meant"
            )
    stored = {tensor.name: tensor for tensor in graph.initializer if not tensor.HasField("data_location")}
    for node in graph.node:
        # Inference multiplies by repeats in 64 bits, and silently.
        for name in node.input[1:2] if node.op_type == "Tile" else ():
            counts = onnx.numpy_helper.to_array(stored[name]).reshape(-1).tolist() if name in stored else []
            if max(map(abs, counts), default=0) > value_bytes:
                yield f"node {node.name!r} (Tile){where} repeats more than {value_bytes} times (Limits.value_bytes)"
        for body in bodies(node):
            inside = f" in a body of node {node.name!r} ({node.op_type}){where}"
            yield from size_problems(body, value_bytes, inside)


def _nbytes(type_: onnx.TypeProto) -> float:
    """Return the size of a tensor; 0 where it is not known, infinity where there are more elements than counted."""
    tensor = type_.tensor_type
    if not type_.HasField("tensor_type") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return 0
    dims = [dim.dim_value for dim in tensor.shape.dim]
    if any(dim < 0 for dim in dims):
        return math.inf if min(dims) < _OVERFLOWN else 0
    count: int = prod(dims)
    if tensor.elem_type == TensorProto.STRING:
        return count * _STRING_BYTES
    return size(tensor.elem_type, count) if is_known(tensor.elem_type) else count


def _short(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 28 else f"{nbytes} bytes"


def class_problems(
    types: Mapping[str, onnx.TypeProto], classes: Mapping[str, Iterable[str | int]]
) -> Iterator[str]:
    """Yield the outputs of ZipMaps that have another number of columns than of labels."""
    for name, labels in classes.items():
        sizes = [d.dim_value for d in types[name].tensor_type.shape.dim] if name in types else []
        count, columns = len(tuple(labels)), sizes[-1] if len(sizes) > 1 else 0
        # 0: not known.
        if not count or columns not in (0, count):
            yield (
                f"output {name!r}: its ZipMap has {count} class labels for {columns or '?'} columns of scores;"
                ' convert the model without it (skl2onnx: options={id(classifier): {"zipmap": False}}), or leave the'
                " output out: outputs=[...]"
            )
