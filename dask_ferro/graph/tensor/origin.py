"""Sources of tensors (arguments and constants), and the numbers that identify tensors and nodes.

Later ones have larger numbers, so sorting by them is a topological order and no graph has to be kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.graph.tensor.dims import Shape

# The opset of nodes that are written here; newer ops give their own.
OPSET = 21
_NUMBERS = itertools.count()


def next_number() -> int:
    """Return a number larger than all before it."""
    return next(_NUMBERS)


class DeviceSpecs(NamedTuple):
    """A node's device configuration as a file has it, with values by position, so that it can be written again.

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
    """The dtype and the shape of a tensor, as far as they are known."""

    dtype: ir.DataType
    shape: Shape


@dataclass(frozen=True, eq=False, slots=True)
class TensorSource:
    """An argument (it has no tensor) or a constant; `data` are the values bound to an argument, if any."""

    type: TensorType
    name: str | None
    tensor: ir.TensorProtocol | None = None
    data: Any = None
    number: int = field(default_factory=next_number)
