"""Windows that slide over (batch, channels, ...): convolution of one, two or three spatial dimensions, and pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import Any

from dask_ferro.errors import InputError, is_count
from dask_ferro.graph.tensor.dims import Shape, format_shape, is_static, same_dim, sizes, window_size
from dask_ferro.graph.tensor.nn.layers import check_shape
from dask_ferro.graph.tensor.rows import example, row
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, emit, floating, promote

# One number for all spatial dimensions, or one for each.
Sizes = int | Sequence[int]

# The spatial dimensions by their number, in the order of the tensor.
_SPACE = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def _counts(value: Sizes, name: str, rank: int, where: str, least: int = 1) -> tuple[int, ...]:
    counts = tuple(value) if isinstance(value, Sequence) else (value,) * rank
    if len(counts) != rank or not all(is_count(n, least) for n in counts):
        several = " and ".join(f"one for {dim}" for dim in _SPACE[rank])
        wanted = f"wanted a whole number of at least {least}, or {several}"
        raise InputError(f"{where}: {name}: got {value!r}, {wanted}")
    return counts


def _spatial(input: TensorLike, rank: int, where: str) -> Tensor:
    image = floating(input, where)
    if image.ndim != rank + 2:
        raise InputError(f"{where}: takes (batch, channels, {', '.join(_SPACE[rank])}), got {image!r}")
    return image


def _windows(
    image: Tensor, kernel: Sequence[int], stride: Sizes, padding: Sizes, dilation: Sizes, where: str
) -> tuple[Shape, dict[str, Any]]:
    """Return the spatial dimensions of the result, and the attributes of the node."""
    rank = len(kernel)
    strides, spans = _counts(stride, "stride", rank, where), _counts(dilation, "dilation", rank, where)
    pads = _counts(padding, "padding", rank, where, 0)
    axes = zip(image.shape[2:], kernel, strides, zip(pads, pads, strict=True), spans, strict=True)
    shape = tuple(window_size(*axis, where) for axis in axes)
    return shape, {"strides": list(strides), "pads": [*pads, *pads], "dilations": list(spans)}


def _convolution(name: str, things: str, space: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return the convolution whose example has this size of its input."""
    rank = len(space)

    def function(
        input: TensorLike,
        weight: TensorLike,
        bias: TensorLike | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        """{things} convolved with a weight, in the promoted dtype of the arguments: (batch, channels out, {dims})

        Parameters
        ----------
        input : Tensor
            (batch, channels in, {dims}).
        weight, bias : Tensor
            (channels out, channels in / groups, {dims}), and (channels out); the bias is optional.
        stride, dilation, padding : int or sequence of int, optional
            Stride and dilation of each spatial dimension, at least 1; the number of zeros on both sides of each, at
            least 0.
        groups : int, optional
            The number of groups of channels that are convolved separately; it divides both numbers of channels.
        """
        parameters = [weight] if bias is None else [weight, bias]
        image, w, *biases = promote(name, _spatial(input, rank, name), *map(asarray, parameters))
        if w.ndim != rank + 2 or not is_static(w.shape[2:]):
            form = f"(out, in / groups, {', '.join(_SPACE[rank])})"
            raise InputError(f"{name}: a weight is {form}, got {w!r}")
        _check_channels(image, w, groups, name)
        for b in biases:
            check_shape(f"{name}: bias", b, w.shape[:1], f"one for each channel out of {w!r}")
        shape, attributes = _windows(image, sizes(w.shape[2:]), stride, padding, dilation, name)
        dims = (image.shape[0], w.shape[0], *shape)
        return emit("Conv", [image, w, *biases], dims, group=groups, **attributes)

    says = cleandoc(function.__doc__ or "").format(things=things, dims=", ".join(_SPACE[rank]))
    x, w = ("N", 3, *space), (8, 3, *(3 for _ in space))
    call = f"nn.{name}(ft.input('x', {x}), ft.input('w', {w}), padding=1)"
    return row(name, says, call, f"<Tensor Conv: float32{format_shape(('N', 8, *space))}>")(function)


conv1d = _convolution("conv1d", "sequences", (32,))
conv2d = _convolution("conv2d", "images", (32, 32))
conv3d = _convolution("conv3d", "volumes", (8, 32, 32))


def _check_channels(image: Tensor, weight: Tensor, groups: int, where: str) -> None:
    if not is_count(groups):
        raise InputError(f"{where}: groups: got {groups!r}, wanted a whole number of at least 1")
    out, each = weight.shape[:2]
    if isinstance(each, int) and not same_dim(image.shape[1], each * groups):
        raise InputError(
            f"{where}: {image.shape[1]!r} channels of {image!r} do not match {weight!r} in {groups} groups"
        )
    for what, channels in (("channels in", image.shape[1]), ("channels out", out)):
        if isinstance(channels, int) and channels % groups:
            raise InputError(
                f"{where}: {channels} {what} in {groups} groups; take a number that divides them"
            )


def _pool(
    where: str, op_type: str, input: TensorLike, kernel_size: Sizes, stride: Sizes | None, padding: Sizes
) -> Tensor:
    image, kernel = _spatial(input, 2, where), _counts(kernel_size, "kernel_size", 2, where)
    shape, geometry = _windows(image, kernel, kernel if stride is None else stride, padding, 1, where)
    if any(2 * pad > length for pad, length in zip(geometry["pads"], kernel * 2, strict=True)):
        wanted = f"at most half of the kernel_size {kernel_size!r}"
        raise InputError(f"{where}: padding: got {padding!r}, wanted {wanted}")
    counted = 1 if op_type == "AveragePool" else None
    dims = (*image.shape[:2], *shape)
    return emit(op_type, [image], dims, kernel_shape=list(kernel), count_include_pad=counted, **geometry)


@example(
    'nn.max_pool2d(ft.input("x", ("N", 3, 32, 32)), 2)',
    "<Tensor MaxPool: float32(N, 3, 16, 16)>",
)
def max_pool2d(
    input: TensorLike, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0
) -> Tensor:
    """Return the largest element of each window, channel by channel; ONNX Runtime may pass over a NaN.

    Parameters
    ----------
    input : Tensor
        (batch, channels, height, width). The result has the numbers of windows instead of height and width.
    kernel_size, stride : int or pair of int
        Size of a window, and distance from one window to the next, in height and width; the stride is the size by
        default.
    padding : int or pair of int, optional
        Elements of -inf on both sides of height and width, at most half of a window.
    """
    return _pool("max_pool2d", "MaxPool", input, kernel_size, stride, padding)


@example(
    'nn.avg_pool2d(ft.input("x", ("N", 3, 8, 8)), 2)',
    "<Tensor AveragePool: float32(N, 3, 4, 4)>",
)
def avg_pool2d(
    input: TensorLike, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0
) -> Tensor:
    """Return the mean of each window; its padding counts as zeros.  Parameters are the same as in `max_pool2d`."""
    return _pool("avg_pool2d", "AveragePool", input, kernel_size, stride, padding)
