"""What growing and shrinking costs, under stock Dask's adaptive controller and under `ff.Elastic`.

    python benchmarks/elastic.py                        # all of it; the parts on SLURM where one is configured
    python benchmarks/elastic.py --only gemm --rounds 1
    eval "$(tests/slurm/slurm-up)"; python benchmarks/elastic.py --only bursts

gemm       tile GEMM, iterated on the same tiles; in the third iteration the cluster grows from 8 workers by 2, 4, 8,
cholesky   or shrinks from 16 by 2, 4, 8 (tables IV to VI of John and Milthorpe); Cholesky likewise.  The speed of the
           iterations after it, over that of a run with so many workers throughout.  Tasks sleep; workers are local.
bursts     8 bursts of 4 s of work, 6 s apart, on at most 6 one-thread jobs of a real SLURM.
unknown    40 tasks of 5 s that nobody knows the length of, at most 12 jobs.
full       a partition with room for four jobs, and work for twelve.
simulated  GEMM's resize on 64 and 256 virtual workers, and ten 2 s tasks a worker from no worker on, for 64 to 4,096.

Node-seconds are those that SLURM held nodes for jobs; cycles are jobs that were submitted beyond the most that
ran at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
from dask._task_spec import List, Task, TaskRef  # noqa: E402
from dask.highlevelgraph import HighLevelGraph  # noqa: E402
from distributed import Adaptive, Client, Future, wait  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.policy.scale import Parameters  # noqa: E402
from dask_ferro.runtime import synthetic  # noqa: E402
from dask_ferro.simulate.controllers import Scaling, StockAdaptive  # noqa: E402
from dask_ferro.simulate.elastic import simulate_elastic  # noqa: E402
from dask_ferro.simulate.pools import VirtualPool  # noqa: E402
from dask_ferro.simulate.taskgraph import Key, TaskGraph, TaskSpec  # noqa: E402
from dask_ferro.simulate.tiles import cholesky, gemm, iterated_gemm  # noqa: E402

CONTENDERS = ("stock", "ferro")
TILED = ("gemm", "cholesky")
CHANGES = ((8, 10), (8, 12), (8, 16), (16, 14), (16, 12), (16, 8))
TOY_CHANGES = ((2, 3), (3, 2))
ITERATIONS, BEFORE = 6, 2  # the resize comes in the third
Note = Callable[[str], None]


# ---- resize: iterated tile algorithms ----------------------------------------------------------------------


class Tiles(NamedTuple):
    """An iterated workload: what is on the cluster before, and one iteration on it.

    Attributes
    ----------
    roots : mapping of key to bytes
        Tiles that are made once and stay.
    graph : TaskGraph
        One iteration; its tasks may read roots, and tiles of the iteration before.
    carried : mapping of task to task
        A task that reads the tile that another one left in the iteration before.
    """

    name: str
    roots: Mapping[Key, int]
    graph: TaskGraph
    carried: Mapping[Key, Key]


def tiles(name: str, toy: bool) -> Tiles:
    """Return the workload: C += A B again and again, or the factorization of the same A again and again."""
    seconds = 0.02 if toy else 0.06
    size = 64 * 1024
    if name == "gemm":
        graph = gemm(3 if toy else 8, seconds, size)
        roots = {t.key: t.nbytes for t in graph.tasks if t.kernel == "tile"}
        products = [t for t in graph.tasks if t.key not in roots]
        ends = {t.key[1:3]: t.key for t in products}  # the last of each chain
        firsts = {
            t.key: ends[t.key[1:3]] for t in products if not any(d not in roots for d in t.dependencies)
        }
        return Tiles(name, roots, TaskGraph(name, tuple(products)), firsts)
    graph = cholesky(4 if toy else 12, seconds, size)
    return Tiles(name, {}, graph, {})


class Iterated:
    """A workload on a client: each iteration is persisted, and the one before released."""

    def __init__(self, client: Client, work: Tiles) -> None:
        self.client, self.work = client, work
        self._number = 0
        self._roots: dict[Key, Future] = {}
        self._tiles: dict[Key, Future] = {}
        if work.roots:
            made = {
                ("root", *key): Task(("root", *key), synthetic.sleep, 0.002, size, None, List())
                for key, size in work.roots.items()
            }
            futures = self._get(made, list(made))
            self._roots = dict(zip(work.roots, futures, strict=True))
            wait(futures)

    def start(self) -> Callable[[], float]:
        """Submit the next iteration; what is returned waits for it and returns its seconds."""
        self._number += 1
        work, number = self.work, self._number
        held: dict[Key, Any] = {f.key: f for f in (*self._roots.values(), *self._tiles.values())}
        tasks: dict[Key, Any] = {}
        for spec in work.graph.tasks:
            reads = [
                self._roots[d].key if d in self._roots else (d[0], number, *d[1:]) for d in spec.dependencies
            ]
            if number > 1 and spec.key in work.carried:
                reads.append(self._tiles[work.carried[spec.key]].key)
            key = (spec.key[0], number, *spec.key[1:])
            tasks[key] = Task(
                key, synthetic.sleep, spec.seconds, spec.nbytes, None, List(*map(TaskRef, reads))
            )
        outputs = self._outputs()
        began = time.perf_counter()
        futures = self._get(held | tasks, [(k[0], number, *k[1:]) for k in outputs])
        before, self._tiles = self._tiles, dict(zip(outputs, futures, strict=True))

        def finish() -> float:
            wait(futures)
            seconds = time.perf_counter() - began
            before.clear()
            return seconds

        return finish

    def _outputs(self) -> list[Key]:
        graph = self.work.graph
        return list(self.work.carried.values()) or [
            key for key, after in graph.dependents.items() if not after
        ]

    def _get(self, tasks: Mapping[Key, Any], outputs: Sequence[Key]) -> list[Future]:
        found: list[Future] = self.client.get(
            HighLevelGraph.from_collections(self.work.name, dict(tasks), []), list(outputs), sync=False
        )
        return found

    def release(self) -> None:
        """Give everything back."""
        self._tiles.clear()
        self._roots.clear()


class Local(NamedTuple):
    """A local cluster under one contender."""

    name: str
    cluster: Any
    client: Client

    def resize(self, workers: int) -> None:
        """Ask for so many workers, as an adaptive controller does that was given these bounds."""
        kind = ff.Elastic if self.name == "ferro" else Adaptive
        self.cluster.adapt(Adaptive=kind, minimum=workers, maximum=workers)

    def settle(self, workers: int) -> None:
        """Ask, and wait until there are so many."""
        self.resize(workers)
        deadline = time.monotonic() + 120
        while len(self.client.scheduler_info(n_workers=-1)["workers"]) != workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: not {workers} workers within 120 s")
            time.sleep(0.1)


@contextmanager
def local(name: str, processes: bool) -> Iterator[Local]:
    """Open a cluster of no workers; "ferro" has the scheduler plugin, "stock" is Dask alone."""
    options = {} if name == "ferro" else {"scheduler_kwargs": {"preload": []}}
    with (
        ff.LocalCluster(
            n_workers=0, threads_per_worker=1, processes=processes, dashboard_address=":0", **options
        ) as cluster,
        Client(cluster) as client,
    ):
        yield Local(name, cluster, client)


def iterate(on: Local, work: Tiles, first: int, then: int) -> dict[str, Any]:
    """Run the iterations, resized in the third; return their seconds, and bytes sent per worker after it."""
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


def resize(name: str, toy: bool, rounds: int, note: Note) -> dict[str, Any]:
    """Return, per contender and change, speed after over the speed of a run with that count throughout."""
    changes = TOY_CHANGES if toy else CHANGES
    counts = sorted({then for _, then in changes})
    work = tiles(name, toy)
    found: dict[str, Any] = {}
    for contender in CONTENDERS:
        with local(contender, processes=not toy) as on:
            throughout: dict[int, list[float]] = {n: [] for n in counts}
            after: dict[tuple[int, int], list[dict[str, Any]]] = {change: [] for change in changes}
            for number in range(rounds):
                for n in counts:
                    throughout[n].append(iterate(on, work, n, n)["after"])
                    note(f"{name} {contender} round {number + 1}: {n} throughout {throughout[n][-1]:.2f} s")
                for change in changes:
                    after[change].append(iterate(on, work, *change))
                    note(
                        f"{name} {contender} round {number + 1}: {change} {after[change][-1]['after']:.2f} s"
                    )
        found[contender] = {
            f"{first} -> {then}": {
                "ratio": measure.Summary.of(
                    [e / a["after"] for e, a in zip(throughout[then], after[first, then], strict=True)]
                ),
                "seconds": measure.Summary.of([a["after"] for a in after[first, then]]),
                "expected": measure.Summary.of(throughout[then]),
                "sent_per_worker": median([a["sent_per_worker"] for a in after[first, then]]),
            }
            for first, then in changes
        }
    show_resize(name, found)
    return found


def show_resize(name: str, found: Mapping[str, Any]) -> None:
    rows = []
    for change in found[CONTENDERS[0]]:
        cells = [change]
        for contender in CONTENDERS:
            c = found[contender][change]
            cells += [
                f"{c['ratio'].median:.2f}",
                f"{c['seconds'].median:.2f}",
                f"{c['sent_per_worker'] / 1e6:.2f}",
            ]
        rows.append(tuple(cells))
    columns = [""] + [
        f"{c} {what}" for c in CONTENDERS for what in ("after/expected", "s/iteration", "MB/worker")
    ]
    measure.show(f"{name}, resized in the third iteration", columns, rows)


# ---- on SLURM ----------------------------------------------------------------------------------------------


class Meter:
    """What SLURM did for a cluster's jobs, looked at five times a second."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.node_seconds = 0.0
        self.jobs: set[str] = set()
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.2):
            lines = subprocess.run(
                ["squeue", "-h", "-r", "-o", "%i %T %j"], capture_output=True, text=True, check=False
            ).stdout.splitlines()
            own = [line.split() for line in lines if line.split()[2].startswith(self.tag)]
            running = [job for job, state, _ in own if state == "RUNNING"]
            now = time.monotonic()
            self.node_seconds += len(running) * (now - last)
            last = now
            self.jobs |= {job for job, _, _ in own}
            self.most = max(self.most, len(running))


@contextmanager
def on_slurm(name: str, maximum: int, cores: int = 1) -> Iterator[tuple[Client, Meter]]:
    """Open an adaptive cluster on the SLURM at hand."""
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
    """Run long tasks that nobody knows the length of."""
    count, work, most = (4, 0.5, 2) if toy else (40, 5.0, 12)
    with on_slurm(name, most) as (client, meter):
        began = time.perf_counter()
        wait(client.map(_nap, [work] * count, key=[f"long-{i}" for i in range(count)]))
        seconds = time.perf_counter() - began
    return _figures(meter, seconds)


def full(name: str, toy: bool) -> dict[str, Any]:
    """Run work for twelve jobs where four find room."""
    count, work, most = (8, 0.2, 5) if toy else (240, 0.8, 12)
    with on_slurm(name, most, cores=4) as (client, meter):
        began = time.perf_counter()
        wait(client.map(_nap, [work] * count, key=[f"full-{i}" for i in range(count)]))
        seconds = time.perf_counter() - began
    return _figures(meter, seconds)


def _figures(meter: Meter, seconds: float, **more: Any) -> dict[str, Any]:
    jobs = len(meter.jobs)
    figures = {"seconds": seconds, "node_seconds": meter.node_seconds, "jobs": jobs, "most": meter.most}
    return figures | {"cycles": jobs - meter.most} | more


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
    """Return the resize ratios at larger sizes, and runs from no worker on."""
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
    """The speed of the iterations after the third, over that of a run with the later number throughout."""

    def after(workers: int) -> float:
        pinned = Scaling(Parameters(minimum=workers, maximum=workers), resize={BEFORE + 2: then})
        pool = VirtualPool(queue_wait=0.2, start_up=0.3)
        graph = iterated_gemm(nt, ITERATIONS, seconds=0.08, tile_bytes=64 * 1024)
        run = simulate_elastic(graph, [pool], pinned, at_start={pool.name: workers})
        return sum(run.phases[BEFORE + 2 :])  # the first phase makes the tiles

    return after(then) / after(first)


def _from_zero(workers: int, contender: str) -> dict[str, Any]:
    tasks = tuple(TaskSpec(("task-0", i), "task", "task-0", 2.0, 1000) for i in range(10 * workers))
    stock = contender == "stock"
    controller = StockAdaptive(0, workers) if stock else Scaling(Parameters(maximum=workers))
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
    parser.add_argument("--only", choices=parts, action="append", help="this part alone")
    options = parser.parse_args(arguments)
    note: Note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    rounds = 1 if options.toy else options.rounds
    names = options.only or [p for p in parts if p not in ON_SLURM or "SLURM_CONF" in os.environ]
    record = measure.provenance(rounds=rounds, toy=options.toy)
    record["results"] = {}
    for name in names:
        if name in TILED:
            record["results"][name] = resize(name, options.toy, rounds, note)
        elif name == "simulated":
            record["results"][name] = simulated(options.toy, note)
        else:
            record["results"][name] = slurm_part(name, options.toy, rounds, note)
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
