"""Output types of ai.onnx.ml operators that ONNX's inference leaves out, so that it would end at a classifier.

Some other operators are here too: ONNX's inference does not inspect the function body of GroupNormalization, and
infers no length for the texts of StringNormalizer or of ONNX Runtime's Tokenizer.

Shapes are the shapes of ONNX Runtime's results.  Operators that read rows treat a table of one dimension as one row:
they return the results of one row, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import onnx
from onnx import TensorProto, TypeProto, helper

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.messages import types_of

DOMAIN = "ai.onnx.ml"
# `ir.Value.meta` key: the class labels of the columns of an output that a ZipMap would pair with them.
CLASSES = "dask_ferro.classes"
# After each added type inference gets further; pipelines have a few such nodes in a row.
ROUNDS = 16

Dim: TypeAlias = int | str | None
Shape: TypeAlias = Sequence[Dim]
Attributes: TypeAlias = Mapping[str, Any]
Outputs: TypeAlias = Sequence[tuple[int, Shape]]
# From a node's attributes, the dtype and the shape of its first input, and the shapes of the others, to the dtype and
# the shape of each output.
Row: TypeAlias = Callable[[Attributes, int, Shape, Sequence[Shape | None]], Outputs]


def add_types(graph: onnx.GraphProto) -> bool:
    """Add output types that ONNX's inference leaves out, if input types are known; return whether there were any."""
    types, added = types_of(graph), False
    infos = {info.name: info for info in [*graph.value_info, *graph.output]}
    for node in graph.node:
        if (rule := TABLE.get((node.domain, node.op_type))) is None:
            continue
        tensors = [types[name].tensor_type if name in types else TypeProto.Tensor() for name in node.input]
        first, *others = map(_shape, tensors) if tensors else [None]
        if first is None:
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        outputs = rule(attributes, tensors[0].elem_type, first, others)
        for name, (dtype, sizes) in zip(node.output, outputs, strict=False):
            if name and name not in infos:
                infos[name] = graph.value_info.add(name=name)
                types[name] = infos[name].type
            added |= bool(name) and _complete(infos[name], dtype, sizes)
    return added


def _shape(tensor: TypeProto.Tensor) -> Shape | None:
    if not tensor.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]


def _complete(info: onnx.ValueInfoProto, dtype: int, shape: Shape) -> bool:
    """Complete the declared type of a value; return whether anything was missing."""
    if info.type.WhichOneof("value") not in (None, "tensor_type"):
        return False
    dims = info.type.tensor_type.shape.dim
    if not info.type.tensor_type.HasField("shape"):
        info.type.CopyFrom(helper.make_tensor_type_proto(dtype, list(shape)))
        return True
    if len(dims) != len(shape):
        return False
    sizes = zip(dims, shape, strict=True)
    missing = [(dim, size) for dim, size in sizes if isinstance(size, int) and not dim.HasField("dim_value")]
    for dim, size in missing:
        dim.dim_value = size
    return bool(missing)


# Rules by operator.


def _records(shape: Shape) -> Dim:
    return shape[0] if len(shape) > 1 else 1


def _keep_type(attributes: Attributes, dtype: int, shape: Shape, others: Sequence[Shape | None]) -> Outputs:
    return ((dtype, shape),)


def _floats(attributes: Attributes, dtype: int, shape: Shape, others: Sequence[Shape | None]) -> Outputs:
    return ((TensorProto.FLOAT, shape),)


def _scores(columns: Callable[[Attributes], Dim]) -> Row:
    """Return the rule of a row of `columns` floats for each row of the input."""
    return lambda attributes, dtype, shape, _: ((TensorProto.FLOAT, (_records(shape), columns(attributes))),)


def _classify(columns: Callable[[Attributes], Dim]) -> Row:
    """Return the rule of a label and a row of `columns` scores for each row of the input."""

    def row(attributes: Attributes, dtype: int, shape: Shape, others: Sequence[Shape | None]) -> Outputs:
        label = TensorProto.STRING if attributes.get("classlabels_strings") else TensorProto.INT64
        count = _records(shape)
        return (label, (count,)), (TensorProto.FLOAT, (count, columns(attributes)))

    return row


def _labels(attributes: Attributes) -> int:
    lists = (f"classlabels_{kind}" for kind in ("strings", "int64s", "ints"))
    return max(len(attributes.get(name, ())) for name in lists)


def _machine_scores(attributes: Attributes) -> Dim:
    """Return the columns of a support vector machine's scores; None for fewer than three classes."""
    labels = _labels(attributes)
    if labels < 3 or not attributes.get("vectors_per_class"):
        return None
    # Probabilities are one a class, votes one a pair of classes.
    return labels if attributes.get("prob_a") else labels * (labels - 1) // 2


def _extract_features(
    attributes: Attributes, dtype: int, table: Shape, others: Sequence[Shape | None]
) -> Outputs:
    """Return ArrayFeatureExtractor's output for a table of one dimension; ONNX infers the others."""
    indices = others[0] if others else None
    sizes = [size for size in indices or () if isinstance(size, int)]
    count = prod(sizes) if indices is not None and len(sizes) == len(indices) else None
    return ((dtype, (*(table[:-1] or (1,)), count)),)


def _normalize_strings(
    attributes: Attributes, dtype: int, shape: Shape, others: Sequence[Shape | None]
) -> Outputs:
    """Return StringNormalizer's output: all texts if there are no stop words."""
    return ((TensorProto.STRING, (*shape[:-1], None) if attributes.get("stopwords") else shape),)


_LEARNERS: Mapping[str, Row] = {
    "ArrayFeatureExtractor": _extract_features,
    "FeatureVectorizer": _scores(lambda attributes: sum(attributes.get("inputdimensions", ())) or None),
    "Imputer": _keep_type,
    "LinearRegressor": _scores(lambda attributes: attributes.get("targets", 1)),
    "Normalizer": _floats,
    "Scaler": _floats,
    "SVMClassifier": _classify(_machine_scores),
    "SVMRegressor": _scores(lambda attributes: 1),
    "TreeEnsembleClassifier": _classify(_labels),
    "TreeEnsembleRegressor": _scores(lambda attributes: attributes.get("n_targets", 1)),
}
# The operators whose output types ONNX's inference leaves out, by domain and name.
TABLE: Mapping[tuple[str, str], Row] = {
    **{(DOMAIN, name): row for name, row in _LEARNERS.items()},
    **{(domain, "GroupNormalization"): _keep_type for domain in STANDARD_DOMAINS},
    **{(domain, "StringNormalizer"): _normalize_strings for domain in STANDARD_DOMAINS},
    # The words of each text, as many as in the longest text.
    ("com.microsoft", "Tokenizer"): lambda attributes, dtype, shape, _: (
        (TensorProto.STRING, (*shape, None)),
    ),
}
