"""`scale(n)` and `adapt(...)` of a cluster by the elastic controller: one way to grow and shrink, not two.

Dask's own `scale` closes whichever worker was added last, with all that it holds.  Here `scale(n)` is `adapt` with
both bounds at n: workers drain before they go, and jobs that die are replaced.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from dask.utils import parse_bytes
from distributed import Status

from dask_ferro.errors import ConfigError
from dask_ferro.runtime import seams
from dask_ferro.runtime.elastic import Elastic
from dask_ferro.runtime.scale_options import scale_parameters


class Scaling:
    """Mixed into a cluster of dask-jobqueue, before it."""

    def scale(
        self: Any,
        n: int | None = None,
        jobs: int = 0,
        memory: str | int | None = None,
        cores: int | None = None,
    ) -> Any:
        """Have so many workers, and keep them; those that go drain first.

        Parameters
        ----------
        n : int, optional
            Workers (processes); jobs are whole, so it is rounded up.
        jobs : int, optional
        memory : int or str, optional
            Bytes, of all of them.
        cores : int, optional
            Threads, of all of them.

        Raises
        ------
        ConfigError
            When the site refuses the jobs for good, in its own words.
        """
        if self.status in (Status.closing, Status.closed, Status.failed):
            return super().scale(n, jobs, memory, cores)  # type: ignore[misc]
        processes = self.pools()[0].processes
        count = jobs if n is None else max(jobs, math.ceil(n / processes))
        if memory is not None:
            count = max(count, math.ceil(parse_bytes(memory) / self._memory_per_worker()))
        if cores is not None:
            count = max(count, math.ceil(cores / self._threads_per_worker()))
        seams.forget_adapting(self)
        workers = count * processes
        super().adapt(Adaptive=Elastic, minimum=workers, maximum=workers)  # type: ignore[misc]
        return self._settled()

    def adapt(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the number of workers follow the work, by `ff.Elastic` where no other class is given.

        Parameters are those of dask-jobqueue's `adapt` and of `ff.Elastic`.

        Raises
        ------
        ConfigError
            When the site refuses the first jobs for good, in its own words.
        """
        if not args and issubclass(kwargs.setdefault("Adaptive", Elastic), Elastic):
            _check(kwargs)  # before the controller that there is gives way
        seams.forget_adapting(self)
        adaptive = super().adapt(*args, **kwargs)  # type: ignore[misc]
        if isinstance(adaptive, Elastic) and not (self.asynchronous or self.called_from_running_loop):
            self._settled()
        return adaptive

    def _settled(self: Any) -> Any:
        """Wait for the first step; on an event loop, return what can be awaited for it."""
        if self.asynchronous or self.called_from_running_loop:
            return asyncio.ensure_future(self._settle(self._adaptive))
        return self.sync(self._settle, self._adaptive)

    async def _settle(self: Any, adaptive: Elastic) -> None:
        try:
            await adaptive.settle()
        except ConfigError:
            if not await self.reconcile():  # those that there are go on being looked after
                adaptive.stop(reason="the first step failed")
            raise


def _check(options: dict[str, Any]) -> None:
    """Refuse options that the controller would refuse.  Bounds by cores, memory or jobs are dask-jobqueue's to read."""
    by_others = {
        "minimum_jobs",
        "maximum_jobs",
        "minimum_cores",
        "maximum_cores",
        "minimum_memory",
        "maximum_memory",
    }
    own = {"Adaptive", "interval", "minimum", "maximum", *by_others}
    rest = {name: value for name, value in options.items() if name not in own}
    scale_parameters(options.get("minimum"), options.get("maximum"), rest)
