"""What `rows` knows of operators beyond the placement table: rules of more of them, and which surely combine rows.

The table says of a dimension only that it is not split; here stands whether a node surely computes along it.  Each
rule reads the shapes and attributes of a node as the table's rows do, for nodes of which all shapes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dask_ferro.graph.batch_independence.states import FREE, Counts, Rows, State
from dask_ferro.graph.ir.domain import OWN_DOMAIN, STANDARD_DOMAINS
from dask_ferro.graph.ir.nodes import bodies
from dask_ferro.graph.sharding.placements import Dims, Row, Rule, Site, aligned, names, without
from dask_ferro.graph.sharding.rules import table
from dask_ferro.graph.sharding.rules.math import pointwise

RESHAPES = frozenset(["Reshape", "Flatten", "Squeeze", "Unsqueeze"])
# Of a list of sizes: what leaves its elements in order, and what computes with them one by one.
KEEPS_COUNTS = RESHAPES | {"Identity", "Cast"}
_BY_ELEMENT = (
    "Add Sub Mul Div Mod Max Min Pow Neg Abs Sqrt Reciprocal Floor Ceil Round Exp Log Sign Equal Greater Less"
    " GreaterOrEqual LessOrEqual And Or Not Where Clip CastLike"
)
BY_ELEMENT = frozenset(_BY_ELEMENT.split())
# What a node does to rows whatever the shapes.
_WITHOUT_RULE: Mapping[str, str] = {
    "CumProd": "runs along an axis that is only known when it runs",
    "CumSum": "runs along an axis that is only known when it runs",
    "DynamicQuantizeLinear": "quantizes them by the range of all",
    "EyeLike": "computes with their order",
    "NonMaxSuppression": "numbers the rows of a chunk from 0",
    "NonZero": "numbers the rows of a chunk from 0",
    "Unique": "compares them with each other",
}
_RUNNING = ("CumProd", "CumSum")
# What `combines` tells of from the shape of the data alone.
_BY_AXIS = frozenset(
    ["ArgMax", "ArgMin", "TopK", "LpNormalization", "Gather", "Softmax", "LogSoftmax", "Hardmax"]
)
_RANDOM = frozenset(
    ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
# Where exporters write "to the end", they write at least this.
_THE_END = 2**31 - 1


def row_rule(o: Site) -> Rule | None:
    """Return the rule of a node, the table's or one of this module; None where there is none."""
    if not o.is_known():
        return None
    if o.node.domain == OWN_DOMAIN and o.node.op_type == "Sleep":
        return pointwise()(o)
    if o.node.domain not in STANDARD_DOMAINS:
        return None
    if o.node.op_type == "BatchNormalization" and trains(o):
        channel: Dims = ("1",)
        dims = without(names(o.rank()), [i for i in range(o.rank()) if i != 1])
        return Rule((dims, *(channel,) * 4), (dims, *(channel,) * (len(o.node.outputs) - 1)))
    row = _TABLE.get(o.node.op_type)
    return table.rule(o) if row is None else row(o)


def without_rule(o: Site, states: Sequence[State]) -> tuple[bool, str]:
    """Return what a node without a rule does to rows, and whether that is sure.

    A node has none where a shape is not known, which of a result may be so because its size depends on the data.
    """
    kind = o.node.op_type
    standard = o.node.domain in STANDARD_DOMAINS
    if o.node.domain == "com.microsoft" and kind.startswith("DynamicQuantize"):
        return True, _WITHOUT_RULE["DynamicQuantizeLinear"]
    if kind in _WITHOUT_RULE and (standard or kind == "Unique"):
        axis = o.constant(1) if kind in _RUNNING else None
        if axis is None:
            return True, _WITHOUT_RULE[kind]
        if not isinstance(states[0], Rows) or not o.rank() or axis[0] % o.rank() != states[0].dim:
            return False, "may run along them"
        return True, "works along the axis of the rows"
    if standard and kind in _BY_AXIS and isinstance(states[0], Rows) and o.rank():
        why = combines(o, 0, states[0].dim)
        if why:
            return True, why
    if standard and kind == "Compress":
        data, picks = states
        flat = "axis" not in o.node.attributes
        along = isinstance(data, Rows) and bool(o.rank()) and o.axis(0) == data.dim
        if flat or along != isinstance(
            picks, Rows
        ):  # rows that vanish by themselves are seen by their number
            return True, "picks some by their number"
    return False, "is not known to keep them apart"


def draws(o: Site) -> bool:
    """Whether a node, or one in its bodies, draws random numbers or may: the same seed gives each chunk the same."""
    if o.node.domain in STANDARD_DOMAINS:
        if o.node.op_type in _RANDOM:
            return True
        if o.node.op_type == "Dropout" and o.has(2):
            mode = o.constant(2)
            return mode is None or any(mode)
    inside = bodies(o.node)
    return bool(inside) and any(draws(Site(inner, o.types, o.opset)) for body in inside for inner in body)


def slices_all(o: Site, rows: Rows, settings: Sequence[State]) -> bool | None:
    """Return whether a Slice takes all rows in order, however many there are; None: not known.

    What is cut off is not seen where a probe is shorter: only an end of `_THE_END` is the end, or their number.

    Parameters
    ----------
    o : Site
    rows : Rows
        Where they lie in the value that is sliced.
    settings : sequence of State
        Of starts, ends, axes and steps.
    """
    axes, starts, ends, steps = (
        o.constant(p) if o.has(p) else tuple(o.attribute(name, ())) or None
        for p, name in ((3, "axes"), (1, "starts"), (2, "ends"), (4, "steps"))
    )
    if o.has(3) and axes is None:
        return None
    if axes is None:
        axes = tuple(range(o.size(1) if o.has(1) else len(starts or ())))
    places = [axis % max(1, o.rank()) for axis in axes]
    counts = [s for s in settings if s != FREE]
    if rows.dim not in places:
        return None if counts else True
    place = places.index(rows.dim)
    if starts is None or (o.has(4) and steps is None):
        return None
    if (steps is not None and steps[place] != 1) or -_THE_END < starts[place] != 0:
        return False
    if ends is not None:
        return ends[place] >= _THE_END
    # Where rows lie once, any number of theirs that was read is the end or beyond it.
    end = settings[1]
    is_theirs = (
        isinstance(end, Counts) and end.exact and end.depends == tuple(i == place for i in range(len(axes)))
    )
    return True if is_theirs and len(counts) == 1 and rows.before == 1 else None


def trains(o: Site) -> bool:
    """Whether a BatchNormalization takes the statistics of the batch: up to opset 13, when it returns them."""
    if o.opset >= 14:
        return bool(o.attribute("training_mode", 0))
    return sum(bool(v.name) for v in o.node.outputs) > 1


def combines(o: Site, position: int, dim: int) -> str:
    """Return how a node surely combines what lies along dimension `dim` of an input; "" where that is not sure.

    Parameters
    ----------
    o : Site
    position : int
        Of the input.
    dim : int
        One that the node's rule does not split.
    """
    kind = o.node.op_type
    if kind in _ALONG_ONE:
        sure = dim == o.axis(_ALONG_ONE[kind])
    elif kind in ("Softmax", "LogSoftmax", "Hardmax"):
        sure = dim == o.axis(-1) if o.opset >= 13 else dim >= o.axis(1)
    elif kind in _CONVOLUTIONS:
        sure = dim == 1 or _has_neighbours(o, dim - 2)
    elif kind == "Gather":
        return "picks some by their number" if position == 0 and dim == o.axis(0) else ""
    elif kind == "Slice":
        return _cut(o, dim)
    elif kind == "Pad":
        return "adds to them" if o.out_shape()[dim] != o.shape(0)[dim] else ""
    elif kind in ("Resize", "Upsample"):
        return "resizes them" if o.out_shape()[dim] != o.shape(0)[dim] else ""
    elif kind == "Trilu":
        return "computes with their order"
    else:
        sure = kind in _COMBINES
    return "works along the axis of the rows" if sure else ""


_ALONG_ONE = {"ArgMax": 0, "ArgMin": 0, "TopK": -1, "LpNormalization": -1}
_NORMS_AND_LOSSES = (
    "LayerNormalization RMSNormalization BatchNormalization InstanceNormalization GroupNormalization"
    " MeanVarianceNormalization LRN Unique SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss"
)
_POOLS_AND_CELLS = "GlobalAveragePool GlobalMaxPool GlobalLpPool LSTM GRU RNN CumSum CumProd Compress"
_COMBINES = frozenset((_NORMS_AND_LOSSES + " " + _POOLS_AND_CELLS).split())
_WINDOWS = "Conv ConvTranspose AveragePool MaxPool LpPool QLinearConv ConvInteger"
_CONVOLUTIONS = frozenset(_WINDOWS.split())


def _has_neighbours(o: Site, axis: int) -> bool:
    """Whether a window is longer than one, or skips some or adds to them, along a dimension of the image."""
    if axis < 0:
        return False
    ones = (1,) * (axis + 1)
    weights = o.shape(3 if o.node.op_type == "QLinearConv" else 1)[2:]
    kernel = tuple(o.attribute("kernel_shape", ())) or weights
    pads = tuple(o.attribute("pads", ()))
    half = len(pads) // 2
    return (
        (kernel or ones)[axis] != 1
        or tuple(o.attribute("strides", ones))[axis] != 1
        or bool(pads and (pads[axis] or pads[half + axis]))
    )


def _cut(o: Site, dim: int) -> str:
    return "picks some by their number" if o.out_shape()[dim] != o.shape(0)[dim] or _reverses(o, dim) else ""


def _reverses(o: Site, dim: int) -> bool:
    axes = o.constant(3) if o.has(3) else tuple(range(o.size(1)))
    steps = o.constant(4) if o.has(4) else None
    pairs = zip(axes or (), steps or (), strict=False)
    return any(axis % o.rank() == dim and step < 0 for axis, step in pairs)


# Rules.


def _first(*positions: int) -> Row:
    """Make a row: dimension 0 of these inputs and of every output."""

    def row(o: Site) -> Rule:
        inputs = tuple(_zeroth(o.rank(i)) if i in positions else () for i in range(len(o.node.inputs)))
        return Rule(inputs, tuple(_zeroth(len(o.out_shape(i))) for i in range(len(o.node.outputs))))

    return row


def _zeroth(rank: int) -> Dims:
    return ("0", *(None,) * (rank - 1)) if rank else ()


def _sliced(o: Site) -> Rule | None:
    """The table's rule, and what is taken whole: from first to last."""
    found = table.rule(o)
    if found is None:
        return None
    whole = [
        i
        for i, (a, b) in enumerate(zip(o.shape(0), o.out_shape(), strict=True))
        if a == b and not _reverses(o, i)
    ]
    dims = without(names(o.rank()), [i for i in range(o.rank()) if i not in whole])
    return Rule((dims,), (dims,))


def _resized(o: Site) -> Rule | None:
    """The dimensions that keep their size."""
    if str(o.attribute("coordinate_transformation_mode", "")) == "tf_crop_and_resize":
        return None
    changed = [i for i, (a, b) in enumerate(zip(o.shape(0), o.out_shape(), strict=True)) if a != b]
    dims = without(names(o.rank()), changed)
    return Rule((dims,), (dims,))


def _product(left: int, right: int) -> Row:
    """Make a row: a matrix product whose operands are at these positions; the others are settings."""

    def row(o: Site) -> Rule | None:
        a, b, out = o.shape(left), o.shape(right), o.out_shape()
        if len(a) < 2 or len(b) < 2:
            return None
        batch = out[:-2]
        inputs: list[Dims] = [()] * len(o.node.inputs)
        inputs[left] = (*aligned(a[:-2], batch), "i", None)
        inputs[right] = (*aligned(b[:-2], batch), None, "j")
        return Rule(tuple(inputs), ((*names(len(batch)), "i", "j"),))

    return row


def _pooled(o: Site) -> Rule | None:
    """The table's rule without the indices, which count through the whole tensor."""
    dims = without(names(o.rank()), range(2, o.rank()))
    return Rule((dims,), (dims,))


def _reversed_sequence(o: Site) -> Rule:
    dims: list[str | None] = list(names(o.rank()))
    dims[int(o.attribute("time_axis", 0))] = None
    return Rule((tuple(dims), (str(o.attribute("batch_axis", 1)),)), (tuple(dims),))


def _compressed(o: Site) -> Rule | None:
    if "axis" not in o.node.attributes:
        return None
    dims = without(names(o.rank()), (o.axis(0),))
    return Rule((dims,), (dims,))


def _gathered_by_tuples(o: Site) -> Rule:
    """The dimensions that data and indices share, and those of the indices."""
    shared, dims = int(o.attribute("batch_dims", 0)), names(o.rank())
    picks = tuple(f"i{k}" for k in range(shared, o.rank(1) - 1))
    width = o.shape(1)[-1]
    rest = dims[shared + width :]
    data = (*dims[:shared], *(None,) * width, *rest)
    return Rule((data, (*dims[:shared], *picks, None)), ((*dims[:shared], *picks, *rest),))


def _matrices(o: Site) -> Rule:
    """Det: all but the matrix."""
    dims = without(names(o.rank()), range(o.rank() - 2, o.rank()))
    return Rule((dims,), (dims[:-2],))


def _normalized_texts(o: Site) -> Rule | None:
    """A text that is a stop word is left out, and then all that follow move up."""
    if o.attribute("stopwords", ()):
        return None
    return pointwise()(o)


def _split_texts(o: Site) -> Rule:
    """The last dimension of the parts is as long as the longest."""
    dims = names(o.rank())
    return Rule((dims,), ((*dims, None), dims)[: len(o.node.outputs)])


_TABLE: Mapping[str, Callable[[Site], Rule | None]] = {
    "Slice": _sliced,
    "Resize": _resized,
    "Upsample": _resized,
    "MaxPool": _pooled,
    "QLinearMatMul": _product(0, 3),
    "MatMulInteger": _product(0, 1),
    "QLinearConv": _first(0),
    "ConvInteger": _first(0),
    "DeformConv": _first(0, 2, 4),
    "GridSample": _first(0, 1),
    "AffineGrid": _first(0),
    "Col2Im": _first(0),
    "STFT": _first(0),
    "ReverseSequence": _reversed_sequence,
    "Compress": _compressed,
    "GatherND": _gathered_by_tuples,
    "Det": _matrices,
    "StringConcat": pointwise(),
    "RegexFullMatch": pointwise(),
    "StringNormalizer": _normalized_texts,
    "StringSplit": _split_texts,
}
