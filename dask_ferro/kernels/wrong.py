"""Where an engine computes something else than the standard says, or refuses what it declares.

Each row names an operator, a test of the node, and what was seen.  The rows come from runs of ONNX's backend
suite, one engine at a time (onnx 1.23, ONNX Runtime 1.31); the suite's test runs it again, and fails when a
case is routed to an engine that gets it wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import onnx_ir as ir


class Wrong(NamedTuple):
    """One known fault of an engine: `when(node, opset)` says whether a node is hit by it."""

    op: str
    when: Callable[[ir.Node, int], bool]
    seen: str
    domain: str = ""


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    found = node.attributes.get(name)
    return default if found is None or found.is_ref() else found.value


def _has_input(node: ir.Node, position: int) -> bool:
    return len(node.inputs) > position and node.inputs[position] is not None


def _has_output(node: ir.Node, position: int) -> bool:
    return len(node.outputs) > position and bool(node.outputs[position].name)


def _is(node: ir.Node, dtype: ir.DataType) -> bool:
    return _has_input(node, 0) and node.inputs[0] is not None and node.inputs[0].dtype == dtype


def _always(node: ir.Node, opset: int) -> bool:
    return True


def _batchwise(node: ir.Node, opset: int) -> bool:
    return bool(_attribute(node, "layout", 0))


def _changes_case(node: ir.Node, opset: int) -> bool:
    return _attribute(node, "case_change_action", "NONE") != "NONE" or not _attribute(
        node, "is_case_sensitive", 0
    )


def _flattens(node: ir.Node, opset: int) -> bool:
    """Before opset 13 these operators took everything from `axis` on as one axis."""
    return opset < 13


ONNXRUNTIME: tuple[Wrong, ...] = (
    Wrong("Attention", lambda n, v: _is(n, ir.DataType.FLOAT16), "causal fp16 differs"),
    Wrong("Attention", lambda n, v: _has_input(n, 6), "nonpad_kv_seqlen: refuses the padded mask"),
    Wrong("Attention", lambda n, v: _has_output(n, 3), "qk_matmul_output with bias and causal mask differs"),
    Wrong("ConvInteger", lambda n, v: any(_attribute(n, "pads", ())), "refuses padding"),
    Wrong("DFT", _always, "differs on the suite's own signals"),
    Wrong("STFT", _always, "differs on the suite's own signals"),
    Wrong("GRU", _batchwise, "refuses layout=1"),
    Wrong("LSTM", _batchwise, "refuses layout=1"),
    Wrong("RNN", _batchwise, "refuses layout=1"),
    Wrong("MaxUnpool", lambda n, v: _has_input(n, 2), "output_shape differs"),
    Wrong("ReduceMax", lambda n, v: _is(n, ir.DataType.BOOL), "refuses an empty set of bool"),
    Wrong("ReduceMin", lambda n, v: _is(n, ir.DataType.BOOL), "refuses an empty set of bool"),
    Wrong(
        "Resize",
        lambda n, v: (
            _attribute(n, "coordinate_transformation_mode", "half_pixel") == "align_corners"
            and not _has_input(n, 3)
        ),
        "align_corners with scales: takes the rounded size for the length",
    ),
    Wrong("StringNormalizer", _changes_case, "wants an en_US locale on the machine"),
    Wrong("Dropout", lambda n, v: _has_input(n, 2), "training mode: another random mask"),
)

REFERENCE: tuple[Wrong, ...] = (
    Wrong("Softmax", _flattens, "takes one axis where opset < 13 means all from axis on"),
    Wrong("LogSoftmax", _flattens, "takes one axis where opset < 13 means all from axis on"),
    Wrong("Hardmax", _flattens, "takes one axis where opset < 13 means all from axis on"),
    Wrong("LRN", _always, "sums over the wrong axis"),
    Wrong("Scatter", _always, "has no such operator"),
    Wrong("Scan", lambda n, v: v < 9, "takes the optional first input of opset 8 for a state"),
    Wrong("Gradient", _always, "has no such operator", "ai.onnx.preview.training"),
)


def _hits(rows: tuple[Wrong, ...], node: ir.Node, opset: int) -> bool:
    return any(row.op == node.op_type and row.domain == node.domain and row.when(node, opset) for row in rows)


def wrong_in_onnxruntime(node: ir.Node, opset: int) -> bool:
    """Whether ONNX Runtime is known to compute this node wrongly, or to refuse it in spite of its registry."""
    return _hits(ONNXRUNTIME, node, opset)


def wrong_in_reference(node: ir.Node, opset: int) -> bool:
    """Whether the reference ops are known to compute this node wrongly, or lack it."""
    return _hits(REFERENCE, node, opset)
