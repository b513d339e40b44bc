"""Fine-tune a trained ONNX model for pictures that it was not made for, and write it back into its own graph.

    python examples/finetune.py               # in this process and two threads of a local cluster; some seconds
    python examples/finetune.py --steps 20    # shorter

`models/digits_conv.onnx` reads dark digits on a light ground; here they come inverted.  Its last layer alone is trained
first, on frozen features, and then all layers.  Both tuned files have the graph and the names of the first one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from train_digits import MODELS, Digits, split

import dask_ferro as ff
import dask_ferro.parallel as fp
import dask_ferro.tensor as ft

BATCH, RATE = 128, 3e-2
SOURCE = MODELS / "digits_conv.onnx"


def inverted(digits: Digits) -> Digits:
    """Return the digits with light and dark exchanged, as images [N, 1, 8, 8]."""
    return Digits(16 - digits.images.reshape(-1, 1, 8, 8), digits.labels)


def tuned(
    model: ff.TrainableModel, params: dict[str, ft.Tensor], digits: Digits, steps: int
) -> dict[str, np.ndarray]:
    """Return the parameters after some steps of Adam."""
    # The loss is computed of logits: `scores`, the model's output, is their softmax.
    logits = model.until("logits")(params=params)
    loss = ft.nn.cross_entropy(logits, ft.input("label", ("N",), "int64"))
    step = ff.parallelize(loss, params=params, optimizer=ft.optim.Adam(RATE))
    rng, now = np.random.default_rng(0), None
    for _ in range(steps):
        rows = rng.choice(len(digits.labels), BATCH, replace=False)
        batch = {"image": digits.images[rows], "label": digits.labels[rows]}
        kept = {} if now is None else {"params": now.params, "state": now.state}
        now = step(batch, **kept).submit()
    return fp.gather(now.params)


def accuracy(path: Path, digits: Digits) -> float:
    """Return the share of digits that a model's file names."""
    return float((ff.from_onnx(path).predict(digits.images).argmax(axis=1) == digits.labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fine-tune an ONNX model, its last layer and then all of it."
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("."))
    arguments = parser.parse_args()
    from dask.distributed import Client, LocalCluster

    train, held = map(inverted, split())
    model = ff.load_trainable(SOURCE)
    print(model)
    print(f"as it is: {accuracy(SOURCE, held):.1%} of the held-out digits")
    runs = {"last layer": model.parameters("fc.*"), "all layers": model.parameters()}
    cluster = LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0")
    with cluster, Client(cluster):
        for name, params in runs.items():
            path = arguments.out / f"digits_{name.replace(' ', '_')}.onnx"
            model.save(path, params=tuned(model, params, train, arguments.steps))
            onnx.checker.check_model(path, full_check=True)
            print(f"{name}, {len(params)} parameters: {accuracy(path, held):.1%}, written to {path}")


if __name__ == "__main__":
    main()
