"""Sliding windows over spatial axes, for convolution and pooling: their padding, number and elements.

The attributes of a window operator become a `KernelWindow` once; with the input's spatial sizes known, `place`
returns the padding and the number of positions along each axis.  Element k of the windows at all positions is then
a strided slice of the padded input (`taps`), so no namespace needs stride tricks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.graph.ir.nodes import attribute_of


class KernelWindow(NamedTuple):
    """A window's sizes, strides and dilations, per spatial axis."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    auto_pad: str
    ceil_mode: bool

    def reach(self, axis: int) -> int:
        """Return the length of a window along an axis, dilation included."""
        return (self.sizes[axis] - 1) * self.dilations[axis] + 1


class Placement(NamedTuple):
    """The windows of an input: the requested `pads`, `extra` at the end for ceil_mode, `counts` of positions."""

    pads: tuple[tuple[int, int], ...]
    extra: tuple[int, ...]
    counts: tuple[int, ...]

    def widths(self) -> list[tuple[int, int]]:
        """Return the whole padding, for an array with batch and channel axes before the spatial axes."""
        return [(0, 0), (0, 0), *((a, b + e) for (a, b), e in zip(self.pads, self.extra, strict=True))]


# The attributes of a window operator except its sizes, with their defaults.
WINDOW: Mapping[str, Any] = {
    "strides": (),
    "dilations": (),
    "pads": (),
    "auto_pad": "NOTSET",
    "ceil_mode": 0,
}


def window_of(
    sizes: Sequence[int],
    *,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    auto_pad: str,
    ceil_mode: int,
) -> KernelWindow:
    """Return the window that an operator's attributes describe."""
    rank = len(sizes)
    pads = pads or (0,) * (2 * rank)
    return KernelWindow(
        tuple(sizes),
        tuple(strides or (1,) * rank),
        tuple(dilations or (1,) * rank),
        tuple(zip(pads[:rank], pads[rank:], strict=True)),
        auto_pad,
        bool(ceil_mode),
    )


def only_pads(node: ir.Node, opset: int) -> bool:
    """Return whether no pad of a node is negative."""
    # A negative pad is a crop, on which the engines disagree.
    pads: Sequence[int] = attribute_of(node, "pads", ())
    return all(pad >= 0 for pad in pads)


def place(window: KernelWindow, spatial: Sequence[int]) -> Placement:
    """Return the padding and the number of windows for an input of these spatial sizes."""
    rows = [_place_axis(window, axis, n) for axis, n in enumerate(spatial)]
    return Placement(tuple(r[0] for r in rows), tuple(r[1] for r in rows), tuple(r[2] for r in rows))


def _place_axis(window: KernelWindow, axis: int, size: int) -> tuple[tuple[int, int], int, int]:
    stride, reach = window.strides[axis], window.reach(axis)
    if window.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        # ONNX's SAME: as many windows as strides fit, for every window length; the padding follows from that.
        count = -(-size // stride)
        total = max((count - 1) * stride + reach - size, 0)
        small, large = total // 2, total - total // 2
        return ((small, large) if window.auto_pad == "SAME_UPPER" else (large, small)), 0, count
    before, after = (0, 0) if window.auto_pad == "VALID" else window.pads[axis]
    span = size + before + after - reach
    count = (-(-span // stride) if window.ceil_mode else span // stride) + 1
    # The last window must start inside the input or its leading padding, or it would average nothing.
    if window.ceil_mode and (count - 1) * stride >= size + before:
        count -= 1
    extra = max((count - 1) * stride + reach - (size + before + after), 0)
    return (before, after), extra, count


def tap(window: KernelWindow, axis: int, offset: int, count: int) -> slice:
    """Return the slice of a padded axis that holds element `offset` of `count` windows."""
    start = offset * window.dilations[axis]
    return slice(start, start + (count - 1) * window.strides[axis] + 1, window.strides[axis])


def taps(window: KernelWindow, counts: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each element of the window, in row-major order: its offsets and its slices."""
    for offsets in itertools.product(*map(range, window.sizes)):
        yield (
            offsets,
            tuple(tap(window, axis, k, n) for axis, (k, n) in enumerate(zip(offsets, counts, strict=True))),
        )
