"""The worker plugin: what only a worker can measure, told to the scheduler with each heartbeat.

    worker.metrics["ferro"] -> {"address", "device", "flops", "bandwidth", "beat", "transfers", "received"}
    and, of a worker with a GPU, "gpu": its memory, its model, which results lie there, and what its links take

It measures and judges nothing: what a figure is good for is the cost model's.  A measurement that fails is a
warning and a None, never a worker that does not start.  All state is in the metric, so that one plugin may serve
many workers.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NotRequired, Protocol, TypedDict, cast

from dask.utils import typename
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.policy.estimates import Speed
from dask_ferro.runtime import upstream_worker
from dask_ferro.runtime.upstream_names import WORKER, missing, remedy, warn_once
from dask_ferro.runtime.worker.calibration import GpuMemory, declared, detected, figures, memory

logger = logging.getLogger(__name__)

NAME = "ferro-worker"
METRIC = "ferro"
# The worker plugin that answers in place of measurements, where there is one: a `Measured`.
DEVICE = "ferro-device"
# Classes of link: between processes of a host, and between hosts.
LINKS = ("host", "hosts")

# The newest of one heartbeat: 3 kB of it.
_SAMPLES = 64
# A start waits so long for the measurement, which goes on after that; it takes 0.2 s where nobody else runs.
_PATIENCE = 2.0


class FerroWorker(WorkerPlugin):
    """Measures a worker and its links, and shortens the gathering of its messages.

    Parameters
    ----------
    device : str, optional
        "cpu" or "gpu"; default: `ferro.worker.device` of the worker's configuration, or else what CuPy sees.
    sends : float, optional
        Seconds for which messages to the scheduler are gathered; default: left as they are.

    Raises
    ------
    ConfigError
        For another device.
    """

    name = NAME

    def __init__(self, device: str | None = None, sends: float | None = None) -> None:
        self.device = declared(device)
        self.sends = sends

    @classmethod
    def configured(cls) -> FerroWorker:
        """Return the plugin as the configuration at hand wants it.

        Raises
        ------
        ConfigError
            For a setting that is wrong.
        """
        return cls(sends=config.value("scheduler.worker-sends"))

    async def setup(self, worker: Worker) -> None:
        """Measure, publish, and shorten the interval.  Idempotent; nothing where Dask lacks what that needs."""
        if lacks := missing(WORKER):
            warn_once(remedy(lacks, "nothing is measured on this process's workers"))
            return
        self.teardown(worker)
        try:
            config.check()
        except ConfigError as error:  # the site's to mend: no worker ends for it
            logger.error("dask_ferro on %s: %s", worker.address, error)
        report = Report(self.device, cast("Measured | None", worker.plugins.get(DEVICE)))
        upstream_worker.publish(worker, METRIC, report)
        if self.sends is not None:
            report.stock_sends = upstream_worker.put_sends(worker, self.sends)
        await report.measure()

    def teardown(self, worker: Worker) -> None:
        """Take all of it back."""
        if missing(WORKER):
            return
        report = upstream_worker.unpublish(worker, METRIC)
        if isinstance(report, Report):
            report.close()
            if report.stock_sends is not None:
                upstream_worker.put_sends(worker, report.stock_sends)


class GpuFacts(GpuMemory):
    """What a heartbeat tells of a worker's GPU: its memory, its model, types of results on it, and what copies took."""

    model: str
    types: list[str]
    links: list[tuple[str, int, float]]


class Heartbeat(TypedDict):
    """What a worker tells with each heartbeat.

    `flops` and `bandwidth` are None until they are measured; `transfers` are those since the one before, as (source,
    bytes, seconds); `received` has transfers, bytes and seconds so far, by class of link.
    """

    address: str | None
    device: str
    flops: float | None
    bandwidth: float | None
    beat: int
    transfers: list[tuple[str, int, float]]
    received: dict[str, tuple[int, int, float]]
    gpu: NotRequired[GpuFacts | None]


class Measured(Protocol):
    """A device whose figures are told, not measured: those of a worker's plugin `DEVICE`."""

    device: str
    model: str
    speed: Speed

    def links(self) -> Sequence[tuple[str, int, float]]:
        """Return what copies take, as `calibration.links` does."""

    def memory(self, worker: Worker) -> GpuMemory:
        """Return the memory, as `calibration.memory` does."""


class Report:
    """What one worker publishes: called by Dask at each heartbeat, with the worker."""

    def __init__(self, device: str | None, told: Measured | None = None) -> None:
        self._declared = device
        self._device = device or "cpu"
        self._told = told
        self._speed: Speed | None = None
        self._model = ""
        self._links: Sequence[tuple[str, int, float]] = ()
        self._measuring: asyncio.Task[None] | None = None
        self._beat = 0
        self._last: object = None
        self._received: dict[str, tuple[int, int, float]] = dict.fromkeys(LINKS, (0, 0, 0.0))
        self.stock_sends: float | None = None

    def __call__(self, worker: Worker) -> Heartbeat:
        """Return the figures, with the transfers that finished since the last call."""
        self._beat += 1
        told: Heartbeat = {
            "address": upstream_worker.address_of(worker),
            "device": self._device,
            "flops": self._speed and self._speed.flops,
            "bandwidth": self._speed and self._speed.bandwidth,
            "beat": self._beat,
            "transfers": self._transfers(worker),
            "received": dict(self._received),
        }
        if self._device == "gpu" and self._speed is not None:
            told["gpu"] = self._gpu(worker)
        return told

    def _gpu(self, worker: Worker) -> GpuFacts | None:
        """What is there of the worker's GPU, as of now, and what its links took at the start."""
        found = memory() if self._told is None else self._told.memory(worker)
        if found is None:
            return None
        return {**found, "model": self._model, "types": types_on_device(worker), "links": list(self._links)}

    async def measure(self) -> None:
        """Measure in a thread; return when that is done, or goes on in the background."""
        self._measuring = asyncio.create_task(self._measure())
        await asyncio.wait({self._measuring}, timeout=_PATIENCE)

    def close(self) -> None:
        """Wait for no measurement any more."""
        if self._measuring is not None:
            self._measuring.cancel()

    async def _measure(self) -> None:
        if self._told is not None:
            self._device, self._speed = self._told.device, self._told.speed
            self._model, self._links = self._told.model, self._told.links()
            return
        try:
            if self._declared is None:
                self._device = await asyncio.to_thread(detected)
            found = await asyncio.to_thread(figures, self._device)
            # Together: a heartbeat between two of them would tell of a GPU without links, and be believed.
            self._speed, self._model, self._links = found
        except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises, the worker works
            logger.warning("dask_ferro: the %s was not measured: %r", self._device, error)

    def _transfers(self, worker: Worker) -> list[tuple[str, int, float]]:
        """The newest transfers, oldest first, as (source, bytes, seconds)."""
        log = upstream_worker.transfers(worker)
        new = list(takewhile(lambda entry: entry is not self._last, reversed(log)))
        self._last = log[-1] if log else None
        here = _host(upstream_worker.address_of(worker))
        for entry in new:
            link = LINKS[_host(entry["who"]) != here]
            transfers, nbytes, seconds = self._received[link]
            total = nbytes + int(entry["total"])
            self._received[link] = transfers + 1, total, seconds + entry["stop"] - entry["start"]
        # Dask's own "duration" is never under a millisecond; most of small transfers are.
        return [(e["who"], int(e["total"]), e["stop"] - e["start"]) for e in reversed(new[:_SAMPLES])]


def types_on_device(worker: Worker) -> list[str]:
    """Return the types, as Dask writes them, of the worker's results that lie in the memory of its device.

    By their classes alone, and so whatever was spilled meanwhile; a container of such results is none itself, unless
    its class says that it is (`engines.device.results`).
    """
    return sorted(typename(found) for found in upstream_worker.result_types(worker) if _is_on_device(found))


def _is_on_device(found: type) -> bool:
    marked = getattr(found, "lies_on_device", False) is True or hasattr(found, "__cuda_array_interface__")
    return marked or found.__module__.partition(".")[0] == "cudf"


def _host(address: str | None) -> str:
    """The host in an address; nothing where the address is of a process (inproc), and so the same for all of it."""
    return (address or "").rpartition("://")[2].rpartition(":")[0]


def sent(metrics: Heartbeat | None, hosts: Mapping[str, str]) -> list[tuple[str, tuple[str, int, float]]]:
    """Return a worker's transfers as (sender, (class of link, bytes, seconds)), for `policy.estimates.Links.add`.

    The classes are "host" and "hosts"; how long the way out of a device takes cannot be told from these.

    Parameters
    ----------
    metrics : mapping or None
        What the worker published: ``ws.metrics.get("ferro")``.  It stays the same until the next heartbeat, so
        take each "beat" once.
    hosts : mapping
        Host by address; transfers from or to other workers are left out.
    """
    if not metrics:
        return []
    here = hosts.get(metrics["address"] or "")
    return [
        (source, ("host" if hosts[source] == here else "hosts", nbytes, seconds))
        for source, nbytes, seconds in metrics["transfers"]
        if here is not None and source in hosts and seconds > 0
    ]
