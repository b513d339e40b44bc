"""The cost of copies ahead of a preemption when nothing is preempted: the second half of `preemption.py`.

Two workers of one thread run each workload in pairs: once as two preemptible jobs ("on"), once as safe ones ("off").
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import measure
import numpy as np
from distributed import Client, wait

import dask_ferro as ff
from dask_ferro.elastic.scheduler_rpc import ScalingRPC
from dask_ferro.scheduler.plugin import part_of, put_on

# Of a tile of 1 MB.
SIDE = 360
Note = Callable[[str], None]


def spin(number: int, seconds: float, nbytes: int = 1000) -> bytes:
    """Compute for a number of CPU seconds of this thread, and return some bytes."""
    end, total = time.thread_time() + seconds, 0
    while time.thread_time() < end:
        total += sum(range(500))
    return bytes(nbytes)


def nothing(number: int) -> int:
    return number


def tile(number: int, side: int) -> np.ndarray:
    return np.full((side, side), float(number))


def add_product(total: np.ndarray | None, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a @ b if total is None else total + a @ b


def small(client: Client, scale: float) -> None:
    wait(client.map(spin, range(round(400 * scale)), seconds=0.02, pure=False))


def large(client: Client, scale: float) -> None:
    held = client.map(spin, range(round(60 * scale)), seconds=0.1, nbytes=2_000_000, pure=False)
    wait(held)
    wait(client.map(spin, range(round(40 * scale)), seconds=0.1, pure=False))


def shuffle(client: Client, scale: float) -> None:
    count, tag = max(round(8 * scale), 2), f"{random.getrandbits(32):x}"
    graph: dict[Any, Any] = {}
    for name in "ab":
        graph |= {(f"{name}-{tag}", i, j): (tile, i + j, SIDE) for i in range(count) for j in range(count)}
    for i in range(count):
        for j in range(count):
            before: Any = None
            for k in range(count):
                key = (f"c{k}-{tag}", i, j)
                graph[key] = (add_product, before, (f"a-{tag}", i, k), (f"b-{tag}", k, j))
                before = key
    wait(
        client.get(
            graph, [(f"c{count - 1}-{tag}", i, j) for i in range(count) for j in range(count)], sync=False
        )
    )


def no_op(client: Client, scale: float) -> None:
    wait(client.map(nothing, range(round(6000 * scale)), pure=False))


WORKLOADS: Mapping[str, Callable[[Client, float], None]] = {
    "small": small,
    "large": large,
    "shuffle": shuffle,
    "no-op": no_op,
}


class Local(NamedTuple):
    """Two workers whose jobs can be declared preemptible."""

    client: Client
    scheduler: Any
    idle: float = 0.0
    """CPU seconds that all processes take in a second of doing nothing."""

    def copies(self) -> Mapping[str, int]:
        """Return the "results" and "bytes" that were copied so far."""
        roster = part_of(self.scheduler, ScalingRPC)
        assert roster is not None
        return roster.copies.totals

    def cpu(self) -> float:
        """Return the CPU seconds of the scheduler (with its client) and of the workers so far."""
        return time.process_time() + sum(self.client.run(time.process_time).values())

    def expose(self, on: bool) -> None:
        """Declare both workers preemptible jobs, one each, or safe."""
        names = [str(ws.name) for ws in self.scheduler.workers.values()] if on else []
        self.client.sync(self.client.scheduler.ferro_roster, exposed={name: f"job-{name}" for name in names})

    def once(self, work: Callable[[Client, float], None], on: bool, scale: float) -> dict[str, float]:
        """Run a workload once; return its figures."""
        self.expose(on)
        before, cpu, began = dict(self.copies()), self.cpu(), time.monotonic()
        work(self.client, scale)
        seconds = time.monotonic() - began
        cpu = self.cpu() - cpu
        copied = {name: self.copies()[name] - before.get(name, 0) for name in ("results", "bytes")}
        while self.scheduler.tasks:  # what was held is forgotten
            time.sleep(0.02)
        return {"seconds": seconds, "cpu": cpu - self.idle * seconds} | copied

    def rested(self, seconds: float) -> Local:
        """Do nothing for a while, and return these workers with what that took."""
        cpu, began = self.cpu(), time.monotonic()
        time.sleep(seconds)
        return self._replace(idle=(self.cpu() - cpu) / (time.monotonic() - began))


@contextmanager
def local(processes: bool) -> Iterator[Local]:
    """Open two workers of one thread."""
    with (
        ff.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=processes, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        client.run_on_scheduler(put_on, part=ScalingRPC())
        yield Local(client, cluster.scheduler)


def overhead(names: Sequence[str], rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the cost of copies for each workload, by pairs of consecutive runs in alternating order."""
    found: dict[str, Any] = {}
    scale = 0.02 if toy else 1.0
    with local(processes=not toy) as two:
        on = two.rested(0.1 if toy else 5.0)
        for name in names:
            pairs = []
            on.once(WORKLOADS[name], False, scale / 4)  # imports and connections
            for number in range(rounds):
                order = (False, True) if number % 2 == 0 else (True, False)
                ran = {is_on: on.once(WORKLOADS[name], is_on, scale) for is_on in order}
                pairs.append((ran[False], ran[True]))
                note(f"{name} round {number + 1}: off {_line(ran[False])}, on {_line(ran[True])}")
            found[name] = _compared(pairs)
    rows = [
        (
            name,
            f"{told['off'].median:.2f}",
            *(f"{100 * (told[which].median - 1):+.1f}" for which in ("seconds", "cpu")),
            f"{100 * (told['seconds'].low - 1):+.1f} to {100 * (told['seconds'].high - 1):+.1f}",
            f"{told['results'].median:.0f}",
            f"{told['bytes'].median / 1e6:.1f}",
            f"{told['seconds'].repeats}",
        )
        for name, told in found.items()
    ]
    columns = ("", "s without", "s, %", "CPU, %", "spread of s", "copies", "MB", "pairs")
    measure.show("copies on over off, nothing is preempted", columns, rows)
    return found


def _line(run: Mapping[str, float]) -> str:
    return f"{run['seconds']:.2f} s, CPU {run['cpu']:.2f} s, {run['results']} copies, {run['bytes'] / 1e6:.1f} MB"


def _compared(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, Any]:
    ratios = {which: [on[which] / max(off[which], 1e-6) for off, on in pairs] for which in ("seconds", "cpu")}
    return {
        **{which: measure.Summary.of(each) for which, each in ratios.items()},
        **{f"{which}_ratios": each for which, each in ratios.items()},
        "off": measure.Summary.of([off["seconds"] for off, _ in pairs]),
        **{which: measure.Summary.of([on[which] for _, on in pairs]) for which in ("results", "bytes")},
    }
