"""A small regression for tests of training: two layers, with the names that plans need."""

from __future__ import annotations

from typing import Any

import numpy as np

import dask_ferro as ff
import dask_ferro.tensor as ft

PLANS: dict[str, Any] = {
    "none": None,
    "data": {"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0}},
    "tensor": {
        "mesh": {"tensor": 2},
        "first": {"shard": {"weight": {"tensor": 1}, "bias": {"tensor": 0}}},
        "last": {"shard": {"weight": {"tensor": 0}}},
    },
    "data x tensor": {
        "mesh": {"data": 2, "tensor": 2},
        "inputs": {"x": {"data": 0}, "t": {"data": 0}},
        "first": {"shard": {"weight": {"tensor": 1}, "bias": {"tensor": 0}}},
        "last": {"shard": {"weight": {"tensor": 0}}},
    },
    "pipeline": {"first": {"stage": 0}, "last": {"stage": 1}},
}

# Rows over all ranks, weights over one axis.
FSDP = {
    "mesh": {"data": 2, "fsdp": 2},
    "inputs": {"x": {"data": 0, "fsdp": 0}, "t": {"data": 0, "fsdp": 0}},
    "first": {"shard": {"weight": {"fsdp": 0}, "bias": {"fsdp": 0}}},
    "last": {"shard": {"weight": {"fsdp": 0}}},
}


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 2).astype("f4")

    return {"first": {"weight": array(6, 8), "bias": array(8)}, "last": {"weight": array(8, 4)}}


def data(rows: int = 20) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "x": rng.standard_normal((rows, 6)).astype("f4"),
        "t": rng.standard_normal((rows, 4)).astype("f4"),
    }


def outputs(p: Any, x: Any) -> Any:
    with ft.region("first"):
        hidden = ft.nn.relu(x @ p["first"]["weight"] + p["first"]["bias"])
    with ft.region("last"):
        return hidden @ p["last"]["weight"]


def loss(p: Any, batch: Any) -> Any:
    return ft.nn.mse_loss(outputs(p, batch["x"]), batch["t"])


def dropped(p: Any, batch: Any, step: Any, rows: Any) -> Any:
    with ft.region("first"):
        hidden = ft.nn.relu(batch["x"] @ p["first"]["weight"] + p["first"]["bias"])
        hidden = ft.nn.dropout(hidden, 0.5, seed=0, layer="first", step=step, rows=rows)
    with ft.region("last"):
        return ft.nn.mse_loss(hidden @ p["last"]["weight"], batch["t"])


def distance(p: Any, batch: Any) -> Any:
    return ft.mean(ft.abs(outputs(p, batch["x"]) - batch["t"]))


def leaves(tree: Any) -> list[np.ndarray]:
    return [
        np.asarray(leaf)
        for part in tree.values()
        for leaf in (leaves(part) if isinstance(part, dict) else [part])
    ]


def same_bits(a: Any, b: Any) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(leaves(a), leaves(b), strict=True))


def ran(*, steps: int | None = None, **options: Any) -> tuple[list[tuple[Any, ...]], Any]:
    """Train, and leave the loop after so many steps (0: before any); return what steps told, and the parameters."""
    given = {"batch_size": 8, "epochs": 2, "metrics": {"distance": distance}, **options}
    optimizer = given.pop("optimizer", ft.optim.Adam(0.01))
    training = ff.fit(
        given.pop("loss", loss), given.pop("params", params()), given.pop("data", data()), optimizer, **given
    )
    told: list[tuple[Any, ...]] = []
    for step in training if steps != 0 else ():
        told.append((step.index, step.epoch, step.rows, step.is_updated, step.loss, step.metrics["distance"]))
        if steps is not None and len(told) == steps:
            break
    return told, training.params
