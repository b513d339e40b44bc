"""A stack of GPT blocks and its gradients with tensor parallelism, a pipeline, and both, without changes to its code.

    python examples/transformer_tp_pp.py                # four local workers; half a minute

The stack is array math with named regions (`ft.region`).  `plans/transformer.yaml` splits heads and hidden units over
two workers; a layer has two all-reduces forward and two backward.  `pipeline` cuts the same loss into two stages of
one worker each, and runs four micro-batches by the 1f1b schedule.  `plans/transformer_stages.yaml` does both, tensor 2
x pipeline 2 on four workers: each stage is two workers, with the same schedule.  All give the loss and the gradients
of one worker.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import BuiltModel, build
from dask_ferro.graph.tensor.manipulation import permute_dims
from dask_ferro.graph.tensor.tensor import Tensor, asarray, input
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.pipeline import Pipeline
from dask_ferro.lower.ranks.sharded_array import gather
from dask_ferro.lower.ranks.spmd import Ranks

PLANS = Path(__file__).parent / "plans"
BATCH, TOKENS, HEADS, MICRO_BATCHES = 8, 32, 4, 4
SAME = 1e-6


def parameters(layers: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    found = {}
    for layer in range(layers):
        for name, shape in shapes.items():
            array = rng.standard_normal(shape) / np.sqrt(shape[0])
            found[f"layer{layer}.{name}"] = asarray(array, name=f"layer{layer}.{name}")
    return found


def heads(x: Tensor, rows: int) -> Tensor:
    return permute_dims(x.reshape((rows, TOKENS, HEADS, x.shape[-1] // HEADS)), (0, 2, 1, 3))


def block(x: Tensor, w: dict[str, Tensor], layer: int, rows: int) -> Tensor:
    """Return a block's output: pre-norm causal attention, then a feed-forward part."""
    width = x.shape[-1]
    with region(f"layer{layer}"):
        with region("attention"):
            h = nn.layer_norm(x, (width,))
            q, k, v = (heads(h @ w[f"layer{layer}.{name}"], rows) for name in "qkv")
            mixed = permute_dims(nn.scaled_dot_product_attention(q, k, v, is_causal=True), (0, 2, 1, 3))
            mixed = mixed.reshape((rows, TOKENS, width))
            x = x + mixed @ w[f"layer{layer}.o"]
        with region("mlp"):
            h = nn.layer_norm(x, (width,))
            return x + nn.gelu(h @ w[f"layer{layer}.up"]) @ w[f"layer{layer}.down"]


def loss_of(w: dict[str, Tensor], layers: int, width: int, rows: int) -> Tensor:
    x, wanted = (input(name, (rows, TOKENS, width), np.float64) for name in ("x", "wanted"))
    y = x
    for layer in range(layers):
        y = block(y, w, layer, rows)
    return nn.mse_loss(y, wanted)


def whole_step(layers: int, width: int, rows: int = BATCH) -> BuiltModel:
    w = parameters(layers, width)
    loss = loss_of(w, layers, width, rows)
    return build({"loss": loss, **{f"d {n}": g for n, g in grad(loss, w).items()}}, list(w.values()))


def by_schedule(
    layers: int, width: int, batch: dict[str, Any], **how: Any
) -> tuple[dict[str, Any], Pipeline]:
    """Return the loss and gradients of micro-batches by the 1f1b schedule, and the pipeline."""
    w = parameters(layers, width)
    loss = loss_of(w, layers, width, BATCH // MICRO_BATCHES)
    step = parallelize(loss, params=w, micro_batches=MICRO_BATCHES, schedule="1f1b", **how)
    value, gradients = step(batch).compute()
    return {"loss": value, **{f"d {name}": g for name, g in gradients.items()}}, step


def apart(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the largest difference, relative to the largest value of each array."""
    return max(float(np.abs(got[n] - wanted[n]).max() / np.abs(wanted[n]).max()) for n in wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description="A transformer, tensor parallel and pipelined.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    from dask.distributed import Client, LocalCluster

    layers, width = arguments.layers, arguments.width
    rng = np.random.default_rng(1)
    batch = {name: rng.standard_normal((BATCH, TOKENS, width)) for name in ("x", "wanted")}
    built = whole_step(layers, width)
    alone = gather(Ranks.of(apply_plan(built))({**batch, **built.bound}), scheduler="sync")
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster),
    ):
        applied = apply_plan(built, PLANS / "transformer.yaml")
        counted = dict(applied.shard().collectives)
        ranks = Ranks.of(applied)
        start = time.perf_counter()
        split = gather(ranks({**batch, **built.bound}))
        seconds = time.perf_counter() - start
        print(f"tensor parallel on 2 workers: {counted}, {seconds:.2f} s, {apart(split, alone):.0e} apart")

        start = time.perf_counter()
        piped, step = by_schedule(layers, width, batch, stages=2)
        seconds = time.perf_counter() - start
        print(
            f"1f1b, 2 stages x {MICRO_BATCHES} micro-batches: {seconds:.2f} s, {apart(piped, alone):.0e} apart"
        )
        print(step.schedule)

        both = alone
        if layers == 2:  # as many as the plan has
            start = time.perf_counter()
            both, _ = by_schedule(layers, width, batch, plan=PLANS / "transformer_stages.yaml")
            seconds = time.perf_counter() - start
            print(
                f"1f1b, tensor 2 x pipeline 2 on 4 workers: {seconds:.2f} s, {apart(both, alone):.0e} apart"
            )
    if max(apart(each, alone) for each in (split, piped, both)) > SAME:
        raise SystemExit(f"the gradients are further apart than {SAME:.0e}")


if __name__ == "__main__":
    main()
