"""`scale(n)` and `adapt(...)` of a cluster, both by the elastic controller.

Dask's own `scale` closes the worker that was added last, with all its data.  Here `scale(n)` is `adapt` with both
bounds at n: workers drain before they close, and jobs that die are replaced.  It is an order: jobs beyond n end
within half a minute; data that no other worker could take by then is lost, and the loss is reported.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from itertools import product
from numbers import Real
from typing import Any

from dask.utils import parse_bytes
from distributed import Status

from dask_ferro.elastic.controller import Elastic
from dask_ferro.elastic.options import check_room, elastic_options
from dask_ferro.elastic.providers import Pools
from dask_ferro.errors import InputError
from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.scheduler import upstream_deploy
from dask_ferro.scheduler.upstream_jobqueue import JobCluster

# Seconds for which a user's call waits for the controller's step, which goes on by itself.
_STEP = 3.0


class ElasticCluster(JobCluster, Pools):  # type: ignore[misc]
    """A dask-jobqueue cluster whose number of workers is kept by `ff.Elastic`."""

    def scale(  # type: ignore[override]
        self,
        n: int | None = None,
        jobs: int = 0,
        memory: str | int | None = None,
        cores: int | None = None,
    ) -> Any:
        """Set the number of workers and keep it; surplus workers drain first, within a time limit.

        Surplus jobs end even if there is no room for their unique data: a warning and an event on topic "ferro"
        report the loss.  Dask recomputes lost results when they are needed.

        Parameters
        ----------
        n : int, optional
            Workers (processes); jobs are whole, so it is rounded up.
        jobs : int, optional
        memory : int or str, optional
            Total bytes.
        cores : int, optional
            Total threads.

        Raises
        ------
        InputError
            If a value is not a number of at least 0.  If the site refuses the jobs permanently; the error has the
            site's message.  If only paused pools could provide the jobs; the order is filled when one is resumed.
        """
        n, jobs, cores = _amount("n", n), _amount("jobs", jobs) or 0, _amount("cores", cores)
        wanted = _amount("memory", memory)
        if self.status in (Status.closing, Status.closed, Status.failed):
            return super().scale(n, jobs, memory, cores)
        pool = self.pools[0]
        count = jobs if n is None else max(jobs, math.ceil(n / pool.processes))
        if wanted is not None:
            count = max(count, math.ceil(wanted / max(pool.memory, 1)))
        if cores is not None:
            count = max(count, math.ceil(cores / pool.threads))
        upstream_deploy.forget_adapting(self)
        workers = count * pool.processes
        super().adapt(Adaptive=Elastic, minimum=workers, maximum=workers, strict_maximum=True)
        return self._settled()

    # An older name in Dask.
    scale_up = scale  # type: ignore[assignment]

    async def scale_down(self, workers: Iterable[str]) -> None:
        """End the jobs of some workers as `scale` does, and lower the number set by `scale` accordingly.

        Parameters
        ----------
        workers : iterable of str
            Addresses or names; a job ends as a whole.
        """
        wanted = set(map(str, workers))
        infos = upstream_deploy.workers_of(self)
        wanted |= {str(worker["name"]) for address, worker in infos.items() if address in wanted}
        going = [job for job in await self.reconcile() if not wanted.isdisjoint(job.workers)]
        controller = upstream_deploy.controller_of(self)
        if isinstance(controller, Elastic):
            await controller.end(going)
        else:
            await self.release([job.name for job in going])

    def _worker_shape(self) -> tuple[int, int]:
        """Return the threads and the bytes of one worker; Dask would return those of a job, from keywords only."""
        pool = self.pools[0]
        return int(pool.threads) // int(pool.processes), int(pool.memory) // int(pool.processes)

    def adapt(self, *args: Any, **kwargs: Any) -> Any:
        """Let the number of workers follow the work, by `ff.Elastic` unless another class is given.

        It takes the parameters of dask-jobqueue's `adapt` and of `ff.Elastic`.

        Raises
        ------
        InputError
            If the site refuses the first jobs permanently; the error has the site's message.
        """
        if not args and issubclass(kwargs.setdefault("Adaptive", Elastic), Elastic):
            # Before the present controller is replaced.
            _check(kwargs, self.pools)
        upstream_deploy.forget_adapting(self)
        adaptive = super().adapt(*args, **kwargs)
        if isinstance(adaptive, Elastic) and not (self.asynchronous or self.called_from_running_loop):
            self._settled()
        return adaptive

    def _settled(self) -> Any:
        """Wait for the first step; on an event loop, return an awaitable for it."""
        return self._awaited(self._settle, upstream_deploy.controller_of(self))

    def _awaited(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> Any:
        """Wait for a coroutine; on an event loop, start it and return an awaitable."""
        if self.asynchronous or self.called_from_running_loop:
            return asyncio.ensure_future(function(*args))
        return self.sync(function, *args)

    async def _settle(self, adaptive: Elastic) -> None:
        try:
            await adaptive.settle()
        except InputError:
            # The order is kept and is filled when a pool is resumed.
            paused = any(pool.is_paused for pool in self.pools)
            # Existing jobs need a controller that follows them.
            if not paused and not await self.reconcile():
                adaptive.stop(reason="the first step failed")
            raise

    def _adapting(self) -> Elastic | None:
        """Return the active elastic controller, if there is one."""
        adaptive = upstream_deploy.controller_of(self)
        if isinstance(adaptive, Elastic) and adaptive.state in ("starting", "running"):
            return adaptive
        return None

    async def _look_now(self) -> None:
        """Let the controller take a step now, and wait for it for a moment."""
        if (adaptive := self._adapting()) is not None:
            await asyncio.wait({adaptive.look()}, timeout=_STEP)


def _amount(name: str, value: Any) -> int | None:
    """Return a number of workers, jobs, cores or bytes, rounded up; None is returned as it is.

    Raises
    ------
    InputError
        For a value that is neither a number of at least 0 nor, for memory, a size.
    """
    if value is None:
        return None
    amount: Any = None if isinstance(value, bool) else value
    if name == "memory":
        with suppress(ValueError, TypeError, AttributeError, OverflowError):
            amount = parse_bytes(amount)
    is_number = isinstance(amount, Real)
    if not is_number or not 0 <= amount < math.inf:
        wanted = "a size such as 64GiB" if name == "memory" else "a number of at least 0"
        raise InputError(f"cluster.scale: got {name}={value!r}, wanted {wanted}")
    return math.ceil(amount)


def _check(options: dict[str, Any], kinds: Iterable[Pool]) -> None:
    """Refuse invalid options early.  Bounds in cores, memory or jobs are read by dask-jobqueue."""
    by_others = set(map("_".join, product(("minimum", "maximum"), ("jobs", "cores", "memory"))))
    own = {"Adaptive", "strict_maximum", *by_others}
    check_room(elastic_options({name: value for name, value in options.items() if name not in own}), kinds)
