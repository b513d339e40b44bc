"""The worker plugin of flows: it sets up the worker's hub, and tells the scheduler where that listens."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distributed import Worker
from distributed.core import send_recv
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.pickle import dumps

from dask_ferro.flow.channel import CONNECTS
from dask_ferro.flow.hub import Hub

logger = logging.getLogger(__name__)

NAME = "ferro-flow"
# The metric with host and port of the hub, the message that ends a run, and one with a value, from another worker.
METRIC = "ferro-flow"
VOID = "ferro-flow-void"
_VALUE = "ferro_flow_value"


class FlowWorker(WorkerPlugin):
    """Lets a worker take part in flows.

    Parameters
    ----------
    token : bytes
        What connections between the hubs of a cluster begin with.
    installation : str
        Tells a worker's hub from that of an earlier installation, of which the scheduler may still have the metric.
    """

    name = NAME

    def __init__(self, token: bytes, installation: str) -> None:
        self._token, self._installation = token, installation
        self._hub: Hub | None = None

    async def setup(self, worker: Worker) -> None:
        """Listen, and tell the scheduler at once."""
        made = worker.security.get_listen_args, worker.security.get_connection_args
        contexts = [args("worker").get("ssl_context") for args in made]  # type: ignore[no-untyped-call]
        host = "127.0.0.1" if worker.address.startswith("inproc") else worker.ip
        try:
            relay = _Relay(worker)
            hub = self._hub = Hub(worker.address, host, 0, self._token, contexts, dumps, relay)
        except OSError as error:
            logger.warning(
                "dask_ferro: %s takes part in no flow: cannot listen at %s: %s", worker.address, host, error
            )
            return

        def void(run: str) -> None:
            hub.void(run)

        async def take(message: bytes) -> None:
            await asyncio.to_thread(hub.take, message)

        worker.handlers[_VALUE] = take
        worker.stream_handlers[VOID] = void
        worker.metrics[METRIC] = _Where(self._installation, host, hub.port)
        await worker.heartbeat()

    def teardown(self, worker: Worker) -> None:
        """Close the hub; runs end, and their members ask to be run again."""
        worker.metrics.pop(METRIC, None)
        worker.handlers.pop(_VALUE, None)
        # A message that is on its way must not end the connection to the scheduler.
        worker.stream_handlers[VOID] = _ignored
        if self._hub is not None:
            self._hub.close()
            self._hub = None


def _ignored(run: str) -> None:
    """Ignore a run that ends while the plugin is taken off."""


class _Relay:
    """Sends a worker's messages over Dask's own connections, from any thread but that of the event loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, address: str, message: bytes) -> None:
        loop = self._worker.loop.asyncio_loop  # type: ignore[attr-defined]
        asyncio.run_coroutine_threadsafe(self._send(address, message), loop).result()

    async def _send(self, address: str, message: bytes) -> None:
        pool = self._worker.rpc
        # Of a worker that is gone, the scheduler knows at once, and Dask's own 30 s would hold up the next run.
        comm = await pool.connect(address, timeout=CONNECTS)
        try:
            await send_recv(comm, op=_VALUE, message=message)
        finally:
            pool.reuse(address, comm)


class _Where:
    """The metric of a worker: the installation, and where its hub listens."""

    def __init__(self, installation: str, host: str, port: int) -> None:
        self._where = installation, host, port

    def __call__(self, worker: Any) -> tuple[str, str, int]:
        return self._where
