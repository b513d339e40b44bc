"""The four commonest jobs with a model, by dask_ferro, Dask, joblib and Ray Data: lines of code, and seconds.

    python benchmarks/jobs.py                      # all of them
    python benchmarks/jobs.py --only images        # one
    python benchmarks/jobs.py --ray-python ray/bin/python    # beside Ray Data, in an environment of its own
    python benchmarks/jobs.py --toy

table      parquet in, parquet out: a random forest on 30 columns, a key column is carried through.
images     a folder of JPEG files, parquet out: a network of ResNet-18's shape, 8 channels, preprocessed for ImageNet.
cube       a zarr cube of (time, channel, y, x), zarr out: three convolutions over the maps of each time.
pipeline   a pipeline of scikit-learn on a table with strings, in memory: its probabilities as columns.

Each contender is a function that a user could have written, and its lines are counted as they stand, without `session`
and the function that prepares an image, which dask_ferro has and which the others would have to write.  All use two
workers: processes of Dask, actors of Ray, and of joblib threads, or processes for scikit-learn.  ONNX Runtime computes
everywhere, with one thread, except that the pipeline's others call scikit-learn itself.  dask_ferro also runs without a
cluster, in the threads of one process.  Results are compared, and each
run writes to a new path, so that nothing is reused.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask.array as da  # noqa: E402
import dask.dataframe as dd  # noqa: E402
import joblib  # noqa: E402
import measure  # noqa: E402
import networks  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime as ort  # noqa: E402
import pandas as pd  # noqa: E402
import PIL.Image  # noqa: E402
import xarray as xr  # noqa: E402
import zarr  # noqa: E402
from distributed import Client, LocalCluster  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.stream.formats.images import imagenet  # noqa: E402

WORKERS = 2
FERRO, DASK, JOBLIB, RAY = "dask_ferro", "Dask by hand", "joblib", "Ray Data"
ALONE = "dask_ferro, one process"
RAY_PROGRAMS = Path(__file__).with_name("jobs_ray.py")
Note = Callable[[str], None]
Job = Callable[[Path, Path], None]


class Size(NamedTuple):
    """Rows of tables, images, and times and side of the cube."""

    rows: int = 200_000
    images: int = 200
    times: int = 64
    side: int = 256


TOY = Size(400, 6, 4, 16)


@cache
def session(path: str) -> ort.InferenceSession:
    """Return a session, one for each process, as everybody writes it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options)


# ---- table ------------------------------------------------------------------------------------------------


def table_ferro(data: Path, out: Path) -> None:
    ff.predict_files(data / "forest.onnx", data / "table.parquet", out / "scores.parquet", passthrough=["id"])


def table_dask(data: Path, out: Path) -> None:
    def score(part: pd.DataFrame) -> pd.DataFrame:
        features = part.drop(columns="id").to_numpy(np.float32)
        label, scores = session(str(data / "forest.onnx")).run(None, {"X": features})
        frame = pd.DataFrame(scores, columns=["scores_0", "scores_1"], index=part.index)
        return pd.concat([part[["id"]], pd.Series(label, part.index, name="label"), frame], axis=1)

    table = dd.read_parquet(data / "table.parquet", split_row_groups=True)
    meta = {"id": "int64", "label": "int64", "scores_0": "float32", "scores_1": "float32"}
    table.map_partitions(score, meta=meta).to_parquet(out / "scores.parquet", write_index=False)


def table_joblib(data: Path, out: Path) -> None:
    def score(group: int) -> None:
        part = ParquetFile(data / "table.parquet").read_row_group(group).to_pandas()
        features = part.drop(columns="id").to_numpy(np.float32)
        label, scores = session(str(data / "forest.onnx")).run(None, {"X": features})
        found = pd.DataFrame(
            {"id": part["id"], "label": label, "scores_0": scores[:, 0], "scores_1": scores[:, 1]}
        )
        found.to_parquet(out / "scores.parquet" / f"part-{group:06d}.parquet")

    from pyarrow.parquet import ParquetFile

    (out / "scores.parquet").mkdir()
    groups = range(ParquetFile(data / "table.parquet").num_row_groups)
    joblib.Parallel(WORKERS, prefer="threads")(joblib.delayed(score)(group) for group in groups)


# ---- images -----------------------------------------------------------------------------------------------


def images_ferro(data: Path, out: Path) -> None:
    ff.predict_files(data / "net.onnx", data / "images", out / "scores.parquet", preprocess="imagenet")


def images_dask(data: Path, out: Path) -> None:
    def score(paths: list[str]) -> pd.DataFrame:
        x = np.stack([imagenet(PIL.Image.open(path)) for path in paths])
        (scores,) = session(str(data / "net.onnx")).run(None, {"x": x})
        return pd.DataFrame({"path": paths} | {f"scores_{k}": scores[:, k] for k in range(scores.shape[1])})

    paths = sorted(map(str, (data / "images").iterdir()))
    meta = {"path": object} | {f"scores_{k}": np.float32 for k in range(10)}
    parts = [paths[k : k + 16] for k in range(0, len(paths), 16)]
    dd.from_map(score, parts, meta=meta).to_parquet(out / "scores.parquet", write_index=False)


def images_joblib(data: Path, out: Path) -> None:
    def score(paths: list[str]) -> pd.DataFrame:
        x = np.stack([imagenet(PIL.Image.open(path)) for path in paths])
        (scores,) = session(str(data / "net.onnx")).run(None, {"x": x})
        return pd.DataFrame({"path": paths} | {f"scores_{k}": scores[:, k] for k in range(scores.shape[1])})

    paths = sorted(map(str, (data / "images").iterdir()))
    parts = [paths[k : k + 16] for k in range(0, len(paths), 16)]
    found = joblib.Parallel(WORKERS, prefer="threads")(joblib.delayed(score)(part) for part in parts)
    pd.concat(found).to_parquet(out / "scores.parquet")


# ---- cube -------------------------------------------------------------------------------------------------


def cube_ferro(data: Path, out: Path) -> None:
    cube = xr.open_zarr(data / "cube.zarr", consolidated=False)["maps"]
    ff.from_onnx(data / "maps.onnx")(cube).to_dataset(name="y").to_zarr(out / "cube.zarr", consolidated=False)


def cube_dask(data: Path, out: Path) -> None:
    def block(x: np.ndarray) -> Any:
        return session(str(data / "maps.onnx")).run(None, {"x": x})[0]

    cube = xr.open_zarr(data / "cube.zarr", consolidated=False)["maps"]
    found = cube.copy(data=cube.data.map_blocks(block, dtype="float32", chunks=cube.data.chunks))
    found.to_dataset(name="y").to_zarr(out / "cube.zarr", consolidated=False)


def cube_joblib(data: Path, out: Path) -> None:
    def block(start: int) -> None:
        at = slice(start, start + cube.chunks[0])
        target[at] = session(str(data / "maps.onnx")).run(None, {"x": cube[at]})[0]

    cube = zarr.open_array(data / "cube.zarr" / "maps", mode="r")
    target = zarr.create_array(
        out / "cube.zarr" / "y", shape=cube.shape, chunks=cube.chunks, dtype=cube.dtype
    )
    starts = range(0, cube.shape[0], cube.chunks[0])
    joblib.Parallel(WORKERS, prefer="threads")(joblib.delayed(block)(start) for start in starts)


# ---- pipeline ---------------------------------------------------------------------------------------------


def pipeline_ferro(data: Path, out: Path) -> None:
    people = pd.read_pickle(data / "people.pkl")
    parts = dd.from_pandas(people, npartitions=8, sort=False)
    ff.from_onnx(data / "pipeline.onnx")(parts).compute().to_pickle(out / "scores.pkl")


def pipeline_dask(data: Path, out: Path) -> None:
    pipeline, people = joblib.load(data / "pipeline.joblib"), pd.read_pickle(data / "people.pkl")

    def score(part: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame(pipeline.predict_proba(part), index=part.index, columns=["p0", "p1"])

    parts = dd.from_pandas(people, npartitions=8, sort=False)
    parts.map_partitions(score, meta={"p0": "float64", "p1": "float64"}).compute().to_pickle(
        out / "scores.pkl"
    )


def pipeline_joblib(data: Path, out: Path) -> None:
    pipeline, people = joblib.load(data / "pipeline.joblib"), pd.read_pickle(data / "people.pkl")
    parts = [people.iloc[k : k + 25_000] for k in range(0, len(people), 25_000)]
    found = joblib.Parallel(WORKERS)(joblib.delayed(pipeline.predict_proba)(part) for part in parts)
    pd.DataFrame(np.concatenate(found), index=people.index).to_pickle(out / "scores.pkl")


JOBS: Mapping[str, Mapping[str, Job]] = {
    "table": {FERRO: table_ferro, DASK: table_dask, JOBLIB: table_joblib},
    "images": {FERRO: images_ferro, DASK: images_dask, JOBLIB: images_joblib},
    "cube": {FERRO: cube_ferro, DASK: cube_dask, JOBLIB: cube_joblib},
    "pipeline": {FERRO: pipeline_ferro, DASK: pipeline_dask, JOBLIB: pipeline_joblib},
}


@contextmanager
def ray_programs(python: str) -> Iterator[Callable[[str], Job]]:
    """Run `jobs_ray.py`; yield the function from a job to what has it computed there."""
    running = subprocess.Popen(
        [python, str(RAY_PROGRAMS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    answer = partial(_answer, running)

    def program(job: str) -> Job:
        def run(data: Path, out: Path) -> None:
            assert running.stdin is not None
            print(json.dumps([job, str(data), str(out)]), file=running.stdin, flush=True)
            answer()

        return run

    try:
        # Its version, once Ray is there.
        answer()
        yield program
    finally:
        assert running.stdin is not None
        running.stdin.close()
        running.wait(timeout=60)


def on(client: Client, job: Job) -> Job:
    """Return a job that has a client, which others do not."""

    def run(data: Path, out: Path) -> None:
        with client.as_current():
            job(data, out)

    return run


def _answer(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    line = running.stdout.readline()
    if not line:
        raise RuntimeError(f"the interpreter of Ray ended with {running.wait(timeout=60)}")
    return line.strip()


# ---- data -------------------------------------------------------------------------------------------------


def prepare(data: Path, size: Size) -> None:
    """Write the data and the models of all jobs."""
    rng = np.random.default_rng(0)
    _table(data, size, rng)
    _images(data, size, rng)
    _cube(data, size, rng)
    _pipeline(data, size, rng)


def _table(data: Path, size: Size, rng: np.random.Generator) -> None:
    from skl2onnx import to_onnx
    from sklearn.ensemble import RandomForestClassifier

    x = rng.standard_normal((size.rows, 30)).astype(np.float32)
    forest = RandomForestClassifier(50, max_depth=10, random_state=0, n_jobs=1)
    forest.fit(x[:2000], x[:2000, 0] * x[:2000, 1] > 0)
    made = to_onnx(forest, x[:1], options={"zipmap": False})
    (data / "forest.onnx").write_bytes(made.SerializeToString())
    table = pd.DataFrame(x).add_prefix("c").assign(id=np.arange(size.rows))
    table.to_parquet(data / "table.parquet", row_group_size=max(1, size.rows // 16))


def _images(data: Path, size: Size, rng: np.random.Generator) -> None:
    onnx.save(networks.resnet18(8, 224), data / "net.onnx")
    (data / "images").mkdir()
    for number in range(size.images):
        small = rng.integers(0, 255, (12, 16, 3), np.uint8)
        image = PIL.Image.fromarray(small).resize((400, 300))
        image.save(data / "images" / f"{number:06d}.jpg")


def _cube(data: Path, size: Size, rng: np.random.Generator) -> None:
    kernel = [
        numpy_helper.from_array((rng.standard_normal((8, c, 3, 3)) / 9).astype("f4"), f"w{c}") for c in (4, 8)
    ]
    kernel.append(numpy_helper.from_array((rng.standard_normal((4, 8, 3, 3)) / 9).astype("f4"), "wy"))
    same = {"pads": [1] * 4}
    nodes = [
        helper.make_node("Conv", ["x", "w4"], ["a"], **same),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w8"], ["c"], **same),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "wy"], ["y"], **same),
    ]
    shape = ["time", 4, size.side, size.side]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph(nodes, "maps", ends[:1], ends[1:], kernel)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
        data / "maps.onnx",
    )
    values = da.random.default_rng(0).random((size.times, *shape[1:]), chunks=(4, -1, -1, -1), dtype="f4")
    maps = xr.DataArray(values, dims=("time", "channel", "y", "x"), coords={"time": np.arange(size.times)})
    maps.to_dataset(name="maps").to_zarr(data / "cube.zarr", consolidated=False)


def _pipeline(data: Path, size: Size, rng: np.random.Generator) -> None:
    from skl2onnx import to_onnx
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    people = pd.DataFrame(
        {
            "age": rng.integers(18, 90, size.rows).astype("f4"),
            "income": rng.lognormal(10, 1, size.rows).astype("f4"),
            "city": rng.choice(["Bern", "Rome", "Oslo", "Kyiv"], size.rows).astype(object),
            "plan": rng.choice(["basic", "full"], size.rows).astype(object),
        }
    )
    columns = ColumnTransformer(
        [("n", StandardScaler(), ["age", "income"]), ("s", OneHotEncoder(), ["city", "plan"])]
    )
    sample = people.iloc[:2000]
    pipeline = make_pipeline(columns, LogisticRegression()).fit(sample, sample["age"] > 50)
    joblib.dump(pipeline, data / "pipeline.joblib")
    made = to_onnx(pipeline, sample, options={"zipmap": False})
    (data / "pipeline.onnx").write_bytes(made.SerializeToString())
    people.to_pickle(data / "people.pkl")


# ---- measuring --------------------------------------------------------------------------------------------


def result(job: str, out: Path) -> np.ndarray:
    """Return the numbers that a job wrote, in the order of its rows."""
    if job == "cube":
        found: np.ndarray = np.asarray(zarr.open_array(out / "cube.zarr" / "y", mode="r")[:])
        return found
    if job == "pipeline":
        return np.asarray(pd.read_pickle(out / "scores.pkl").iloc[:, -2:], float)
    frame = pd.read_parquet(out / "scores.parquet")
    key = "id" if "id" in frame else "path"
    return np.asarray(frame.sort_values(key).iloc[:, 2 if key == "id" else 1 :], float)


def lines_of(source: str, name: str) -> int:
    """Return the lines of code of a function in a module's source, without its head, empty lines and comments."""
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    found = next(node for node in functions if node.name == name)
    body = source.splitlines()[found.body[0].lineno - 1 : found.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in body)


def lines_by_contender(job: str, contenders: Mapping[str, Job]) -> dict[str, int]:
    """Return the lines of code of a job's contenders."""
    here, there = inspect.getsource(sys.modules[__name__]), RAY_PROGRAMS.read_text(encoding="utf-8")
    own = JOBS[job]
    return {
        name: lines_of(there, job) if name == RAY else lines_of(here, own[name.split(",")[0]].__name__)
        for name in contenders
    }


def compared(
    job: str, contenders: Mapping[str, Job], data: Path, folder: Path, rounds: int, note: Note
) -> dict[str, Any]:
    """Return lines, seconds and rates of a job's contenders, whose results are compared."""
    seconds, first = dict[str, list[float]](), None
    for number in range(rounds + 1):
        for name in contenders if number % 2 else reversed(contenders):
            out = folder / f"{job}-{number}-{name.replace(' ', '-')}"
            out.mkdir()
            began = time.perf_counter()
            contenders[name](data, out)
            taken = time.perf_counter() - began
            found = result(job, out)
            first = found if first is None else first
            np.testing.assert_allclose(found, first, rtol=1e-3, atol=1e-4, err_msg=f"{job}: {name} differs")
            shutil.rmtree(out)
            note(f"{job}, {name}: {taken:.2f} s" + ("" if number else " (warm-up)"))
            if number:
                seconds.setdefault(name, []).append(taken)
    shares, lines = measure.ratios(seconds, FERRO), lines_by_contender(job, contenders)
    return {
        name: {
            "lines": lines[name],
            "seconds": measure.Summary.of(seconds[name]),
            "speed_of_ferro": measure.Summary.of(shares[name]),
        }
        for name in contenders
    }


def show(job: str, record: Mapping[str, Any]) -> None:
    rows = [
        (
            name,
            str(of["lines"]),
            f"{of['seconds'].median:.2f}",
            f"{of['seconds'].low:.2f} to {of['seconds'].high:.2f}",
            f"{of['speed_of_ferro'].median:.2f}",
        )
        for name, of in record.items()
    ]
    measure.show(job, ("", "lines", "seconds", "spread", "speed / dask_ferro"), rows)


def main() -> int:
    parser = measure.options("The commonest jobs, side by side.", rounds=5)
    parser.add_argument("--only", choices=tuple(JOBS), help="run only this job")
    parser.add_argument("--ray-python", metavar="PATH", help="an interpreter that has Ray, for its programs")
    chosen = parser.parse_args()
    note: Note = (lambda line: None) if chosen.quiet else partial(print, file=sys.stderr)
    size, rounds = (TOY, 1) if chosen.toy else (Size(), chosen.rounds)
    results, load = {}, os.getloadavg()
    options = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": None}
    programs = ray_programs(chosen.ray_python) if chosen.ray_python else nullcontext()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(**options) as cluster,
        Client(cluster, set_as_default=False) as client,
        programs as ray,
    ):
        data = Path(folder) / "data"
        data.mkdir()
        prepare(data, size)
        for job in (chosen.only,) if chosen.only else JOBS:
            contenders = {name: on(client, run) for name, run in JOBS[job].items()}
            contenders |= {ALONE: JOBS[job][FERRO]} | ({RAY: ray(job)} if ray else {})
            results[job] = compared(job, contenders, data, Path(folder), rounds, note)
            show(job, results[job])
    if chosen.json:
        measure.write(
            chosen.json,
            measure.provenance(rounds=rounds, workers=WORKERS, load_before=load, **size._asdict())
            | {"results": results},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
