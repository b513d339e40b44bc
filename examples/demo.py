"""Classify handwritten digits on two worker processes (`make demo`).

    python examples/demo.py [--rows 20000] [--batch 2500] [--model digits_conv]

It starts a Dask cluster on this machine, loads a trained ONNX model, and classifies the digits that were held out of
its training (repeated, for a measurable load).  It prints accuracy, speed, the tasks of each worker, and whether the
scores equal those of ONNX Runtime alone.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
from dask.distributed import Client, get_task_stream
from train_digits import MODELS, split

import dask_ferro as ff

REPEATS = 5
LEAST_ACCURACY = 0.95
LARGEST_GAP = 1e-5  # tolerance of probabilities: kernels may sum in another order for another number of rows


class Run(NamedTuple):
    """The scores of the last run, the seconds of each run, and the last run's number of tasks by worker address."""

    scores: np.ndarray
    seconds: list[float]
    tasks: Counter[str]


def classify(client: Client, model: ff.Model, images: np.ndarray, batch: int) -> Run:
    """Classify all images several times, from the images in this process to the scores in this process.

    Each run has another order of the images, the given one last, since Dask would not compute the same task twice.
    """
    seconds = []
    for shift in reversed(range(REPEATS)):
        shifted = np.roll(images, shift, axis=0)
        with get_task_stream(client) as stream:
            start = time.perf_counter()
            scores = client.compute(model(shifted, batch_size=batch)).result()
            seconds.append(time.perf_counter() - start)
    return Run(scores, seconds, Counter(record["worker"] for record in stream.data))


def by_onnxruntime(path: Path, images: np.ndarray) -> np.ndarray:
    """Return the scores of one ONNX Runtime session in this process, without Dask."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"image": images})[0]


def demo(path: Path, rows: int, batch: int) -> bool:
    """Run the demonstration; return whether accuracy and scores are as expected."""
    _, held_out = split()
    which = np.arange(rows) % len(held_out.labels)
    labels = held_out.labels[which]

    print("Starting a Dask cluster of 2 worker processes, 1 thread each ...")
    with ff.LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        print(f"Dashboard: {client.dashboard_link}\n")
        model = ff.from_onnx(path)
        image_shape = model.inputs["image"].shape[1:]
        images = held_out.images[which].reshape(-1, *image_shape)
        print(model(images, batch_size=batch))

        digits = f"{len(held_out.labels)} held-out digits, repeated"
        print(f"\nClassifying {rows:,} images ({digits}), {batch:,} a task ...")
        run = classify(client, model, images, batch)

    accuracy = float((run.scores.argmax(axis=1) == labels).mean())
    warm = float(np.median(run.seconds[1:]))
    print(f"Accuracy    {accuracy:.1%} of the digits named rightly")
    print(
        f"Throughput  {rows / warm:,.0f} images/s (the first time, with set-up: {rows / run.seconds[0]:,.0f})"
    )
    for number, (worker, tasks) in enumerate(sorted(run.tasks.items())):
        print(f"{'Work' if number == 0 else '':10}  {worker} ran {tasks} tasks")
    gap = float(np.abs(run.scores - by_onnxruntime(path, images)).max())
    agrees = gap < LARGEST_GAP
    verdict = "the same" if agrees else "OTHER"
    print(f"Check       ONNX Runtime alone gives {verdict} scores (largest gap {gap:.1e})")
    return agrees and accuracy > LEAST_ACCURACY


def main() -> int:
    parser = argparse.ArgumentParser(description="Classify handwritten digits on a local Dask cluster.")
    parser.add_argument("--model", choices=("digits_mlp", "digits_conv"), default="digits_mlp")
    parser.add_argument("--rows", type=int, default=20_000, help="images in all (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2_500, help="images per task (default: %(default)s)")
    options = parser.parse_args()
    if options.rows < 1 or options.batch < 1:
        parser.error("--rows and --batch must be at least 1")
    # When another cluster has the usual port, Dask takes a free one; the address is printed anyway.
    warnings.filterwarnings("ignore", message=r"Port \d+ is already in use")
    try:
        good = demo(MODELS / f"{options.model}.onnx", options.rows, options.batch)
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
