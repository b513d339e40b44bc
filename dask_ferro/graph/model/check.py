"""The model against ONNX's own checker and inference, in their words, with the node and a remedy before them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import onnx
import onnx_ir as ir
from onnx import TensorProto, checker, defs

from dask_ferro.errors import ModelError, UnsupportedOp
from dask_ferro.words import at_most

# A reader needs no more lines, and a file may have a name of a megabyte.
SHOWN, LINE = 40, 600

_NODE = re.compile(r"Name: (.*?) +OpType: (\w*)", re.DOTALL)
_UNREGISTERED = re.compile(r"No Op registered for (\S+) with")
# What inference says of types; of shapes it knows less than engines do (1 that broadcasts in an Einsum).
_WRONG_TYPES = re.compile(r"TypeInferenceError|typestr|elem type|data type|inconsistent type")
_INFERENCE = re.compile(r"\(op_type:([^,)]*)(?:, node name: ([^)]*))?\):? *")
_PREFIX = re.compile(r"\[\w*InferenceError\] *|Inference error\(s\): *")
_NUMBER = re.compile(r"\((\d+)\)")
_REMEDIES = {
    "topologically sorted": "a value is computed by no node before it; the file lost a node, or a name is wrong",
    "not an output of any node": "remove the output, or mend its name",
    "is required but missing": "export the model again",
    "deprecated": "export the model again, for the operators of the opset that it imports",
    "opset_import": "import the operators' domain and its version",
}


def shown(problems: Iterable[str]) -> list[str]:
    """Return problems as an error lists them: each once, no more and none longer than one reads."""
    lines = (p if len(p) <= LINE else f"{p[: LINE // 2]} ... {p[-LINE // 2 :]}" for p in problems)
    return at_most(SHOWN, dict.fromkeys(lines), before="and ")


def raise_any(headline: str, problems: Iterable[str]) -> None:
    """Raise a `ModelError` that lists the problems, if there are any."""
    if listed := list(problems):
        raise ModelError(headline, shown(listed))


def check(model: ir.Model, lean: onnx.ModelProto, headline: str) -> None:
    """Raise an error where ONNX's checker refuses a model; `lean` is its `strip_weights.lean_model`.

    Raises
    ------
    ModelError
        In the checker's words.
    UnsupportedOp
        An operator that ONNX does not define in any version.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(lean)
    _emptied(copy.graph)
    # The checker wants the shape of each output, which inference is there to find.
    for info in [*copy.graph.input, *copy.graph.output]:
        info.type.CopyFrom(_ANY)
    # Our own operators may have several outputs, and are an Identity without weights.
    for node, message in zip(model.graph, copy.graph.node, strict=True):
        message.domain = node.domain
    try:
        checker.check_model(copy)
    except (checker.ValidationError, UnicodeDecodeError) as error:
        raise _explained(str(error), headline) from error


_ANY = onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, ())


def _emptied(graph: onnx.GraphProto) -> None:
    """Make the tensors that were left out empty: without data, the checker looks for it in files."""
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0]))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.t.data_location == TensorProto.EXTERNAL:
                attribute.t.CopyFrom(TensorProto(data_type=attribute.t.data_type, dims=[0]))
            for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _emptied(body)


def _explained(words: str, headline: str) -> ModelError | UnsupportedOp:
    words, _, context = words.partition("\n==> Context")
    node = _NODE.search(context)
    where = f"node {node[1].strip()!r} ({node[2]}): " if node else ""
    words = " ".join(words.split()).rstrip(".")
    if unregistered := _UNREGISTERED.search(words):
        op = unregistered[1]
        names = {s.name for s in defs.get_all_schemas_with_history()}
        close = difflib.get_close_matches(op, names, 1)
        if op not in names:
            hint = (
                f"did you mean {close[0]}?"
                if close
                else "export the model without it, or as a local function"
            )
            return UnsupportedOp(headline, [f"{where}ONNX has no such operator ({words}); {hint}"])
        return ModelError(headline, [f"{where}{words}; export the model again, for an opset that has it"])
    remedy = next((r for said, r in _REMEDIES.items() if said in words), "export the model again")
    return ModelError(headline, shown([f"{where}{words}; {remedy}"]))


def type_problem(error: Exception) -> str | None:
    """Return what an error of strict inference says of a dtype that an operator does not take; None otherwise."""
    words = " ".join(str(error).split())
    if not _WRONG_TYPES.search(words):
        return None
    # The last place is the innermost: in a body, or in an operator's own function, which the file did not write.
    *around, (op, name) = [*_INFERENCE.findall(words)] or [("", "")]
    if around and around[-1][0] not in ("If", "Loop", "Scan", "SequenceMap"):
        return None
    words = _INFERENCE.sub("", _PREFIX.sub("", words))
    words = _NUMBER.sub(lambda found: _DTYPES.get(int(found[1]), found[0]), words)
    return f"node {name!r} ({op}): {words}; put a Cast before it, or declare what it gives"


_DTYPES = {number: name.lower() for name, number in TensorProto.DataType.items()}
