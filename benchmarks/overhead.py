"""The overhead of dask_ferro: tiny ops, graphs with a known best makespan, and submission of large graphs.

    python benchmarks/overhead.py                 # all three
    python benchmarks/overhead.py --only dags --json out.json

tiny    1,281 ops on 256 floats that take about a microsecond each, with granularity "op", "auto" and "model".
dags    the built-in graphs on 8 workers, from submission to result, compared with the projection and the bound
        max(work / workers, critical path).  A sleep uses no CPU, so 8 workers do not need 8 cores; kernels do.
        Also the time of Dask for the same sleeps cut by hand: one task per worker, chains assigned longest first,
        all outputs of a task in one array, `client.map` and `gather`; and of Dask's threads, `num_workers=8`.
        Flows: each sleep is a task of Dask's in `ff.bundle_tasks()`, on 8 worker processes, and on 8 threads of one
        worker in this process.  The warm-up measures the tasks; the record says how many runs were flows.
submit  from a model in memory to its tasks on the scheduler: 1,000 to 100,000 nodes, and 10,000 chunks.

Everything runs in processes, over TCP; cold runs (files opened, sessions built) are the unmeasured warm-up.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask  # noqa: E402
import measure  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
from bundles import flows_so_far  # noqa: E402
from dask.delayed import Delayed  # noqa: E402
from distributed import Client  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from tiny_graph import tiny_graph  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.engines.array.custom_ops import sleep  # noqa: E402

SEED = 0
DAG_WORKERS = 8
LIMIT = (1.1, 0.030)  # of a bound, and seconds: what a graph of sleeps may take
BY_HAND = ", by hand"
THREADS = ", threads"
FLOWS = ", flows"
FLOWS_IN_THREADS = ", flows in threads"
Note = Callable[[str], None]


class Dag(NamedTuple):
    """A built-in graph with its parameters."""

    name: str
    params: Mapping[str, int | float] = {}

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{k}={v}" for k, v in self.params.items())])


SLEEPS = (
    Dag("imbalanced"),
    Dag("wide"),
    Dag("large-wide"),
    Dag("large-wide", {"branches": 320, "length": 1, "skew": 0.47}),
    Dag("xlarge-wide"),
    Dag("xlarge-wide", {"branches": 64, "length": 10, "skew": 0.5}),
)
KERNELS = (
    Dag("transformer"),
    Dag("large-transformer"),
    Dag("xlarge-transformer"),
    Dag("matmul-chain"),
    Dag("matmul-parallel"),
    Dag("resnet"),
)
TOY_DAGS = (Dag("wide", {"branches": 4, "length": 2}), Dag("resnet", {"channels": 4}))


@contextmanager
def cluster_of(workers: int, threads: int = 1, *, processes: bool = True) -> Iterator[Client]:
    with (
        ff.LocalCluster(
            n_workers=workers, threads_per_worker=threads, processes=processes, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def _compute(client: Client, collection: Any) -> Any:
    return collection.compute(scheduler=client)


def _settle(client: Client, patience: float = 30.0) -> None:
    """Wait until the scheduler has forgotten the last run, which for 1,281 tasks takes longer than the next run.

    Scattered inputs stay, so some tasks may be left.
    """
    deadline = time.monotonic() + patience
    before, left = -1, client.run_on_scheduler(_tasks)
    while left != before:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the scheduler has not forgotten all tasks after {patience:g} s")
        time.sleep(0.03)
        before, left = left, client.run_on_scheduler(_tasks)


def _tasks(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)


def _inputs(model: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    return {n: rng.standard_normal(s.shape, dtype=np.float32) for n, s in model.inputs.items()}


def _same(expected: Any, name: str, result: Any) -> None:
    wanted = expected if isinstance(expected, dict) else {"": expected}
    got = result if isinstance(result, dict) else {"": result}
    for key, value in wanted.items():
        np.testing.assert_allclose(got[key], value, 1e-3, 1e-4, err_msg=f"{name} {key} is wrong")


# ---- tiny -------------------------------------------------------------------------------------------------


def tiny(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return ops/s of tiny ops, by granularity."""
    proto = tiny_graph(n=40 if toy else 1280)
    with cluster_of(2) as client:
        models = {g: ff.from_onnx(proto, granularity=g) for g in ("op", "auto", "model")}
        x = _inputs(models["model"])
        bound = {g: model(x) for g, model in models.items()}
        expected = bound["model"].compute(scheduler="sync")
        runs = {g: partial(_compute, client, model) for g, model in bound.items()}

        def check(name: str, result: Any) -> None:
            _same(expected, name, result)
            _settle(client)

        seconds = measure.in_turn(runs, rounds, check=check, note=note)
    ops = len(proto.graph.node)
    return {
        "ops": ops,
        "granularity": {
            g: {
                "tasks": len(models[g].planned(x).bundles),
                "seconds": measure.Summary.of(times),
                "ops_per_s": measure.Summary.of([ops / s for s in times]),
            }
            for g, times in seconds.items()
        },
    }


def show_tiny(record: dict[str, Any]) -> None:
    rows = [
        (
            g,
            str(r["tasks"]),
            f"{1e3 * r['seconds'].median:.1f}",
            f"{r['ops_per_s'].median:,.0f}",
            _spread(r["ops_per_s"]),
        )
        for g, r in record["granularity"].items()
    ]
    measure.show(
        f"tiny: {record['ops']:,} ops of 256 floats, 2 processes, end to end",
        ("granularity", "tasks", "ms", "ops/s", "spread"),
        rows,
    )


def _spread(summary: measure.Summary) -> str:
    return f"{summary.low:,.0f} to {summary.high:,.0f}"


# ---- dags -------------------------------------------------------------------------------------------------


def dags(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return makespans of the built-in graphs, with their bounds and projections."""
    chosen = TOY_DAGS if toy else SLEEPS + KERNELS
    workers = 2 if toy else DAG_WORKERS
    with (
        dask.config.set({"ferro.bundle.costs": None}),
        cluster_of(workers) as client,
        cluster_of(1, workers, processes=False) as in_threads,
    ):
        protos = {str(d): ff.testing.build(d.name, **d.params) for d in chosen}
        models = {name: ff.from_onnx(proto) for name, proto in protos.items()}
        bound = {name: model(_inputs(model)) for name, model in models.items()}
        runs: dict[str, Callable[[], Any]] = {}
        for d in chosen:
            runs[str(d)] = partial(_compute, client, bound[str(d)])
            if ff.testing.WORKLOADS[d.name].sleeps:
                runs[f"{d}{BY_HAND}"] = partial(_by_hand, client, _dealt(protos[str(d)], workers))
                runs[f"{d}{THREADS}"] = partial(_threads, bound[str(d)], workers)
                tasks = _as_tasks(protos[str(d)])
                runs[f"{d}{FLOWS}"] = partial(_bundled, client, tasks)
                runs[f"{d}{FLOWS_IN_THREADS}"] = partial(_bundled, in_threads, tasks)
        clients = {FLOWS: client, FLOWS_IN_THREADS: in_threads}

        def check(name: str, result: Any) -> None:
            for one in clients.values():
                _settle(one)

        seconds = measure.in_turn(runs, rounds, check=check, note=note)
        return {
            "workers": workers,
            "graphs": [_dag(d, models[str(d)], workers, seconds) for d in chosen],
            "runs_of_tasks": (rounds + 1) * sum(name.endswith(FLOWS) for name in runs),
            "flows": {name.strip(", "): one.run_on_scheduler(flows_so_far) for name, one in clients.items()},
        }


def _threads(collection: Any, workers: int) -> Any:
    return collection.compute(scheduler="threads", num_workers=workers)


def _bundled(client: Client, collection: Any) -> Any:
    with ff.bundle_tasks(client=client):
        return _compute(client, collection)


def _as_tasks(proto: onnx.ModelProto) -> Delayed:
    """Return the outputs of a graph of sleeps, each of which is a task; those of one length have one name."""
    keys: dict[str, Any] = {proto.graph.input[0].name: np.zeros(ff.testing.SLEEP_ITEMS, np.float32)}
    graph: dict[Any, Any] = {}
    for number, node in enumerate(proto.graph.node):
        seconds = next(a.f for a in node.attribute if a.name == "seconds")
        key = keys[node.output[0]] = (f"{proto.graph.name}_{1e3 * seconds:.0f}ms-0", number)
        graph[key] = (_slept, seconds, keys[node.input[0]])
    outputs = f"{proto.graph.name}-outputs"
    graph[outputs] = (list, [keys[output.name] for output in proto.graph.output])
    return Delayed(outputs, graph)


def _slept(seconds: float, x: np.ndarray) -> np.ndarray:
    sleep(seconds)
    return x.copy()


def _dealt(proto: onnx.ModelProto, workers: int) -> list[list[list[float]]]:
    """Return the seconds of each op by worker and chain: each chain goes to the least loaded worker (LPT)."""
    chains: dict[str, list[float]] = {}  # by the value that they end in
    for node in proto.graph.node:
        seconds = next(a.f for a in node.attribute if a.name == "seconds")
        chains[node.output[0]] = [*chains.pop(node.input[0], []), seconds]
    dealt: list[list[list[float]]] = [[] for _ in range(workers)]
    for chain in sorted(chains.values(), key=sum, reverse=True):
        min(dealt, key=lambda mine: sum(map(sum, mine))).append(chain)
    return dealt


def _by_hand(client: Client, dealt: list[list[list[float]]]) -> list[np.ndarray]:
    x = np.zeros(ff.testing.SLEEP_ITEMS, np.float32)
    return client.gather(client.map(_sleep, dealt, x=x, pure=False))


def _sleep(chains: list[list[float]], x: np.ndarray) -> np.ndarray:
    """Sleep through some chains; return their outputs [chain, item] as one array."""
    outputs = np.empty((len(chains), *x.shape), x.dtype)
    for row, chain in zip(outputs, chains, strict=True):
        for seconds in chain:
            sleep(seconds)
            row[:] = x
    return outputs


def _dag(dag: Dag, model: Any, workers: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    bound = None
    if ff.testing.WORKLOADS[dag.name].sleeps:
        bound = ff.testing.lower_bound(dag.name, workers, **dag.params)
    ops, by_hand = sum(model.ops.values()), seconds.get(f"{dag}{BY_HAND}")
    rates = {
        suffix: ops / measure.Summary.of(times).median if (times := seconds.get(f"{dag}{suffix}")) else None
        for suffix in (THREADS, FLOWS, FLOWS_IN_THREADS)
    }
    found, planned = measure.Summary.of(seconds[str(dag)]), model.planned(_inputs(model))
    return {
        "graph": str(dag),
        "ops": ops,
        "tasks": len(planned.bundles),
        "bound": bound,
        "limit": None if bound is None else LIMIT[0] * bound + LIMIT[1],
        "projected": planned.plan.makespan,
        "seconds": found,
        "by_hand": None if by_hand is None else measure.Summary.of(by_hand),
        "ops_per_s": ops / found.median,
        "threads_ops_per_s": rates[THREADS],
        "flows_ops_per_s": rates[FLOWS],
        "flows_in_threads_ops_per_s": rates[FLOWS_IN_THREADS],
    }


def show_dags(record: dict[str, Any]) -> None:
    rows = [
        (
            r["graph"],
            str(r["ops"]),
            str(r["tasks"]),
            _ms(r["bound"]),
            _ms(r["projected"]),
            _ms(r["seconds"].median),
            f"{_ms(r['seconds'].low)} to {_ms(r['seconds'].high)}",
            _ms(r["by_hand"] and r["by_hand"].median),
            _ms(r["limit"]),
            *(
                "-" if r[rate] is None else f"{r[rate]:,.0f}"
                for rate in (
                    "ops_per_s",
                    "threads_ops_per_s",
                    "flows_ops_per_s",
                    "flows_in_threads_ops_per_s",
                )
            ),
        )
        for r in record["graphs"]
    ]
    measure.show(
        f"dags: {record['workers']} worker processes, milliseconds, end to end",
        (
            "",
            "ops",
            "tasks",
            "bound",
            "projected",
            "measured",
            "spread",
            "by hand",
            "limit",
            "ops/s",
            "threads",
            "flows",
            "flows in threads",
        ),
        rows,
        notes=(
            "bound: max(work / workers, critical path); real kernels have none that holds on any machine",
            "by hand: the same sleeps as one task a worker, mapped and gathered; what Dask itself takes",
            f"limit: {LIMIT[0]:g} x the bound and {_ms(LIMIT[1])} ms",
            f"of {record['runs_of_tasks']} runs of single tasks in `ff.bundle_tasks`, "
            f"{record['flows']['flows']} were flows, in threads {record['flows']['flows in threads']}",
        ),
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


# ---- submit -----------------------------------------------------------------------------------------------


def submit(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the seconds from a model to its tasks on the scheduler."""
    sizes = (100,) if toy else (1_000, 10_000, 100_000)
    by_op = (100,) if toy else (1_000, 10_000)
    chunks = 50 if toy else 10_000
    with cluster_of(2) as client:
        cases: dict[str, Callable[[], Any]] = {}
        for n in sizes:
            cases[f"{n:,} nodes, auto"] = partial(_one_model, client, tiny_graph(n=n - 1), "auto")
        for n in by_op:
            cases[f"{n:,} nodes, op"] = partial(_one_model, client, tiny_graph(n=n - 1), "op")
        cases[f"{chunks:,} chunks"] = partial(_many_chunks, client, _double(), chunks)
        _many_chunks(client, _double(), 2)  # warm: imports on the scheduler and the workers
        phases: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for number in range(rounds):
            for name, run in cases.items():
                phases[name].append(run())
                note(f"round {number + 1}: {name} {phases[name][-1]}")
    return {
        "cases": {
            name: {phase: measure.Summary.of([t[phase] for t in times]) for phase in times[0]}
            for name, times in phases.items()
        }
    }


def _double() -> onnx.ModelProto:
    """Return a model of one op with a symbolic batch, so that the cost of a chunk is Dask's."""
    x, y = (helper.make_tensor_value_info(v, TensorProto.FLOAT, ["batch", 8]) for v in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"], name="double")], "double", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _one_model(client: Client, proto: onnx.ModelProto, granularity: str) -> dict[str, float]:
    start = time.perf_counter()
    model = ff.from_onnx(proto, granularity=granularity)
    loaded = time.perf_counter()
    x = _inputs(model)
    bound = model(x)
    planned = time.perf_counter()
    tasks = len(model.planned(x).bundles)
    submitted, done = _submitted(client, bound, tasks)
    return {
        "tasks": tasks,
        "load": loaded - start,
        "plan": planned - loaded,
        "submit": submitted - planned,
        "finish": done - submitted,
    }


def _many_chunks(client: Client, proto: onnx.ModelProto, chunks: int) -> dict[str, float]:
    x = np.random.default_rng(SEED).standard_normal((chunks, 8), dtype=np.float32)
    start = time.perf_counter()
    model = ff.from_onnx(proto)
    loaded = time.perf_counter()
    bound = model(x, batch_size=1)
    planned = time.perf_counter()
    submitted, done = _submitted(client, bound, chunks)
    return {
        "tasks": chunks,
        "load": loaded - start,
        "plan": planned - loaded,
        "submit": submitted - planned,
        "finish": done - submitted,
    }


def _submitted(client: Client, collection: Any, tasks: int) -> tuple[float, float]:
    """Return when the scheduler knew the tasks, and when the result was ready."""
    future = client.compute(collection)
    while client.run_on_scheduler(_knows, key=future.key) is False:
        time.sleep(0.002)
    known = time.perf_counter()
    future.result()
    return known, time.perf_counter()


def _knows(key: Any, dask_scheduler: Any) -> bool:
    """Return whether the scheduler has received the graph that ends in `key`; runs on the scheduler."""
    task = dask_scheduler.tasks.get(key)
    return task is not None and task.state not in ("released", "forgotten")


def show_submit(record: dict[str, Any]) -> None:
    rows = [
        (
            name,
            f"{r['tasks'].median:,.0f}",
            *(f"{r[phase].median:.3f}" for phase in ("load", "plan", "submit", "finish")),
        )
        for name, r in record["cases"].items()
    ]
    measure.show(
        "submit: seconds to load, to plan, until the scheduler has the tasks, until the result is here",
        ("", "tasks", "load", "plan", "submit", "finish"),
        rows,
    )


# ---- all --------------------------------------------------------------------------------------------------


PARTS: Mapping[str, tuple[Callable[[int, bool, Note], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
    "tiny": (tiny, show_tiny),
    "dags": (dags, show_dags),
    "submit": (submit, show_submit),
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("What dask_ferro itself costs.", rounds=5)
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="run only this part")
    options = parser.parse_args(arguments)
    rounds = 1 if options.toy else options.rounds
    note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    record = measure.provenance(seed=SEED, rounds=rounds, toy=options.toy, cores=os.cpu_count())
    record["results"] = {}
    for name in options.only or PARTS:
        run, show = PARTS[name]
        part = run(rounds, options.toy, note)
        show(part)
        record["results"][name] = part
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
