"""Train a network for handwritten digits five times: on one worker, and with four parallel plans for the same code.

    python examples/train_parallel.py              # two local workers; a minute
    python examples/train_parallel.py --epochs 2   # shorter

The network, its gradients and its optimizer are array math, and a training step is one graph.  The YAML files in
`plans/` distribute that graph: data parallel, tensor parallel, both, and in pipeline stages (with one micro-batch a
step).  The losses of all runs agree to 1e-5 at every step.  Parameters stay on the workers that hold them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import signal
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import Built, build
from dask_ferro.graph.tensor.optim import SGD
from dask_ferro.graph.tensor.tensor import Tensor, argument, asarray
from dask_ferro.lower.ranks.sharded import ShardedArray
from dask_ferro.lower.ranks.spmd import Ranks

PLANS = {
    "one worker": None,
    "data": "data.yaml",
    "tensor": "tensor.yaml",
    "data x tensor": "both.yaml",
    "pipeline": "pipeline.yaml",
}
FOLDER = Path(__file__).parent / "plans"
ROWS, HIDDEN, RATE = 336, 64, 1.0
SAME_LOSS, LEAST_ACCURACY = 1e-5, 0.95


# ---- the model: pure math ------------------------------------------------------------------------------------


def parameters(seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)

    def weight(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns)) * np.sqrt(2 / rows)

    return {
        "hidden.weight": asarray(weight(64, HIDDEN), name="hidden.weight"),
        "hidden.bias": asarray(np.zeros(HIDDEN), name="hidden.bias"),
        "scores.weight": asarray(weight(HIDDEN, 10), name="scores.weight"),
        "scores.bias": asarray(np.zeros(10), name="scores.bias"),
    }


def network(image: Tensor, w: dict[str, Tensor]) -> Tensor:
    with signal("hidden"):
        hidden = nn.relu(image @ w["hidden.weight"] + w["hidden.bias"])
    with signal("scores"):
        return hidden @ w["scores.weight"] + w["scores.bias"]


def training_step() -> Built:
    """Return a training step as one model: from a batch and parameters to the loss and the updated parameters."""
    image, label = argument("image", (ROWS, 64), np.float64), argument("label", (ROWS,), np.int64)
    w = parameters()
    loss = nn.cross_entropy(network(image, w), label)
    after, _ = SGD(RATE).step(w, grad(loss, w), {})
    return build(
        {"loss": loss, **{f"next {name}": value for name, value in after.items()}},
        [image, label, *w.values()],
    )


# ---- running it ----------------------------------------------------------------------------------------------


class Run(NamedTuple):
    losses: list[float]
    weights: dict[str, np.ndarray]
    seconds: float


def train(plan: str | None, batches: Sequence[dict[str, np.ndarray]], epochs: int) -> Run:
    built = training_step()
    follow = {f"next {name}": name for name in built.bound}
    step = Ranks.of(apply(built, None if plan is None else FOLDER / plan), follow=follow)
    weights: dict[str, Any] = dict(built.bound)
    losses = []
    start = time.perf_counter()
    for batch in list(batches) * epochs:
        out: dict[str, ShardedArray] = step({**batch, **weights})
        out = dict(zip(out, dask.persist(*out.values()), strict=True))
        losses.append(float(out["loss"].compute()))
        weights = {name: out[end] for end, name in follow.items()}
    seconds = time.perf_counter() - start
    return Run(losses, {name: value.compute() for name, value in weights.items()}, seconds)


def accuracy(weights: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray) -> float:
    hidden = np.maximum(images @ weights["hidden.weight"] + weights["hidden.bias"], 0)
    scores = hidden @ weights["scores.weight"] + weights["scores.bias"]
    return float((scores.argmax(1) == labels).mean())


def digits() -> tuple[list[dict[str, np.ndarray]], np.ndarray, np.ndarray]:
    """Return the training batches, and the held-out digits."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SystemExit("The digits come with scikit-learn: pip install 'dask-ferro[examples]'") from None
    images, labels = load_digits(return_X_y=True)
    x, held_x, y, held_y = train_test_split(
        images / 16, labels, test_size=0.25, stratify=labels, random_state=0
    )
    starts = range(0, len(x) - ROWS + 1, ROWS)
    return [{"image": x[i : i + ROWS], "label": y[i : i + ROWS]} for i in starts], held_x, held_y


def main() -> None:
    parser = argparse.ArgumentParser(description="Train digits on one worker and by four plans.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    from distributed import Client, LocalCluster

    batches, held_x, held_y = digits()
    runs: dict[str, Run] = {}
    with (
        LocalCluster(n_workers=arguments.workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster),
    ):
        for name, plan in PLANS.items():
            run = runs[name] = train(plan, batches, arguments.epochs)
            apart = max(abs(a - b) for a, b in zip(run.losses, runs["one worker"].losses, strict=True))
            print(
                f"{name:<14} {len(run.losses)} steps, {1e3 * run.seconds / len(run.losses):.0f} ms each; "
                f"loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}, at most {apart:.0e} apart; "
                f"held-out accuracy {100 * accuracy(run.weights, held_x, held_y):.1f} %"
            )
            if apart > SAME_LOSS:
                raise SystemExit(f"{name}: the losses are {apart:.1e} apart, wanted {SAME_LOSS:.0e} at most")
    if arguments.epochs >= 20 and accuracy(runs["data"].weights, held_x, held_y) < LEAST_ACCURACY:
        raise SystemExit(f"held-out accuracy is under {LEAST_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
