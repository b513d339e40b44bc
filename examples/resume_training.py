"""Train a network for handwritten digits so that it can be killed at any time, and goes on where it was.

    python examples/resume_training.py /tmp/digits                 # kill it (kill -9, or Ctrl-C), and run it again
    python examples/resume_training.py /tmp/digits --plan examples/plans/data.yaml --workers 2

The folder has the checkpoints: parameters, the optimizer's state, and the position in the shuffled data.  However often
it is killed, the last line is the same: `parameters` is a digest of all bits of the trained parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import dask_ferro as ff
import dask_ferro.tensor as ft

HIDDEN, ROWS, RATE = 64, 128, 1e-2


def network(params: Any, image: Any) -> Any:
    with ft.region("hidden"):
        hidden = ft.nn.relu(image @ params["hidden"]["weight"] + params["hidden"]["bias"])
    with ft.region("scores"):
        return hidden @ params["scores"]["weight"] + params["scores"]["bias"]


def loss(params: Any, batch: Any) -> Any:
    return ft.nn.cross_entropy(network(params, batch["image"]), batch["label"])


def accuracy(params: Any, batch: Any) -> Any:
    right = ft.argmax(network(params, batch["image"]), axis=1) == batch["label"]
    return ft.mean(ft.astype(right, "float32"))


def parameters(seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)

    def layer(rows: int, columns: int) -> dict[str, np.ndarray]:
        weight = rng.standard_normal((rows, columns)) * np.sqrt(2 / rows)
        return {"weight": weight.astype(np.float32), "bias": np.zeros(columns, np.float32)}

    return {"hidden": layer(64, HIDDEN), "scores": layer(HIDDEN, 10)}


def digits() -> dict[str, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("The digits come with scikit-learn: pip install 'dask-ferro[examples]'") from None
    images, labels = load_digits(return_X_y=True)
    return {"image": (images / 16).astype(np.float32), "label": labels.astype(np.int64)}


def training(folder: str | None, epochs: int, plan: str | None = None) -> Any:
    """Return the training; without a folder it leaves no checkpoints."""
    return ff.fit(
        loss,
        parameters(),
        digits(),
        ft.optim.Adam(RATE),
        plan=plan,
        epochs=epochs,
        batch_size=ROWS,
        drop_last=True,
        metrics={"accuracy": accuracy},
        lr=ff.CosineDecay(RATE, updates=14 * epochs, warmup=14),
        clip_norm=1.0,
        accumulate_steps=2,
        checkpoint=folder,
        checkpoint_every=None if folder is None else 2,
    )


def digest(params: dict[str, dict[str, np.ndarray]]) -> str:
    """Return a digest of all bits of the parameters."""
    found = sha256()
    for layer in params.values():
        for array in layer.values():
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


@contextmanager
def cluster(workers: int) -> Iterator[None]:
    if not workers:
        yield
        return
    from dask.distributed import Client

    # Its workers go on when a terminal sends Ctrl-C to all processes, so that they write the last checkpoint.
    with (
        ff.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as local,
        Client(local),
    ):
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train digits; kill it and run it again.")
    parser.add_argument("folder", type=Path, help="of the checkpoints")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--plan", help="of examples/plans; needs --workers")
    parser.add_argument("--workers", type=int, default=0, help="0: in this process")
    options = parser.parse_args(arguments)
    with cluster(options.workers):
        run = training(str(options.folder), options.epochs, options.plan)
        print(run, flush=True)
        for step in run:
            print(f"step {step.index}  epoch {step.epoch}  loss {step.loss:.4f}  {step.metrics}", flush=True)
        print(f"parameters {digest(run.params)}")


if __name__ == "__main__":
    main()
