"""Windows over images: convolution, pooling, resampling, regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import BILINEAR, UNKNOWN_TO_KEEP, Flops, OpFacts, per_input, rows_of
from dask_ferro.graph.ops.labels import Dims, Labels, Rule, TypedNode, all_but, first_dimension
from dask_ferro.graph.ops.states import Finding, Rows, State

# FLOPs.


def conv_flops(weight: int, bias: int) -> Flops:
    """Return the FLOPs of a convolution: each output element is a product over [C / group, *kernel]."""
    return lambda o: o.out() * (2.0 * prod(o.shape(weight)[1:]) + o.has(bias))


def _conv_transpose(o: Operands) -> float:
    """Each input element meets [M / group, *kernel] weights."""
    return 2.0 * o.size(0) * prod(o.shape(1)[1:]) + o.has(2) * o.out()


def _pool_flops(o: Operands) -> float:
    return float(o.out() * prod(o.attribute("kernel_shape", ())))


def _taps(o: Operands) -> float:
    """Interpolation: 2 (linear) or 4 (cubic) neighbours for each dimension that is resampled."""
    mode = str(o.attribute("mode", "nearest"))
    dims = sum(a != b for a, b in zip(o.shape(0), o.out_shape(), strict=False))
    return 0.0 if mode == "nearest" else 2.0 * o.out() * float((4 if mode == "cubic" else 2) ** dims)


# Labels.


def _conv(kernel: Dims) -> Labels:
    """Batch, input and output channels are split; with groups, whole groups."""

    def labels(o: TypedNode) -> Rule:
        still: Dims = (None,) * (o.rank() - 2)
        linear = ((0,), (1,))
        if o.attribute("group", 1) == 1:
            x, w, y = ("n", "c", *still), (*kernel, *still), ("n", "m", *still)
            return Rule((x, w, ("m",)), (y,), "sum", linear, once=(2,))
        x, w = ("n", "m", *still), ("m", None, *still)
        return Rule((x, w, ("m",)), (x,), "sum", linear, once=(2,), counts={"group": (0, 1)})

    return labels


def _causal(o: TypedNode) -> Rule:
    """Batch and channels, each of which has a kernel of its own; time is a window."""
    x: Dims = ("n", "c", None)
    return Rule((x, ("c", None, None), ("c",), x), (x, x)[: len(o.node.outputs)])


def _window(o: TypedNode) -> range:
    return range(2, o.rank())


def _largest(o: TypedNode) -> Rule | None:
    """MaxPool: its indices count through the whole tensor, so they have no labels."""
    rule = all_but(_window)(o)
    return rule and rule._replace(outputs=rule.outputs[:1])


# Rows of a batch.


def _resize_rows(o: TypedNode, states: Sequence[State], rows: int) -> State:
    """The positions of the rows, if their axis keeps its size; never split: a scale of 1.1 keeps a length of 4."""
    state = states[0]
    if not isinstance(state, Rows) or not o.is_known:
        return UNKNOWN_TO_KEEP
    crops = str(o.attribute("coordinate_transformation_mode", "")) == "tf_crop_and_resize"
    if crops or o.out_shape()[state.dim] != o.shape(0)[state.dim]:
        return Finding(not crops, "resizes them")
    return state


TABLE: Mapping[str, OpFacts] = {
    "Conv": OpFacts(conv_flops(1, 2), labels=_conv(("m", "c"))),
    "ConvTranspose": OpFacts(_conv_transpose, labels=_conv(("c", "m"))),
    "DeformConv": OpFacts(conv_flops(1, 3), labels=first_dimension(0, 2, 4)),
    "CausalConvWithState": OpFacts(conv_flops(1, 2), labels=_causal),
    "AveragePool": OpFacts(_pool_flops, labels=all_but(_window, (0,))),
    "LpPool": OpFacts(_pool_flops, labels=all_but(_window)),
    "MaxPool": OpFacts(_pool_flops, labels=_largest),
    "GlobalAveragePool": OpFacts(per_input(1), labels=all_but(_window, (0,))),
    "GlobalMaxPool": OpFacts(per_input(1), labels=all_but(_window)),
    "GlobalLpPool": OpFacts(per_input(2), labels=all_but(_window)),
    "MaxUnpool": OpFacts(0),
    "MaxRoiPool": OpFacts(per_input(1)),
    "RoiAlign": OpFacts(4 * BILINEAR),
    "Col2Im": OpFacts(per_input(1), labels=first_dimension(0)),
    **rows_of("Resize Upsample", OpFacts(_taps, row_states=_resize_rows, takes_sizes="in shapes")),
    "GridSample": OpFacts(BILINEAR, labels=first_dimension(0, 1)),
    "AffineGrid": OpFacts(8),
}
