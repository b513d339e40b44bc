"""Arithmetic on dimensions: known (an int), named (a string) or unknown (None).

A name stands for one size throughout a graph, which is assumed not to be 1: "N" broadcasts with "N" or 1, and any
other size is refused while the graph is written.  None broadcasts with everything; the engine checks it at run time.
Nothing here depends on tensors or nodes.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.inference import Dim

Shape = tuple[Dim, ...]


def check_dim(dim: object, name: str) -> Dim:
    """Return a dimension of the argument `name`, or raise `InputError` if it is not a dimension."""
    if dim is None or (isinstance(dim, str) and dim):
        return dim
    try:
        size = operator.index(dim)  # type: ignore[arg-type]
    except TypeError:
        size = -1
    if size < 0:
        raise InputError(f"argument {name!r}: a dimension is a size, a name or None, got {dim!r}")
    return size


def is_static(shape: Iterable[Dim]) -> bool:
    return all(isinstance(dim, int) for dim in shape)


def sizes(shape: Iterable[Dim]) -> tuple[int, ...]:
    """Return the dimensions of a static shape as plain ints."""
    return tuple(dim for dim in shape if isinstance(dim, int))


def broadcast(shapes: Sequence[Shape], where: str) -> Shape:
    """Return the shape that `shapes` broadcast to, as in numpy; `where` names the call in an error."""
    rank, result = max(map(len, shapes), default=0), []
    for dims in zip(*[(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes], strict=True):
        # A name and a number are refused, and so are two names: they may differ at run time.
        known = [dim for dim in dict.fromkeys(dims) if dim is not None and dim != 1]
        if len(known) > 1:
            listed = " and ".join(map(format_shape, shapes))
            raise InputError(
                f"{where}: shapes {listed} do not broadcast: {known[0]!r} against {known[1]!r}; "
                "reshape one, or give both dimensions one name"
            )
        result.append(known[0] if known else None if None in dims else 1)
    return tuple(result)


def format_shape(shape: Sequence[Dim]) -> str:
    """Return the shape as text for messages: (N, 4, ?)."""
    inside = ", ".join("?" if dim is None else str(dim) for dim in shape)
    return f"({inside},)" if len(shape) == 1 else f"({inside})"


def same_dim(a: Dim, b: Dim) -> bool:
    """Return whether two dimensions can be equal."""
    return a is None or b is None or a == b


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return len(a) == len(b) and all(map(same_dim, a, b))


def axis_of(axis: int, rank: int, where: str) -> int:
    # True would be axis 1.
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        remedy = f"take one in [{-rank}, {rank})" if rank else "a scalar has no axis"
        raise InputError(f"{where}: axis {axis!r} of a tensor of {rank} dimensions; {remedy}")
    return axis % rank


def axes_of(axis: int | Sequence[int] | None, rank: int, where: str) -> tuple[int, ...]:
    """Return the axes counted from the front, in order; None means all of them."""
    if axis is None:
        return tuple(range(rank))
    listed = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted(axis_of(a, rank, where) for a in listed))
    if len(set(axes)) != len(axes):
        raise InputError(f"{where}: an axis occurs twice in {listed}; name each once")
    return axes


def resolve_shape(old: Shape, new: Sequence[Dim], where: str) -> Shape:
    """Return `new` with its -1 replaced, as far as the names allow."""
    bad = [d for d in new if d is None or (isinstance(d, int) and d < -1)]
    if bad or list(new).count(-1) > 1:
        raise InputError(f"{where}: {tuple(new)} is not a shape: sizes, names, and at most one -1")
    # The number of elements is not known, so the new shape is accepted; ONNX checks it at run time.
    if None in old:
        return tuple(None if d == -1 else d for d in new)
    names_left = Counter(d for d in old if isinstance(d, str))
    names_left.subtract(d for d in new if isinstance(d, str))
    have, want = math.prod(sizes(old)), math.prod(d for d in sizes(new) if d != -1)
    fault = f"{where}: {format_shape(old)} and {format_shape(new)} have different numbers of elements"
    if -1 not in new:
        if have != want or any(names_left.values()):
            raise InputError(f"{fault}; use -1 for the dimension that should take the rest")
        return tuple(new)
    if (
        min(names_left.values(), default=0) < 0
        or (want == 0)
        or (have % want and not any(names_left.values()))
    ):
        raise InputError(f"{fault}, whatever the -1 is")
    left = list(names_left.elements())
    # The remainder of the names is a size, or one of the names; the size of a product of names is not known.
    rest: Dim = have // want if not left else left[0] if len(left) == 1 and have == want else None
    return tuple(rest if d == -1 else d for d in new)


def cut_size(dim: Dim, cut: slice) -> Dim:
    if isinstance(dim, int):
        return len(range(*cut.indices(dim)))
    # A slice of a dimension of unknown size has a known length only if it takes everything.
    return dim if cut in (slice(None), slice(None, None, 1), slice(None, None, -1)) else None


def window_size(dim: Dim, kernel: int, stride: int, pads: tuple[int, int], dilation: int, where: str) -> Dim:
    """Return the number of windows of `kernel` taps that fit along a padded dimension."""
    reach = dilation * (kernel - 1) + 1
    if not isinstance(dim, int):
        return dim if stride == 1 and sum(pads) + 1 == reach else None
    count = (dim + sum(pads) - reach) // stride + 1
    if count < 1:
        raise InputError(f"{where}: a window of {reach} does not fit into {dim} + {sum(pads)} of padding")
    return count
