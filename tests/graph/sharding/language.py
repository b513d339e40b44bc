"""A small language model whose vocabulary ranks split, and its plan, for tests of sharding and of its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.sharding.placements import Shard
from dask_ferro.graph.sharding.plan import Sharding
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.sharding.spmd import Spmd, lower
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.tensor import input

ENTRIES, WIDTH, ROWS, LENGTH = 32, 6, 4, 3
HIDDEN = 4 * WIDTH


class Language(NamedTuple):
    """A training step of a language model whose table gives the logits too, and its inputs."""

    model: ir.Model
    feeds: dict[str, np.ndarray]


def language(dtype: Any = np.float64, entries: int = ENTRIES, **loss: Any) -> Language:
    """Embedding, one block, logits by the same table, cross entropy, and the gradients of all weights."""
    shapes = {"table": (entries, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    w = {name: input(name, shape, dtype) for name, shape in shapes.items()}
    ids, labels = (input(name, (ROWS, LENGTH), np.int64) for name in ("ids", "labels"))
    with region("words"):
        h = nn.embedding(ids, w["table"])
    h = h + nn.gelu(h @ w["up"]) @ w["down"]
    losses = nn.cross_entropy(h @ xp.permute_dims(w["table"], (1, 0)), labels, axis=-1, **loss)
    weighted = (
        losses * np.linspace(1, 2, ROWS * LENGTH, dtype=dtype).reshape(ROWS, LENGTH)
        if losses.ndim
        else losses
    )
    gradients = {f"d_{name}": g for name, g in grad(xp.sum(weighted), w).items()}
    rng = np.random.default_rng(5)
    feeds = {name: (0.3 * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
    # Indices of all ranks, and some of them twice.
    feeds["ids"] = rng.permutation(np.arange(ROWS * LENGTH) * 5 % entries).reshape(ROWS, LENGTH)
    feeds["ids"][0] = feeds["ids"][1]
    feeds["labels"] = rng.integers(0, entries, (ROWS, LENGTH))
    if loss.get("ignore_index", 0) < 0:
        feeds["labels"][1, :2] = loss["ignore_index"]
    return Language(to_model({"loss": losses, **gradients}, [ids, labels, *w.values()]), feeds)


WEIGHTS = {"table": 0, "up": 1, "down": 0}
MESHES = {
    "2 ranks": Mesh({"tensor": 2}),
    "4 ranks": Mesh({"tensor": 4}),
    "2 ranks, the batch over 2": Mesh({"data": 2, "tensor": 2}),
    "4 ranks, the batch over 2": Mesh({"tensor": 4, "data": 2}),
}


def sharded(step: Language, mesh: Mesh) -> tuple[Sharding, Spmd]:
    """The plan with a split vocabulary, and its graph of all ranks."""
    placed = {name: {"tensor": Shard(dim)} for name, dim in WEIGHTS.items()}
    if "data" in mesh.axes:
        placed |= {name: {"data": Shard(0)} for name in ("ids", "labels")}
    plan = propagate(step.model, infer(step.model), mesh, placed)
    spmd = lower(plan)
    onnx.checker.check_model(ir.to_proto(spmd.model))
    return plan, spmd


def assert_close(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_allclose(
            got[name], array, rtol=tolerance, atol=tolerance * np.abs(array).max(), err_msg=name
        )
