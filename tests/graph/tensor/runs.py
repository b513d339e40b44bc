"""How tensors are computed in the tests: by the array kernels in float64, by ONNX Runtime, or by ONNX's reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

from dask_ferro.engines import array
from dask_ferro.graph.tensor.emit import Outputs, build
from dask_ferro.graph.tensor.tensor import Tensor

Feeds = Mapping[str, Any]


def computed(model: ir.Model, feeds: Feeds) -> dict[str, np.ndarray]:
    """Every output of the model, by the array kernels on numpy."""
    graph = model.graph
    weights = {name: v.const_value for name, v in graph.initializers.items()}
    inputs, outputs = [str(v.name) for v in graph.inputs], [str(v.name) for v in graph.outputs]
    program = array.Program(list(graph), inputs, outputs, opset=model.opset_imports[""], weights=weights)
    with np.errstate(all="ignore"):
        values = program(*(feeds[name] for name in inputs))
    return dict(zip(outputs, values, strict=True))


def values(
    outputs: Outputs, feeds: Feeds | None = None, inputs: Sequence[Tensor] = ()
) -> dict[str, np.ndarray]:
    """Every output, by the array kernels; what arguments are bound to needs not be fed."""
    model, bound = build(outputs, inputs)
    return computed(model, bound | dict(feeds or {}))


def by_reference(model: ir.Model, feeds: Feeds) -> dict[str, np.ndarray]:
    """Every output of the model, by ONNX's reference: it has bfloat16."""
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(ir.to_proto(model)).run(None, dict(feeds))
    return dict(zip([str(v.name) for v in model.graph.outputs], found, strict=True))


def by_onnxruntime(outputs: Outputs, feeds: Feeds | None = None) -> dict[str, np.ndarray]:
    """Every output, by ONNX Runtime, after the whole of ONNX's checks."""
    model, bound = build(outputs)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [str(v.name) for v in model.graph.outputs]
    return dict(zip(names, session.run(names, bound | dict(feeds or {})), strict=True))
