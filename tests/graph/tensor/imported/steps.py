"""Training steps of a loaded model, as one graph that ONNX Runtime runs step after step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime

import dask_ferro.tensor as ft
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build


class Trained(NamedTuple):
    """The loss before each step, and the parameters after the last one."""

    losses: list[float]
    params: dict[str, np.ndarray]


def trained(
    loss: ft.Tensor,
    params: Mapping[str, ft.Tensor],
    optimizer: ft.optim.Optimizer,
    feeds: Mapping[str, np.ndarray],
    steps: int,
) -> Trained:
    """Train on one batch; `feeds` are the values of arguments by name."""
    state = optimizer.init(params)
    before = [*params.values(), *(pytree.leaves(state) if state else [])]
    after, new_state = optimizer.step(params, ft.grad(loss, params), state)
    results = [loss, *after.values(), *(pytree.leaves(new_state) if new_state else [])]
    model, bound = build({f"after_{i}": y for i, y in enumerate(results)}, before)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = (
        1  # threads that spin for work between steps take the processor from the next one
    )
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    names = [value.name for value in session.get_inputs() if value.name not in feeds]
    values, losses = [bound[name] for name in names], []
    for _ in range(steps):
        found, *values = session.run(None, {**feeds, **dict(zip(names, values, strict=True))})
        losses.append(float(found))
    return Trained(losses, dict(zip(params, values, strict=False)))
