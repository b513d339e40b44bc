"""Convolution and pooling of images: (batch, channels, height, width)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import alike, same, window_size, written
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    emit,
    floating,
    promoted,
)
from dask_ferro.options import is_count

Pair = int | Sequence[int]


def _two(value: Pair, name: str, where: str, least: int = 1) -> tuple[int, int]:
    """Return the numbers for height and width, each checked to be at least `least`."""
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(is_count(n, least) for n in pair):
        wanted = f"wanted a whole number from {least} on, or one for height and one for width"
        raise ConfigError(f"{where}: {name}: got {value!r}, {wanted}")
    return pair


def _image(x: TensorLike, where: str) -> Tensor:
    tensor = floating(x, where)
    if tensor.ndim != 4:
        raise ConfigError(f"{where}: takes (batch, channels, height, width), got {tensor!r}")
    return tensor


def _spatial(
    x: Tensor, kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair, where: str
) -> tuple[tuple[Dim, ...], dict[str, Any]]:
    """Return height and width of the result, and the attributes of the node."""
    strides, spans = _two(stride, "stride", where), _two(dilation, "dilation", where)
    pads = _two(padding, "padding", where, 0)
    shape = tuple(
        window_size(x.shape[2 + i], kernel[i], strides[i], (pads[i], pads[i]), spans[i], where)
        for i in (0, 1)
    )
    return shape, {"strides": list(strides), "pads": [*pads, *pads], "dilations": list(spans)}


def conv2d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    /,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Return images convolved with a weight of (channels out, channels in / groups, height, width).

    Parameters
    ----------
    x : Tensor
        (batch, channels in, height, width).
    weight, bias : Tensor
        The bias is of (channels out), and may be left out.
    stride, dilation : int or pair of int, optional
        Of height and width, from 1 on.
    padding : int or pair of int, optional
        Zeros on both sides of height and width.
    groups : int, optional
        The number of groups of channels that are convolved separately.

    Returns
    -------
    Tensor
        (batch, channels out, height, width), in the promoted dtype of the arguments.

    Raises
    ------
    ConfigError
        Channels of image and weight that differ, or that `groups` does not divide; a bias of another length; a stride
        or dilation of 0; or a window larger than the image.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> x = ff.argument("x", ("N", 3, 32, 32))
    >>> ff.nn.conv2d(x, ff.argument("w", (8, 3, 3, 3)), padding=1)
    <Tensor Conv: float32(N, 8, 32, 32)>
    """
    image = _image(x, "conv2d")
    given = [image, weight] if bias is None else [image, weight, bias]
    parts = promoted("conv2d", *map(asarray, given))
    w = parts[1]
    if w.ndim != 4 or not (isinstance(w.shape[2], int) and isinstance(w.shape[3], int)):
        raise ConfigError(f"conv2d: a weight is (out, in / groups, height, width), got {w!r}")
    _check_channels(image, w, groups)
    if bias is not None and not alike(parts[2].shape, w.shape[:1]):
        wanted = f"{written(w.shape[:1])}, one for each channel out of {w!r}"
        raise ConfigError(f"conv2d: bias: got {parts[2]!r}, wanted {wanted}")
    shape, attributes = _spatial(image, (w.shape[2], w.shape[3]), stride, padding, dilation, "conv2d")
    return emit("Conv", list(parts), (image.shape[0], w.shape[0], *shape), group=groups, **attributes)


def _check_channels(image: Tensor, weight: Tensor, groups: int) -> None:
    if not is_count(groups):
        raise ConfigError(f"conv2d: groups: got {groups!r}, wanted a whole number from 1 on")
    out, each = weight.shape[:2]
    if isinstance(each, int) and not same(image.shape[1], each * groups):
        raise ConfigError(
            f"conv2d: {image.shape[1]!r} channels of {image!r} do not match {weight!r} in {groups} groups"
        )
    for what, channels in (("channels in", image.shape[1]), ("channels out", out)):
        if isinstance(channels, int) and channels % groups:
            raise ConfigError(
                f"conv2d: {channels} {what} in {groups} groups; take a number that divides them"
            )


def max_pool2d(x: TensorLike, size: Pair, /, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the largest element of each window, channel by channel.

    Parameters
    ----------
    x : Tensor
        (batch, channels, height, width), of floating point numbers.
    size : int or pair of int
        Of a window, in height and width; at least 1.
    stride : int or pair of int, optional
        From one window to the next; the size if left out.
    padding : int or pair of int, optional
        Elements of -inf on both sides of height and width.

    Returns
    -------
    Tensor
        (batch, channels, windows in height, windows in width), in the dtype of `x`.

    Raises
    ------
    ConfigError
        `x` is no such image, a size or stride is below 1, or no window fits.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> x = ff.argument("x", ("N", 3, 32, 32))
    >>> ff.nn.max_pool2d(x, 2)
    <Tensor MaxPool: float32(N, 3, 16, 16)>
    """
    return _pooled("MaxPool", x, size, stride, padding, "max_pool2d")


def avg_pool2d(x: TensorLike, size: Pair, /, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the mean of each window, channel by channel; padding is not counted.

    Parameters, result and errors are those of `max_pool2d`.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> x = ff.argument("x", ("N", 3, 32, 32))
    >>> ff.nn.avg_pool2d(x, 2)
    <Tensor AveragePool: float32(N, 3, 16, 16)>
    """
    return _pooled("AveragePool", x, size, stride, padding, "avg_pool2d")


def _pooled(
    op_type: str, x: TensorLike, size: Pair, stride: Pair | None, padding: Pair, where: str
) -> Tensor:
    image, kernel = _image(x, where), _two(size, "size", where)
    shape, attributes = _spatial(image, kernel, size if stride is None else stride, padding, 1, where)
    return emit(op_type, [image], (*image.shape[:2], *shape), kernel_shape=list(kernel), **attributes)


__all__ = ["avg_pool2d", "conv2d", "max_pool2d"]
