"""Recurrent nodes of doubles, which ONNX Runtime refuses: what ONNX Runtime computes from floats, or refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import dask_ferro as ff

STEPS, ROWS, WIDTH = 3, 2, 4
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def text(op: str, attributes: str, lengths: str, dtype: str) -> str:
    rows = GATES[op] * WIDTH
    return (
        f'<ir_version: 10, opset_import: ["": 20]> g ({dtype}[{STEPS},{ROWS},{WIDTH}] x, {dtype}[1,{rows},{WIDTH}] w,'
        f" {dtype}[1,{rows},{WIDTH}] r, int32[{ROWS}] n) => ({dtype}[N,1,{ROWS},{WIDTH}] y)"
        f" {{ y = {op}<hidden_size = {WIDTH}{attributes}>(x, w, r, , {lengths}) }}"
    )


@pytest.mark.parametrize("op", GATES)
def test_what_a_cell_has_beside_its_weights_is_computed_or_refused(op: str) -> None:
    rng = np.random.default_rng(0)
    rows = GATES[op] * WIDTH
    feeds = {
        "x": 3 * rng.normal(size=(STEPS, ROWS, WIDTH)),
        "w": rng.normal(size=(1, rows, WIDTH)),
        "r": rng.normal(size=(1, rows, WIDTH)),
    }
    others = ", ".join(['"Relu"', *(f'"{name}"' for name in DEFAULTS[op][1:])])
    cells = {
        "plain": ("", ""),
        "lengths": ("", "n"),
        "clip": (", clip = 0.5", ""),
        "activations": (f", activations = [{others}]", ""),
        "bounds": (", activation_alpha = [0.5]", ""),
    }
    cells |= {"input_forget": (", input_forget = 1", "")} if op == "LSTM" else {}
    computed = set()
    for name, (attributes, lengths) in cells.items():
        floats = onnx.parser.parse_model(text(op, attributes, lengths, "float"))
        doubles = onnx.parser.parse_model(text(op, attributes, lengths, "double"))
        counts = {"n": np.array([1, STEPS], np.int32)}
        session = onnxruntime.InferenceSession(floats.SerializeToString())
        single = {key: value.astype(np.float32) for key, value in feeds.items()}
        (right,) = session.run(["y"], single | counts)
        try:
            model = ff.from_onnx(doubles)
        except ff.UnsupportedOpError:
            continue
        np.testing.assert_allclose(model.predict(feeds | counts), right, rtol=1e-4, atol=1e-5, err_msg=name)
        computed.add(name)
    assert "plain" in computed
