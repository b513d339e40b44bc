"""Train a network for handwritten digits five times: on one worker, and with four parallel plans for the same code.

    python examples/train_parallel.py              # four local workers; a minute
    python examples/train_parallel.py --epochs 2   # shorter

The network and its loss are array math, and `ff.fit` trains it.  The YAML files in `plans/` distribute a step: data
parallel, tensor parallel, both on four workers, and in pipeline stages (with one micro-batch a step).  The losses of
all runs agree to 1e-5 at every step.  Parameters stay on the workers that hold them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dask_ferro as ff
import dask_ferro.tensor as ft

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


def parameters(seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)

    def layer(rows: int, columns: int) -> dict[str, np.ndarray]:
        return {
            "weight": rng.standard_normal((rows, columns)) * np.sqrt(2 / rows),
            "bias": np.zeros(columns),
        }

    return {"hidden": layer(64, HIDDEN), "scores": layer(HIDDEN, 10)}


def loss(w: Any, batch: Any) -> Any:
    with ft.region("hidden"):
        hidden = ft.nn.relu(batch["image"] @ w["hidden"]["weight"] + w["hidden"]["bias"])
    with ft.region("scores"):
        scores = hidden @ w["scores"]["weight"] + w["scores"]["bias"]
    return ft.nn.cross_entropy(scores, batch["label"])


# ---- running it ----------------------------------------------------------------------------------------------


class Run(NamedTuple):
    losses: list[float]
    weights: dict[str, dict[str, np.ndarray]]
    seconds: float


def train(plan: str | None, batches: Sequence[dict[str, np.ndarray]], epochs: int) -> Run:
    training = ff.fit(
        loss,
        parameters(),
        batches,
        ft.optim.SGD(RATE),
        plan=None if plan is None else FOLDER / plan,
        epochs=epochs,
        seed=None,
        progress=False,
    )
    start = time.perf_counter()
    losses = [step.loss for step in training]
    return Run(losses, training.params, time.perf_counter() - start)


def accuracy(w: dict[str, dict[str, np.ndarray]], images: np.ndarray, labels: np.ndarray) -> float:
    hidden = np.maximum(images @ w["hidden"]["weight"] + w["hidden"]["bias"], 0)
    scores = hidden @ w["scores"]["weight"] + w["scores"]["bias"]
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
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    from dask.distributed import Client

    batches, held_x, held_y = digits()
    runs: dict[str, Run] = {}
    with (
        ff.LocalCluster(n_workers=arguments.workers, threads_per_worker=1, dashboard_address=":0") as cluster,
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
