"""Clusters in this process for tests; their schedulers and workers validate their state.

    @on_cluster(workers=3, installed=True)
    async def test_it(client, scheduler, monkeypatch): ...

An asynchronous test takes objects of its cluster by name (`client`, `cluster`, `scheduler`, `workers`) and, as every
test, pytest's fixtures and parameters.  A parameter with the name of an option of the cluster, such as `installed`, is
passed to it.  `plays` makes such a decorator from any asynchronous context manager that yields objects by name.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import dask
from distributed import Client, LocalCluster, Scheduler, Worker, get_task_stream
from distributed.diagnostics.task_stream import TaskStreamPlugin

import dask_ferro as ff
from dask_ferro.elastic.scheduler_rpc import ScalingRPC
from dask_ferro.scheduler.plugin import put_on
from dask_ferro.scheduler.settings import Settings
from tests.waiting import BOUND_S, WHOLE_S

CHECKED = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}
# For tests in which the plugin holds tasks back: the scheduler's validation fails if a slot is free while tasks queue.
UNCHECKED = {"distributed.scheduler.validate": False}

Scene = Callable[..., AbstractAsyncContextManager[Mapping[str, Any]]]
AsyncTest = Callable[..., Awaitable[None]]


@contextmanager
def tuned(placing: Mapping[str, Any] | None = None, **others: Any) -> Iterator[None]:
    """Let plugins that are installed in the block have other parameters than the constants.

    Parameters
    ----------
    placing : mapping, optional
        Parameters of placement, by name.
    others
        `coalesce` and `tick`, and parameters of stealing.
    """
    plain = Settings.configured

    def configured(**options: Any) -> Settings:
        found = plain(**options)
        own = {name: value for name, value in others.items() if name in ("coalesce", "tick")}
        stealing = {name: value for name, value in others.items() if name not in own}
        return replace(
            found,
            parameters=replace(found.parameters, **stealing),
            placing=replace(found.placing, **(placing or {})),
            **own,
        )

    with mock.patch.object(Settings, "configured", configured):
        yield


def plays(scene: Scene, *gives: str) -> Callable[..., Callable[[AsyncTest], Callable[..., None]]]:
    """Return a decorator with the options of `scene`, for asynchronous tests that take its objects by name."""
    taken = inspect.signature(scene).parameters

    def with_options(*arguments: Any, **options: Any) -> Callable[[AsyncTest], Callable[..., None]]:
        def as_test(test: AsyncTest) -> Callable[..., None]:
            names = inspect.signature(test).parameters

            @functools.wraps(test)
            def run(**asked: Any) -> None:
                handed = {name: value for name, value in asked.items() if name in taken}

                async def play() -> None:
                    async with asyncio.timeout(WHOLE_S), scene(*arguments, **options, **handed) as given:
                        await test(**{name: given[name] for name in gives if name in names}, **asked)

                asyncio.run(play())

            ours = [parameter for name, parameter in names.items() if name not in gives]
            run.__signature__ = inspect.Signature(ours)  # type: ignore[attr-defined]
            return run

        return as_test

    return with_options


@asynccontextmanager
async def opened(
    workers: int | Mapping[str, Mapping[str, Any]] = 2,
    *,
    threads: int = 1,
    roster: bool = False,
    installed: bool | Mapping[str, Any] = False,
    parameters: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    kind: type[LocalCluster] = LocalCluster,
    **options: Any,
) -> AsyncIterator[dict[str, Any]]:
    """Open a cluster and a client of it.

    Parameters
    ----------
    workers : int or mapping
        Their number; or the options of each by its name.
    roster : bool
        Whether the scheduler has the handlers for an elastic controller.
    installed : bool or mapping
        Whether dask_ferro's scheduler plugin is installed; or its options.
    parameters : mapping, optional
        Parameters of the plugin by name, as `tuned` takes them.
    config : mapping, optional
        Dask's configuration, in addition to the validation.
    options
        Options of `LocalCluster`.
    """
    by_name = {} if isinstance(workers, int) else workers
    settings: dict[str, Any] = {
        "processes": False,
        "dashboard_address": ":0",
        "asynchronous": True,
        **options,
    }
    if isinstance(workers, int):
        settings |= {"n_workers": workers, "threads_per_worker": threads}
    else:
        settings |= {"n_workers": 0}
    async with AsyncExitStack() as stack:
        stack.enter_context(dask.config.set({**CHECKED, **(config or {})}))
        stack.enter_context(tuned(**(parameters or {})))
        cluster = await stack.enter_async_context(kind(**settings))
        client = await stack.enter_async_context(Client(cluster, asynchronous=True))
        if roster:
            await client.run_on_scheduler(put_on, part=ScalingRPC())
        if installed is not False:
            await ff.install(client, **({} if installed is True else installed))
        there = list(cluster.workers.values())
        address = cluster.scheduler.address
        for name, own in by_name.items():
            there.append(await Worker(address, name=name, nthreads=threads, **own))
        stack.push_async_callback(_close, there if by_name else [])
        yield {"client": client, "cluster": cluster, "scheduler": cluster.scheduler, "workers": there}


async def _close(workers: list[Worker]) -> None:
    await asyncio.gather(*(worker.close() for worker in workers))


on_cluster = plays(opened, "client", "cluster", "scheduler", "workers")


@contextmanager
def running(
    workers: int = 1, *, threads: int = 1, kind: type[LocalCluster] = LocalCluster, **options: Any
) -> Iterator[Client]:
    """Open a cluster for a synchronous test, and yield its client; `client.cluster` is the cluster.

    Its workers are processes, unless `processes=False`.
    """
    with (
        kind(
            **{"n_workers": workers, "threads_per_worker": threads, "dashboard_address": ":0"} | options
        ) as cluster,
        Client(cluster, timeout=BOUND_S) as client,
    ):
        yield client


def tasks_of(client: Client, run: Callable[[], object]) -> int:
    """Run a function, and return the number of tasks that workers ran for it."""
    with get_task_stream(client):  # it adds the plugin, and in older releases selects by the workers' clocks
        before = client.run_on_scheduler(_ended)
        run()
        return client.run_on_scheduler(_ended) - before


def _ended(dask_scheduler: Scheduler) -> int:
    """Return the number of tasks that have ended since the task stream began; runs on the scheduler."""
    return dask_scheduler.plugins[TaskStreamPlugin.name].index


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Suspend a process during the block: it does not answer, but its connections stay open."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
