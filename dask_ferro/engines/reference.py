"""A run of nodes on the onnx package's reference operators, which are slow and nearly complete.

Weights are passed as arrays and are not part of the model, so that they stay memory-mapped.

Operators of this module replace operators that differ from the standard's text: onnx.reference drops empty texts,
strips accents and removes stop words from the middle of texts.  It computes learners in the dtype of their input,
which may be an integer, and it divides an integer by 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array
from dask_ferro.engines.array.ops.elementwise import DIVIDED_BY_ZERO
from dask_ferro.engines.subgraph import extract, weights_of

# Learners whose scores are float32 in the standard, whatever the dtype of their input, by module.
_OF_FLOATS = {
    "op_linear_classifier": "LinearClassifier",
    "op_normalizer": "Normalizer",
    "op_scaler": "Scaler",
    "op_svm_classifier": "SVMClassifier",
    "op_svm_regressor": "SVMRegressor",
    "op_tree_ensemble_classifier": "TreeEnsembleClassifier",
    "op_tree_ensemble_regressor": "TreeEnsembleRegressor",
}
_CASES = {"LOWER": str.lower, "UPPER": str.upper}


@cache
def _replacements() -> list[type]:
    """Return the operators that replace others."""
    from onnx.reference.ops import op_div, op_mod, op_string_normalizer
    from onnx.reference.ops.aionnxml import op_linear_regressor

    learners = [
        getattr(import_module(f"onnx.reference.ops.aionnxml.{module}"), name)
        for module, name in _OF_FLOATS.items()
    ]
    pairs = [
        *((_Integers, base) for base in (op_div.Div, op_mod.Mod)),
        *((_Floats, base) for base in learners),
        (_Linear, op_linear_regressor.LinearRegressor),
        (_Normalizer, op_string_normalizer.StringNormalizer),
    ]
    return [type(base.__name__, (ours, base), {}) for ours, base in pairs]


class _Integers:
    def _run(self, a: Array, b: Array, **attributes: object) -> tuple[Array, ...]:
        """Refuse an integer divided by 0, as the other engines do."""
        results: tuple[Array, ...] = super()._run(a, b, **attributes)  # type: ignore[misc]  # of onnx's class
        if b.dtype.kind in "iu" and results[0].size and (b == 0).any():
            raise ZeroDivisionError(DIVIDED_BY_ZERO)
        return results


class _Floats:
    def _run(self, x: Array, **attributes: object) -> tuple[Array, ...]:
        floats = x if x.dtype == np.float32 else x.astype(np.float64)
        results = super()._run(floats, **attributes)  # type: ignore[misc]  # of onnx's class
        return tuple(r.astype(np.float32) if r.dtype == np.float64 else r for r in results)


class _Linear:
    def _run(
        self,
        x: Array,
        coefficients: Sequence[float],
        intercepts: Sequence[float] | None,
        targets: int,
        **_: object,
    ) -> tuple[Array, ...]:
        weights = np.array(coefficients).reshape(targets, -1)
        return ((np.atleast_2d(x) @ weights.T + (intercepts or 0.0)).astype(np.float32),)


class _Normalizer:
    def _run(
        self,
        x: Array,
        case_change_action: str,
        is_case_sensitive: int,
        stopwords: Sequence[str] | None,
        **_: object,
    ) -> tuple[Array, ...]:
        if x.ndim not in (1, 2) or (x.ndim == 2 and len(x) != 1):
            raise ValueError(f"StringNormalizer takes the shapes [C] and [1, C], and got {list(x.shape)}")
        alike = str if is_case_sensitive else str.casefold
        stops = set(map(alike, stopwords or ()))
        texts = [_CASES.get(case_change_action, str)(t) for t in x.ravel() if alike(t) not in stops]
        # One empty text if all were stop words.
        return (np.array(texts or [""] * bool(x.size), object).reshape(*x.shape[:-1], -1),)


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
        self._evaluator = ReferenceEvaluator(piece.proto, new_ops=_replacements())
        # Mapped from their file if they are external; as part of the model they would be copied.
        self._weights = {name: tensor.numpy() for name, tensor in weights_of(model, nodes).items()}
        self._inputs = tuple(inputs)
        self.nbytes = len(piece.proto.SerializeToString())

    def __call__(self, *arrays: Array) -> Array:
        feeds = dict(zip(self._inputs, arrays, strict=True)) | self._weights
        # Overflow and 0/0 are results in ONNX (inf, nan), not reasons for a warning.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            results = self._evaluator.run(None, feeds)
        # The reference operators return numpy scalars for 0-d results, and numpy's own type for texts.
        return tuple(_array(r) for r in results)


def _array(result: Array) -> Array:
    if isinstance(result, np.generic):
        result = np.asarray(result)
    is_text = isinstance(result, np.ndarray) and result.dtype.kind == "U"
    return result.astype(object) if is_text else result
