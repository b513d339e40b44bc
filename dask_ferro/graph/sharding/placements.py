"""Placements of a value along one axis of a mesh: replicated, sharded, or partial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

# The metadata key of a rank's node for the layout of its output.
PLACEMENT = "dask_ferro.placement"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis has the whole value.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.parallel as fp
    >>> str(fp.Replicate())
    'R'
    """

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank i of the axis has the i-th part along dimension `dim`, counted from the front.

    The number of ranks divides the dimension.  If several axes of a mesh split one dimension, each splits the parts
    of the axes before it.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.parallel as fp
    >>> fp.Shard(1).dim, str(fp.Shard(1))
    (1, 'S(1)')
    """

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank has a term of the value's shape; the value is the sum (or mean, max, min) of all terms.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.parallel as fp
    >>> str(fp.Partial()), str(fp.Partial("max"))
    ('P', 'P(max)')
    """

    reduction: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


Placement: TypeAlias = Replicate | Shard | Partial
WHOLE = Replicate()
