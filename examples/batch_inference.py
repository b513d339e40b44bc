"""A model in the middle of a dask.array program: the accuracy of a model on noisy images.

    python examples/batch_inference.py [--rows 10000] [--chunk 1000]

The images are a dask array.  The program adds noise before the model; after it, it compares with the labels and takes a
mean.  All steps are one graph: no step waits for the previous one to finish on all chunks, and only the means are
gathered.
"""

from __future__ import annotations

import argparse

import dask
import dask.array as da
import numpy as np
from dask.distributed import Client
from train_digits import MODELS, split

import dask_ferro as ff

NOISE = (0, 1, 2, 4, 8)  # standard deviations, of pixels from 0 to 16


def accuracies(model: ff.Model, images: da.Array, labels: da.Array) -> list[da.Array]:
    """Return the lazy accuracy for each strength of noise."""
    rng = da.random.default_rng(0)
    found = []
    for sigma in NOISE:
        noise = rng.normal(0, sigma, size=images.shape, chunks=images.chunks)
        noisy = da.clip(images + noise, 0, 16).astype(np.float32)
        scores = model(noisy)  # a dask array in, a dask array out
        found.append((scores.argmax(axis=1) == labels).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Batch inference over a dask array.")
    parser.add_argument("--rows", type=int, default=10_000, help="images (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=1_000, help="images per task (default: %(default)s)")
    options = parser.parse_args()

    _, held_out = split()
    which = np.arange(options.rows) % len(held_out.labels)
    images = da.from_array(held_out.images[which].reshape(-1, 1, 8, 8), chunks=(options.chunk, 1, 8, 8))
    labels = da.from_array(held_out.labels[which], chunks=options.chunk)

    with ff.LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster):
        model = ff.from_onnx(MODELS / "digits_conv.onnx")
        print(f"{options.rows} images in {images.numblocks[0]} chunks, through {model.name}")
        for sigma, right in zip(NOISE, dask.compute(*accuracies(model, images, labels)), strict=True):
            print(f"noise of {sigma} (pixels are 0 to 16): accuracy {right:.1%}")


if __name__ == "__main__":
    main()
