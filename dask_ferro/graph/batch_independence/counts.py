"""Uses of the number of rows other than as the size of their own axis.

    Expand(x [N, 1], [n, 4])     allowed: the axis of the rows has this size anyway
    Expand(x [N, 1], [n])        misplaced: aligned from the back, so each row is repeated n times
    Resize(x, sizes=[n, c, 8, 8])
    Trilu(x, k=n), Pad(x, [0, 0, 0, n]), TopK(x, n), Unsqueeze(x, [n]), Clip(x, 0, n)

A chunk has fewer rows than the batch, so any other use of the number changes the result of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ops.labels import TypedNode
from dask_ferro.graph.ops.states import Counts, Depends, State
from dask_ferro.graph.ops.table import facts_of


def misplaced(o: TypedNode, states: Sequence[State]) -> bool | None:
    """Return whether a node uses the number of rows other than as the size of their axis.

    Parameters
    ----------
    o : TypedNode
        A node that reads rows.
    states : sequence of State
        The states of its inputs.

    Returns
    -------
    bool or None
        None if it is not known.
    """
    # The meaning of operands in other domains is not known, so no finding is reported for them.
    if o.node.domain not in STANDARD_DOMAINS:
        return False
    misplaces = facts_of(o.node).misplaces or _surely
    found = [misplaces(o, i, s.depends, states[0]) for i, s in enumerate(states) if isinstance(s, Counts)]
    return True if True in found else None if None in found else False


def _surely(o: TypedNode, position: int, depends: Depends, data: State) -> bool | None:
    """Return the default rule: no operand of an operator is a size."""
    return None if depends is None else True
