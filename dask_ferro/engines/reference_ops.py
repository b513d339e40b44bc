"""Operators that take the place of onnx.reference's, where those differ from the standard's text.

onnx.reference drops empty texts, strips accents, takes stop words out of the midst of texts and ends texts before a
NUL; it computes learners in the dtype of their input, which may be an integer; and it divides an integer by 0.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from dask_ferro.engines import Array
from dask_ferro.engines.array.ops.elementwise import DIVIDED_BY_ZERO

# Learners whose scores the standard has as float32, whatever the dtype of their input.
_OF_FLOATS = (
    *("LinearClassifier", "SVMClassifier", "SVMRegressor", "TreeEnsembleClassifier", "TreeEnsembleRegressor"),
    *("Normalizer", "Scaler"),
)
_CASES = {"LOWER": str.lower, "UPPER": str.upper}


@cache
def replacements() -> list[type]:
    """Return the operators, for `ReferenceEvaluator(new_ops=)`."""
    from onnx.reference.ops import op_div, op_mod, op_string_concat, op_string_normalizer
    from onnx.reference.ops.aionnxml import _op_list, op_linear_regressor

    def of_integers(base: type) -> type:
        """Return Div or Mod, which refuses an integer divided by 0, as the other engines do."""

        def _run(self: object, a: Array, b: Array, **attributes: object) -> tuple[Array, ...]:
            results: tuple[Array, ...] = base._run(self, a, b, **attributes)
            if b.dtype.kind in "iu" and results[0].size and (b == 0).any():
                raise ZeroDivisionError(DIVIDED_BY_ZERO)
            return results

        return type(base.__name__, (base,), {"_run": _run})

    def of_floats(base: type) -> type:
        def _run(self: object, x: Array, **attributes: object) -> tuple[Array, ...]:
            results = base._run(self, x if x.dtype == np.float32 else x.astype(np.float64), **attributes)
            return tuple(r.astype(np.float32) if r.dtype == np.float64 else r for r in results)

        return type(base.__name__, (base,), {"_run": _run})

    class LinearRegressor(op_linear_regressor.LinearRegressor):  # type: ignore[misc]  # onnx is untyped here
        def _run(  # type: ignore[override]
            self,
            x: Array,
            coefficients: list[float],
            intercepts: list[float] | None,
            targets: int,
            **_: object,
        ) -> tuple[Array, ...]:
            weights = np.array(coefficients).reshape(targets, -1)
            return ((np.atleast_2d(x) @ weights.T + (intercepts or 0.0)).astype(np.float32),)

    class StringConcat(op_string_concat.StringConcat):  # type: ignore[misc]
        def _run(self, x: Array, y: Array) -> tuple[Array, ...]:
            return (np.asarray(x.astype(object) + y.astype(object), object),)

    class StringNormalizer(op_string_normalizer.StringNormalizer):  # type: ignore[misc]
        def _run(  # type: ignore[override]
            self,
            x: Array,
            *,
            case_change_action: str,
            is_case_sensitive: int,
            stopwords: list[str],
            **_: object,
        ) -> tuple[Array, ...]:
            if x.ndim not in (1, 2) or (x.ndim == 2 and len(x) != 1):
                raise ValueError(f"StringNormalizer takes the shapes [C] and [1, C], and got {list(x.shape)}")
            alike = str if is_case_sensitive else str.casefold
            stops = set(map(alike, stopwords or ()))
            texts = [t for t in map(str, x.ravel().tolist()) if alike(t) not in stops]
            cased = list(map(_CASES.get(case_change_action, str), texts))
            # One empty text where all were stop words.
            return (np.array(cased or [""] * bool(x.size), object).reshape(*x.shape[:-1], -1),)

    learners = [of_floats(getattr(_op_list, name)) for name in _OF_FLOATS]
    return [
        *map(of_integers, (op_div.Div, op_mod.Mod)),
        *learners,
        LinearRegressor,
        StringConcat,
        StringNormalizer,
    ]
