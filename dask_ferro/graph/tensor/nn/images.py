"""Pooling of images: (batch, channels, height, width)."""

from __future__ import annotations

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.nn.windows import Sizes, counts, spatial, windows
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, emit


def max_pool2d(x: TensorLike, size: Sizes, /, *, stride: Sizes | None = None, padding: Sizes = 0) -> Tensor:
    """Return the largest element of each window, channel by channel; ONNX Runtime may pass over a NaN.

    Parameters
    ----------
    x : Tensor
        (batch, channels, height, width), of floating point numbers.
    size : int or pair of int
        Of a window, in height and width; at least 1.
    stride : int or pair of int, optional
        From one window to the next; the size if left out.
    padding : int or pair of int, optional
        Elements of -inf on both sides of height and width, at most half of a window.

    Returns
    -------
    Tensor
        (batch, channels, windows in height, windows in width), in the dtype of `x`.

    Raises
    ------
    ConfigError
        `x` is no such image, a size or stride is below 1, the padding is too large, or no window fits.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> x = ff.argument("x", ("N", 3, 32, 32))
    >>> ff.nn.max_pool2d(x, 2)
    <Tensor MaxPool: float32(N, 3, 16, 16)>
    """
    return _pooled("MaxPool", x, size, stride, padding, "max_pool2d")


def avg_pool2d(x: TensorLike, size: Sizes, /, *, stride: Sizes | None = None, padding: Sizes = 0) -> Tensor:
    """Return the mean of each window, channel by channel; its padding counts as zeros, as in PyTorch.

    Parameters, result and errors are those of `max_pool2d`.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> x = ff.argument("x", ("N", 3, 32, 32))
    >>> ff.nn.avg_pool2d(x, 2)
    <Tensor AveragePool: float32(N, 3, 16, 16)>
    """
    return _pooled("AveragePool", x, size, stride, padding, "avg_pool2d", count_include_pad=1)


def _pooled(
    op_type: str, x: TensorLike, size: Sizes, stride: Sizes | None, padding: Sizes, where: str, **counted: int
) -> Tensor:
    image, kernel = spatial(x, 2, where), counts(size, "size", 2, where)
    shape, geometry = windows(image, kernel, size if stride is None else stride, padding, 1, where)
    if any(2 * pad > length for pad, length in zip(geometry["pads"], kernel * 2, strict=True)):
        raise ConfigError(f"{where}: padding: got {padding!r}, wanted at most half of the size {size!r}")
    dims = (*image.shape[:2], *shape)
    return emit(op_type, [image], dims, kernel_shape=list(kernel), **(geometry | counted))


__all__ = ["avg_pool2d", "max_pool2d"]
