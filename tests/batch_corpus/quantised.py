"""Small models quantised by ONNX Runtime to operators of com.microsoft and QLinear ones, whose values have no types."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import parser
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

from tests.graphs import model

ROWS = 12


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


# Nodes in ONNX's text form; weights; the shape of one row.
MODELS: Mapping[str, tuple[str, Mapping[str, np.ndarray], tuple[int, ...]]] = {
    "mlp": ("h = Gemm (x, w, b) r = Relu (h) y = Gemm (r, w2, b2)",
        {"w": _floats(8, 16), "b": _floats(16), "w2": _floats(16, 3), "b2": _floats(3)}, (8,)),
    "conv": ("c = Conv (x, w, b) r = Relu (c) p = GlobalAveragePool (r) q = Flatten (p) y = MatMul (q, w2)",
        {"w": _floats(4, 3, 3, 3), "b": _floats(4), "w2": _floats(4, 2)}, (3, 8, 8)),
    "residual": ("c = Conv <pads = [1,1,1,1]> (x, w) a = Add (c, x) s = Sigmoid (a)"
        " y = AveragePool <kernel_shape = [2,2]> (s)", {"w": _floats(3, 3, 3, 3)}, (3, 8, 8)),
    "concat": ("a = MatMul (x, w) l = LeakyRelu (a) c = Concat <axis = 1> (l, x) m = MatMul (c, w2) y = Softmax (m)",
        {"w": _floats(8, 4), "w2": _floats(12, 3)}, (8,)),
}  # fmt: skip


def rows(name: str) -> np.ndarray:
    """Return the rows by which a model is calibrated."""
    return np.random.default_rng(2).standard_normal((ROWS, *MODELS[name][2])).astype(np.float32)


class _Rows(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, x: np.ndarray) -> None:
        self._left: Iterator[dict[str, np.ndarray]] = iter([{"x": x}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


def quantised(name: str, folder: Path) -> onnx.ModelProto:
    """Return a model of `MODELS` in QOperator form."""
    nodes, weights, shape = MODELS[name]
    made = model(
        parser.parse_graph(f"g () => () {{ {nodes} }}").node,
        {"x": ["N", *shape]},
        {"y": None},
        dict(weights),
        opset=17,
    )
    made.ir_version = 8
    onnx.save(made, folder / "floats.onnx")
    logging.getLogger().setLevel(logging.ERROR)  # it logs advice of its own to the root
    files = folder / "floats.onnx", folder / "integers.onnx"
    quantize_static(*files, _Rows(rows(name)), quant_format=QuantFormat.QOperator)
    return onnx.load(folder / "integers.onnx")
