"""Where tensors begin: arguments and constants, and the numbers that tell tensors and nodes apart.

Later ones have larger numbers, so sorting by them is a topological order and no graph has to be kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.graph.tensor.dims import Shape

OPSET = 21  # of the nodes that are written here; ops that came later say so themselves
_NUMBERS = itertools.count()


def next_number() -> int:
    """Return a number larger than all before it."""
    return next(_NUMBERS)


class DeviceSpecs(NamedTuple):
    """A node's device configuration of a file, its values by position, for a node that is written again.

    Attributes
    ----------
    configuration : onnx_ir.ModelConfiguration
    stage : int or None
    specs : tuple of (int, onnx_ir.ShardingSpec)
        An input by its position, an output by its position from the end (-1 is the last); the spec has no value.
    """

    configuration: ir.ModelConfiguration
    stage: int | None
    specs: tuple[tuple[int, ir.ShardingSpec], ...]


class TensorType(NamedTuple):
    """What is known of a tensor's elements."""

    dtype: ir.DataType
    shape: Shape


@dataclass(frozen=True, eq=False, slots=True)
class TensorSource:
    """An argument of the graph (no tensor), or a constant; `data` is what an argument is bound to, if at all."""

    type: TensorType
    name: str | None
    tensor: ir.TensorProtocol | None = None
    data: Any = None
    number: int = field(default_factory=next_number)
