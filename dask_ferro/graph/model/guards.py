"""Guards on a model: all reasons to refuse it, before and while ONNX's own libraries read it.

    `check_message`      faults that these do not refuse, or would hang or crash on: texts, tensors and their sizes,
                         names listed twice, numbers in attributes, functions
    `check_operators`    faults that `onnx.checker` refuses, in its words, with the node and a remedy
    `check_types`        faults of dtypes that strict inference reports; the sizes of values that the graph will compute

Every problem is a sentence with its node or tensor, and an error lists all of one step.  Sizes are bytes.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, checker, defs

from dask_ferro.errors import ModelError, UnsupportedOpError
from dask_ferro.graph.ir.domain import OWN_DOMAIN, STANDARD_DOMAINS
from dask_ferro.graph.ir.messages import all_nodes, bodies, domain_of
from dask_ferro.graph.ir.ml_types import CLASSES
from dask_ferro.graph.ir.onnx_inference import MOST_DIMS, TooManyDimensions, TypedModel
from dask_ferro.graph.model import functions
from dask_ferro.words import limit_texts

# A reader needs no more lines, and a file may have a name of a megabyte.
_MAX_PROBLEMS, _LINE = 40, 600


@dataclass(frozen=True)
class Limits:
    """Bounds that a model must keep; each error that one causes names it.

    Parameters
    ----------
    value_bytes, mapped_above : int
        The options `ferro.limits.value-bytes` and `ferro.limits.mapped-above`.
    nodes : int
        All nodes, nodes of bodies included, with local functions written out.
    """

    value_bytes: int = 8 << 30
    nodes: int = 1_000_000
    mapped_above: int = 128 << 20


def list_problems(problems: Iterable[str]) -> list[str]:
    """Return problems as an error lists them: each once, and a readable number of a readable length."""
    lines = (p if len(p) <= _LINE else f"{p[: _LINE // 2]} ... {p[-_LINE // 2 :]}" for p in problems)
    return limit_texts(_MAX_PROBLEMS, dict.fromkeys(lines), before="and ")


def _raise_any(headline: str, problems: Iterable[str]) -> None:
    """Raise a `ModelError` that lists the problems, if there are any."""
    if listed := list(problems):
        raise ModelError(headline, list_problems(listed))


# Parsed messages.

# Names around bodies: onnx_ir and inference copy them into each body, 45 ns each, with the interpreter's lock held.
# 100,000 branches in a row would be 15 minutes.
_NAMES = 100_000_000


def check_message(proto: onnx.ModelProto, limits: Limits, headline: str) -> None:
    """Raise a `ModelError` with the problems of a model as it was parsed, if it has any."""
    _raise_any(headline, _message_problems(proto, limits))


def _message_problems(proto: onnx.ModelProto, limits: Limits) -> Iterator[str]:
    """Yield the problems of a model as it was parsed."""
    if not proto.HasField("graph"):
        yield "it has no graph; the file is cut off, damaged or not an ONNX model"
        return
    nodes = list(all_nodes(chain(proto.graph.node, *(function.node for function in proto.functions))))
    graphs = [proto.graph, *chain.from_iterable(map(bodies, nodes))]
    # The only problem that is reported, since protobuf returns such texts as bytes, and all other code expects strings.
    damaged = [text for text in _texts(proto, graphs, nodes) if isinstance(text, bytes)]
    if damaged:
        yield from (f"the text {text[:80]!r} is not UTF-8; the file is damaged" for text in damaged)
        return
    if not 1 <= proto.ir_version <= onnx.IR_VERSION:
        yield (
            f"its IR version is {proto.ir_version or 'missing'}, and ONNX {onnx.__version__} reads 1 to "
            f"{onnx.IR_VERSION}; export it again, or update onnx"
        )
    if len(nodes) > limits.nodes:
        yield f"it has {len(nodes)} nodes, and {limits.nodes} are allowed (Limits.nodes)"
        return
    if (names := (len(graphs) - 1) * sum(len(node.output) for node in nodes)) > _NAMES:
        yield f"its bodies (If, Loop, Scan) see {names} names in all, and {_NAMES} are allowed; use fewer bodies"
        return
    if not proto.graph.output:
        yield "its graph has no outputs; name at least one"
    yield from _opset_problems(proto)
    yield from _input_problems(proto.graph)
    for graph in graphs:
        yield from _find_duplicates(graph)
        for tensor in graph.initializer:
            if problem := tensor_problem(tensor):
                yield f"initializer {tensor.name!r}: {problem}"
        for sparse in graph.sparse_initializer:
            if problem := sparse_problem(sparse):
                yield f"sparse initializer {sparse.values.name!r}: {problem}"
    for node in all_nodes(proto.graph.node):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                yield (
                    f"node {node.name!r} ({node.op_type}): attribute {attribute.name!r} refers to a"
                    f" function's parameter {attribute.ref_attr_name!r}, outside of one"
                )
    for node in nodes:
        if node.attribute:
            yield from (f"node {node.name!r} ({node.op_type}): {p}" for p in _node_problems(node))
    if proto.functions:
        yield from functions.problems(proto, limits.nodes)


def _texts(
    proto: onnx.ModelProto, graphs: list[onnx.GraphProto], nodes: list[onnx.NodeProto]
) -> Iterator[str | bytes]:
    yield from (entry.domain for entry in proto.opset_import)
    yield from chain.from_iterable((entry.key, entry.value) for entry in proto.metadata_props)
    for function in proto.functions:
        yield from (function.name, function.domain, *function.input, *function.output, *function.attribute)
    for graph in graphs:
        yield graph.name
        yield from (tensor.name for tensor in graph.initializer)
        for info in chain(graph.input, graph.output, graph.value_info):
            yield info.name
            yield from (dim.dim_param for dim in info.type.tensor_type.shape.dim)
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, node.doc_string)
        yield from node.input
        yield from node.output
        yield from (attribute.name for attribute in node.attribute)
        yield from chain.from_iterable((entry.key, entry.value) for entry in node.metadata_props)


def _opset_problems(proto: onnx.ModelProto) -> Iterator[str]:
    versions: dict[str, int] = {}
    for entry in proto.opset_import:
        domain = domain_of(entry.domain)
        if versions.setdefault(domain, entry.version) != entry.version:
            yield f"it imports domain {domain!r} as {versions[domain]} and {entry.version}; keep one"
    newest = defs.onnx_opset_version()
    if not versions:
        yield "it imports no opset, so its operators are undefined; add opset_import"
    elif not 1 <= versions.get("", 1) <= newest:
        yield f"it imports opset {versions['']} of ONNX, and onnx {onnx.__version__} has 1 to {newest}; export it again"


def _input_problems(graph: onnx.GraphProto) -> Iterator[str]:
    for info in graph.input:
        tensor = info.type.tensor_type
        if info.type.WhichOneof("value") is None:
            yield f"input {info.name!r} has no type; declare its dtype"
        elif info.type.HasField("tensor_type") and not is_known(tensor.elem_type):
            yield f"input {info.name!r} has dtype number {tensor.elem_type}, which ONNX does not know"
        # Exporters write -1 for an open size, which the normal form leaves out.
        if sizes := [dim.dim_value for dim in tensor.shape.dim if dim.dim_value < -1]:
            yield f"input {info.name!r} has the size {sizes[0]}; name a dimension of any size instead (dim_param)"


def _find_duplicates(graph: onnx.GraphProto) -> Iterator[str]:
    for what, infos in (("input", graph.input), ("initializer", graph.initializer), ("output", graph.output)):
        for name, count in Counter(info.name for info in infos).items():
            if count > 1 or not name:
                yield f"{what} {name!r} is listed {count} times; give each a name, and list it once"


# Tensors.

_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
# Elements; beyond this a signed 64-bit count of bits overflows somewhere below us.
_MOST_ELEMENTS = 1 << 56


def is_known(data_type: int) -> bool:
    """Return whether `data_type` is a dtype that a tensor may have."""
    return data_type != TensorProto.UNDEFINED and data_type in ir.DataType.__members__.values()


def size(data_type: int, count: int) -> int:
    """Return the bytes of `count` packed elements; 0 for strings."""
    return 0 if data_type == TensorProto.STRING else (count * int(ir.DataType(data_type).bitwidth) + 7) // 8


def tensor_problem(tensor: TensorProto) -> str | None:
    """Return the problem of a tensor's data for its dtype and dimensions; external data is not read."""
    if not is_known(tensor.data_type):
        return f"its dtype is number {tensor.data_type}, which ONNX {onnx.__version__} does not know"
    # Before they are multiplied: the product of 80,000 sizes takes 12 s.
    if len(tensor.dims) > MOST_DIMS:
        return f"it has {len(tensor.dims)} dimensions; engines compute at most {MOST_DIMS}"
    shown = f"{ir.DataType(tensor.data_type).name.lower()}{list(tensor.dims)[:8]}"
    # In Python's integers: a product of four sizes from a file may wrap around to 0 in 64 bits.
    if any(dim < 0 for dim in tensor.dims) or (count := prod(tensor.dims)) > _MOST_ELEMENTS:
        return f"its dimensions {shown} are negative, or more elements than any machine holds"
    filled = [name for name in _DATA_FIELDS if len(getattr(tensor, name))]
    if tensor.HasField("segment") or len(filled) + bool(tensor.raw_data) > 1:
        return "it is stored in segments or in several fields, which no ONNX runtime reads; store it whole"
    if tensor.data_location == TensorProto.EXTERNAL:
        return "it has data of its own and external data; keep one" if filled or tensor.raw_data else None
    if tensor.raw_data:
        got, needed = len(tensor.raw_data), size(tensor.data_type, count)
        return None if got == needed else f"its raw_data has {got} bytes, and {shown} needs {needed}"
    try:
        onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        return f"its data are not {shown}: {error}"
    return None


def sparse_problem(sparse: onnx.SparseTensorProto) -> str | None:
    """Return the problem of a sparse tensor."""
    whole = TensorProto(
        data_type=sparse.values.data_type, dims=sparse.dims, data_location=TensorProto.EXTERNAL
    )
    for tensor in (whole, sparse.values, sparse.indices):
        if tensor is not whole and tensor.data_location == TensorProto.EXTERNAL:
            return "a part of it is external; store it in the model"
        if problem := tensor_problem(tensor):
            return problem
    try:
        checker.check_sparse_tensor(sparse)
    except checker.ValidationError as error:
        return str(error)
    return None


# Attributes.  ONNX's inference never returns from some equations of Einsum ("....a->a"), and holds the interpreter's
# lock meanwhile; ONNX Runtime divides by strides, groups and block sizes.

_KINDS = frozenset(onnx.AttributeProto.AttributeType.values()) - {onnx.AttributeProto.UNDEFINED}
# More letters have no use, and inference is cubic in them.
_TERM = re.compile(r"(?=.{0,55}$)[A-Za-z]*(?:\.\.\.)?[A-Za-z]*")
# Attributes that divide or count down: each number is at least 1.
_POSITIVE = frozenset(
    {"kernel_shape", "strides", "dilations", "group", "blocksize", "num_groups", "size", "num_outputs"}
)
# Seconds; a longer sleep is treated as a typing error.
_LONGEST_SLEEP = 3600
# Kernels count in 32 bits, and the product of two larger numbers overflows 64.
_INT32_LIMIT = 1 << 31


def _node_problems(node: onnx.NodeProto) -> Iterator[str]:
    if node.op_type == "Sleep" and node.domain == OWN_DOMAIN:
        seconds = sum(a.f for a in node.attribute if a.name == "seconds")
        if not 0 <= seconds <= _LONGEST_SLEEP:
            yield f"it sleeps for {seconds:g} s; expected 0 to {_LONGEST_SLEEP} s"
    is_standard = node.domain in STANDARD_DOMAINS
    for attribute in node.attribute:
        name, numbers = attribute.name, [*attribute.ints, attribute.i]
        if attribute.ref_attr_name:
            continue
        if attribute.type not in _KINDS:
            yield f"attribute {name!r} has kind {attribute.type}, which ONNX {onnx.__version__} does not know"
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
        if not is_standard:
            continue
        if name == "equation" and node.op_type == "Einsum":
            yield from equation_problems(attribute.s.decode("utf-8", "replace"))
        # numpy treats an axis of -2^31 as all axes.
        if name in ("axis", "axes") and (wrong := [n for n in numbers if not -MOST_DIMS <= n < MOST_DIMS]):
            yield f"its attribute {name!r} has {wrong[0]}, which is beyond the axes of any tensor"
        if name in _POSITIVE and (
            wrong := [n for n in attribute.ints or [attribute.i] if not 1 <= n < _INT32_LIMIT]
        ):
            yield f"its attribute {name!r} has {wrong[0]}; expected numbers from 1 to 2^31"


def equation_problems(equation: str) -> Iterator[str]:
    """Yield the problem of an Einsum equation whose terms do not follow ONNX's grammar.

    Examples
    --------
    >>> list(equation_problems("ij,jk->ik"))
    []
    >>> list(equation_problems("....a->a"))
    ["its equation '....a->a' has the term '....a'; expected letters and at most one '...'"]
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    for term in [*left.split(","), *([right] if arrow else [])]:
        if not _TERM.fullmatch(term):
            shown = equation if len(equation) <= 80 else f"{equation[:80]}..."
            yield f"its equation {shown!r} has the term {term[:80]!r}; expected letters and at most one '...'"
            return


# Operators, as ONNX's checker takes them.

_NODE = re.compile(r"Name: (.*?) +OpType: (\w*)", re.DOTALL)
_NO_OPERATOR = re.compile(r"No Op registered for (\S+) with")
_REMEDIES = {
    "topologically sorted": "a value is computed by no node before it; the file lost a node, or a name is wrong",
    "not an output of any node": "remove the output, or correct its name",
    "is required but missing": "export the model again",
    "deprecated": "export the model again, for the operators of the opset that it imports",
    "opset_import": "import the operators' domain and its version",
}
_ANY_TYPE = onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, ())


def check_operators(model: ir.Model, lean: onnx.ModelProto, headline: str) -> None:
    """Raise an error if ONNX's checker refuses a model; `lean` is its `lean_model`.

    Raises
    ------
    ModelError
        If the checker refuses it; the message has the checker's words.
    UnsupportedOpError
        If ONNX does not define an operator in any version.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(lean)
    _empty_tensors(copy.graph)
    # The checker requires the shape of each output, which inference has yet to find.
    for info in [*copy.graph.input, *copy.graph.output]:
        info.type.CopyFrom(_ANY_TYPE)
    # dask_ferro's own operators may have several outputs, and are an Identity without weights.
    for node, message in zip(model.graph, copy.graph.node, strict=True):
        message.domain = node.domain
    try:
        checker.check_model(copy)
    except (checker.ValidationError, UnicodeDecodeError) as error:
        raise _explain(str(error), headline) from error


def _empty_tensors(graph: onnx.GraphProto) -> None:
    """Make the tensors that were left out empty: without data, the checker looks for it in files."""
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0]))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.t.data_location == TensorProto.EXTERNAL:
                attribute.t.CopyFrom(TensorProto(data_type=attribute.t.data_type, dims=[0]))
            for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _empty_tensors(body)


def _explain(words: str, headline: str) -> ModelError | UnsupportedOpError:
    words, _, context = words.partition("\n==> Context")
    node = _NODE.search(context)
    where = f"node {node[1].strip()!r} ({node[2]}): " if node else ""
    words = " ".join(words.split()).rstrip(".")
    if unregistered := _NO_OPERATOR.search(words):
        op = unregistered[1]
        names = {s.name for s in defs.get_all_schemas_with_history()}
        close = difflib.get_close_matches(op, names, 1)
        if op not in names:
            hint = (
                f"did you mean {close[0]}?"
                if close
                else "export the model without it, or as a local function"
            )
            return UnsupportedOpError(headline, [f"{where}ONNX has no such operator ({words}); {hint}"])
        return ModelError(headline, [f"{where}{words}; export the model again, for an opset that has it"])
    remedy = next((r for said, r in _REMEDIES.items() if said in words), "export the model again")
    return ModelError(headline, list_problems([f"{where}{words}; {remedy}"]))


# Types and sizes of computed values: a file of a few hundred bytes can request terabytes.

# Inference's errors about types; about shapes it knows less than engines (1 that broadcasts in an Einsum).
_WRONG_TYPES = re.compile(r"TypeInferenceError|typestr|elem type|data type|inconsistent type")
_INFERENCE = re.compile(r"\(op_type:([^,)]*)(?:, node name: ([^)]*))?\):? *")
_PREFIX = re.compile(r"\[\w*InferenceError\] *|Inference error\(s\): *")
_NUMBER = re.compile(r"\((\d+)\)")
_DTYPES = {number: name.lower() for name, number in TensorProto.DataType.items()}
# Operators whose operands are sizes or counts: the inferred size of too large operands overflows silently.
_SIZE_OPERATORS = frozenset(
    {"ConstantOfShape", "Expand", "OneHot", "Pad", "Resize", "Tile", "Upsample", "Range"}
)
# Inference gives small negative sizes for branches that are never taken; these are products that overflowed.
_OVERFLOWN = -(1 << 31)
# A string is a pointer and a length at least.
_STRING_BYTES = 16


def check_types(model: ir.Model, typed: TypedModel, limits: Limits, headline: str) -> None:
    """Raise a `ModelError` with the problems of a model's inferred types, if there are any."""
    if isinstance(typed.error, TooManyDimensions):
        raise ModelError(headline, [str(typed.error)])
    problem = typed.error and _type_problem(typed.error)
    sizes = _size_problems(typed.proto.graph, limits.value_bytes)
    _raise_any(headline, chain([problem] if problem else [], sizes, _class_problems(model, typed.types)))


def _type_problem(error: Exception) -> str | None:
    """Return a strict inference error's sentence about a dtype that an operator does not accept; else None."""
    words = " ".join(str(error).split())
    if not _WRONG_TYPES.search(words):
        return None
    # The last place is the innermost: in a body, or in an operator's own function, which the file did not write.
    *around, (op, name) = [*_INFERENCE.findall(words)] or [("", "")]
    if around and around[-1][0] not in ("If", "Loop", "Scan", "SequenceMap"):
        return None
    words = _INFERENCE.sub("", _PREFIX.sub("", words))
    words = _NUMBER.sub(lambda found: _DTYPES.get(int(found[1]), found[0]), words)
    return f"node {name!r} ({op}): {words}; put a Cast before it, or declare its result"


def _size_problems(graph: onnx.GraphProto, value_bytes: int, where: str = "") -> Iterator[str]:
    """Yield the values of a graph with inferred types, and of its bodies, that are larger than `value_bytes`."""
    makers = {name: node for node in graph.node for name in node.output}
    for info in {i.name: i for i in [*graph.input, *graph.value_info, *graph.output]}.values():
        nbytes = _nbytes(info.type)
        if nbytes > value_bytes:
            node = makers.get(info.name)
            maker = f", of node {node.name!r} ({node.op_type})" if node is not None else ""
            yield (
                f"value {info.name!r}{maker}{where}, has {_format_bytes(nbytes)}, and {_format_bytes(value_bytes)} are"
                " allowed (Limits.value_bytes); raise the limit if that is meant"
            )
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        held = (
            [stored[name] for name in node.input if name in stored] if node.op_type in _SIZE_OPERATORS else []
        )
        if any(_largest(tensor) > value_bytes for tensor in held):
            yield (
                f"node {node.name!r} ({node.op_type}){where} has to create a value of more than"
                f" {value_bytes}, which are allowed (Limits.value_bytes)"
            )
        for body in bodies(node):
            inside = f" in a body of node {node.name!r} ({node.op_type}){where}"
            yield from _size_problems(body, value_bytes, inside)


def _nbytes(type_: onnx.TypeProto) -> float:
    """Return the size of a tensor; 0 if it is not known, infinity if there are more elements than counted."""
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


def _format_bytes(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 28 else f"{nbytes} bytes"


def _largest(tensor: TensorProto) -> float:
    """Return the largest magnitude in a stored tensor of integers; 0 for other tensors and for omitted values."""
    if tensor.data_location == TensorProto.EXTERNAL or tensor.data_type != TensorProto.INT64:
        return 0.0
    return float(np.max(np.abs(onnx.numpy_helper.to_array(tensor).astype(np.float64)), initial=0.0))


def _class_problems(model: ir.Model, types: Mapping[str, onnx.TypeProto]) -> Iterator[str]:
    """Yield the outputs of ZipMaps that have another number of columns than of labels."""
    for value in model.graph.outputs:
        if (labels := value.meta.get(CLASSES)) is None:
            continue
        type_ = types.get(value.name or "", onnx.TypeProto())
        sizes = [dim.dim_value for dim in type_.tensor_type.shape.dim]
        count, columns = len(labels), sizes[-1] if len(sizes) > 1 else 0
        # 0: not known.
        if not count or columns not in (0, count):
            yield (
                f"output {value.name!r}: its ZipMap has {count} class labels for {columns or '?'} columns of"
                " scores;"
                ' convert the model without it (skl2onnx: options={id(classifier): {"zipmap": False}}), or leave the'
                " output out: outputs=[...]"
            )
