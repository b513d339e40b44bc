"""Our policies and stock Dask's on a virtual cluster, by one name each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask_ferro.policy.stealing.policies import POLICIES as OWN
from dask_ferro.simulate import engine
from dask_ferro.simulate.cluster import VirtualCluster
from dask_ferro.simulate.graphs.taskgraph import TaskGraph
from dask_ferro.simulate.virtual_scheduler import Scheduler
from dask_ferro.trace import Trace
from simulated.stock import Stock
from simulated.stock_stealing import StockStealing

# Dask's own placement, with and without its stealing.
STOCK: dict[str, Callable[[Scheduler, int], Stock]] = {"stock": StockStealing, "stock-none": Stock}
POLICIES = (*OWN, *STOCK)


def simulate(
    graph: TaskGraph, cluster: VirtualCluster, *, policy: str = "informed", seed: int = 0, **options: Any
) -> Trace:
    """Return the trace of a graph under one of `POLICIES`; the options are those of `engine.simulate`."""
    if policy not in STOCK:
        return engine.simulate(graph, cluster, policy=policy, seed=seed, **options)
    make = STOCK[policy]
    return engine.simulate(
        graph, cluster, decide=lambda scheduler: make(scheduler, seed), seed=seed, **options
    )
