"""Output types of ai.onnx.ml operators, which ONNX's inference lacks, so that it would end at a classifier.

Some others are here too: ONNX's inference does not look into the function body of GroupNormalization, and gives no
length to the texts of StringNormalizer and none to those of ONNX Runtime's Tokenizer.

Shapes are those of ONNX Runtime's results.  A table of one dimension is one row to the operators that read rows: they
give the results of one, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import onnx
from onnx import TensorProto, helper

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS

DOMAIN = "ai.onnx.ml"
_OF_OTHERS = frozenset(
    {*product(STANDARD_DOMAINS, ("GroupNormalization", "StringNormalizer")), ("com.microsoft", "Tokenizer")}
)
# `ir.Value.meta` key: the class labels of the columns of an output that a ZipMap would pair with them.
CLASSES = "dask_ferro.classes"
# After each added type inference gets further; pipelines have a few such nodes in a row.
ROUNDS = 16

Dim: TypeAlias = int | str | None
Shape: TypeAlias = Sequence[Dim]


class Given(NamedTuple):
    """A node's attributes, and dtypes and shapes of its inputs (None: not known)."""

    attributes: Mapping[str, Any]
    dtypes: Sequence[int]
    shapes: Sequence[Shape | None]


# An output's dtype and shape.
Made: TypeAlias = tuple[int, Shape]
Row: TypeAlias = Callable[[Given, Shape], Sequence[Made]]


def add_types(graph: onnx.GraphProto) -> bool:
    """Add the output types of ai.onnx.ml nodes to `graph`, where their input types are known.

    Returns
    -------
    bool
        Whether there were any.
    """
    infos = {i.name: i for i in [*graph.input, *graph.value_info, *graph.output]}
    tensors = {t.name: t for t in graph.initializer}
    added = False
    for node in filter(is_left_out, graph.node):
        for name, (dtype, shape) in _made(node, infos, tensors):
            added |= _told(graph, infos, name, dtype, shape)
    return added


def is_left_out(node: onnx.NodeProto) -> bool:
    """Return whether ONNX's inference leaves out the node's output types and this module may know them."""
    return node.domain == DOMAIN or (node.domain, node.op_type) in _OF_OTHERS


def _made(
    node: onnx.NodeProto,
    infos: Mapping[str, onnx.ValueInfoProto],
    tensors: Mapping[str, onnx.TensorProto],
) -> Iterator[tuple[str, Made]]:
    row = _TABLE.get(node.op_type)
    types = [_type(name, infos, tensors) for name in node.input]
    if row is None or not types or types[0][1] is None:
        return
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    given = Given(attributes, [dtype for dtype, _ in types], [shape for _, shape in types])
    made = row(given, types[0][1])
    yield from ((name, one) for name, one in zip(node.output, made, strict=False) if name)


def _type(
    name: str, infos: Mapping[str, onnx.ValueInfoProto], tensors: Mapping[str, onnx.TensorProto]
) -> tuple[int, Shape | None]:
    if name in tensors:
        return tensors[name].data_type, tuple(tensors[name].dims)
    info = infos.get(name)
    if info is None or not info.type.HasField("tensor_type"):
        return TensorProto.UNDEFINED, None
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, tuple(map(_dim, tensor.shape.dim))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None


def _told(
    graph: onnx.GraphProto, infos: dict[str, onnx.ValueInfoProto], name: str, dtype: int, shape: Shape
) -> bool:
    """Complete the declared type of a value; return whether anything was missing."""
    info = infos.get(name)
    if info is None:
        info = infos[name] = graph.value_info.add(name=name)
    tensor = info.type.tensor_type
    if info.type.WhichOneof("value") not in (None, "tensor_type"):
        return False
    if not tensor.HasField("shape"):
        info.type.CopyFrom(helper.make_tensor_type_proto(dtype, list(shape)))
        return True
    if len(tensor.shape.dim) != len(shape):
        return False
    missing = [
        (dim, size)
        for dim, size in zip(tensor.shape.dim, shape, strict=True)
        if isinstance(size, int) and not dim.HasField("dim_value")
    ]
    for dim, size in missing:
        dim.dim_value = size
    return bool(missing)


# Rules by operator: the type of an output, from a node's attributes and its first input's shape.


def _size(given: Given, *names: str) -> int:
    """Return the length of the first of these attributes that the node has."""
    found = next((given.attributes[name] for name in names if name in given.attributes), ())
    return len(found)


def _records(shape: Shape) -> Dim:
    """Return the number of rows of a table of this shape."""
    return shape[0] if len(shape) > 1 else 1


def _same(given: Given, shape: Shape) -> Sequence[Made]:
    return ((given.dtypes[0], shape),)


def _floats(given: Given, shape: Shape) -> Sequence[Made]:
    return ((TensorProto.FLOAT, shape),)


def _scores(columns: Callable[[Given], Dim]) -> Row:
    """Return a rule: a row of `columns` floats for each row of the input."""
    return lambda given, shape: ((TensorProto.FLOAT, (_records(shape), columns(given))),)


def _trees(given: Given, shape: Shape) -> Sequence[Made]:
    """Return TreeEnsemble's output (opset 5), of the input's dtype."""
    return ((given.dtypes[0], (_records(shape), given.attributes.get("n_targets", 1))),)


def _classified(columns: Callable[[Given], Dim]) -> Row:
    """Return a rule: a label and a row of `columns` scores for each row of the input."""

    def row(given: Given, shape: Shape) -> Sequence[Made]:
        strings = _size(given, "classlabels_strings")
        label = TensorProto.STRING if strings else TensorProto.INT64
        count = _records(shape)
        return (label, (count,)), (TensorProto.FLOAT, (count, columns(given)))

    return row


def _labels(given: Given) -> int:
    return max(
        _size(given, "classlabels_strings"),
        _size(given, "classlabels_int64s"),
        _size(given, "classlabels_ints"),
    )


def _linear_scores(given: Given) -> Dim:
    """Return the columns of a linear classifier's scores: one for each intercept."""
    intercepts = _size(given, "intercepts")
    if not intercepts:
        return None
    # One hyperplane separates two classes, and ONNX Runtime returns the second one's score as well.
    return 2 if intercepts == 1 and _labels(given) == 2 else intercepts


def _machine_scores(given: Given) -> Dim:
    """Return the columns of a support vector machine's scores; None for fewer than three classes."""
    labels = _labels(given)
    if labels < 3 or not _size(given, "vectors_per_class"):
        return None
    # Probabilities are one a class, votes one a pair of classes.
    return labels if _size(given, "prob_a") else labels * (labels - 1) // 2


def _one_hot(given: Given, shape: Shape) -> Sequence[Made]:
    return ((TensorProto.FLOAT, (*shape, _size(given, "cats_strings", "cats_int64s"))),)


def _encoded(given: Given, shape: Shape) -> Sequence[Made]:
    """Return LabelEncoder's output, of the dtype of its values."""
    kinds = {
        "values_strings": TensorProto.STRING,
        "values_int64s": TensorProto.INT64,
        "values_floats": TensorProto.FLOAT,
    }
    dtype = next((kinds[name] for name in kinds if _size(given, name)), None)
    values = given.attributes.get("values_tensor")
    if dtype is None and values is not None:
        dtype = values.data_type
    if dtype is None and _size(given, "classes_strings"):
        dtype = TensorProto.INT64 if given.dtypes[0] == TensorProto.STRING else TensorProto.STRING
    return () if dtype is None else ((dtype, shape),)


def _mapped(given: Given, shape: Shape) -> Sequence[Made]:
    """Return CategoryMapper's output: strings become numbers, and numbers strings."""
    strings = given.dtypes[0] == TensorProto.STRING
    return ((TensorProto.INT64 if strings else TensorProto.STRING, shape),)


def _extracted(given: Given, shape: Shape) -> Sequence[Made]:
    """Return ArrayFeatureExtractor's output: its last dimension is the number of indices, whatever their shape."""
    indices = given.shapes[1] if len(given.shapes) > 1 else None
    known = [d for d in indices or () if isinstance(d, int)]
    count = prod(known) if indices is not None and len(known) == len(indices) else None
    # A vector counts as a table of one row.
    before = tuple(shape[:-1]) or (1,)
    return ((given.dtypes[0], (*before, count)),)


def _joined(given: Given, shape: Shape) -> Sequence[Made]:
    """Return FeatureVectorizer's output: its inputs side by side."""
    wide = sum(given.attributes.get("inputdimensions", ()))
    return ((TensorProto.FLOAT, (_records(shape), wide or None)),)


def _normalized(given: Given, shape: Shape) -> Sequence[Made]:
    """Return StringNormalizer's output: all texts where there are no stop words."""
    texts = (*shape[:-1], None) if _size(given, "stopwords") else shape
    return ((TensorProto.STRING, texts),)


_TABLE: Mapping[str, Row] = {
    "ArrayFeatureExtractor": _extracted,
    "Binarizer": _same,
    "CategoryMapper": _mapped,
    "FeatureVectorizer": _joined,
    "GroupNormalization": _same,
    "Imputer": _same,
    "LabelEncoder": _encoded,
    "LinearClassifier": _classified(_linear_scores),
    "LinearRegressor": _scores(lambda given: given.attributes.get("targets", 1)),
    "Normalizer": _floats,
    "OneHotEncoder": _one_hot,
    "Scaler": _floats,
    "StringNormalizer": _normalized,
    "SVMClassifier": _classified(_machine_scores),
    "SVMRegressor": _scores(lambda given: 1),
    # The words of each text, as many as the longest one has.
    "Tokenizer": lambda given, shape: ((TensorProto.STRING, (*shape, None)),),
    "TreeEnsemble": _trees,
    "TreeEnsembleClassifier": _classified(_labels),
    "TreeEnsembleRegressor": _scores(lambda given: given.attributes.get("n_targets", 1)),
}
