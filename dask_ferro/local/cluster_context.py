"""A cluster for one command: connected to, or started and closed again, even if Ctrl-C ends the command."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from dask.system import CPU_COUNT
from distributed import Client

from dask_ferro.elastic.report import closed_text
from dask_ferro.errors import InputError, missing_extra
from dask_ferro.local.local_cluster import LocalCluster
from dask_ferro.local.sigint import defer_sigint
from dask_ferro.observe.top import address_source
from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.scheduler.events import TOPIC

# Seconds to connect to an existing cluster, and for its first worker to join.
_CONNECT_S = 10
_WORKERS_S = 30


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """Connect to a cluster that has a worker, or gets one soon; leave it running.

    Raises
    ------
    InputError
        If no scheduler answers at the address, or it has no workers.
    """
    # An invalid address is reported at once: Dask's client would wait when it is closed.
    address_source(address)
    # Not the default: a client that fails to connect would remain the process's default client.
    try:
        client = Client(address, timeout=f"{_CONNECT_S}s", set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise InputError(f"scheduler {address!r}: cannot connect: {error}") from error
    with client, client.as_current():
        try:
            client.wait_for_workers(1, timeout=_WORKERS_S)
        except TimeoutError:
            why = closed_pools(client.get_events(TOPIC)) or "start one"
            raise InputError(f"scheduler {address!r}: no worker within {_WORKERS_S} s; {why}") from None
        yield client


def closed_pools(events: Iterable[tuple[float, object]]) -> str:
    """Return the description of closed pools in an elastic controller's latest event; empty: none is closed."""
    said = [event for _, event in events if isinstance(event, Mapping) and event.get("action") == "scale"]
    newest = (said[-1].get("closed") or {}) if said else {}
    return closed_text(
        Pool(name, closed=t["why"], closed_until=t["until"], output=t["output"], is_paused=t["paused"])
        for name, t in newest.items()
    )


@contextmanager
def start_cluster(
    workers: int | None = None, threads: int | None = None, *, dashboard: bool = False, quiet: bool = True
) -> Iterator[Client]:
    """Start worker processes on this machine, and stop them at the end.

    Parameters
    ----------
    workers : int, optional
        Number of processes; default: one for each core, divided by `threads`.
    threads : int, optional
        Threads of each process; default: 1.
    dashboard : bool
        Whether to serve Dask's dashboard.
    quiet : bool
        Whether to suppress the workers' own logs of failed tasks; errors are raised in any case.

    Raises
    ------
    InputError
        For a dashboard without bokeh.
    """
    if dashboard and find_spec("bokeh") is None:
        raise missing_extra("the dashboard", "bokeh", "dashboard")
    with ExitStack() as stack:
        with defer_sigint():
            cluster = stack.enter_context(
                LocalCluster(
                    n_workers=workers or max(1, CPU_COUNT // (threads or 1)),
                    threads_per_worker=threads or 1,
                    dashboard_address=":8787" if dashboard else ":0",
                    # Dask serves metrics in any case: at any port.
                    scheduler_kwargs={"dashboard": dashboard},
                    silence_logs=logging.CRITICAL if quiet else logging.WARNING,
                )
            )
        yield stack.enter_context(Client(cluster))
