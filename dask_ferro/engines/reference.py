"""A run of nodes on the onnx package's reference operators, which are slow and nearly complete.

Weights are passed as arrays and are not part of the model, so that they stay memory-mapped.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array
from dask_ferro.engines.array.ops.elementwise import DIVIDED_BY_ZERO
from dask_ferro.engines.hooks import OpHook, Watched
from dask_ferro.engines.subgraph import extract, weights_of
from dask_ferro.engines.time_limit import interrupted


@cache
def _stricter() -> list[type]:
    """Return reference operators that refuse cases which the standard leaves undefined, as the other engines do.

    The cases are Div and Mod of an integer by 0, and StringNormalizer of other shapes than [C] and [1, C].
    """
    from onnx.reference.ops import op_div, op_mod, op_string_normalizer

    def refuse(b: Array, result: Array) -> None:
        if b.dtype.kind in "iu" and result.size and (b == 0).any():
            raise ZeroDivisionError(DIVIDED_BY_ZERO)

    class Div(op_div.Div):  # type: ignore[misc]  # onnx is untyped here
        def _run(self, a: Array, b: Array) -> tuple[Array, ...]:
            results: tuple[Array, ...] = super()._run(a, b)  # type: ignore[no-untyped-call]
            refuse(b, results[0])
            return results

    class Mod(op_mod.Mod):  # type: ignore[misc]
        def _run(self, a: Array, b: Array, fmod: int | None = None) -> tuple[Array, ...]:
            results: tuple[Array, ...] = super()._run(a, b, fmod=fmod)  # type: ignore[no-untyped-call]
            refuse(b, results[0])
            return results

    class StringNormalizer(op_string_normalizer.StringNormalizer):  # type: ignore[misc]
        def _run(self, x: Array, **attributes: object) -> tuple[Array, ...]:  # type: ignore[override]
            if x.ndim not in (1, 2) or (x.ndim == 2 and len(x) != 1):
                raise ValueError(f"StringNormalizer takes the shapes [C] and [1, C], and got {list(x.shape)}")
            results: tuple[Array, ...] = super()._run(x, **attributes)  # type: ignore[no-untyped-call]
            return results

    return [Div, Mod, StringNormalizer]


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
        self._evaluator = ReferenceEvaluator(piece.proto, new_ops=_stricter())
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
        # The reference operators return numpy scalars for 0-d results.
        return tuple(np.asarray(r) if isinstance(r, np.generic) else r for r in results)

    def watched(self, watch: OpHook) -> Watched:
        """Return the same run, which is one operator for `watch`: the evaluator's loop has no hooks."""
        return Watched(watch.kernel("reference", f"{self._nodes} nodes", "", self))
