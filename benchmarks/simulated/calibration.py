"""The costs of a machine's worker processes, from two measured runs in which stock Dask has nothing to decide.

Tasks that do nothing show how fast the machine is: `pace` is a factor for all CPU costs of `VirtualCluster`, which were
measured elsewhere.  Tasks that sleep show how late a thread wakes if more tasks run than there are cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from dask_ferro.simulate.cluster import VirtualCluster
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from simulated.contenders import simulate

EACH, SLEEP = 50, 0.02  # tasks for each worker, and their seconds
_NO_OPS = 1_000
_CPU_COSTS = (
    "per_result", "per_send", "per_step", "per_report", "per_submitted", "per_batch", "per_batch_read", "per_fetch",
    "per_notice", "before", "after",
)  # fmt: skip
_PACES, _LATES = (0.1, 10.0), (0.0, 0.05)
# Halvings of an interval: to a thousandth of it.
_HALVINGS = 10


class Calibration(NamedTuple):
    """A factor for all CPU costs, and the seconds by which threads wake late."""

    pace: float
    late: float

    def of(self, cluster: VirtualCluster) -> VirtualCluster:
        """Return a cluster with these costs."""
        costs = {name: self.pace * getattr(cluster, name) for name in _CPU_COSTS}
        return replace(cluster, late=self.late, **costs)


def independent(name: str, count: int, seconds: float) -> TaskGraph:
    """Return tasks without inputs."""
    return TaskGraph(
        name, tuple(TaskSpec((f"{name}-0", i), name, f"{name}-0", seconds) for i in range(count))
    )


def probes(workers: int) -> dict[str, TaskGraph]:
    """Return the graphs to measure, by name."""
    return {
        "pace": independent("no-op", _NO_OPS, 0.0),
        "late": independent("floor", EACH * workers, SLEEP),
    }


def calibrate(cluster: VirtualCluster, measured: dict[str, float]) -> Calibration:
    """Return the calibration with which the simulated probes take as long as the `measured` ones."""
    graphs = probes(len(cluster.workers))

    def seconds(probe: str, calibration: Calibration) -> float:
        trace = simulate(
            graphs[probe], calibration.of(cluster), policy="stock", known={"no-op": 0.0, "floor": SLEEP}
        )
        return trace.counts["elapsed"]

    pace, late = 1.0, cluster.late
    for _ in range(2):  # each changes the other a little
        pace = _root(lambda x: seconds("pace", Calibration(x, late)) - measured["pace"], *_PACES)  # noqa: B023
        late = _root(lambda x: seconds("late", Calibration(pace, x)) - measured["late"], *_LATES)  # noqa: B023
    return Calibration(pace, late)


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Return where a growing function is zero, or the nearest end."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return (low + high) / 2
