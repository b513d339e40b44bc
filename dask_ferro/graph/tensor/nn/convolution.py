"""Convolution over one, two or three spatial dimensions."""

from __future__ import annotations

from dask_ferro.errors import ConfigError, is_count
from dask_ferro.graph.tensor.dims import alike, is_static, same, sizes, written
from dask_ferro.graph.tensor.nn.windows import Sizes, spatial, weight_form, windows
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, emit, promoted


def conv1d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    /,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Return sequences convolved with a weight of (channels out, channels in / groups, length).

    Parameters, result and errors are those of `conv2d`, for (batch, channels, length).

    Examples
    --------
    >>> import dask_ferro as ff
    >>> x = ff.argument("x", ("N", 3, 32))
    >>> ff.nn.conv1d(x, ff.argument("w", (8, 3, 3)), padding=1)
    <Tensor Conv: float32(N, 8, 32)>
    """
    return _convolved(x, weight, bias, (stride, padding, dilation), groups, 1)


def conv2d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    /,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
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
    return _convolved(x, weight, bias, (stride, padding, dilation), groups, 2)


def conv3d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    /,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Return volumes convolved with a weight of (channels out, channels in / groups, depth, height, width).

    Parameters, result and errors are those of `conv2d`, for (batch, channels, depth, height, width).

    Examples
    --------
    >>> import dask_ferro as ff
    >>> x = ff.argument("x", ("N", 3, 8, 32, 32))
    >>> ff.nn.conv3d(x, ff.argument("w", (8, 3, 3, 3, 3)), padding=1)
    <Tensor Conv: float32(N, 8, 8, 32, 32)>
    """
    return _convolved(x, weight, bias, (stride, padding, dilation), groups, 3)


def _convolved(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None,
    steps: tuple[Sizes, Sizes, Sizes],
    groups: int,
    rank: int,
) -> Tensor:
    """Return a convolution over `rank` spatial dimensions; `steps` are stride, padding and dilation."""
    where = f"conv{rank}d"
    image = spatial(x, rank, where)
    given = [image, weight] if bias is None else [image, weight, bias]
    parts = promoted(where, *map(asarray, given))
    w = parts[1]
    if w.ndim != rank + 2 or not is_static(w.shape[2:]):
        raise ConfigError(f"{where}: a weight is {weight_form(rank)}, got {w!r}")
    _check_channels(image, w, groups, where)
    if bias is not None and not alike(parts[2].shape, w.shape[:1]):
        wanted = f"{written(w.shape[:1])}, one for each channel out of {w!r}"
        raise ConfigError(f"{where}: bias: got {parts[2]!r}, wanted {wanted}")
    shape, attributes = windows(image, sizes(w.shape[2:]), *steps, where)
    return emit("Conv", list(parts), (image.shape[0], w.shape[0], *shape), group=groups, **attributes)


def _check_channels(image: Tensor, weight: Tensor, groups: int, where: str) -> None:
    if not is_count(groups):
        raise ConfigError(f"{where}: groups: got {groups!r}, wanted a whole number from 1 on")
    out, each = weight.shape[:2]
    if isinstance(each, int) and not same(image.shape[1], each * groups):
        raise ConfigError(
            f"{where}: {image.shape[1]!r} channels of {image!r} do not match {weight!r} in {groups} groups"
        )
    for what, channels in (("channels in", image.shape[1]), ("channels out", out)):
        if isinstance(channels, int) and channels % groups:
            raise ConfigError(
                f"{where}: {channels} {what} in {groups} groups; take a number that divides them"
            )


__all__ = ["conv1d", "conv2d", "conv3d"]
