"""The worker plugin of flows: it sets up the worker's hub, and tells the scheduler where that listens."""

from __future__ import annotations

import asyncio
import logging

from distributed import Worker
from distributed.core import send_recv
from distributed.diagnostics.plugin import WorkerPlugin

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

    `token` is what connections between the hubs of a cluster begin with.  `installation` tells a worker's hub from that
    of an earlier installation, of which the scheduler may still have the metric.
    """

    name = NAME

    def __init__(self, token: bytes, installation: str) -> None:
        self._token, self._installation = token, installation
        self._hub: Hub | None = None

    async def setup(self, worker: Worker) -> None:
        """Listen, and report to the scheduler at once."""
        arguments = worker.security.get_listen_args, worker.security.get_connection_args
        contexts = [of("worker").get("ssl_context") for of in arguments]  # type: ignore[no-untyped-call]
        host = "127.0.0.1" if worker.address.startswith("inproc") else worker.ip

        def relay(address: str, message: bytes) -> None:
            # A thread of a member waits, not the event loop.
            loop = worker.loop.asyncio_loop  # type: ignore[attr-defined]
            asyncio.run_coroutine_threadsafe(_relay(worker, address, message), loop).result()

        try:
            hub = self._hub = Hub(worker.address, host, self._token, contexts, relay)
        except OSError as error:
            logger.warning(
                "dask_ferro: %s takes part in no flow: cannot listen at %s: %s", worker.address, host, error
            )
            return

        async def take(message: bytes) -> None:
            await asyncio.to_thread(hub.take, message)

        where = self._installation, host, hub.port
        worker.handlers[_VALUE] = take
        worker.stream_handlers[VOID] = lambda run: hub.void(run)
        worker.metrics[METRIC] = lambda worker: where
        await worker.heartbeat()

    def teardown(self, worker: Worker) -> None:
        """Close the hub; runs end, and their members ask to be run again."""
        worker.metrics.pop(METRIC, None)
        worker.handlers.pop(_VALUE, None)
        # A message that is on its way must not end the connection to the scheduler.
        worker.stream_handlers[VOID] = lambda run: None
        if self._hub is not None:
            self._hub.close()
            self._hub = None


async def _relay(worker: Worker, address: str, message: bytes) -> None:
    """Send a message to another worker over Dask's own connections."""
    pool = worker.rpc
    # The scheduler knows at once of a worker that is gone, and Dask's own 30 s would hold up the next run.
    comm = await pool.connect(address, timeout=CONNECTS)
    try:
        await send_recv(comm, op=_VALUE, message=message)
    finally:
        pool.reuse(address, comm)
