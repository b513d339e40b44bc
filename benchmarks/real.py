"""Real Dask programs with and without dask_ferro: linear algebra, climate, rechunking, sorting, tables.

    python benchmarks/real.py                     # stock Dask, ours, and ours with bundles, on 4 worker processes
    python benchmarks/real.py --only svd merge    # some of them
    python benchmarks/real.py --workers 2 --json real.json

Each contender has a cluster of its own, all of the same size and alive at the same time, and computes a program in
turn. The warm-up is where bundles learn what tasks cost.  Beside the seconds stand the tasks that the workers ran,
and the most memory that their results and processes took (sampled every 50 ms, less what the processes took before).
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask  # noqa: E402
import dask.array as da  # noqa: E402
import dask.bag as db  # noqa: E402
import dask.dataframe as dd  # noqa: E402
import measure  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from distributed import Client, LocalCluster, Scheduler  # noqa: E402
from distributed.diagnostics import MemorySampler  # noqa: E402

import dask_ferro as ff  # noqa: E402

SEED = 7
CONTENDERS = ("stock", "ours", "bundled")


def _random(shape: tuple[int, ...], chunks: Any) -> da.Array:
    return da.random.default_rng(SEED).random(shape, chunks=chunks)


def svd(scale: float) -> Any:
    _, s, _ = da.linalg.svd(_random((int(200_000 * scale) + 100, 50), (int(2_000 * scale) + 50, 50)))
    return s


def svd_compressed(scale: float) -> Any:
    n = int(4000 * scale) + 100
    x = _random((n, n), (n // 16, n // 4))
    _, s, _ = da.linalg.svd_compressed(x, 10, seed=SEED)
    return s


def tensordot(scale: float) -> Any:
    n = int(2400 * scale) + 64
    x = _random((n, n), n // 12)
    return da.tensordot(x, x, axes=1).sum()


def anomaly(scale: float) -> Any:
    """Return the anomaly of daily temperatures against the mean of their month, as climate scientists compute it."""
    days = int(730 * scale) + 48
    x = _random((days, 180, 360), (12, 90, 180))
    months = [x[month::12] for month in range(12)]
    return da.concatenate([(m - m.mean(axis=0)) / (m.std(axis=0) + 1) for m in months]).std()


def rechunk_p2p(scale: float) -> Any:
    n = int(4000 * scale) + 100
    with dask.config.set({"array.rechunk.method": "p2p"}):
        return (_random((n, n), (n, n // 20)).rechunk((n // 20, n)) + 1).sum()


def rechunk_tasks(scale: float) -> Any:
    n = int(4000 * scale) + 100
    with dask.config.set({"array.rechunk.method": "tasks"}):
        return (_random((n, n), (n, n // 20)).rechunk((n // 20, n)) + 1).sum()


def map_overlap(scale: float) -> Any:
    n = int(3000 * scale) + 100
    return da.map_overlap(_smoothed, _random((n, n), n // 12), depth=1, boundary="reflect").mean()


def _smoothed(x: np.ndarray) -> np.ndarray:
    return (x + np.roll(x, 1, 0) + np.roll(x, -1, 0) + np.roll(x, 1, 1) + np.roll(x, -1, 1)) / 5


def fft(scale: float) -> Any:
    n = int(3000 * scale) + 60
    x = _random((n, n), (n // 15, n))
    return abs(da.fft.fft(da.fft.fft(x, axis=1).rechunk((n, n // 15)), axis=0)).mean()


def vorticity(scale: float) -> Any:
    shape, chunks = (int(120 * scale) + 8, 300, 300), (4, 100, 100)
    u, v = _random(shape, chunks), _random(shape, chunks) + 1
    return (da.gradient(v, axis=2) - da.gradient(u, axis=1)).std()


def tree_of_sorts(scale: float) -> Any:
    parts = [dask.delayed(_drawn, pure=True)(i, int(20_000 * scale) + 100) for i in range(256)]
    while len(parts) > 1:
        parts = [dask.delayed(_merged, pure=True)(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return dask.delayed(np.sum, pure=True)(parts[0])


def _drawn(seed: int, n: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).random(n))


def _merged(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sort(np.concatenate([a, b]), kind="stable")[::2].copy()


def _frame(rows: int, partitions: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"key": rng.integers(0, rows // 4, rows), "x": rng.random(rows)})
    return dd.from_pandas(frame, npartitions=partitions)


def shuffle(scale: float) -> Any:
    frame = _frame(int(400_000 * scale) + 1000, 40, SEED)
    return frame.shuffle("key").map_partitions(_first).x.sum()


def _first(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop_duplicates("key")[["x"]]


def merge(scale: float) -> Any:
    n = int(200_000 * scale) + 1000
    return _frame(n, 30, SEED).merge(_frame(n, 30, SEED + 1), on="key").x_x.sum()


def words(scale: float) -> Any:
    n = int(200_000 * scale) + 1000
    return db.from_sequence(range(n), npartitions=400).map(_digits).filter(bool).sum()


def _digits(n: int) -> int:
    return sum(map(int, str(n)))


PROGRAMS: dict[str, Callable[[float], Any]] = {
    program.__name__: program
    for program in (
        svd, svd_compressed, tensordot, anomaly, rechunk_p2p, rechunk_tasks, map_overlap, fft, vorticity, tree_of_sorts,
        shuffle, merge, words,
    )
}  # fmt: skip


class Run(NamedTuple):
    """A contender's figures of one program: seconds of each round, tasks of a run, the most memory in MiB."""

    seconds: list[float]
    tasks: int
    peak_mib: float


@contextmanager
def clusters(names: tuple[str, ...], workers: int, costs: str) -> Iterator[dict[str, Client]]:
    """Open a cluster for each contender."""
    with ExitStack() as stack:
        stack.enter_context(dask.config.set({"ferro.bundle.costs": costs}))
        found = {}
        for name in names:
            cluster = stack.enter_context(
                LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    dashboard_address=":0",
                    silence_logs=logging.ERROR,
                )
            )
            found[name] = stack.enter_context(Client(cluster, set_as_default=False))
            if name != "stock":
                ff.install(found[name], bundles=name == "bundled")
        yield found


def _finished(dask_scheduler: Scheduler) -> int:
    return sum(prefix.state_counts["memory"] for prefix in dask_scheduler.task_prefixes.values())


def run(
    name: str, contenders: Mapping[str, Client], scale: float, rounds: int, note: Callable[[str], None]
) -> dict[str, Run]:
    """Run a program by each contender in turn, and check that the results agree."""
    results: dict[str, Any] = {}
    tasks: dict[str, int] = {}
    peaks: dict[str, list[float]] = {contender: [] for contender in contenders}

    def once(contender: str) -> Any:
        client = contenders[contender]
        before = client.run_on_scheduler(_finished)
        with client.as_current(), dask.config.set(scheduler="dask.distributed"):
            sampler = MemorySampler()
            with sampler.sample(contender, client=client, interval=0.05, measure="managed"):
                result = client.compute(PROGRAMS[name](scale)).result()
        tasks[contender] = client.run_on_scheduler(_finished) - before
        peaks[contender].append(_peak_mib(sampler, contender))
        return result

    def check(contender: str, result: Any) -> None:
        first = results.setdefault(name, result)
        if not np.allclose(np.asarray(first, float), np.asarray(result, float)):
            raise AssertionError(f"{name}: {contender} gives {result}, {first} was wanted")

    seconds = measure.in_turn(
        {contender: (lambda c=contender: once(c)) for contender in contenders},
        rounds,
        check=check,
        note=lambda line: note(f"{name}, {line}"),
    )
    return {c: Run(seconds[c], tasks[c], median(peaks[c][1:])) for c in contenders}


def _peak_mib(sampler: MemorySampler, name: str) -> float:
    frame = sampler.to_pandas()
    used = frame[name].to_numpy() if len(frame) else np.zeros(1)
    return float(used.max()) / 2**20


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 where results differ."""
    parser = measure.options(__doc__.partition("\n")[0], rounds=5)
    parser.add_argument("--workers", type=int, default=4, help="worker processes of each cluster (4)")
    parser.add_argument("--only", nargs="+", choices=sorted(PROGRAMS), help="these programs alone")
    args = parser.parse_args(arguments)
    scale, rounds = (0.02, 1) if args.toy else (1.0, args.rounds)
    names = args.only or list(PROGRAMS)
    note = (lambda line: None) if args.quiet else (lambda line: print(line, flush=True))
    record: dict[str, Any] = measure.provenance(workers=args.workers, rounds=rounds, scale=scale)
    found: dict[str, dict[str, Run]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        clusters(CONTENDERS, args.workers, str(Path(folder, "costs"))) as contenders,
    ):
        for name in names:
            found[name] = run(name, contenders, scale, rounds, note)
    rows, logs = [], {"ours": [], "bundled": []}
    over_stock: dict[str, dict[str, float]] = {}
    for name, runs in found.items():
        stock = runs["stock"]
        cells = [name, f"{median(stock.seconds):.2f}"]
        for contender in ("ours", "bundled"):
            own = runs[contender]
            ratio = median(a / b for a, b in zip(own.seconds, stock.seconds, strict=True))
            logs[contender].append(log(ratio))
            over_stock.setdefault(name, {})[contender] = ratio
            cells += [f"{ratio:.2f}"]
        cells += [str(stock.tasks), str(runs["bundled"].tasks)]
        cells += [f"{stock.peak_mib:.0f}", f"{runs['bundled'].peak_mib:.0f}"]
        rows.append(cells)
    means = {c: exp(sum(logs[c]) / len(logs[c])) for c in logs}
    measure.show(
        f"Real programs on {args.workers} worker processes, {rounds} rounds: ours / stock",
        ["program", "stock s", "ours", "bundled", "tasks", "bundled tasks", "peak MiB", "bundled MiB"],
        rows,
        [f"geometric means: ours {means['ours']:.2f}, bundled {means['bundled']:.2f}"],
    )
    record["programs"] = {
        name: {
            c: {
                "seconds": measure.Summary.of(r.seconds),
                "over_stock": over_stock[name].get(c, 1.0),
                "tasks": r.tasks,
                "peak_mib": r.peak_mib,
            }
            for c, r in runs.items()
        }
        for name, runs in found.items()
    }
    record["geometric_means"] = means
    if args.json:
        measure.write(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
