"""Groups of dtypes, and what reads them: numbers of 8 bits and less, which are stored and cast alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from dask_ferro.engines.subgraph import extract
from dask_ferro.errors import InputError
from dask_ferro.graph.ir import dtypes
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.tensor import Tensor, input
from dask_ferro.lower.signature import ValueSpec, as_array
from tests.each import each, every
from tests.graph.tensor.runs import by_reference

D = ir.DataType
EXTENSIONS = [d for d in sorted(dtypes.STORAGE) if d.name.startswith(("INT", "UINT"))]


def test_every_dtype_that_onnx_knows_is_in_one_group_or_has_one_of_its_own():
    known = {D(number) for number in onnx.TensorProto.DataType.values()} - {D.UNDEFINED}
    groups = [dtypes.NUMERIC, dtypes.BOOL, dtypes.COMPLEX, dtypes.STORAGE, {D.STRING}, {D.BFLOAT16}]
    assert set.union(*map(set, groups)) == known
    assert sum(map(len, groups)) == len(known)


@pytest.mark.parametrize(
    ("dtype", "opset"),
    [(D.FLOAT, 6), (D.BFLOAT16, 13), (D.INT4, 21), (D.FLOAT8E8M0, 24), (D.INT2, 25), (D.FLOAT6E2M3, 28)],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_first_operator_set_that_casts_a_dtype(dtype, opset):
    assert dtypes.first_cast_opset(dtype) == opset


@every("dtype", sorted(dtypes.STORAGE), ids=lambda d: d.name)
def test_a_cast_of_tensors_is_of_an_operator_set_that_has_it(dtype):
    x = input("x", (3,), np.float32)
    y = (2 - x.astype(dtype).astype(np.float32)).astype(dtype)
    model = to_model({"y": y})
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    # The number that all dtypes have: two bits have no 2, and an exponent alone has no 0.
    feeds = {"x": np.ones(3, np.float32)}
    wanted = 2 - feeds["x"].astype(dtype.numpy()).astype(np.float32)
    assert by_reference(model, feeds)["y"].tolist() == wanted.astype(dtype.numpy()).tolist()


@pytest.mark.parametrize(
    "computed",
    [lambda x: x + x, lambda x: -x, lambda x: x.sum(), lambda x: x * 2],
    ids=["+", "-", "sum", "* 2"],
)
def test_tensors_of_what_onnx_computes_nothing_with_are_not_computed_with(computed):
    def is_refused(dtype):
        x: Tensor = input("x", (3,), dtype)
        with pytest.raises(InputError, match=r"takes numbers.*astype"):
            computed(x)

    each(sorted(dtypes.STORAGE | dtypes.COMPLEX), is_refused)


def spec(dtype: Any) -> ValueSpec:
    return ValueSpec("x", np.dtype(dtype), (2,))


@every("dtype", EXTENSIONS, ids=lambda d: d.name)
@every("values", [[0, 300], [0.5, 1]], ids=["too large", "a fraction"])
def test_a_list_that_an_integer_of_few_bits_does_not_hold_is_refused(dtype, values):
    with pytest.raises(InputError, match="cannot represent without loss"):
        as_array(spec(dtype.numpy()), values, "model")


def test_a_session_is_not_handed_weights_that_numpy_has_no_dtype_for():
    held = np.zeros(2**17, ml_dtypes.float8_e5m2)
    model = ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 21]> g () => (float[131072] y) { y = Cast <to=1> (w) }'
        )
    )
    weight = next(iter(model.graph)).inputs[0]
    assert weight is not None
    weight.const_value = ir.Tensor(held, name="w")
    model.graph.register_initializer(weight)
    assert not extract(model, list(model.graph), [], ["y"], opset=21, shares=True).shared
