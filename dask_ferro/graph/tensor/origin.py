"""How a tensor comes to be: a source (an argument or a constant), or an output of an ONNX node to be.

Records, which point back only: to the tensors that a node reads.  Each has a number, and later ones larger
numbers, so sorting by them is a topological order and no graph has to be kept.  Decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.ir import regions
from dask_ferro.graph.tensor.dims import Shape

if TYPE_CHECKING:
    from dask_ferro.graph.tensor.core import Tensor

OPSET = 21  # of the nodes that are written here; ops that came later say so themselves
_NUMBERS = itertools.count()


class TensorType(NamedTuple):
    """What is known of a tensor's elements."""

    dtype: ir.DataType
    shape: Shape


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """An argument of the graph (no tensor), or a constant; `data` is what an argument is bound to, if at all."""

    type: TensorType
    name: str | None
    tensor: ir.TensorProtocol | None = None
    data: Any = None
    number: int = field(default_factory=lambda: next(_NUMBERS))


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """An ONNX node to be; its output types are those of the tensors made from it."""

    op_type: str
    inputs: tuple[Tensor | None, ...]
    types: tuple[TensorType | None, ...]
    attributes: Mapping[str, Any]
    domain: str = ""
    opset: int = OPSET
    name: str | None = None
    region: regions.Region = field(default_factory=regions.current)
    number: int = field(default_factory=lambda: next(_NUMBERS))

    def attribute(self, name: str, default: Any = None) -> Any:
        """The attribute's value; a float is rounded to float32, as a file would hold it."""
        value = self.attributes.get(name, default)
        value = value.value if isinstance(value, ir.Attr) else value
        return float(np.float32(value)) if isinstance(value, float) else value
