"""The worker plugin: measurements that only a worker can make, sent to the scheduler with each heartbeat.

    worker.metrics["ferro"] -> {"address", "device", "flops", "bandwidth", "beat", "transfers", "received"}
    and, of a worker with a GPU, "gpu": its memory and its model

A GPU is measured at the start; a CPU when the scheduler requests it, because the cluster has devices of other classes.
It only measures; the cost model interprets the figures.  A failed measurement gives a warning and None, and never
keeps a worker from starting.  All state is in the metric, so that one plugin may serve many workers.  Durations are
seconds, sizes bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import takewhile
from typing import NotRequired, Protocol, TypedDict, cast

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from dask_ferro import config
from dask_ferro.errors import InputError
from dask_ferro.policy.estimates import SENDS, Speed
from dask_ferro.scheduler import calibration, upstream_worker
from dask_ferro.scheduler.calibration import GpuMemory

logger = logging.getLogger(__name__)

NAME = "ferro-worker"
METRIC = "ferro"
# The name of a worker plugin that replaces measurements, if there is one: a `DeviceFigures`.
DEVICE = "ferro-device"
# Classes of link: between processes of a host, and between hosts.
LINKS = ("host", "hosts")

# The most transfers in one heartbeat: 3 kB.
_SAMPLES = 64
# The scheduler's message that requests the speed of a worker's CPU.
MEASURE = "ferro-measure"


class FerroWorker(WorkerPlugin):
    """Measures a worker and its links, and shortens the interval at which its messages are sent.

    The device is `ferro.worker.device` in the worker's configuration, or else "gpu" if CuPy finds one.
    """

    name = NAME

    async def setup(self, worker: Worker) -> None:
        """Measure, publish, and shorten the interval.  Idempotent."""
        self.teardown(worker)
        try:
            config.check()
        except InputError as error:  # the site has to correct it, but no worker ends for it
            logger.error("dask_ferro on %s: %s", worker.address, error)
        report = Report(
            cast("DeviceFigures | None", worker.plugins.get(DEVICE)), upstream_worker.put_sends(worker, SENDS)
        )
        worker.metrics[METRIC] = report
        worker.stream_handlers[MEASURE] = report.measure
        report.begin(worker)

    def teardown(self, worker: Worker) -> None:
        """Undo `setup`."""
        report = worker.metrics.pop(METRIC, None)
        if isinstance(report, Report):
            report.close()
            worker.stream_handlers[MEASURE] = lambda: None  # a request may be under way
            upstream_worker.put_sends(worker, report.stock_sends)


class GpuFacts(GpuMemory):
    """A heartbeat's figures of a worker's GPU: memory and model."""

    model: str


class Heartbeat(TypedDict):
    """The figures that a worker sends with each heartbeat.

    `flops` and `bandwidth` are None until they are measured; `transfers` are those since the previous heartbeat, as
    (source, bytes, seconds); `received` has the total transfers, bytes and seconds by class of link.
    """

    address: str | None
    device: str
    flops: float | None
    bandwidth: float | None
    beat: int
    transfers: list[tuple[str, int, float]]
    received: dict[str, tuple[int, int, float]]
    gpu: NotRequired[GpuFacts | None]


class DeviceFigures(Protocol):
    """A device with given instead of measured figures: a worker's plugin `DEVICE`."""

    device: str
    model: str
    speed: Speed

    def memory(self, worker: Worker) -> GpuMemory:
        """Return the memory, as `calibration.memory` does."""


class Report:
    """A worker's metric: called by Dask at each heartbeat, with the worker.

    Parameters
    ----------
    declared : Measured, optional
        In place of measurements.
    stock_sends : float
        Seconds for which Dask batches the worker's messages.
    """

    def __init__(self, declared: DeviceFigures | None, stock_sends: float) -> None:
        self._declared = declared
        self.stock_sends = stock_sends
        self._device = "cpu"
        self._speed: Speed | None = None
        self._model = ""
        self._measuring: asyncio.Task[None] | None = None
        self._beat = 0
        self._last: object = None
        self._received: dict[str, tuple[int, int, float]] = dict.fromkeys(LINKS, (0, 0, 0.0))

    def __call__(self, worker: Worker) -> Heartbeat:
        """Return the figures, with the transfers that finished since the last call."""
        self._beat += 1
        beat: Heartbeat = {
            "address": upstream_worker.address_of(worker),
            "device": self._device,
            "flops": self._speed and self._speed.flops,
            "bandwidth": self._speed and self._speed.bandwidth,
            "beat": self._beat,
            "transfers": self._transfers(worker),
            "received": dict(self._received),
        }
        if self._device == "gpu" and self._speed is not None:
            beat["gpu"] = self._gpu(worker)
        return beat

    def _gpu(self, worker: Worker) -> GpuFacts | None:
        """Return the current figures of the worker's GPU."""
        memory = calibration.memory() if self._declared is None else self._declared.memory(worker)
        return None if memory is None else {**memory, "model": self._model}

    def begin(self, worker: Worker) -> None:
        """Take the declared figures, or find the device in a thread, and measure a GPU."""
        if self._declared is not None:
            self._device, self._speed = self._declared.device, self._declared.speed
            self._model = self._declared.model
        else:
            self._measuring = asyncio.create_task(self._begin())

    def measure(self) -> None:
        """Measure the device in a thread, unless it is measured."""
        self._measuring = asyncio.create_task(self._measure(self._measuring))

    def close(self) -> None:
        """Stop waiting for a measurement."""
        if self._measuring is not None:
            self._measuring.cancel()

    async def _begin(self) -> None:
        try:
            self._device = await asyncio.to_thread(calibration.detect_device)
        except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises, the worker works
            logger.warning("dask_ferro: the device was not detected: %r", error)
        if self._device == "gpu":
            await self._measure()

    async def _measure(self, before: asyncio.Task[None] | None = None) -> None:
        if before is not None:
            await before
        if self._speed is not None:
            return
        try:
            figures = await asyncio.to_thread(calibration.figures, self._device)
            # Set together: a heartbeat in between would report a GPU without a model, and be believed.
            self._speed, self._model = figures
        except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises, the worker works
            logger.warning("dask_ferro: the %s was not measured: %r", self._device, error)

    def _transfers(self, worker: Worker) -> list[tuple[str, int, float]]:
        """Return the newest transfers, oldest first, as (source, bytes, seconds)."""
        log = worker.transfer_incoming_log
        new = list(takewhile(lambda entry: entry is not self._last, reversed(log)))
        self._last = log[-1] if log else None
        here = _host(upstream_worker.address_of(worker))
        for entry in new:
            link = LINKS[_host(entry["who"]) != here]
            transfers, nbytes, seconds = self._received[link]
            total = nbytes + int(entry["total"])
            self._received[link] = transfers + 1, total, seconds + entry["stop"] - entry["start"]
        # Dask's own "duration" is at least a millisecond, longer than most small transfers.
        return [(e["who"], int(e["total"]), e["stop"] - e["start"]) for e in reversed(new[:_SAMPLES])]


def _host(address: str | None) -> str:
    """Return the host in an address; empty for addresses within a process (inproc), where it is always the same."""
    return (address or "").rpartition("://")[2].rpartition(":")[0]


def transfers_of(metrics: Heartbeat, hosts: Mapping[str, str]) -> list[tuple[str, int, float]]:
    """Return a worker's transfers as (class of link, bytes, seconds), for `policy.estimates.Links.add`.

    Parameters
    ----------
    metrics : mapping
        The worker's published metric: ``ws.metrics["ferro"]``.  It is unchanged until the next heartbeat, so use
        each "beat" once.
    hosts : mapping
        Host by address; transfers from or to other workers are skipped.
    """
    here = hosts.get(metrics["address"] or "")
    return [
        (LINKS[hosts[source] != here], nbytes, seconds)
        for source, nbytes, seconds in metrics["transfers"]
        if here is not None and source in hosts and seconds > 0
    ]
