"""Batch inference on two worker processes: dask_ferro compared with the usual alternatives.

    python benchmarks/inference.py                       # three models, inputs in files and in memory
    python benchmarks/inference.py --only mlp --rounds 9 --json out.json

The limit is one ONNX Runtime process with all cores: this process, without a cluster.  The contenders run on two
processes of one thread each, and gather their results here.  Each baseline has a plain LocalCluster, as its user would;
"tuned" ones run on dask_ferro's own.  Every result is compared with the limit's.  Kept sessions are built in the
unmeasured warm-up.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import dask  # noqa: E402
import dask.array as da  # noqa: E402
import make_models  # noqa: E402
import measure  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import rivals  # noqa: E402
from distributed import Client, LocalCluster, get_task_stream  # noqa: E402

import dask_ferro as ff  # noqa: E402

SEED = 0
WORKERS = 2
LIMIT = "onnxruntime, one process, all cores"
RELATIVE, ABSOLUTE = 1e-3, 1e-4  # of float32, over other orders of summation


@dataclass(frozen=True)
class Job:
    """A model, its input in one file and in a file for each chunk, and the noun for its rows."""

    name: str
    model: str
    whole: str
    shards: tuple[str, ...]
    rows: int
    unit: str

    @property
    def chunk(self) -> int:
        """Rows of a chunk."""
        return self.rows // len(self.shards)


# ---- the jobs ----------------------------------------------------------------------------------------------


def mlp(folder: Path, toy: bool) -> Job:
    """Return an MLP, 784-512-512-10, on 200,000 rows in 20 chunks."""
    sizes, rows, chunks = ((784, 32, 10), 64, 4) if toy else ((784, 512, 512, 10), 200_000, 20)
    model = make_models.mlp(sizes=sizes)
    return _job(folder, "mlp", model, (sizes[0],), rows, chunks, "rows")


def squeezenet(folder: Path, toy: bool) -> Job:
    """Return SqueezeNet 1.0 of onnx's light models, batch fixed at 1, on 512 images in 64 chunks."""
    light = Path(onnx.__file__).parent / "backend/test/data/light/light_squeezenet.onnx"
    rows, chunks = (2, 2) if toy else (512, 64)
    return _job(folder, "squeezenet", onnx.load(light), (3, 224, 224), rows, chunks, "images")


def encoder(folder: Path, toy: bool) -> Job:
    """Return a transformer encoder, 4 layers of 256, on 512 sequences of 128 tokens in 16 chunks."""
    layers, d, seq, rows, chunks = (1, 32, 8, 8, 2) if toy else (4, 256, 128, 512, 16)
    model = make_models.transformer_encoder(layers=layers, d_model=d, heads=4, seq=seq)
    return _job(folder, "encoder", model, (seq, d), rows, chunks, "sequences")


JOBS: Mapping[str, Callable[[Path, bool], Job]] = {"mlp": mlp, "squeezenet": squeezenet, "encoder": encoder}


def _job(
    folder: Path, name: str, model: onnx.ModelProto, item: tuple[int, ...], rows: int, chunks: int, unit: str
) -> Job:
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    rng = np.random.default_rng(SEED)
    shards = tuple(str(folder / f"{name}-{i:02d}.npy") for i in range(chunks))
    for shard in shards:
        np.save(shard, rng.standard_normal((rows // chunks, *item), dtype=np.float32))
    whole = folder / f"{name}.npy"
    np.save(whole, np.concatenate([np.load(shard) for shard in shards]))
    return Job(name, str(path), str(whole), shards, rows, unit)


# ---- the contenders ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clusters:
    """One plain cluster and one of dask_ferro's, both of two processes; only one is busy at a time."""

    plain: Client
    tuned: Client


@contextmanager
def clusters() -> Iterator[Clusters]:
    size = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": ":0"}
    with ExitStack() as stack:
        enter = stack.enter_context
        plain = enter(Client(enter(LocalCluster(**size)), set_as_default=False))
        tuned = enter(Client(enter(ff.LocalCluster(**size)), set_as_default=False))
        yield Clusters(plain, tuned)


def from_files(job: Job, on: Clusters, extra: bool) -> dict[str, Callable[[], Any]]:
    """Return the contenders that read their input from files."""
    model = ff.from_onnx(job.model)
    contenders: dict[str, Callable[[], Any]] = {
        LIMIT: partial(_limit, job, job.shards),
        # As client.map and map_blocks: not first after the processes were idle, which would cost 4 %.
        "dask_ferro, ff.predict_files to a file": lambda: _streamed(job, on.tuned),
        "dask_ferro": lambda: _at(on.tuned, model(_lazy(job))),
        "map_blocks, session in each task": lambda: _in(
            on.plain, _blocks(job, _lazy(job), rivals.on_array_afresh)
        ),
        "map_blocks, kept session": lambda: _in(on.plain, _blocks(job, _lazy(job), rivals.on_array)),
        "client.map, kept session": lambda: _mapped(on.plain, rivals.from_file, job.shards, job),
        "joblib (loky), kept session": lambda: _joblib(rivals.from_file, job.shards, job),
    }
    if extra:
        contenders["dask_ferro, plain cluster"] = lambda: _at(on.plain, model(_lazy(job)))
        contenders["map_blocks, kept session, tuned"] = lambda: _in(
            on.tuned, _blocks(job, _lazy(job), rivals.on_array)
        )
        contenders["client.map, kept session, tuned"] = lambda: _mapped(
            on.tuned, rivals.from_file, job.shards, job
        )
    if has_ray():
        contenders["Ray Data map_batches over paths"] = lambda: _ray(job, job.shards)
    return contenders


def from_memory(job: Job, on: Clusters, extra: bool) -> dict[str, Callable[[], Any]]:
    """Return the contenders whose input is one array in this process."""
    whole = np.load(job.whole)
    pieces = np.split(whole, len(job.shards))
    model = ff.from_onnx(job.model)

    def ferro(client: Client) -> Any:
        with client.as_current():
            return model(whole, batch_size=job.chunk).compute()

    def blocks(client: Client) -> Any:
        with client.as_current():
            return _in(
                client,
                _blocks(job, da.from_array(whole, chunks=(job.chunk, *whole.shape[1:])), rivals.on_array),
            )

    contenders: dict[str, Callable[[], Any]] = {
        LIMIT: partial(_limit, job, pieces),
        "dask_ferro": lambda: ferro(on.tuned),
        "map_blocks, kept session": lambda: blocks(on.plain),
        "client.map, kept session": lambda: _mapped(on.plain, rivals.on_array, _sent(on.plain, pieces), job),
        "joblib (loky), kept session": lambda: _joblib(rivals.on_array, pieces, job),
    }
    if extra:
        contenders["map_blocks, kept session, tuned"] = lambda: blocks(on.tuned)
        contenders["client.map, kept session, tuned"] = lambda: _mapped(
            on.tuned, rivals.on_array, _sent(on.tuned, pieces), job
        )
    if has_ray():
        contenders["Ray Data map_batches"] = lambda: _ray(job, pieces)
    return contenders


SOURCES: Mapping[str, Callable[[Job, Clusters, bool], dict[str, Callable[[], Any]]]] = {
    "files": from_files,
    "memory": from_memory,
}


def _limit(job: Job, chunks: Sequence[Any]) -> np.ndarray:
    run = rivals.kept_session(job.model, os.cpu_count() or 1)
    loaded = (np.load(c) if isinstance(c, str) else c for c in chunks)
    return np.concatenate([rivals.answer(run, rows) for rows in loaded])


def _lazy(job: Job) -> da.Array:
    """Return the chunk files as one dask array; the workers read them."""
    first = np.load(job.shards[0], mmap_mode="r")
    read = dask.delayed(rivals.load, pure=True)
    return da.concatenate([da.from_delayed(read(s), first.shape, first.dtype) for s in job.shards])


def _blocks(job: Job, x: da.Array, function: Callable[..., Any]) -> da.Array:
    out = rivals.kept_session(job.model, os.cpu_count() or 1).get_outputs()[0].shape[1:]
    return x.map_blocks(
        function,
        job.model,
        dtype=np.float32,
        drop_axis=list(range(1 + len(out), x.ndim)),
        chunks=(x.chunks[0], *((d,) for d in out)),
    )


def _streamed(job: Job, client: Client) -> np.ndarray:
    sink = Path(job.model).with_suffix(".out.npy")
    ff.predict_files(
        job.model, job.whole, sink, batch_size=job.chunk, client=client, progress=False, overwrite=True
    )
    return np.load(sink)


def _at(client: Client, collection: Any) -> Any:
    """Compute a collection on a client; dask_ferro's collections are assembled in this process."""
    with client.as_current():
        return collection.compute()


def _in(client: Client, collection: Any) -> Any:
    return client.compute(collection).result()


def _sent(client: Client, pieces: Sequence[np.ndarray]) -> Any:
    # With content keys, releasing the first round's chunks could release the second round's too.
    return client.scatter(pieces, hash=False)


def _mapped(client: Client, function: Callable[..., Any], chunks: Sequence[Any], job: Job) -> np.ndarray:
    return np.concatenate(client.gather(client.map(function, chunks, model=job.model, pure=False)))


def _joblib(function: Callable[..., Any], chunks: Sequence[Any], job: Job) -> np.ndarray:
    import joblib

    work = (joblib.delayed(function)(chunk, job.model) for chunk in chunks)
    return np.concatenate(joblib.Parallel(n_jobs=WORKERS)(work))


def has_ray() -> bool:
    """Return whether Ray Data is installed."""
    return importlib.util.find_spec("ray") is not None


def _ray(job: Job, chunks: Sequence[Any]) -> np.ndarray:
    """Return Ray Data over paths or arrays, one block each; each run of a dataset starts its own two actors."""
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
        settings = ray.data.DataContext.get_current()
        settings.enable_progress_bars = False
        settings.execution_options.preserve_order = True
        logging.getLogger("ray.data").setLevel(logging.ERROR)
    if isinstance(chunks[0], str):
        data = ray.data.from_items([{"path": path} for path in chunks], override_num_blocks=len(chunks))
    else:
        data = ray.data.from_numpy(list(chunks))
    answers = data.map_batches(
        rivals.OnBatches,
        fn_constructor_args=(job.model,),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=WORKERS),
        num_cpus=1,
    )
    return np.concatenate([block["y"] for block in answers.iter_batches(batch_size=None)])


# ---- the measuring -----------------------------------------------------------------------------------------


def compare(
    job: Job, source: str, on: Clusters, rounds: int, *, extra: bool, note: Callable[[str], None]
) -> dict[str, Any]:
    """Return the rates of one job with one kind of input, and their ratios to the limit of the same round."""
    contenders = SOURCES[source](job, on, extra)
    expected = contenders[LIMIT]()

    def check(name: str, result: Any) -> None:
        np.testing.assert_allclose(
            result, expected, RELATIVE, ABSOLUTE, err_msg=f"{job.name}: {name} is wrong"
        )

    tasks = {name: _tasks(run, on, partial(check, name)) for name, run in contenders.items()}
    seconds = measure.in_turn(contenders, rounds, warm_up=False, check=check, note=note)
    ratios = measure.ratios(seconds, LIMIT)
    return {
        "job": job.name,
        "inputs": source,
        "rows": job.rows,
        "chunks": len(job.shards),
        "unit": job.unit,
        "contenders": {
            name: {
                "rate": measure.Summary.of([job.rows / s for s in seconds[name]]),
                "ratio": measure.Summary.of(ratios[name]),
                "seconds": seconds[name],
                "tasks": tasks[name],
            }
            for name in contenders
        },
    }


def _tasks(run: Callable[[], Any], on: Clusters, check: Callable[[Any], None]) -> int:
    """Warm up, check, and count the Dask tasks of one run."""
    check(run())
    with get_task_stream(on.plain) as plain, get_task_stream(on.tuned) as tuned:
        run()
    return len(plain.data) + len(tuned.data)


def show(record: dict[str, Any]) -> None:
    """Print one record."""
    rows = [
        (
            name,
            f"{c['rate'].median:,.4g}" if c["rate"].median < 1000 else f"{c['rate'].median:,.0f}",
            f"{c['ratio'].median:.2f}",
            f"{c['ratio'].low:.2f} to {c['ratio'].high:.2f}",
            str(c["tasks"] or "-"),
        )
        for name, c in record["contenders"].items()
    ]
    place = "in memory" if record["inputs"] == "memory" else "in files"
    measure.show(
        f"{record['job']}: {record['rows']:,} {record['unit']} in {record['chunks']} chunks, {place}",
        ("", f"{record['unit']}/s", "ratio", "spread", "tasks"),
        rows,
        notes=() if has_ray() else ("Ray is not installed: no Ray Data",),
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("Batch inference on two worker processes, beside the alternatives.", rounds=5)
    parser.add_argument("--only", choices=tuple(JOBS), action="append", help="run only this model")
    parser.add_argument(
        "--inputs", choices=tuple(SOURCES), action="append", help="run only this kind of input"
    )
    parser.add_argument("--all", action="store_true", help="also the baselines on dask_ferro's own cluster")
    options = parser.parse_args(arguments)
    rounds = 1 if options.toy else options.rounds
    note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    record = measure.provenance(seed=SEED, workers=WORKERS, rounds=rounds, toy=options.toy)
    record["results"] = []
    with tempfile.TemporaryDirectory(prefix="ferro-bench-") as folder, clusters() as on:
        for name in options.only or JOBS:
            job = JOBS[name](Path(folder), options.toy)
            for source in options.inputs or SOURCES:
                one = compare(job, source, on, rounds, extra=options.all, note=note)
                show(one)
                record["results"].append(one)
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
