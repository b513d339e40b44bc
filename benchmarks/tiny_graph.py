"""A graph of tiny ops, which measures overhead alone."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

ITEMS = 256


def tiny_graph(n: int = 1280, width: int = 4, seed: int = 0) -> onnx.ModelProto:
    """Return a source, and `n` two-input ops on 256 floats in `width` lanes, of which each has an output.

    The next op of a lane reads the lane's last value, and that of a random other lane (Max, Min) or, one time in
    four, the source (Add, Sub).  So values are whole multiples of the source, n / width at most: they neither
    overflow nor vanish, and all engines that follow IEEE 754 give the same bits.
    """
    rng = np.random.default_rng(seed)
    width = min(width, n)
    before = after = ["source"] * width
    nodes = [helper.make_node("Neg", ["x"], ["source"], name="source")]
    for i in range(n):
        layer, lane = divmod(i, width)
        if lane == 0:
            before, after = after, list(after)
        other = before[(lane + int(rng.integers(1, width))) % width] if width > 1 else "source"
        mixes = rng.random() < 0.75 and other != "source"
        op = (("Max", "Min") if mixes else ("Add", "Sub"))[(lane + layer) % 2]
        after[lane] = f"y_{lane}" if i + width >= n else f"v_{i + 1}"
        inputs = [before[lane], other if mixes else "source"]
        nodes.append(helper.make_node(op, inputs, [after[lane]], name=f"op_{i + 1}"))
    entries, ends = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (ITEMS,)) for name in names]
        for names in (["x"], dict.fromkeys(after))
    )
    graph = helper.make_graph(nodes, "tiny", entries, ends)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
