"""An ONNX model on a Dask cluster of two processes, in a dozen lines."""

from pathlib import Path

from dask.distributed import Client
from sklearn.datasets import load_digits

import dask_ferro as ff

if __name__ == "__main__":
    images, labels = load_digits(return_X_y=True)
    with ff.LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        model = ff.from_onnx(Path(__file__).parent / "models" / "digits_mlp.onnx")
        print(model)
        scores = client.compute(model(images.astype("float32"), batch_size=500)).result()
        print(f"scores {scores.shape}; the first ten are {labels[:10]}, named {scores[:10].argmax(axis=1)}")
