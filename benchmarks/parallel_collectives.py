"""Bandwidth of collectives: an all-reduce in each form, and a plain transfer of the same bytes.

    python benchmarks/parallel_collectives.py                    # 2 and 4 local workers; some minutes
    python benchmarks/parallel_collectives.py --toy              # seconds; numbers mean nothing

The terms are on the workers before the clock starts.  In `transfer` each worker reads the term of the next one, which
moves the bytes of one Dask dependency.  `star` and `exchange` are forms of `lower/ranks/exchange.py`.  The rate is the
bytes that a worker receives, over the seconds from the client's call until every worker has its result; both forms
also sum the terms, the transfer does not.  Contenders take turns; medians with their lowest and highest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import measure
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, LocalCluster

from dask_ferro.graph.sharding.segments import Bucket
from dask_ferro.lower.ranks.exchange import FORMS, ExchangeTask, Form, Name, form
from dask_ferro.lower.ranks.spmd_tasks import identity

RESULTS = Path(__file__).parent / "results" / "parallel_collectives.json"
MIB = 2**20
_runs = count()


def ones(size: int, rank: int) -> tuple[np.ndarray]:
    """Return the term of a rank."""
    return (np.full(size, float(rank + 1), np.float32),)


def last(value: tuple[np.ndarray]) -> float:
    """Return the last element, so that nothing else is sent to the client."""
    return float(value[0].reshape(-1)[-1])


class Terms:
    """One term on each worker."""

    def __init__(self, client: Client, ranks: int, nbytes: int) -> None:
        self.client, self.nbytes = client, nbytes
        self.homes = sorted(client.scheduler_info(n_workers=-1)["workers"])[:ranks]
        self.futures: list[Future] = [
            client.submit(ones, nbytes // 4, rank, workers=[home], pure=False)
            for rank, home in enumerate(self.homes)
        ]
        client.gather(client.map(last, self.futures))

    def run(self, steps: Sequence[ExchangeTask], results: Sequence[Any]) -> list[float]:
        """Return the last element of each rank's result, computed on its worker."""
        tasks = {
            step.key: Task(step.key, step.call, *step.constants, *map(TaskRef, step.reads)) for step in steps
        }
        homes = {step.key: [self.homes[step.rank]] for step in steps}
        token = f"{next(_runs)}"
        for rank, key in enumerate(results):
            tasks[f"last-{token}", rank] = Task((f"last-{token}", rank), last, TaskRef(key))
            homes[f"last-{token}", rank] = [self.homes[rank]]
        layer = MaterializedLayer(tasks, annotations={"workers": homes.__getitem__})
        held = {future.key: future for future in self.futures}
        layers = {"terms": MaterializedLayer(held), "it": layer}
        graph = HighLevelGraph(layers, {"terms": set(), "it": {"terms"}})
        return self.client.get(graph, [(f"last-{token}", rank) for rank in range(len(results))])

    def transfer(self) -> list[float]:
        """Make every worker read the term of the next one."""
        keys = [future.key for future in self.futures]
        ends = [(f"moved-{next(_runs)}", rank) for rank in range(len(keys))]
        steps = [
            ExchangeTask(end, rank, identity, (), (keys[(rank + 1) % len(keys)],))
            for rank, end in enumerate(ends)
        ]
        return self.run(steps, ends)

    def all_reduce(self, chosen: Form) -> list[float]:
        """Give every worker the sum of all terms."""
        name = Name("allreduce", str(next(_runs)), 0)
        steps, results = FORMS[chosen](name, self.bucket, [future.key for future in self.futures])
        return self.run(steps, results)

    @property
    def bucket(self) -> Bucket:
        """Return the all-reduce of the terms."""
        ranks = tuple(range(len(self.futures)))
        nothing = ((),) * len(ranks)
        return Bucket("AllReduce", ranks, ({"reduction": "sum"},), nothing, nothing, self.nbytes)


def received(name: str, ranks: int, nbytes: int) -> float:
    """Return the bytes that each worker receives."""
    return {"transfer": 1.0, "star": ranks - 1.0, "exchange": 2 * (ranks - 1) / ranks}[name] * nbytes


def case(client: Client, ranks: int, nbytes: int, rounds: int) -> dict[str, Any]:
    """Measure one size on a number of workers: seconds and rates by contender."""
    terms = Terms(client, ranks, nbytes)
    contenders: dict[str, Callable[[], Any]] = {
        "transfer": terms.transfer,
        "star": lambda: terms.all_reduce("star"),
        "exchange": lambda: terms.all_reduce("exchange"),
    }

    def check(name: str, result: list[float]) -> None:
        wanted = ranks * (ranks + 1) / 2
        if name != "transfer" and result != [wanted] * ranks:
            raise SystemExit(f"{name} on {ranks} workers: got {result}, wanted {wanted} on each")

    seconds = measure.in_turn(contenders, rounds, check=check)
    rates = {n: [received(n, ranks, nbytes) / s for s in times] for n, times in seconds.items()}
    return {
        "ranks": ranks,
        "bytes": nbytes,
        "chosen": form(terms.bucket),
        "seconds": {n: measure.Summary.of(times) for n, times in seconds.items()},
        "rate": {n: measure.Summary.of(values) for n, values in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 4, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--toy", action="store_true", help="two workers, small terms, one round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.workers, arguments.mib, arguments.rounds = [2], [0.01], 1
    cases = []
    for ranks in arguments.workers:
        cluster = LocalCluster(n_workers=ranks, threads_per_worker=1, dashboard_address=":0")
        with cluster, Client(cluster) as client:
            cases += [case(client, ranks, int(mib * MIB) // 4 * 4, arguments.rounds) for mib in arguments.mib]
    settings = {"workers": arguments.workers, "mib": arguments.mib, "rounds": arguments.rounds}
    measure.write(arguments.out, measure.provenance(**settings) | {"cases": cases})
    rows = [
        (
            f"{one['ranks']} x {one['bytes'] / MIB:g} MiB",
            *(
                f"{1e3 * one['seconds'][n].median:.0f} ms, {one['rate'][n].median / 1e6:,.0f}"
                + (" *" if n == one["chosen"] else "")
                for n in ("transfer", "star", "exchange")
            ),
        )
        for one in cases
    ]
    measure.show(
        "all-reduce: seconds, and MB/s that each worker receives",
        ("workers x term", "transfer", "star", "exchange"),
        rows,
        notes=("* the form that is chosen for this size",),
    )


if __name__ == "__main__":
    main()
