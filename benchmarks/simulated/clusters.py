"""Virtual clusters of several hosts, with GPUs and without."""

from __future__ import annotations

from typing import Any

from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker


def hosts(count: int, per_host: int, threads: int = 1) -> VirtualCluster:
    """Return a cluster of many hosts with a few workers each."""
    workers: list[VirtualWorker] = []
    for host in (f"h{number:04d}" for number in range(count)):
        workers += [VirtualWorker(f"{host}-w{i:02d}", threads, host) for i in range(per_host)]
    return VirtualCluster(tuple(workers))


def gpus(
    count: int,
    per_host: int,
    *,
    faster: float = 20.0,
    memory: int | None = None,
    cores: int = 0,
    **options: Any,
) -> VirtualCluster:
    """Return hosts of several GPUs each, with one process per GPU, and CPU workers beside them.

    Parameters
    ----------
    faster : float
        Speed of a GPU relative to a CPU worker.
    memory : int, optional
        Bytes of each GPU.
    cores : int
        CPU workers per host, with one thread each.
    **options
        Other attributes of the cluster.
    """
    workers: list[VirtualWorker] = []
    for host in (f"h{number:04d}" for number in range(count)):
        each = (f"{host}-g{i:02d}" for i in range(per_host))
        workers += [VirtualWorker(name, 1, host, "gpu", faster, memory) for name in each]
        workers += [VirtualWorker(f"{host}-w{i:02d}", 1, host) for i in range(cores)]
    return VirtualCluster(tuple(workers), **options)
