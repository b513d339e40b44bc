"""A run of nodes on the onnx package's reference operators, which are slow and nearly complete.

Weights are passed as arrays and are not part of the model, so that they stay memory-mapped.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array
from dask_ferro.engines.hooks import OpHook, Watched
from dask_ferro.engines.reference_ops import replacements
from dask_ferro.engines.subgraph import extract, weights_of
from dask_ferro.engines.time_limit import interrupted


class ReferenceRun:
    """The nodes between `inputs` and `outputs`, evaluated one by one by `onnx.reference`."""

    def __init__(
        self,
        model: ir.Model,
        nodes: Sequence[ir.Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
    ) -> None:
        # Imported on use, because it imports a module for each operator.
        from onnx.reference import ReferenceEvaluator

        piece = extract(model, nodes, inputs, outputs, opset=opset, weights_as_inputs=True)
        self._evaluator = ReferenceEvaluator(piece.proto, new_ops=replacements())
        # Mapped from their file where they are external; as part of the model they would be copied.
        self._weights = {name: tensor.numpy() for name, tensor in weights_of(model, nodes).items()}
        self._inputs = tuple(inputs)
        self._nodes = len(nodes)
        self.nbytes = len(piece.proto.SerializeToString())

    def __call__(self, *arrays: Array) -> Array:
        feeds = dict(zip(self._inputs, arrays, strict=True)) | self._weights
        # Overflow and 0/0 are results in ONNX (inf, nan), not reasons for a warning.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            results = interrupted(lambda: self._evaluator.run(None, feeds))
        # The reference operators return numpy scalars for 0-d results, and texts of numpy's own.
        return tuple(_array(r) for r in results)

    def watched(self, watch: OpHook) -> Watched:
        """Return the same run, which is one operator for `watch`: the evaluator's loop has no hooks."""
        return Watched(watch.kernel("reference", f"{self._nodes} nodes", "", self))


def _array(result: Any) -> Any:
    found = np.asarray(result) if isinstance(result, np.generic) else result
    return (
        found.astype(object)
        if getattr(found, "dtype", None) is not None and found.dtype.kind == "U"
        else found
    )
