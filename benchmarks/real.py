"""Real Dask programs with and without dask_ferro: linear algebra, climate, rechunking, sorting, tables.

    python benchmarks/real.py                     # stock Dask, ours, and ours with bundles, on 4 worker processes
    python benchmarks/real.py --only svd merge    # some of them
    python benchmarks/real.py --first             # the first program after `ff.install`, on a fresh cluster each time
    python benchmarks/real.py --contenders stock ours unplaced unstolen    # what placement and stealing cost

Contenders compute a program in turn.  A warm contender has a cluster of its own, alive for all programs, and one
unmeasured round, in which bundles learn what tasks cost.  With ``--first``, each run has a new cluster and plugin, and
nothing is known.  Beside the seconds stand counts of one run: tasks, CPU seconds of the process that has scheduler
and client, and of the workers; messages between scheduler and workers; bytes between workers; and the most memory
that results took (sampled every 50 ms).  Walls vary more on a busy machine than counts and CPU seconds.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]
# Worker processes come from a fork server, which imports distributed once: hundreds of clusters start in 0.3 s each.
os.environ.setdefault("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")

import dask  # noqa: E402
import dask.array as da  # noqa: E402
import dask.bag as db  # noqa: E402
import dask.dataframe as dd  # noqa: E402
import measure  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from distributed import Client, LocalCluster, Scheduler, Worker  # noqa: E402
from distributed.diagnostics import MemorySampler  # noqa: E402

import dask_ferro as ff  # noqa: E402

SEED = 7
# Arguments of `ff.install`; None: stock Dask.  "again" is stock Dask once more: its ratio is the noise.
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "again": None,
    "ours": {},
    "bundled": {"bundles": True},
    "unplaced": {"placement": False},
    "unstolen": {"stealing": "none"},
    "unranked": {"rank": False},
}
USUAL = ("stock", "again", "ours", "bundled")


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


class Counts(NamedTuple):
    """What a cluster has counted since it started; CPU in seconds."""

    tasks: float
    scheduler_cpu: float
    worker_cpu: float
    messages: float
    transfers: float
    transferred_mib: float

    @classmethod
    def of(cls, client: Client) -> Counts:
        """Read the counts of a client's cluster, whose scheduler is in this process."""
        tasks, sent = client.run_on_scheduler(_scheduler_counts)
        workers = client.run(_worker_counts).values()
        cpu, received, transfers, nbytes = map(sum, zip(*workers, strict=True))
        return cls(tasks, time.process_time(), cpu, sent + received, transfers, nbytes / 2**20)

    def since(self, before: Counts) -> Counts:
        """Return the difference to earlier counts."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def _scheduler_counts(dask_scheduler: Scheduler) -> tuple[int, int]:
    """Return the tasks that ended, and the messages to workers."""
    tasks = sum(prefix.state_counts["memory"] for prefix in dask_scheduler.task_prefixes.values())
    return tasks, sum(stream.message_count for stream in dask_scheduler.stream_comms.values())


def _worker_counts(dask_worker: Worker) -> tuple[float, int, int, int]:
    """Return CPU seconds, messages to the scheduler, transfers to other workers and their bytes."""
    sent = dask_worker.batched_stream.message_count
    outgoing = dask_worker.transfer_outgoing_count_total, dask_worker.transfer_outgoing_bytes_total
    return time.process_time(), sent, *outgoing


class Run(NamedTuple):
    """One run of a program by a contender."""

    seconds: float
    peak_mib: float
    counts: Counts


@contextmanager
def cluster(contender: str, workers: int, costs: str) -> Iterator[Client]:
    """Open a cluster for a contender, whose plugin knows what `costs` has."""
    with (
        # A worker that is closed while its heartbeat is answered logs an error.
        dask.config.set({"ferro.bundle.costs": costs, "logging.distributed": "critical"}),
        LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=":0", silence_logs=logging.ERROR
        ) as local,
        Client(local, set_as_default=False) as client,
    ):
        options = CONTENDERS[contender]
        if options is not None:
            ff.install(client, **options)
        yield client


@contextmanager
def clusters(contenders: Sequence[str], workers: int, costs: str) -> Iterator[dict[str, Client]]:
    """Open a cluster for each contender; all are alive at the same time."""
    with ExitStack() as stack:
        yield {c: stack.enter_context(cluster(c, workers, f"{costs}-{c}")) for c in contenders}


def once(client: Client, name: str, scale: float, check: Callable[[Any], None]) -> Run:
    """Run a program, and check its result."""
    with client.as_current(), dask.config.set(scheduler="dask.distributed"):
        sampler = MemorySampler()
        before = Counts.of(client)
        with sampler.sample(name, client=client, interval=0.05, measure="managed"):
            start = time.perf_counter()
            result = client.compute(PROGRAMS[name](scale)).result()
            seconds = time.perf_counter() - start
        counts = Counts.of(client).since(before)
    check(result)
    frame = sampler.to_pandas()
    used = frame[name].to_numpy() if len(frame) else np.zeros(1)
    return Run(seconds, float(used.max()) / 2**20, counts)


class Checked:
    """The first result of a program, with which all others are compared."""

    def __init__(self, name: str) -> None:
        self.name, self.first = name, None

    def __call__(self, result: Any) -> None:
        self.first = result if self.first is None else self.first
        if not np.allclose(np.asarray(self.first, float), np.asarray(result, float)):
            raise AssertionError(f"{self.name}: got {result}, wanted {self.first}")


def first_runs(
    name: str, contenders: Sequence[str], workers: int, scale: float, rounds: int, note: Callable[[str], None]
) -> dict[str, list[Run]]:
    """Run a program as the first one of a new cluster, by each contender in turn."""
    runs: dict[str, list[Run]] = {contender: [] for contender in contenders}
    check = Checked(name)
    for number in range(rounds):
        for contender in _turn(contenders, number):
            with (
                tempfile.TemporaryDirectory() as folder,
                cluster(contender, workers, str(Path(folder, "costs"))) as client,
            ):
                runs[contender].append(once(client, name, scale, check))
            note(f"{name}, round {number + 1}: {contender} {runs[contender][-1].seconds:.3f} s")
    return runs


def warm_runs(
    name: str, clients: Mapping[str, Client], scale: float, rounds: int, note: Callable[[str], None]
) -> dict[str, list[Run]]:
    """Run a program on clusters that ran it before, by each contender in turn."""
    runs: dict[str, list[Run]] = {contender: [] for contender in clients}
    check = Checked(name)
    for number in range(-1, rounds):
        for contender in _turn(list(clients), number):
            run = once(clients[contender], name, scale, check)
            if number >= 0:
                runs[contender].append(run)
            note(
                f"{name}, {f'round {number + 1}' if number >= 0 else 'warm-up'}: {contender} {run.seconds:.3f} s"
            )
    return runs


def _turn(contenders: Sequence[str], number: int) -> list[str]:
    """Return the contenders in the order of a round, of which each starts with the next one."""
    start = number % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def summarized(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return medians of each contender; ratios to stock are medians of those inside each round."""
    stock = runs["stock"]
    summary: dict[str, Any] = {}
    for contender, own in runs.items():
        ratio = median(run.seconds / theirs.seconds for run, theirs in zip(own, stock, strict=True))
        counts = {field: median(getattr(run.counts, field) for run in own) for field in Counts._fields}
        cpu = [run.counts.scheduler_cpu + run.counts.worker_cpu for run in own]
        base = [run.counts.scheduler_cpu + run.counts.worker_cpu for run in stock]
        summary[contender] = {
            "seconds": measure.Summary.of([run.seconds for run in own]),
            "over_stock": ratio,
            "cpu_over_stock": median(cpu) / median(base),
            "peak_mib": median(run.peak_mib for run in own),
            **counts,
        }
    return summary


def show(
    title: str, programs: Mapping[str, Mapping[str, Any]], contenders: Sequence[str]
) -> dict[str, float]:
    """Print a table of seconds and one of counts; return the geometric mean of each contender's ratios."""
    others = [contender for contender in contenders if contender != "stock"]
    means = {
        c: exp(sum(log(own[c]["over_stock"]) for own in programs.values()) / len(programs)) for c in others
    }
    rows = [
        [name, f"{own['stock']['seconds'].median:.2f}", *(f"{own[c]['over_stock']:.2f}" for c in others),
         *(f"{own[c]['cpu_over_stock']:.2f}" for c in others)]
        for name, own in programs.items()
    ]  # fmt: skip
    notes = [f"geometric means: {', '.join(f'{c} {mean:.2f}' for c, mean in means.items())}"]
    columns = ["program", "stock s", *others, *(f"CPU {c}" for c in others)]
    measure.show(f"{title}: time and CPU time, ours / stock", columns, rows, notes)
    counted = [
        [name, contender, f"{run['tasks']:.0f}", f"{run['messages']:.0f}", f"{run['transfers']:.0f}",
         f"{run['transferred_mib']:.0f}", f"{run['peak_mib']:.0f}", f"{run['scheduler_cpu']:.2f}",
         f"{run['worker_cpu']:.2f}"]
        for name, own in programs.items()
        for contender, run in own.items()
    ]  # fmt: skip
    columns = ["program", "contender", "tasks", "messages", "transfers", "MiB moved", "peak MiB", "scheduler CPU s",
               "worker CPU s"]  # fmt: skip
    measure.show(f"{title}: counts of a run", columns, counted)
    return means


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 where results differ."""
    parser = measure.options(__doc__.partition("\n")[0], rounds=9)
    parser.add_argument("--workers", type=int, default=4, help="worker processes of each cluster (4)")
    parser.add_argument("--only", nargs="+", choices=sorted(PROGRAMS), help="these programs alone")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=USUAL)
    parser.add_argument("--first", action="store_true", help="a new cluster for each run")
    parser.add_argument(
        "--warm", action="store_true", help="clusters that ran the program before; default: both"
    )
    args = parser.parse_args(arguments)
    scale, rounds = (0.02, 1) if args.toy else (1.0, args.rounds)
    names = args.only or list(PROGRAMS)
    contenders = list(dict.fromkeys(["stock", *args.contenders]))
    note = (lambda line: None) if args.quiet else (lambda line: print(line, flush=True))
    record: dict[str, Any] = measure.provenance(workers=args.workers, rounds=rounds, scale=scale)
    title = f"Real programs on {args.workers} worker processes, {rounds} rounds"
    if args.first or not args.warm:
        first = {n: summarized(first_runs(n, contenders, args.workers, scale, rounds, note)) for n in names}
        record["first"] = {"programs": first, "geometric_means": show(f"{title}, first", first, contenders)}
    if args.warm or not args.first:
        with (
            tempfile.TemporaryDirectory() as folder,
            clusters(contenders, args.workers, str(Path(folder, "costs"))) as clients,
        ):
            warm = {n: summarized(warm_runs(n, clients, scale, rounds, note)) for n in names}
        record["warm"] = {"programs": warm, "geometric_means": show(f"{title}, warm", warm, contenders)}
    if args.json:
        measure.write(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
