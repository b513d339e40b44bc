"""The worker plugin of flows: it sets up the worker's hub and reports the hub's address to the scheduler."""

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
# The metric with host and port of the hub, the message that ends a run, and the message with another worker's value.
METRIC = "ferro-flow"
VOID = "ferro-flow-void"
_VALUE = "ferro_flow_value"


class FlowWorker(WorkerPlugin):
    """Lets a worker run members of flows.

    Connections between the hubs of a cluster begin with `token`.  `installation` distinguishes a worker's hub from
    the hub of an earlier installation, whose metric the scheduler may still have.
    """

    name = NAME

    def __init__(self, token: bytes, installation: str) -> None:
        self._token, self._installation = token, installation
        self._hub: Hub | None = None

    async def setup(self, worker: Worker) -> None:
        """Listen, and report to the scheduler immediately."""
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
                "dask_ferro: %s runs no members of flows: cannot listen at %s: %s",
                worker.address,
                host,
                error,
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
        """Close the hub; runs end, and their members request to be run again."""
        worker.metrics.pop(METRIC, None)
        worker.handlers.pop(_VALUE, None)
        # A message that is still being sent must not end the connection to the scheduler.
        worker.stream_handlers[VOID] = lambda run: None
        if self._hub is not None:
            self._hub.close()
            self._hub = None


async def _relay(worker: Worker, address: str, message: bytes) -> None:
    """Send a message to another worker over Dask's own connections."""
    pool = worker.rpc
    # The scheduler notices a lost worker immediately, and Dask's own 30 s would hold up the next run.
    comm = await pool.connect(address, timeout=CONNECTS)
    try:
        await send_recv(comm, op=_VALUE, message=message)
    finally:
        pool.reuse(address, comm)
