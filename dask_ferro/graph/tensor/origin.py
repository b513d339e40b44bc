"""Sources of tensors (arguments and constants), and the numbers that identify tensors and nodes.

Numbers grow with creation, so sorting by them gives a topological order and no graph has to be kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.graph.tensor.dims import Shape

# The opset of recorded nodes; newer operators state their own.
OPSET = 21
_NUMBERS = itertools.count()


def next_number() -> int:
    """Return a number larger than all earlier ones."""
    return next(_NUMBERS)


class TensorType(NamedTuple):
    """The dtype and the shape of a tensor, as far as they are known."""

    dtype: ir.DataType
    shape: Shape


@dataclass(frozen=True, eq=False, slots=True)
class TensorSource:
    """An argument (without a tensor) or a constant; `data` are the values bound to an argument, if any."""

    type: TensorType
    name: str | None
    tensor: ir.TensorProtocol | None = None
    data: Any = None
    number: int = field(default_factory=next_number)
