"""Where the number of rows may stand as an operand of a node: where it says how long the rows' own axis is.

    Expand(x [N, 1], [n, 4])     the axis of the rows has their number: no more is said than there is
    Expand(x [N, 1], [n])        aligned from the back, so each row is repeated n times
    Resize(x, sizes=[n, c, 8, 8])
    Trilu(x, k=n), Pad(x, [0, 0, 0, n]), TopK(x, n), Unsqueeze(x, [n]), Clip(x, 0, n)

A chunk has fewer rows than all, so anywhere else the count changes what a row becomes.
"""

from __future__ import annotations

from collections.abc import Sequence

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ops.labels import TypedNode
from dask_ferro.graph.ops.states import Counts, Depends, State
from dask_ferro.graph.ops.table import facts_of


def misplaced(o: TypedNode, states: Sequence[State]) -> bool | None:
    """Return whether a node takes the number of rows for something else than the length of their axis.

    Returns
    -------
    True: surely.  False: it does not.  None: not known.

    Parameters
    ----------
    o : TypedNode
        Of an operator that reads rows.
    states : sequence of State
        Of its inputs.
    """
    if o.node.domain not in STANDARD_DOMAINS:
        return False
    misplaces = facts_of(o.node).misplaces or _surely
    found = [misplaces(o, i, s.depends, states[0]) for i, s in enumerate(states) if isinstance(s, Counts)]
    return True if True in found else None if None in found else False


def _surely(o: TypedNode, position: int, depends: Depends, data: State) -> bool | None:
    """No operand of most operators spells sizes."""
    return None if depends is None else True
