"""What PyTorch computes for ops that move elements; and what all entries of that table take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Op = Callable[..., Any]  # (torch, attributes, *inputs) -> the first output


class Attributes:
    """The attributes of a row and their defaults, rounded to float32 as ONNX stores them."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self.given.get(name, default)
        return float(np.float32(value)) if isinstance(value, float) else value


def ints(x: Any) -> list[int]:
    return [int(n) for n in np.atleast_1d(x.numpy())]


def widths(pads: list[int]) -> list[int]:
    """ONNX's pads (all before, all after) as PyTorch's (by axis, the last first)."""
    rank = len(pads) // 2
    return [pads[side * rank + axis] for axis in reversed(range(rank)) for side in (0, 1)]


# ---- layout ------------------------------------------------------------------------------------------------


def _unsqueezed(t: Any, a: Attributes, x: Any, axes: Any) -> Any:
    for axis in ints(axes):
        x = x.unsqueeze(axis)
    return x


def _sliced(
    t: Any, a: Attributes, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None
) -> Any:
    """By indices where a step is negative, which PyTorch's slices do not know."""
    over = range(len(starts)) if axes is None else ints(axes)
    by = [1] * len(starts) if steps is None else ints(steps)
    for axis, start, end, step in zip(over, ints(starts), ints(ends), by, strict=True):
        places = np.arange(x.shape[axis])[start:end:step].copy()
        x = x.index_select(axis, t.tensor(places))
    return x


def _padded(t: Any, a: Attributes, x: Any, pads: Any, value: Any = None, axes: Any = None) -> Any:
    over = range(x.ndim) if axes is None else [axis % x.ndim for axis in ints(axes)]
    given, every = ints(pads), [0] * (2 * x.ndim)
    for i, axis in enumerate(over):
        every[axis], every[x.ndim + axis] = given[i], given[len(given) // 2 + i]
    mode = {"constant": "constant", "edge": "replicate", "reflect": "reflect", "wrap": "circular"}[
        a("mode", "constant")
    ]
    if mode != "constant":  # PyTorch pads no batch and no channel so
        assert not any(every[:2] + every[x.ndim : x.ndim + 2])
        return t.nn.functional.pad(x, widths(every[2 : x.ndim] + every[x.ndim + 2 :]), mode)
    if value is None:
        return t.nn.functional.pad(x, widths(every))
    return t.nn.functional.pad(x - value, widths(every)) + value


def _depth_to_space(t: Any, a: Attributes, x: Any) -> Any:
    size = a("blocksize")
    if a("mode", "DCR") == "CRD":
        return t.pixel_shuffle(x, size)
    n, c, h, w = x.shape
    blocks = x.reshape(n, size * size, c // size**2, h, w).transpose(1, 2)
    return t.pixel_shuffle(blocks.reshape(x.shape), size)


def _space_to_depth(t: Any, a: Attributes, x: Any) -> Any:
    size = a("blocksize")
    y = t.pixel_unshuffle(x, size)
    n, c, h, w = y.shape
    return y.reshape(n, c // size**2, size * size, h, w).transpose(1, 2).reshape(y.shape)


LAYOUT: dict[str, Op] = {
    "Reshape": lambda t, a, x, shape: x.reshape(ints(shape)),
    "Flatten": lambda t, a, x: x.reshape(int(np.prod(x.shape[: a("axis", 1)])), -1),
    "Squeeze": lambda t, a, x, axes: x.squeeze(tuple(ints(axes))),
    "Unsqueeze": _unsqueezed,
    "Transpose": lambda t, a, x: x.permute(a("perm", list(range(x.ndim))[::-1])),
    "Expand": lambda t, a, x, shape: x.expand(t.broadcast_shapes(x.shape, tuple(ints(shape)))),
    "Tile": lambda t, a, x, repeats: x.repeat(ints(repeats)),
    "Concat": lambda t, a, *xs: t.cat(xs, a("axis")),
    "Split": lambda t, a, x, lengths: t.split(x, ints(lengths), a("axis", 0))[0],
    "Slice": _sliced,
    "Pad": _padded,
    "Trilu": lambda t, a, x: t.triu(x) if a("upper", 1) else t.tril(x),
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
}


# ---- indices -----------------------------------------------------------------------------------------------


def _gathered(t: Any, a: Attributes, x: Any, indices: Any) -> Any:
    return x[(slice(None),) * (a("axis", 0) % x.ndim) + (indices,)]


def _gathered_nd(t: Any, a: Attributes, x: Any, indices: Any) -> Any:
    return x[indices.unbind(-1)]


def _scattered_elements(t: Any, a: Attributes, x: Any, indices: Any, updates: Any) -> Any:
    write = x.scatter_add if a("reduction", "none") == "add" else x.scatter
    return write(a("axis", 0), indices, updates)


def _scattered_nd(t: Any, a: Attributes, x: Any, indices: Any, updates: Any) -> Any:
    return x.index_put(indices.unbind(-1), updates, accumulate=a("reduction", "none") == "add")


INDICES: dict[str, Op] = {
    "Gather": _gathered,
    "GatherElements": lambda t, a, x, indices: t.gather(x, a("axis", 0), indices),
    "GatherND": _gathered_nd,
    "ScatterElements": _scattered_elements,
    "ScatterND": _scattered_nd,
    "TopK": lambda t, a, x, k: t.topk(x, int(k), a("axis", -1))[0],
}
