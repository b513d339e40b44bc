"""Elasticity: the cost of resizes, and job counts on SLURM, under stock Dask's `Adaptive` and under `ff.Elastic`.

    python benchmarks/elastic.py                        # all parts; those on SLURM if one is configured
    python benchmarks/elastic.py --only gemm --rounds 1
    python benchmarks/elastic.py --only cholesky --change 8:16 --change 16:16 --contender ferro --rounds 9
    eval "$(tests/on_slurm/slurm-up)"; python benchmarks/elastic.py --only bursts

gemm       tile GEMM, iterated on the same tiles; in the third iteration the cluster grows from 8 workers by 2, 4, 8,
cholesky   or shrinks from 16 by 2, 4, 8 (tables IV to VI of John and Milthorpe); Cholesky likewise.  The speed of the
           iterations after it, over that of a run with the final number of workers throughout, which runs just before
           or just after it.  "16 -> 16" is no change: its spread is the machine's.  Tasks sleep; workers are local.
bursts     8 bursts of 4 s of work, 6 s apart, on at most 6 one-thread jobs of a real SLURM.
unknown    40 tasks of 5 s of unknown duration, at most 12 jobs.
full       a partition with room for four jobs, and work for twelve.
simulated  GEMM's resize on 64 and 256 virtual workers, and the growth from 0 to 64 up to 4,096 workers with ten 2 s
           tasks for each.

Node-seconds are the time for which SLURM allocated nodes to jobs; cycles are submitted jobs beyond the most that ran at
once.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
from distributed import Adaptive, Client, wait  # noqa: E402
from iterated import Iterated, Tiles, tiles  # noqa: E402
from simulated.elastic.controllers import Scaling  # noqa: E402
from simulated.elastic.pools import VirtualPool  # noqa: E402
from simulated.elastic.run import simulate_elastic  # noqa: E402
from simulated.stock_adaptive import StockAdaptive  # noqa: E402
from simulated.tiled_linalg import iterated_gemm  # noqa: E402
from slurm_jobs import Meter  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.policy.scaling.step import ScalingParameters  # noqa: E402
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec  # noqa: E402

CONTENDERS = ("stock", "ferro")
TILED = ("gemm", "cholesky")
# The last one is no change: it shows the random deviation of a ratio from 1.
CHANGES = ((8, 10), (8, 12), (8, 16), (16, 14), (16, 12), (16, 8), (16, 16))
TOY_CHANGES = ((2, 3), (3, 2))
ITERATIONS, BEFORE = 6, 2  # the resize comes in the third
Note = Callable[[str], None]
Change = tuple[int, int]


# ---- resize: iterated tile algorithms ----------------------------------------------------------------------


class Local(NamedTuple):
    """A local cluster under one contender."""

    name: str
    cluster: Any
    client: Client

    def resize(self, workers: int) -> None:
        """Request a number of workers, as an adaptive controller with these bounds does."""
        kind = ff.Elastic if self.name == "ferro" else Adaptive
        self.cluster.adapt(Adaptive=kind, minimum=workers, maximum=workers)

    def settle(self, workers: int) -> None:
        """Request a number of workers, and wait until they are connected."""
        self.resize(workers)
        deadline = time.monotonic() + 120
        while len(self.client.scheduler_info(n_workers=-1)["workers"]) != workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: not {workers} workers within 120 s")
            time.sleep(0.1)


@contextmanager
def local(name: str, processes: bool) -> Iterator[Local]:
    """Open a cluster without workers; "ferro" has the scheduler plugin, "stock" is Dask alone."""
    options = {} if name == "ferro" else {"scheduler_kwargs": {"preload": []}}
    with (
        ff.LocalCluster(
            n_workers=0, threads_per_worker=1, processes=processes, dashboard_address=":0", **options
        ) as cluster,
        Client(cluster) as client,
    ):
        yield Local(name, cluster, client)


def iterate(on: Local, work: Tiles, first: int, then: int) -> dict[str, Any]:
    """Run the iterations with a resize in the third; return their seconds, and the bytes sent per worker after it."""
    on.settle(first)
    run = Iterated(on.client, work)
    seconds = [run.start()() for _ in range(BEFORE)]
    finish = run.start()
    if then != first:
        on.resize(then)
    seconds.append(finish())
    on.settle(then)
    sent = sum(on.client.run(_sent).values())
    seconds += [run.start()() for _ in range(ITERATIONS - len(seconds))]
    moved = sum(on.client.run(_sent).values()) - sent
    run.release()
    return {"seconds": seconds, "after": median(seconds[BEFORE + 1 :]), "sent_per_worker": moved / then}


def _sent(dask_worker: Any) -> int:
    total: int = dask_worker.transfer_outgoing_bytes_total
    return total


def resize(
    name: str, changes: Sequence[Change], contenders: Sequence[str], toy: bool, rounds: int, note: Note
) -> dict[str, Any]:
    """Return, per contender and change, the speed after it over that of a run with the final count throughout.

    The two runs of a ratio are neighbours in time, and change places each round: on a machine with all cores busy, an
    iteration takes 5 % more or less from one minute to the next, and the second of two equal runs is the slower one.
    """
    work = tiles(name, toy)
    found: dict[str, Any] = {}
    for contender in contenders:
        runs: dict[Change, list[tuple[dict[str, Any], dict[str, Any]]]] = {change: [] for change in changes}
        with local(contender, processes=not toy) as on:
            for number in range(rounds):
                for first, then in changes:
                    pair = {"throughout": (then, then), "resized": (first, then)}
                    order = list(pair) if number % 2 == 0 else list(reversed(pair))
                    ran = {which: iterate(on, work, *pair[which]) for which in order}
                    runs[first, then].append((ran["throughout"], ran["resized"]))
                    note(
                        f"{name} {contender} round {number + 1}: {first} -> {then} {ran['resized']['after']:.2f} s, "
                        f"{then} throughout {ran['throughout']['after']:.2f} s"
                    )
        found[contender] = {f"{a} -> {b}": _compared(pairs) for (a, b), pairs in runs.items()}
    show_resize(name, found)
    return found


def _compared(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Return the ratios of resized runs to their neighbours with a constant number of workers."""
    ratios = [throughout["after"] / resized["after"] for throughout, resized in pairs]
    return {
        "ratio": measure.Summary.of(ratios),
        "ratios": ratios,
        "seconds": measure.Summary.of([resized["after"] for _, resized in pairs]),
        "expected": measure.Summary.of([throughout["after"] for throughout, _ in pairs]),
        "sent_per_worker": median([resized["sent_per_worker"] for _, resized in pairs]),
    }


def show_resize(name: str, found: Mapping[str, Any]) -> None:
    rows = []
    for change in next(iter(found.values())):
        cells = [change]
        for one in found.values():
            c = one[change]
            cells += [
                f"{c['ratio'].median:.2f}",
                f"{c['ratio'].low:.2f} to {c['ratio'].high:.2f}",
                f"{c['seconds'].median:.2f}",
                f"{c['sent_per_worker'] / 1e6:.2f}",
            ]
        rows.append(tuple(cells))
    columns = [""] + [
        f"{c} {what}" for c in found for what in ("after/expected", "spread", "s/iteration", "MB/worker")
    ]
    measure.show(f"{name}, resized in the third iteration", columns, rows)


# ---- on SLURM ----------------------------------------------------------------------------------------------


@contextmanager
def on_slurm(name: str, maximum: int, cores: int = 1) -> Iterator[tuple[Client, Meter]]:
    """Open an adaptive cluster on the configured SLURM."""
    import dask_jobqueue

    kind = ff.SLURMCluster if name == "ferro" else dask_jobqueue.SLURMCluster
    tag = f"bench-{name}-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        cluster = kind(
            queue="cpu", cores=cores, memory="400MB", processes=1, interface="lo", job_name=tag,
            scheduler_options={"dashboard_address": "127.0.0.1:0", "interface": "lo"},
            log_directory=folder, local_directory=folder,
        )  # fmt: skip
        with cluster, Client(cluster) as client, Meter(tag) as meter:
            cluster.adapt(minimum=0, maximum=maximum)
            yield client, meter


def bursts(name: str, toy: bool) -> dict[str, Any]:
    """Run bursts of work with pauses between them."""
    count, pause, work = (2, 1.0, 0.5) if toy else (8, 6.0, 4.0)
    seconds = []
    with on_slurm(name, 2 if toy else 6) as (client, meter):
        for number in range(count):
            began = time.perf_counter()
            wait(client.map(_nap, [work / 8] * 8, key=[f"burst-{number}-{i}" for i in range(8)]))
            seconds.append(time.perf_counter() - began)
            time.sleep(pause)
    return _figures(meter, sum(seconds), bursts=measure.Summary.of(seconds))


def unknown(name: str, toy: bool) -> dict[str, Any]:
    """Run long tasks of unknown duration."""
    count, work, most = (4, 0.5, 2) if toy else (40, 5.0, 12)
    with on_slurm(name, most) as (client, meter):
        began = time.perf_counter()
        wait(client.map(_nap, [work] * count, key=[f"long-{i}" for i in range(count)]))
        seconds = time.perf_counter() - began
    return _figures(meter, seconds)


def full(name: str, toy: bool) -> dict[str, Any]:
    """Run work for twelve jobs in a partition with room for four."""
    count, work, most = (8, 0.2, 5) if toy else (240, 0.8, 12)
    with on_slurm(name, most, cores=4) as (client, meter):
        began = time.perf_counter()
        wait(client.map(_nap, [work] * count, key=[f"full-{i}" for i in range(count)]))
        seconds = time.perf_counter() - began
    return _figures(meter, seconds)


def _figures(meter: Meter, seconds: float, **more: Any) -> dict[str, Any]:
    jobs = len(meter.jobs)
    figures = {
        "seconds": seconds,
        "node_seconds": meter.node_seconds,
        "jobs": jobs,
        "most": meter.most_running,
    }
    return figures | {"cycles": jobs - meter.most_running} | more


def _nap(seconds: float) -> None:
    time.sleep(seconds)


ON_SLURM: Mapping[str, Callable[[str, bool], dict[str, Any]]] = {
    "bursts": bursts,
    "unknown": unknown,
    "full": full,
}


def slurm_part(name: str, toy: bool, rounds: int, note: Note) -> dict[str, Any]:
    """Return the figures of both contenders, median over rounds, in turn."""
    taken: dict[str, list[dict[str, Any]]] = {c: [] for c in CONTENDERS}
    for number in range(rounds):
        for contender in CONTENDERS:
            taken[contender].append(ON_SLURM[name](contender, toy))
            note(f"{name} {contender} round {number + 1}: {taken[contender][-1]}")
    found = {
        contender: {
            key: measure.Summary.of([one[key] for one in ones])
            for key in ("seconds", "node_seconds", "jobs", "most", "cycles")
        }
        | {key: [one[key] for one in ones] for key in ("bursts",) if key in ones[0]}
        for contender, ones in taken.items()
    }
    rows = [
        (
            contender,
            f"{c['seconds'].median:.1f}",
            f"{c['node_seconds'].median:.1f}",
            f"{c['jobs'].median:.0f}",
            f"{c['most'].median:.0f}",
            f"{c['cycles'].median:.0f}",
        )
        for contender, c in found.items()
    ]
    columns = ("", "seconds", "node-seconds", "jobs submitted", "most at once", "cycles")
    measure.show(f"{name}, on SLURM", columns, rows)
    return found


# ---- in the simulator --------------------------------------------------------------------------------------


def simulated(toy: bool, note: Note) -> dict[str, Any]:
    """Return the resize ratios at larger sizes, and runs that start without workers."""
    found: dict[str, Any] = {"resize": {}, "from zero": {}}
    for workers, nt in ((8, 6),) if toy else ((64, 16), (256, 24)):
        for first, then in ((workers // 2, workers), (workers, workers // 2)):
            ratio = _virtual_resize(nt, first, then)
            found["resize"][f"{first} -> {then}"] = ratio
            note(f"simulated GEMM {first} -> {then}: {ratio:.3f}")
    for workers in (8,) if toy else (64, 512, 4096):
        for contender in CONTENDERS:
            run = _from_zero(workers, contender)
            found["from zero"][f"{workers} {contender}"] = run
            note(f"simulated from zero to {workers}, {contender}: {run}")
    rows = [(change, f"{ratio:.3f}") for change, ratio in found["resize"].items()]
    measure.show("GEMM, simulated, resized in the third iteration", ("", "after/expected"), rows)
    zero = [
        (name, f"{run['seconds']:.1f}", f"{run['node_seconds']:,.0f}", str(run["jobs"]))
        for name, run in found["from zero"].items()
    ]
    measure.show(
        "ten 2 s tasks a worker, simulated, from no worker on", ("", "s", "node-seconds", "jobs"), zero
    )
    return found


def _virtual_resize(nt: int, first: int, then: int) -> float:
    """Return the speed of the iterations after the third, over that of a run with the final number throughout."""

    def after(workers: int) -> float:
        pinned = Scaling(ScalingParameters(minimum=workers, maximum=workers), resize={BEFORE + 2: then})
        pool = VirtualPool(queue_wait=0.2, start_up=0.3)
        graph = iterated_gemm(nt, ITERATIONS, seconds=0.08, tile_bytes=64 * 1024)
        run = simulate_elastic(graph, [pool], pinned, at_start={pool.name: workers})
        return sum(run.phases[BEFORE + 2 :])  # the first phase makes the tiles

    return after(then) / after(first)


def _from_zero(workers: int, contender: str) -> dict[str, Any]:
    tasks = tuple(TaskSpec(("task-0", i), "task", "task-0", 2.0, 1000) for i in range(10 * workers))
    stock = contender == "stock"
    controller = StockAdaptive(0, workers) if stock else Scaling(ScalingParameters(maximum=workers))
    pool = VirtualPool(queue_wait=5.0, start_up=3.0)
    run = simulate_elastic(
        TaskGraph("independent", tasks), [pool], controller, policy="stock" if stock else "informed"
    )
    return {"seconds": run.makespan, "node_seconds": run.node_seconds, "jobs": run.submitted}


# ---- all of it ---------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("Growing and shrinking, beside stock Dask's adaptive controller.", rounds=3)
    parts = (*TILED, *ON_SLURM, "simulated")
    parser.add_argument("--only", choices=parts, action="append", help="run only this part")
    parser.add_argument(
        "--change",
        type=_change,
        action="append",
        metavar="FROM:TO",
        help="for gemm and cholesky: run only this resize",
    )
    parser.add_argument(
        "--contender",
        choices=CONTENDERS,
        action="append",
        help="for gemm and cholesky: run only this contender",
    )
    options = parser.parse_args(arguments)
    note: Note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    rounds = 1 if options.toy else options.rounds
    names = options.only or [p for p in parts if p not in ON_SLURM or "SLURM_CONF" in os.environ]
    record = measure.provenance(rounds=rounds, toy=options.toy)
    record["results"] = {}
    for name in names:
        if name in TILED:
            changes = options.change or (TOY_CHANGES if options.toy else CHANGES)
            contenders = options.contender or CONTENDERS
            record["results"][name] = resize(name, changes, contenders, options.toy, rounds, note)
        elif name == "simulated":
            record["results"][name] = simulated(options.toy, note)
        else:
            record["results"][name] = slurm_part(name, options.toy, rounds, note)
    if options.json:
        measure.write(options.json, record)
    return record


def _change(text: str) -> Change:
    """Parse the numbers of workers before and after a change."""
    try:
        first, then = map(int, text.split(":"))
    except ValueError:
        first = then = 0
    if min(first, then) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted two counts of workers, as in 8:16")
    return first, then


if __name__ == "__main__":
    main()
