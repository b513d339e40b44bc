"""Every operator of the suite in every dtype of the standard: what is routed to ONNX Runtime, ONNX Runtime takes.

Its registry says yes to some that its kernels refuse when they run (GRU and LSTM of doubles).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from onnx.backend.test.loader import load_model_tests

from tests.engines.onnxruntime.special import Ran, in_children

_CODES = ("f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
KINDS = [helper.np_dtype_to_tensor_dtype(np.dtype(k)) for k in _CODES]
NAMES = {k: f"tensor({onnx.TensorProto.DataType.Name(k).lower()})" for k in KINDS}
Row = tuple[str, bytes, dict[str, Any]]


@cache
def rows() -> tuple[Row, ...]:
    """One node in each dtype of its first type parameter: (name, model, inputs), once an operator and version."""
    seen: set[tuple[str, int, int]] = set()
    found = []
    for case in load_model_tests(kind="node"):
        for name, kind, model, feeds in _retyped(case):
            node = model.graph.node[0]
            version = onnx.defs.get_schema(node.op_type, model.opset_import[0].version).since_version
            if (node.op_type, version, kind) not in seen:
                seen.add((node.op_type, version, kind))
                found.append((name, model.SerializeToString(), feeds))
    return tuple(found)


def _retyped(case: Any) -> Iterator[tuple[str, int, onnx.ModelProto, dict[str, Any]]]:
    model = case.model
    if (
        model is None
        or len(model.graph.node) != 1
        or len(model.opset_import) != 1
        or model.graph.node[0].domain
    ):
        return
    infos = list(model.graph.input)
    if any(info.type.WhichOneof("value") != "tensor_type" for info in infos) or not infos:
        return
    given = case.data_sets[0][0]
    arrays = [x if isinstance(x, (np.ndarray, np.generic)) else numpy_helper.to_array(x) for x in given]
    node = model.graph.node[0]
    schema = onnx.defs.get_schema(node.op_type, model.opset_import[0].version)
    last = len(schema.inputs) - 1
    formals = {x: schema.inputs[min(i, last)].type_str for i, x in enumerate(node.input) if x}
    first = next(iter(formals.values()))
    allowed = {t for c in schema.type_constraints if c.type_param_str == first for t in c.allowed_type_strs}
    if any(np.asarray(a).dtype.kind not in "biuf" for a in arrays):
        return
    for kind in KINDS:
        if NAMES[kind] in allowed:
            changed, feeds = copy.deepcopy(model), {}
            for info, given in zip(changed.graph.input, arrays, strict=False):
                if formals.get(info.name) == first:
                    info.type.tensor_type.elem_type = kind
                    with np.errstate(all="ignore"):
                        given = np.asarray(given).astype(helper.tensor_dtype_to_np_dtype(kind))
                feeds[info.name] = np.asarray(given)
            for info in changed.graph.output:
                info.ClearField("type")
            try:
                yield f"{case.name} of {NAMES[kind]}", kind, _inferred(changed), feeds
            except onnx.shape_inference.InferenceError:
                continue  # the other inputs do not allow this one


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    inferred.ir_version = min(inferred.ir_version, 10)
    return inferred


def run(row: Row) -> Ran | None:
    """What ONNX Runtime makes of a row that is routed to it; None of one that is not."""
    from dask_ferro.engines.compile import compile_bundle
    from dask_ferro.engines.selection import engines_for

    model = ir.from_proto(onnx.ModelProto.FromString(row[1]))
    (node,) = model.graph
    if "onnxruntime" not in engines_for(node, dict(model.opset_imports)):
        return None
    inputs, outputs = list(row[2]), [v.name for v in model.graph.outputs]
    try:
        return Ran(compile_bundle(model, inputs, outputs, (("onnxruntime", 1),))(*row[2].values()))
    except Exception as error:  # noqa: BLE001 - whatever it raises is what the test is about
        return Ran(None, f"{type(error).__name__}: {error}")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the suite makes its own data with overflows
def test_what_is_routed_to_onnxruntime_runs_there() -> None:
    results = in_children("tests.suite.test_dtypes", "run", rows())
    both = zip(rows(), results, strict=True)
    refused = [f"{row[0]}: {ran.error[:200]}" for row, ran in both if ran and ran.error]
    assert sum(ran is not None for ran in results) > 400
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize("op", ["GRU", "LSTM"])
def test_recurrences_of_doubles_are_computed_elsewhere(op: str) -> None:
    import dask_ferro as ff
    from dask_ferro.engines.selection import engines_for
    from tests.graphs import model

    gates, rng = {"GRU": 3, "LSTM": 4}[op], np.random.default_rng(1)
    weights = {"w": rng.standard_normal((1, gates * 2, 3)), "r": rng.standard_normal((1, gates * 2, 2))}
    node = helper.make_node(op, ["x", "w", "r"], ["y"], hidden_size=2)
    made = model([node], {"x": [4, 2, 3]}, {"y": [4, 1, 2, 2]}, weights, dtype=onnx.TensorProto.DOUBLE)
    del made.opset_import[:]
    made.opset_import.add(version=17)
    (routed,) = ir.from_proto(made).graph
    assert "onnxruntime" not in engines_for(routed, {"": 17})
    x = rng.standard_normal((4, 2, 3))
    wanted = onnx.reference.ReferenceEvaluator(made).run(None, {"x": x})[0]
    for granularity in ("op", "auto", "model"):
        got = ff.from_onnx(made, granularity=granularity)(x).compute(scheduler="sync")
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
