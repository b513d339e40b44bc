"""Bundles, and runs of nodes within one, on arrays without elements, such as a chunk of no rows.

ONNX Runtime ends the process on a GRU or LSTM without rows, and raises an error about ranks on norms.  So a node that
reads an array without elements runs only on an engine that was seen to compute it so (`TAKES_NOTHING`).  Nodes run one
by one; a result that has no elements by the standard's shape inference is made from its dtype and shape, without
running the node.  All other nodes are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import shape_inference

from dask_ferro.engines.emptiness import TAKEN, is_harmed_by_empty_inputs
from dask_ferro.engines.executable import compile_bundle, nodes_between, reads_nothing
from dask_ferro.engines.selection import engines_for
from dask_ferro.engines.subgraph import extract
from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir import inference, ml_types
from dask_ferro.graph.ir.nodes import bodies, uses
from dask_ferro.graph.ir.strip_weights import stripped

# Integers that inference may read as shapes, axes or sizes.
_READ_BYTES = 1024
# Operators with results from inputs without elements, which the array table was seen to compute:
# tests/lower/worker/test_no_rows.py runs each.  Operators of other domains have no inference, and no reference to hold
# an engine against.
TAKES_NOTHING = frozenset(
    {
        *("Shape", "Size", "Concat", "MatMul", "Gemm", "Pad", "NonZero", "ScatterND", "ScatterElements"),
        *("ReduceSum", "ReduceProd", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"),
        *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "Compress", "Einsum"),
    }
)

# Operators with data in several inputs: no input may be without elements.
_ROWS_LATER = frozenset({"Concat", "MatMul", "Gemm", "GRU", "LSTM", "RNN", "Attention", "Where", "Einsum"})

# Operators of which ONNX's own suite has cases without elements, on the engine that is selected for them.
_SEEN_IN_SUITE = frozenset({"RegexFullMatch", "StringSplit", "SplitToSequence"})
# Further ones, which the array table lacks, and that tests/lower/worker/test_empty_inside.py runs so.
_SEEN_HERE = frozenset({"Unique"})


def run_on_nothing(
    model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], arrays: Sequence[Any]
) -> tuple[Any, ...]:
    """Return the outputs of the bundle from `inputs` to `outputs`, some of whose arrays have no elements.

    Raises
    ------
    ConfigError
        A node reads arrays without elements, and neither shape inference nor a suitable engine gives its result.
    """
    values: dict[str, Any] = dict(zip(inputs, arrays, strict=True))
    for node in nodes_between(model, inputs, outputs):
        reads = [n for n in dict.fromkeys(uses(node)) if n in values]
        values.update(_results(model, node, reads, [values[n] for n in reads]))
    weights = model.graph.initializers
    return tuple(values[n] if n in values else weights[n].const_value.numpy() for n in outputs)  # type: ignore[union-attr]


def _results(model: ir.Model, node: ir.Node, reads: Sequence[str], arrays: Sequence[Any]) -> dict[str, Any]:
    names = [v.name for v in node.outputs if v.name]
    nothing = reads_nothing(arrays) or any(_is_empty_weight(model, name) for name in uses(node))
    if nothing and node.domain == ml_types.DOMAIN and node.op_type == "ZipMap":
        # Only where another node reads it; it gives a list of dicts, one a row: without rows, an empty list.
        return {name: [] for name in names}
    if nothing:
        found = _inferred(model, node, reads, arrays) or _reshaped(model, node, reads, arrays)
        if all(name in found and 0 in found[name][1] for name in names):
            return {name: np.empty(found[name][1], found[name][0]) for name in names}
    # A node with data, and with empty axes, sizes or indices, runs as usual: ONNX's own suite has such cases.
    data = (
        arrays[:1]
        if reads and node.inputs and node.inputs[0] is not None and reads[0] == node.inputs[0].name
        else ()
    )
    engine = _engine(
        model,
        node,
        nothing=nothing and (reads_nothing(data) or not data or node.op_type in _ROWS_LATER),
        handed=nothing,
    )
    if engine is None:
        given = ", ".join(
            f"{n}: {a.dtype}{list(a.shape)}"
            for n, a in zip(reads, arrays, strict=True)
            if hasattr(a, "dtype")
        )
        raise ConfigError(
            f"node {node.name!r} ({node.op_type}) gets arrays without elements ({given}), and no engine here is known"
            " to compute it from them; leave empty arrays and chunks out, and pass at least one row"
        )
    run = compile_bundle(model, reads, names, ((engine, 1),))
    return dict(zip(names, run(*arrays), strict=True))


def _engine(model: ir.Model, node: ir.Node, *, nothing: bool, handed: bool) -> Any:
    """Return the engine of a node, or None where no engine computes it from arrays without elements.

    Parameters
    ----------
    nothing : bool
        Whether its data have no elements.
    handed : bool
        Whether any array that the node, or a subgraph of it, reads has none.
    """
    able = engines_for(node, dict(model.opset_imports))
    if handed and bodies(node) and is_harmed_by_empty_inputs(node):
        return "reference" if "reference" in able else None
    if node.domain == "" and node.op_type in TAKEN and able:
        return able[0]
    if (not nothing or node.op_type in _SEEN_IN_SUITE | _SEEN_HERE) and able:
        return able[0]
    takes = node.domain == "" and node.op_type in TAKES_NOTHING and "array" in able
    return "array" if takes else None


def _is_empty_weight(model: ir.Model, name: str) -> bool:
    weight = model.graph.initializers.get(name)
    return weight is not None and weight.const_value is not None and weight.const_value.size == 0


Found = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


def _inferred(model: ir.Model, node: ir.Node, reads: Sequence[str], arrays: Sequence[Any]) -> Found:
    """Return dtype and shape of each output for which the standard's inference finds both from these arrays."""
    names = [v.name for v in node.outputs if v.name]
    opset = model.opset_imports.get("", 1)
    proto = stripped(extract(model, [node], (), names, opset=opset).proto)
    for name, array in zip(reads, arrays, strict=True):
        info = _info(name, array)
        if info is None:
            return {}
        proto.graph.input.append(info)
        if array.dtype.kind in "iu" and array.nbytes <= _READ_BYTES:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for info in proto.graph.output:
        info.ClearField("type")
    try:
        # ONNX has no shape inference for operators of this domain.
        if node.domain == ml_types.DOMAIN:
            inferred = inference.infer_model(proto)
        else:
            inferred = shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError:
        return {}
    ml_types.add_types(inferred.graph)
    return {info.name: told for info in inferred.graph.output if (told := _told(info)) is not None}


def _reshaped(model: ir.Model, node: ir.Node, reads: Sequence[str], arrays: Sequence[Any]) -> Found:
    """Return dtype and shape of a Reshape to a shape such as [0, 0, -1], where axes of size 0 are copied.

    Shape inference gives up on -1 there, as it divides by all sizes.  The axes that are copied cancel out.
    """
    known = dict(zip(reads, arrays, strict=True))
    if node.op_type != "Reshape" or node.domain or not node.inputs[0] or node.inputs[0].name not in known:
        return {}
    data, wanted = known[node.inputs[0].name], _integers(model, node.inputs[1], known)
    if wanted is None or wanted.count(-1) != 1 or "allowzero" in node.attributes:
        return {}
    copied = [axis for axis, size in enumerate(wanted) if size == 0]
    if any(axis >= data.ndim for axis in copied):
        return {}
    rest = prod(size for axis, size in enumerate(data.shape) if axis not in copied)
    given = prod(size for size in wanted if size > 0)
    if not rest or rest % given:
        return {}
    sizes = [data.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    shape = tuple(rest // given if size == -1 else int(size) for size in sizes)
    return {str(node.outputs[0].name): (data.dtype, shape)}


def _integers(model: ir.Model, value: ir.Value | None, known: dict[str, Any]) -> list[int] | None:
    name = "" if value is None else value.name or ""
    weight = model.graph.initializers.get(name)
    if weight is not None and weight.const_value is not None:
        return list(map(int, weight.const_value.numpy()))
    return list(map(int, known[name])) if name in known else None


def _info(name: str, array: Any) -> onnx.ValueInfoProto | None:
    """Return the ONNX type of an array; None for other values, and for dtypes that ONNX lacks."""
    if type(array) is not np.ndarray:
        return None
    try:
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    except ValueError:
        return None
    return onnx.helper.make_tensor_value_info(name, kind, array.shape)


def _told(info: onnx.ValueInfoProto) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    type_ = info.type.tensor_type
    if not type_.elem_type or not type_.HasField("shape"):
        return None
    if not all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in type_.shape.dim):
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(type_.elem_type)
    return np.dtype(dtype), tuple(dim.dim_value for dim in type_.shape.dim)
