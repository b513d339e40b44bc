"""Copies of results that a preemption without warning would lose: what `policy.copies` chooses is fetched by others.

Batch systems may end preemptible jobs at once, and nothing can be saved then.  While the controller says that there are
such jobs, a look a second finds what only one of them holds and has held for a while, and lets others fetch some of it.
Dask's own memory manager would drop what there is twice; while there are such jobs, it keeps those copies.
Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from distributed import Scheduler
from distributed.active_memory_manager import (
    ActiveMemoryManagerExtension,
    ActiveMemoryManagerPolicy,
    ReduceReplicas,
    Suggestion,
)
from distributed.metrics import monotonic
from distributed.scheduler import TaskState, WorkerState
from tornado.ioloop import PeriodicCallback

from dask_ferro import config
from dask_ferro.policy.copies import Copying, Exposed, Receiver
from dask_ferro.runtime import seams
from dask_ferro.runtime.moving import free_bytes
from dask_ferro.runtime.recompute import Recompute

logger = logging.getLogger(__name__)

# Between two looks, and how long a result was there before it is copied: most intermediate ones are gone by then.
_LOOK, _SETTLED = 1.0, 1.5
# A look may take this part of the scheduler's time.
_SHARE = 50
# What has not arrived after so long is asked of another one.
_LOST = 30.0


class Copies:
    """The copies of a scheduler.

    Attributes
    ----------
    made : Counter of str
        "results" and "bytes" that were copied so far.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        share, rate = config.number("elastic.copy-share", 0.0, 1.0), config.size("elastic.copy-rate")
        self.copying = Copying(share=share, rate=rate)
        self.made: Counter[str] = Counter()
        self._jobs: dict[str, str] = {}  # of workers that may be preempted, by name
        self._since: dict[Any, float] = {}
        self._coming: dict[Any, tuple[str, int, float]] = {}  # the receiver, the bytes, and when it was told
        self.kept: set[Any] = set()  # results that were copied, or are being
        self._ticks = PeriodicCallback(self._tick, _LOOK * 1000)
        self._not_before = 0.0
        self._keeps: _Keeping | None = None
        self._count = 0

    # -- who is exposed --------------------------------------------------------------------------------------

    def expose(self, jobs: Mapping[str, str]) -> None:
        """Say which workers may be preempted: by name, of which job each is; none: nothing is copied any more."""
        self._jobs = dict(jobs) if self.copying.share else {}
        if self._jobs and not self._ticks.is_running():
            self._ticks.start()
            self._keep()
        elif not self._jobs:
            self.stop()

    def stop(self) -> None:
        """Copy nothing any more, and give Dask's memory manager its own rule back.  Idempotent."""
        self._jobs = {}
        self._ticks.stop()
        self._since.clear()
        self._coming.clear()
        self.kept.clear()
        if self._keeps is not None:
            self._keeps.give_way()
            self._keeps = None

    def job_of(self, worker: WorkerState) -> str:
        """Return the job that a worker may be preempted with; empty: it is safe."""
        return self._jobs.get(str(worker.name), "")

    def forget(self, key: Any) -> None:
        """Take note that a result is gone."""
        self.kept.discard(key)

    # -- a look ----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = monotonic()
        if now < self._not_before:
            return
        try:
            self._look(now)
        except Exception:
            logger.exception("dask_ferro: results of preemptible workers could not be copied")
        self._not_before = now + _SHARE * (monotonic() - now)

    def _look(self, now: float) -> None:
        self._arrived(now)
        alone: dict[Any, tuple[TaskState, str]] = {ts.key: (ts, job) for ts, job in self._alone()}
        self._since = {key: self._since.get(key, now) for key in alone}
        again = Recompute(self.scheduler)
        results = [
            Exposed(key, ts.get_nbytes(), again.seconds(ts), job)
            for key, (ts, job) in alone.items()
            if now - self._since[key] >= _SETTLED and key not in self._coming
        ]
        if not results:
            return
        receivers = {ws.address: self._receiver(ws) for ws in self.scheduler.running}
        coming: Counter[str] = Counter()
        for to, nbytes, _ in self._coming.values():
            coming[to] += nbytes
        budget = {address: int(self.copying.rate * _LOOK) - coming[address] for address in receivers}
        chosen = self.copying.choose(results, receivers, budget)
        told: dict[str, list[Any]] = {}
        for key, to in chosen.items():
            told.setdefault(to, []).append(key)
            self._coming[key] = to, alone[key][0].get_nbytes(), now
            self.kept.add(key)
        for to, keys in told.items():
            self._count += 1
            seams.copy_to(self.scheduler, to, keys, f"ferro-copy-{self._count}")

    def _alone(self) -> Iterator[tuple[TaskState, str]]:
        """Yield the results that one preemptible job alone holds."""
        for ws in self.scheduler.workers.values():
            job = self.job_of(ws)
            if job:
                for ts in ws.has_what:
                    holders = ts.who_has or ()
                    if not ts.actor and all(self.job_of(holder) == job for holder in holders):
                        yield ts, job

    def _arrived(self, now: float) -> None:
        for key, (to, nbytes, sent) in list(self._coming.items()):
            ts = self.scheduler.tasks.get(key)
            holders = (ts.who_has if ts is not None else None) or ()
            if any(holder.address == to for holder in holders):
                self.made.update(results=1, bytes=nbytes)
            elif holders and now - sent < _LOST and to in self.scheduler.workers:
                continue
            del self._coming[key]

    def _receiver(self, ws: WorkerState) -> Receiver:
        room = free_bytes(ws)
        return Receiver(int(room * self.copying.share), self.job_of(ws))

    # -- Dask's memory manager -------------------------------------------------------------------------------

    def _keep(self) -> None:
        manager = self.scheduler.extensions.get("amm")
        if isinstance(manager, ActiveMemoryManagerExtension):
            self._keeps = _Keeping.put_on(manager, self)


class _Keeping(ReduceReplicas):
    """Dask's rule that there is one of each result, but for those that a preemptible job would hold alone then."""

    def __init__(self, copies: Copies, replaced: Iterable[ActiveMemoryManagerPolicy]) -> None:
        self._copies, self._replaced = copies, list(replaced)

    @classmethod
    def put_on(cls, manager: ActiveMemoryManagerExtension, copies: Copies) -> _Keeping | None:
        """Take the place of Dask's rule; None where it is off."""
        replaced: set[ActiveMemoryManagerPolicy] = {
            policy for policy in manager.policies if type(policy) is ReduceReplicas
        }
        if not replaced:
            return None
        manager.policies -= replaced
        keeps = cls(copies, replaced)
        manager.add_policy(keeps)
        return keeps

    def give_way(self) -> None:
        """Put Dask's rule back."""
        self.manager.policies.discard(self)
        for policy in self._replaced:
            self.manager.add_policy(policy)

    def run(self) -> Any:
        """Suggest what Dask suggests, but for copies that were made for a preemption."""
        for suggestion in super().run():
            candidates = self._spare(suggestion.ts)
            if candidates is None:
                yield suggestion
            elif candidates:
                yield Suggestion("drop", suggestion.ts, candidates)

    def _spare(self, ts: TaskState) -> set[WorkerState] | None:
        """Return who may drop it, so that two are left, and not both of one preemptible job; None: anybody."""
        if ts.key not in self._copies.kept:
            return None
        left = set(ts.who_has or ()) - self.manager.pending.get(ts, (set(), set()))[1]
        job_of = self._copies.job_of
        jobs = Counter(job_of(ws) for ws in left)
        if set(jobs) <= {""}:
            return None
        if len(left) <= 2:
            return set()
        if jobs[""]:
            return {ws for ws in left if job_of(ws) or jobs[""] > 1}
        return {ws for ws in left if jobs[job_of(ws)] > 1 or len(jobs) > 2}
