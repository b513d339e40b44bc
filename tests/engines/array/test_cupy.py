"""Where CuPy is not numpy: the table on a namespace with CuPy's name and limits, on numpy's arrays.

The limits are those of CuPy's own sources: `ufunc.at` by atomics, `cupyx.scipy.special.erf` of float32 and float64, a
remainder of floats by a rounded quotient.  And products: what a GPU's library gets to see, over `array_api_strict`.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import array_api_compat.numpy as numpy_namespace
import array_api_strict
import numpy as np
import onnx_ir as ir
import pytest

from tests.each import every
from tests.engines.array.cases import Case, bound, floats, vector

F, H = np.float32, np.float16
_EXTREMA = ["int32", "uint32", "uint64", "float32", "float64"]
_ATOMIC = {"add": [*_EXTREMA, "float16"], "maximum": _EXTREMA, "minimum": _EXTREMA}


class _Ufunc:
    """numpy's ufunc, with CuPy's `at`."""

    def __init__(self, name: str) -> None:
        self._name, self._ufunc = name, getattr(np, name)

    def __call__(self, *arrays: Any) -> Any:
        return self._ufunc(*arrays)

    def at(self, a: Any, indices: Any, b: Any) -> None:
        if a.dtype.name not in _ATOMIC[self._name]:
            raise TypeError(f"scatter_{self._name} only supports {_ATOMIC[self._name]}")
        self._ufunc.at(a, indices, b)


class _Cupy(ModuleType):
    """numpy's namespace under CuPy's name."""

    add, maximum, minimum = _Ufunc("add"), _Ufunc("maximum"), _Ufunc("minimum")

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy_namespace, name)

    def remainder(self, a: Any, b: Any) -> Any:
        return a - np.floor(a / b) * b if a.dtype.kind == "f" else np.remainder(a, b)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    special: Any = ModuleType("cupyx.scipy.special")
    erf = np.frompyfunc(math.erf, 1, 1)
    special.erf = lambda x: erf(x).astype(x.dtype if x.dtype != H else F)
    for name in ("cupyx", "cupyx.scipy"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", special)
    return _Cupy("array_api_compat.cupy")


def run(case: Case, xp: Any) -> Any:
    (y,) = bound(ir.from_proto(case.model(())), xp)(*map(xp.asarray, case.inputs))
    return y


@pytest.mark.parametrize("op", ["Erf", "Gelu"])
@pytest.mark.parametrize("dtype", [H, F, np.float64])
def test_the_error_function_keeps_its_dtype(op: str, dtype: Any, cupy: ModuleType) -> None:
    case = Case("", op, [floats(7, dtype=dtype)])
    y, wanted = run(case, cupy), run(case, numpy_namespace)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, wanted, rtol=2e-3 if dtype is H else 1e-5)


KINDS = [*_EXTREMA, "float16", "int8", "int16", "int64", "uint8", "uint16"]


@every("reduction", ["none", "add", "max", "min"])
@every("dtype", KINDS)
def test_scatters_reduce_every_dtype(dtype: str, reduction: str, cupy: ModuleType) -> None:
    """Repeated indices too; negative int64 are added as what they are."""
    low = 0 if dtype[0] == "u" else -9
    x, updates = (np.arange(low, low + n).astype(dtype) for n in (6, 4))
    where = [0, 1, 2, 3] if reduction == "none" else [1, 1, 4, 1]
    elements = Case("", "ScatterElements", [x, vector(*where), updates], {"reduction": reduction})
    tuples = Case("", "ScatterND", [x, vector(*where).reshape(4, 1), updates], {"reduction": reduction})
    for case in (elements, tuples):
        y = run(case, cupy)
        assert y.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(y, run(case, numpy_namespace))


@pytest.mark.parametrize("dtype", [H, F, np.float64])
def test_fmod_of_floats_is_exact(dtype: Any, cupy: ModuleType) -> None:
    a, b = vector(1, 5.3, -7, 60000, -60000, 1e-3, dtype=dtype), vector(0.1, 0.1, 0.3, 0.7, 7, 2, dtype=dtype)
    case = Case("", "Mod", [a, b], {"fmod": 1})
    wanted = [math.fmod(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    np.testing.assert_array_equal(run(case, cupy), np.array(wanted, dtype))


def test_fmod_of_large_integers_does_not_go_through_floats(cupy: ModuleType) -> None:
    case = Case("", "Mod", [vector(2**62 + 1, -(2**62) - 1), vector(2**31, 2**31)], {"fmod": 1})
    np.testing.assert_array_equal(run(case, cupy), [1, -1])


class _Products(ModuleType):
    """array_api_strict, with the ranks of what is multiplied written down."""

    def __init__(self) -> None:
        super().__init__("array_api_strict")
        self.ranks: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(array_api_strict, name)

    def matmul(self, a: Any, b: Any) -> Any:
        self.ranks.append((a.ndim, b.ndim))
        return array_api_strict.matmul(a, b)


MATRICES, STACKS = [(2, 2)], [(3, 3)]


@every(
    ("case", "ranks"),
    [
        (Case("N rows of S", "MatMul", [floats(3, 4, 5), floats(5, 2)]), MATRICES),
        (Case("no rows", "MatMul", [floats(0, 4, 5), floats(5, 2)]), MATRICES),
        (Case("four dimensions", "MatMul", [floats(2, 3, 4, 5), floats(5, 2)]), MATRICES),
        (Case("a stack of one", "MatMul", [floats(1, 4, 5), floats(1, 1, 5, 2)]), MATRICES),
        (Case("stacks", "MatMul", [floats(3, 4, 5), floats(3, 5, 2)]), STACKS),
        (Case("a vector", "MatMul", [floats(5), floats(3, 5, 2)]), [(1, 3)]),
        (Case("a convolution of one sample", "Conv", [floats(1, 3, 8, 8), floats(4, 3, 3, 3)]), MATRICES),
        (Case("1 x 1, one sample", "Conv", [floats(1, 3, 8, 8), floats(4, 3, 1, 1)]), MATRICES),
        (Case("one transposed", "ConvTranspose", [floats(1, 3, 4, 4), floats(3, 2, 3, 3)]), MATRICES),
        (Case("a batch", "Conv", [floats(2, 3, 8, 8), floats(4, 3, 3, 3)]), [(3, 4)]),
        (Case("attention of one head", "Attention", [floats(1, 1, 4, 8)] * 3), MATRICES * 2),
        (Case("of several", "Attention", [floats(1, 2, 4, 8)] * 3), [(4, 4)] * 2),
    ],
    ids=lambda v: v.id if isinstance(v, Case) else "",
)  # fmt: skip
def test_what_is_one_product_of_matrices_is_computed_as_one(case: Case, ranks: Any) -> None:
    """cuBLAS rounds to TF32 where it is asked to, and is fast, in products of two matrices alone."""
    xp = _Products()
    y = np.asarray(run(case, xp))
    assert xp.ranks == ranks
    np.testing.assert_allclose(y, run(case, numpy_namespace), rtol=1e-5, atol=1e-6)
