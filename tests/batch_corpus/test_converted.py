"""scikit-learn's, LightGBM's and XGBoost's models under random chunkings: all are cut, a warning of bodies apart."""

from __future__ import annotations

import warnings
import zlib
from functools import cache

import numpy as np
import onnxruntime
import pytest

import dask_ferro as ff
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.model.load import load
from tests.batch_corpus.cases import CUT, TRIED
from tests.batch_corpus.chunkings import SINGLE_ROWS, check
from tests.each import every

for module in ("skl2onnx", "onnxmltools", "lightgbm", "xgboost"):
    pytest.importorskip(module)
with warnings.catch_warnings():  # what other packages warn of when they are imported is not ours
    warnings.simplefilter("ignore")
    from tests.batch_corpus import converted

# Single rows in both ways; the rest of the 200 is for `make soak`.
FEW, MANY = SINGLE_ROWS, 200
# Their labels are declared as int64[?] and are of (rows, 1), which no dask array can know.
_MISDECLARED = ("one against one",)
# Distances to all known rows, in a Scan over the new ones.
_WITH_BODIES = ("neighbours", "neighbours of numbers", "gaussian process")


@cache
def built(name: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return converted.MODELS[name]().SerializeToString()


def run(name: str, times: int) -> int:
    model, kind = ff.from_onnx(built(name)), name.partition(",")[0]
    return check(
        model,
        TRIED if kind in _WITH_BODIES else CUT,
        lambda rows, rng: converted.feeds(model.inputs, rows, rng),
        rows=(1, 14),
        times=times,
        seed=zlib.crc32(name.encode()),
        empty=False,
        is_array=kind not in _MISDECLARED,
    )


@every("name", converted.MODELS)
def test_a_converted_model_is_cut_right(name):
    run(name, FEW)


@pytest.mark.soak
@pytest.mark.parametrize("name", converted.MODELS)
def test_a_converted_model_is_cut_right_often(name):
    assert run(name, MANY) > MANY // 4


@pytest.mark.parametrize(
    "name", ["adaboost, arrays", "support vectors, arrays", "bins", "neighbours, arrays"]
)
def test_types_of_a_converted_model_are_those_that_it_computes(name):
    """Of every value: what is inferred without declared shapes is what ONNX Runtime makes of 9 rows."""
    import onnx

    proto = onnx.load_from_string(built(name))
    (x,) = (i.name for i in proto.graph.input)
    types = infer(load(built(name)).model, shapes={x: [9, converted.COLUMNS]}, trusts_declared=False)
    # A ZipMap's value is a list of dicts there, and an array with us.
    plain = [n for n in proto.graph.node if n.op_type != "ZipMap"]
    made = [o for n in plain for o in n.output if o in types and types[o].kind == "tensor"]
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(o) for o in made)
    quiet = onnxruntime.SessionOptions()
    quiet.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), quiet)
    found = session.run(made, {x: converted.X[:9]})
    wrong = {
        n: (types[n].shape, np.shape(v))
        for n, v in zip(made, found, strict=True)
        if types[n].shape != np.shape(v)
    }
    assert not wrong
