"""Where the number of rows may stand as an operand of a node: where it says how long the rows' own axis is.

    Expand(x [N, 1], [n, 4])     the axis of the rows has their number: no more is said than there is
    Expand(x [N, 1], [n])        aligned from the back, so each row is repeated n times
    Resize(x, sizes=[n, c, 8, 8])
    Trilu(x, k=n), Pad(x, [0, 0, 0, n]), TopK(x, n), Unsqueeze(x, [n]), Clip(x, 0, n)

A chunk has fewer rows than all, so anywhere else the count changes what a row becomes.
"""

from __future__ import annotations

from collections.abc import Sequence

from dask_ferro.graph.batch_independence.states import Counts, Rows, State
from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.sharding.placements import Site


def misplaced(o: Site, states: Sequence[State]) -> bool | None:
    """Return whether a node takes the number of rows for something else than the length of their axis.

    Returns
    -------
    True: surely.  False: it does not.  None: not known.

    Parameters
    ----------
    o : Site
        Of an operator that reads rows.
    states : sequence of State
        Of its inputs.
    """
    if (
        o.node.domain not in STANDARD_DOMAINS or o.node.op_type == "Reshape"
    ):  # a reshape is followed by its shapes
        return False
    found: list[bool | None] = [
        _is_misplaced(o, i, s, states[0]) for i, s in enumerate(states) if isinstance(s, Counts)
    ]
    return True if True in found else None if None in found else False


def _is_misplaced(o: Site, position: int, counts: Counts, data: State) -> bool | None:
    if counts.depends is None:
        return None
    if not isinstance(data, Rows) or not _spells_sizes(o, position):
        return True
    axes, own = _axes(o, position, len(counts.depends)), data.dim
    if axes is None or len(axes) != len(counts.depends):
        return None
    if o.node.op_type == "Expand":  # aligned from the back, and maybe of more axes than what it stretches
        own -= o.rank()
    others = [axis for depends, axis in zip(counts.depends, axes, strict=True) if depends and axis != own]
    if o.node.op_type == "Slice" and others and all(o.shape(0)[axis] == 1 for axis in others):
        return None  # an axis of one is taken whole, however many rows there are
    return bool(others)


def _spells_sizes(o: Site, position: int) -> bool:
    """Whether each element of an operand is about one axis: its length, a factor or where it begins or ends."""
    kind = o.node.op_type
    if kind == "Resize":
        return position in (2, 3) if o.opset >= 11 else position == 1
    return position in {"Expand": (1,), "Upsample": (1,), "Split": (1,), "Slice": (1, 2)}.get(kind, ())


def _axes(o: Site, position: int, count: int) -> Sequence[int] | None:
    """The axes that the elements are about, of Expand counted from the back; None: not known."""
    kind, rank = o.node.op_type, o.rank()
    if not rank:  # an unknown one
        return None
    if kind == "Expand":
        return range(-count, 0)
    if kind == "Split":
        return (o.axis(0),) * count
    if kind == "Slice":
        given = o.constant(3) if o.has(3) else tuple(range(count))
    else:
        given = tuple(o.attribute("axes", ())) or tuple(range(count))
    return None if given is None else tuple(axis % rank for axis in given)
