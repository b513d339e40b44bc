"""A run of nodes through the onnx package's own reference ops: the last resort, slow and nearly complete.

Weights are handed in as arrays rather than baked into the model, so that they stay memory-mapped.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.kernels.extract import extract, weights_of
from dask_ferro.kernels.watch import Watch, Watched


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
        from onnx.reference import ReferenceEvaluator

        piece = extract(model, nodes, inputs, outputs, opset=opset, weights_as_inputs=True)
        self._evaluator = ReferenceEvaluator(piece.proto)
        self._weights = {name: tensor.numpy() for name, tensor in weights_of(model, nodes).items()}
        self._inputs = tuple(inputs)
        self._nodes = len(nodes)
        self.nbytes = len(piece.proto.SerializeToString())

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        feeds = dict(zip(self._inputs, arrays, strict=True)) | self._weights
        # Overflow and 0/0 are ONNX semantics here (inf, nan), not events to tell the user of.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            results = self._evaluator.run(None, feeds)
        return tuple(np.asarray(r) if isinstance(r, np.generic) else r for r in results)

    def watched(self, watch: Watch) -> Watched:
        """Return the same run as one op for `watch`: the reference's own loop has no place to listen at."""
        return Watched(watch.kernel("reference", f"{self._nodes} nodes", "", self))
