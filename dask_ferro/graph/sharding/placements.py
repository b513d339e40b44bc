"""Where the parts of a value lie along one axis of a mesh: each rank has all of it, a part, or a term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

# The key of a sharded node's metadata that says how what it makes lies.
PLACEMENT = "dask_ferro.placement"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis has the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank i of the axis has the i-th of as many equal parts along dimension `dim`, counted from the front."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank has a term as large as the value, which is their sum (or mean, max, min)."""

    reduction: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


Placement: TypeAlias = Replicate | Shard | Partial
WHOLE = Replicate()
