"""The jobs of `jobs.py` as programs of Ray Data, for an interpreter that has Ray; `jobs.py --ray-python PATH` runs it.

A line of JSON on standard input is a job, its data and its target; a line comes back when it is done.  Ray starts once,
as Dask's workers do.  The interpreter needs ray[data], onnxruntime, pyarrow, pandas, pillow, scikit-learn and zarr.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import onnxruntime as ort
import pandas as pd
import PIL.Image
import ray
import zarr

WORKERS = 2


def session(path: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options)


def imagenet(image: PIL.Image.Image) -> np.ndarray:
    """Return an image as the other contenders' function does."""
    scale = 256 / min(image.size)
    width, height = (max(224, round(size * scale)) for size in image.size)
    image = image.convert("RGB").resize((width, height), PIL.Image.Resampling.BILINEAR)
    left, top = (width - 224) // 2, (height - 224) // 2
    values = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) / 255
    mean, deviation = np.array([0.485, 0.456, 0.406], "f4"), np.array([0.229, 0.224, 0.225], "f4")
    return np.ascontiguousarray(((values - mean) / deviation).transpose(2, 0, 1))


# Two actors that score; half a core each, so that there is room for the tasks that read.
ACTORS = {"compute": ray.data.ActorPoolStrategy(size=WORKERS), "num_cpus": 0.5}


def table(data: Path, out: Path) -> None:
    class Score:
        def __init__(self) -> None:
            self.session = session(str(data / "forest.onnx"))

        def __call__(self, part: pd.DataFrame) -> pd.DataFrame:
            features = part.drop(columns="id").to_numpy(np.float32)
            label, scores = self.session.run(None, {"X": features})
            found = {"id": part["id"], "label": label, "scores_0": scores[:, 0], "scores_1": scores[:, 1]}
            return pd.DataFrame(found)

    rows = ray.data.read_parquet(str(data / "table.parquet"), override_num_blocks=WORKERS * 4)
    found = rows.map_batches(Score, batch_format="pandas", batch_size=12_500, **ACTORS)
    found.write_parquet(str(out / "scores.parquet"))


def images(data: Path, out: Path) -> None:
    class Score:
        def __init__(self) -> None:
            self.session = session(str(data / "net.onnx"))

        def __call__(self, part: dict[str, Any]) -> dict[str, Any]:
            x = np.stack([imagenet(PIL.Image.fromarray(image)) for image in part["image"]])
            (scores,) = self.session.run(None, {"x": x})
            return {"path": part["path"]} | {f"scores_{k}": scores[:, k] for k in range(scores.shape[1])}

    rows = ray.data.read_images(str(data / "images"), include_paths=True, override_num_blocks=WORKERS * 4)
    found = rows.map_batches(Score, batch_size=16, **ACTORS)
    found.write_parquet(str(out / "scores.parquet"))


def cube(data: Path, out: Path) -> None:
    class Block:
        def __init__(self) -> None:
            self.session = session(str(data / "maps.onnx"))

        def __call__(self, part: dict[str, Any]) -> dict[str, Any]:
            for start in part["id"] * chunk:
                at = slice(start, start + chunk)
                target[at] = self.session.run(None, {"x": cube[at]})[0]
            return part

    cube = zarr.open_array(data / "cube.zarr" / "maps", mode="r")
    target = zarr.create_array(
        out / "cube.zarr" / "y", shape=cube.shape, chunks=cube.chunks, dtype=cube.dtype
    )
    chunk = cube.chunks[0]
    ray.data.range(cube.shape[0] // chunk, override_num_blocks=WORKERS * 4).map_batches(
        Block, batch_size=1, **ACTORS
    ).materialize()


def pipeline(data: Path, out: Path) -> None:
    class Score:
        def __init__(self) -> None:
            self.pipeline = joblib.load(data / "pipeline.joblib")

        def __call__(self, part: pd.DataFrame) -> pd.DataFrame:
            return pd.DataFrame(self.pipeline.predict_proba(part), columns=["p0", "p1"])

    people = pd.read_pickle(data / "people.pkl")
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    rows = ray.data.from_pandas(people).repartition(8)
    found = rows.map_batches(Score, batch_format="pandas", batch_size=25_000, **ACTORS)
    found.to_pandas().to_pickle(out / "scores.pkl")


JOBS = {"table": table, "images": images, "cube": cube, "pipeline": pipeline}


def main() -> None:
    # Ray and its workers print to standard output, which has the answers here.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray.init(num_cpus=WORKERS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    print(ray.__version__, file=answers, flush=True)
    for line in sys.stdin:
        job, data, out = json.loads(line)
        JOBS[job](Path(data), Path(out))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
