"""Windows over images: convolution, pooling, resampling, regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import (
    ALONG_ROWS,
    BILINEAR,
    EXP,
    Combines,
    Flops,
    OpFacts,
    combines_all,
    no_flops,
    per_input,
)
from dask_ferro.graph.ops.families.layout import lengths
from dask_ferro.graph.ops.labels import Dims, Labels, Rule, TypedNode, first_dimension, names, without

# FLOPs.


def conv_flops(weight: int, bias: int) -> Flops:
    """Return the FLOPs of a convolution: each output element is a product over [C / group, *kernel]."""
    return lambda o: o.out() * (2.0 * prod(o.shape(weight)[1:]) + o.has(bias))


def _conv_transpose(o: Operands) -> float:
    """Each input element meets [M / group, *kernel] weights."""
    return 2.0 * o.size(0) * prod(o.shape(1)[1:]) + o.has(2) * o.out()


def _deform_conv(o: Operands) -> float:
    """A convolution whose every input is sampled between pixels."""
    samples = o.shape(0)[1:2] + o.shape(1)[2:] + o.out_shape()[:1] + o.out_shape()[2:]
    return conv_flops(1, 3)(o) + BILINEAR * prod(samples)


def _causal_conv(o: Operands) -> float:
    activation = 0.0 if str(o.attribute("activation", "none")) == "none" else EXP + 3
    return o.out() * (2.0 * prod(o.shape(1)[2:]) + o.has(2) + activation)


def _pool_flops(o: Operands) -> float:
    return float(o.out() * prod(o.attribute("kernel_shape", ())))


def _taps(o: Operands) -> float:
    """Interpolation: 2 (linear) or 4 (cubic) neighbours for each dimension that is resampled."""
    mode = str(o.attribute("mode", "linear" if o.node.op_type == "GridSample" else "nearest"))
    if "nearest" in mode:
        return 0.0
    given, made = o.shape(0), o.out_shape()
    if o.node.op_type == "GridSample":
        dims = max(1, len(given) - 2)
    else:
        dims = sum(a != b for a, b in zip(given, made, strict=False))
    return 2.0 * o.out() * float((4 if "cubic" in mode else 2) ** dims)


def _roi_align(o: Operands) -> float:
    samples = o.attribute("sampling_ratio", 0) or 2  # 0 adapts to the box: two a side is usual
    return BILINEAR * o.out() * samples**2


def _affine_grid(o: Operands) -> float:
    return o.out() * 2.0 * ((o.out_shape() or (1,))[-1] + 1)


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


def _batch_and_channels(*linear: tuple[int, ...]) -> Labels:
    def labels(o: TypedNode) -> Rule | None:
        dims = without(names(o.rank()), range(2, o.rank()))
        return Rule((dims,), (dims,), linear=linear)

    return labels


def _resized(o: TypedNode) -> Rule | None:
    """The dimensions that keep their size."""
    if str(o.attribute("coordinate_transformation_mode", "")) == "tf_crop_and_resize":
        return None
    changed = [i for i, (a, b) in enumerate(zip(o.shape(0), o.out_shape(), strict=True)) if a != b]
    dims = without(names(o.rank()), changed)
    return Rule((dims,), (dims,))


# Rows of a batch.


def window_combines(weight: int) -> Combines:
    """Return that channels are summed over, and neighbours where a window has any."""
    return lambda o, _, dim: ALONG_ROWS if dim == 1 or _has_neighbours(o, weight, dim - 2) else ""


def _has_neighbours(o: TypedNode, weight: int, axis: int) -> bool:
    """Whether a window is longer than one, or skips some or adds to them, along a dimension of the image."""
    if axis < 0:
        return False
    ones = (1,) * (axis + 1)
    kernel = tuple(o.attribute("kernel_shape", ())) or o.shape(weight)[2:]
    pads = tuple(o.attribute("pads", ()))
    half = len(pads) // 2
    return (
        (kernel or ones)[axis] != 1
        or tuple(o.attribute("strides", ones))[axis] != 1
        or bool(pads and (pads[axis] or pads[half + axis]))
    )


def _resize_combines(o: TypedNode, position: int, dim: int) -> str:
    return "resizes them" if o.out_shape()[dim] != o.shape(0)[dim] else ""


def _scales_and_sizes(o: TypedNode) -> Sequence[int]:
    return (2, 3) if o.opset >= 11 else (1,)


def _scaled_axes(o: TypedNode, count: int) -> Sequence[int]:
    given = tuple(o.attribute("axes", ())) or tuple(range(count))
    return tuple(axis % o.rank() for axis in given)


def _convolution(flops: Flops, kernel: Dims) -> OpFacts:
    return OpFacts(flops, labels=_conv(kernel), combines=window_combines(1))


def _pool(labels: Labels) -> OpFacts:
    return OpFacts(_pool_flops, labels=labels, combines=window_combines(1))


def _global(price: float, *linear: tuple[int, ...]) -> OpFacts:
    return OpFacts(per_input(price), labels=_batch_and_channels(*linear), combines=combines_all)


def _resize(positions: Callable[[TypedNode], Sequence[int]]) -> OpFacts:
    return OpFacts(
        _taps,
        # For ranks it is whole: a scale of 1.1 keeps a length of 4, and is no 1.
        row_labels=_resized,
        combines=_resize_combines,
        misplaces=lengths(positions, _scaled_axes),
    )


TABLE: Mapping[str, OpFacts] = {
    "Conv": _convolution(conv_flops(1, 2), ("m", "c")),
    "ConvTranspose": _convolution(_conv_transpose, ("c", "m")),
    "DeformConv": OpFacts(_deform_conv, labels=first_dimension(0, 2, 4)),
    "CausalConvWithState": OpFacts(_causal_conv, labels=_causal, combines=window_combines(1)),
    "AveragePool": _pool(_batch_and_channels((0,))),
    "LpPool": _pool(_batch_and_channels()),
    "MaxPool": _pool(_batch_and_channels()),  # its indices count through the whole tensor
    "GlobalAveragePool": _global(1, (0,)),
    "GlobalMaxPool": _global(1),
    "GlobalLpPool": _global(2),
    "MaxUnpool": OpFacts(no_flops),
    "MaxRoiPool": OpFacts(per_input(1)),
    "RoiAlign": OpFacts(_roi_align),
    "Col2Im": OpFacts(per_input(1), labels=first_dimension(0)),
    "Resize": _resize(_scales_and_sizes),
    "Upsample": _resize(lambda o: (1,)),
    "GridSample": OpFacts(_taps, labels=first_dimension(0, 1)),
    # An operand spells the batch, beside lengths that the result does not have.
    "AffineGrid": OpFacts(_affine_grid, row_labels=first_dimension(0)),
}
