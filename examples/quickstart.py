"""An ONNX model on a Dask cluster of two processes, in a dozen lines."""

from pathlib import Path

import numpy as np
from distributed import Client

import dask_ferro as ff

if __name__ == "__main__":
    images = np.random.default_rng(0).uniform(0, 16, (1000, 64)).astype("float32")
    with ff.LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        model = ff.from_onnx(Path(__file__).parent / "models" / "digits_mlp.onnx")
        print(model)
        scores = client.compute(model(images, batch=250)).result()
        print(f"scores {scores.shape}; of noise, the model makes {scores.argmax(axis=1)[:10]}")
