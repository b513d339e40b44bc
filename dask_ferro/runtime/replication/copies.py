"""Copies of results that a preemption without warning would lose; `policy.replication.copies` chooses them.

Batch systems may end preemptible jobs at once, and nothing can be saved then.  While the controller says that there are
such jobs, a look a second finds what only such jobs have held for a while and what will not be released soon, and lets
others fetch some of it.  Dask's own memory manager would drop what there is twice; while there are such jobs, it keeps
those copies, and drops replicas of preemptible workers before others.
Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice, zip_longest
from typing import NamedTuple, cast

from dask.typing import Key
from distributed import Scheduler
from distributed.active_memory_manager import (
    ActiveMemoryManagerExtension,
    ActiveMemoryManagerPolicy,
    ReduceReplicas,
    Suggestion,
    SuggestionGenerator,
)
from distributed.metrics import monotonic
from distributed.scheduler import TaskState, WorkerState
from tornado.ioloop import PeriodicCallback

from dask_ferro import config
from dask_ferro.policy.replication.copies import Copying, CopyTraffic, Exposed, Receiver, ReplicaHolder, spare
from dask_ferro.runtime import upstream
from dask_ferro.runtime.replication.anchors import Anchors
from dask_ferro.runtime.replication.kept import ReplicaLedger, Rounds
from dask_ferro.runtime.replication.recompute import Recompute
from dask_ferro.runtime.replication.sight import Sight, stays
from dask_ferro.runtime.upstream import nbytes_of
from dask_ferro.runtime.worker_memory import free_bytes, unspilled_bytes

logger = logging.getLogger(__name__)

# Between two looks, and how long a result was there before it is copied: most intermediate ones are gone by then.
_LOOK, _SETTLED = 1.0, 1.5
# A result that is released within so long is not copied: it would hardly have arrived.
_SOON = 3.0
# A look may take this part of the scheduler's time: 1 %.
_SHARE = 100
# So many results are looked at in a look, some 10 ms: a quarter of them the newest, a quarter those that were found
# worth a copy before, the others in turns.
_MOST = 1000
# What has not arrived after so long is asked of another one, and its receiver of nothing for the next minutes.
_LOST, _DOUBT = 30.0, 300.0
# A worker that has spilled reads results from disk to send them, and writes others there in their place.
_SPILLED = 1 / 8
# Of the memory that a receiver may fill, so much stays free: what is dropped for want of memory does not come back.
_MARGIN = 0.1


class _Worthy(NamedTuple):
    """A result that is worth a copy, and the seconds since what is held; 0: it is not to be held itself."""

    ts: TaskState
    result: Exposed
    dear: float


def _one_of_each(workers: Iterable[WorkerState]) -> Iterator[Key]:
    """Yield the keys of what workers hold, one of each worker at a time: of one alone, few could be sent in a look."""
    for row in zip_longest(*(ws.has_what for ws in workers)):
        yield from (ts.key for ts in row if ts is not None)


class Copies:
    """The copies of a scheduler.

    Attributes
    ----------
    made : Counter of str
        "results" and "bytes" that were copied so far.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.copying = config.read(Copying, "elastic.copy-")
        self.made: Counter[str] = Counter()
        self.anchors = Anchors(scheduler)
        self._began = 0.0
        self._traffic = CopyTraffic()
        self._ticks = PeriodicCallback(self._tick, _LOOK * 1000)
        self._keeps: _Keeping | None = None
        self._count = 0
        self._forget()

    def _forget(self) -> None:
        """Begin with nothing that was told, copied or found out."""
        self._jobs: dict[str, str] = {}  # of workers that may be preempted, by name
        self._not_before = 0.0
        self._since: dict[Key, float] = {}  # when results came, while there are such workers
        self._coming: dict[Key, tuple[str, int, float]] = {}  # the receiver, the bytes, and when it was told
        self.kept = ReplicaLedger()
        self._rounds = Rounds()
        # Found worth a copy, but more than could travel.
        self._passed: list[Key] = []
        # Receivers to which something did not come, and until when.
        self._doubted: dict[str, float] = {}

    # -- who is exposed --------------------------------------------------------------------------------------

    def expose(self, jobs: Mapping[str, str]) -> None:
        """Say which workers may be preempted: by name, of which job each is; none: nothing is copied any more."""
        before, self._jobs = self._jobs, dict(jobs) if self.copying.share else {}
        if self._jobs and not before:
            self._began = monotonic()
        if self._jobs and not self._ticks.is_running():
            self._ticks.start()
            self._keeps = _Keeping.put_on(self)
        elif not self._jobs:
            self.stop()

    def stop(self) -> None:
        """Copy nothing any more, and give Dask's memory manager its own rule back.  Idempotent."""
        self._ticks.stop()
        self._forget()
        self.anchors.clear()
        if self._keeps is not None:
            self._keeps.give_way()
            self._keeps = None

    def job_of(self, worker: WorkerState) -> str:
        """Return the job that a worker may be preempted with; empty: it is safe."""
        return self._jobs.get(str(worker.name), "")

    def came(self, key: Key) -> None:
        """Take note that a result is there."""
        if self._jobs:
            self._since[key] = monotonic()

    def forget(self, key: Key) -> None:
        """Take note that a result is gone: nobody fetches it any more, and it is held for nobody."""
        self._since.pop(key, None)
        self._coming.pop(key, None)
        self.kept.drop(key)
        self.anchors.let_go_soon([key])

    # -- a look ----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = monotonic()
        if now < self._not_before:
            return
        began = time.thread_time()  # no other program's time
        try:
            self._look(now)
        except Exception:
            logger.exception("dask_ferro: results of preemptible workers could not be copied")
        self._not_before = now + _SHARE * (time.thread_time() - began)

    def _look(self, now: float) -> None:
        self._arrived(now)
        self.anchors.let_go(self.kept.review(self._is_copy, _MOST))
        sight = Sight(self.scheduler, self.job_of)
        self.anchors.review(sight.is_exposed)
        exposed = [ts for ts in self._next() if sight.is_exposed(ts)]
        if not exposed:
            return
        coming: Counter[str] = Counter()
        for to, nbytes, _ in self._coming.values():
            coming[to] += nbytes
        receivers = self._receivers(now, coming)
        found = {worthy.ts.key: worthy for worthy in self._worthy(now, exposed, sight, receivers)}
        results = [worthy.result for worthy in found.values()]
        chosen = cast(dict[Key, str], self.copying.choose(results, receivers, self._budget(now, coming)))
        self._send(now, chosen, found)
        passed = sorted((r for r in results if r.key not in chosen), key=self.copying.order)
        self._passed = [cast(Key, result.key) for result in passed[: _MOST // 4]]

    def _next(self) -> list[TaskState]:
        """Return the results of exposed workers that are looked at now."""
        workers = [ws for ws in self.scheduler.workers.values() if self.job_of(ws) and stays(ws)]
        each = max(_MOST // 4 // max(len(workers), 1), 1)
        keys = dict.fromkeys(self._passed)
        for ws in workers:  # `has_what` is in the order in which results came
            newest = reversed(cast(dict[TaskState, None], ws.has_what))
            keys |= dict.fromkeys(ts.key for ts in islice(newest, each))
        keys |= dict.fromkeys(self._rounds.take(_MOST // 2, lambda: _one_of_each(workers)))
        tasks = self.scheduler.tasks
        return [tasks[key] for key in keys if key in tasks and key not in self._coming]

    def _worthy(
        self, now: float, exposed: Iterable[TaskState], sight: Sight, receivers: Mapping[str, Receiver]
    ) -> Iterator[_Worthy]:
        """Yield the results that are worth a copy, by what they take to compute when all that their job has is gone.

        What is held counts as gone for those that come after it: with a copy of one of them, it is let go.  Whether
        another one is held is decided by what came since.
        """
        again: dict[str, tuple[Recompute, Recompute]] = {}
        for ts in exposed:
            job = sight.job(ts) or ""
            if job not in again:
                recompute = partial(self._recompute, job, sight, receivers)
                again[job] = recompute({}), recompute(self.anchors.seconds)
            since, all_of_it = again[job]
            nbytes, fresh, seconds = nbytes_of(ts), since.seconds(ts), all_of_it.seconds(ts)
            is_dear = self.copying.is_dear(nbytes, fresh)
            if is_dear or (
                now - self._since.get(ts.key, self._began) >= _SETTLED
                and self.copying.is_worth(nbytes, seconds)
                and since.releases.left(ts) >= _SOON
            ):
                holder = next(iter(ts.who_has or ()))
                result = Exposed(ts.key, nbytes, seconds, job, holder.address, holder.host)
                yield _Worthy(ts, result, fresh if is_dear else 0.0)

    def _recompute(
        self, job: str, sight: Sight, receivers: Mapping[str, Receiver], anchored: Mapping[Key, float]
    ) -> Recompute:
        room = max((r.room for r in receivers.values() if r.job != job), default=0)

        def is_saved(ts: TaskState, seconds: float) -> bool:
            return nbytes_of(ts) <= room and self.copying.is_worth(nbytes_of(ts), seconds)

        return Recompute(self.scheduler, lambda ts: bool(job) and sight.job(ts) == job, is_saved, anchored)

    def _send(self, now: float, chosen: Mapping[Key, str], found: Mapping[Key, _Worthy]) -> None:
        told: dict[str, list[Key]] = {}
        for key, to in chosen.items():
            ts, result, dear = found[key]
            told.setdefault(to, []).append(key)
            self._coming[key] = to, result.nbytes, now
            self.kept.put(key, to, result.nbytes)
            if dear:
                self.anchors.hold(ts, dear)
            for address in (to, result.holder):
                self._traffic.spend(address, self.copying.charge(result.nbytes))
        for to, keys in told.items():
            self._count += 1
            upstream.copy_to(self.scheduler, to, keys, f"ferro-copy-{self._count}")

    def _arrived(self, now: float) -> None:
        for key, (to, nbytes, sent) in list(self._coming.items()):
            ts = self.scheduler.tasks.get(key)
            holders = (ts.who_has if ts is not None else None) or ()
            if any(holder.address == to for holder in holders):
                self.made.update(results=1, bytes=nbytes)
                self._doubted.pop(to, None)
            elif holders and to in self.scheduler.workers:
                if now - sent < _LOST:
                    continue
                self._doubted[to] = now + _DOUBT
            del self._coming[key]

    # -- what others may take --------------------------------------------------------------------------------

    def _receivers(self, now: float, coming: Mapping[str, int]) -> dict[str, Receiver]:
        """Return who may take copies, and their room; those that are silent only where nobody else is there."""
        self._doubted = {address: until for address, until in self._doubted.items() if now < until}
        running = [ws for ws in self.scheduler.running if ws.address not in self._doubted]
        return {
            ws.address: Receiver(
                self._room(ws, self.kept.nbytes[ws.address], coming[ws.address]), self.job_of(ws), ws.host
            )
            for ws in running or self.scheduler.running
        }

    def _room(self, ws: WorkerState, copies: int, coming: int) -> int:
        most = unspilled_bytes(ws)
        return min(int(most * self.copying.share) - copies, free_bytes(ws) - int(most * _MARGIN) - coming)

    def _is_copy(self, key: Key, to: str) -> bool:
        """Whether a receiver has a copy, or will; one whose original is gone is none any more, unless it is held."""
        if key in self._coming:
            return True
        ts = self.scheduler.tasks.get(key)
        holders = (ts.who_has if ts is not None else None) or ()
        return any(h.address == to for h in holders) and (len(holders) > 1 or key in self.anchors.seconds)

    def _budget(self, now: float, coming: Mapping[str, int]) -> dict[str, float]:
        """Return the bytes that each worker may begin to send or fetch; none while a second's worth is on its way."""
        rate = float(self.copying.rate)
        rates = {
            ws.address: rate * (_SPILLED if ws.memory.spilled else 1)
            for ws in self.scheduler.workers.values()
        }
        allowed = self._traffic.allowed(now, rates)
        return {address: left if coming[address] < rate else 0.0 for address, left in allowed.items()}


class _Keeping(ReduceReplicas):
    """Dask's rule that there is one of each result, but for those that a preemptible job would hold alone then."""

    def __init__(self, copies: Copies, replaced: Iterable[ActiveMemoryManagerPolicy]) -> None:
        self._copies, self._replaced = copies, list(replaced)

    @classmethod
    def put_on(cls, copies: Copies) -> _Keeping | None:
        """Take the place of Dask's rule; None where it is off."""
        manager = copies.scheduler.extensions.get("amm")
        if not isinstance(manager, ActiveMemoryManagerExtension):
            return None
        replaced = {policy for policy in manager.policies if type(policy) is ReduceReplicas}
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

    def run(self) -> SuggestionGenerator:
        """Suggest what Dask suggests, but for copies that were made for a preemption."""
        short: dict[WorkerState, bool] = {}
        again = Recompute(self._copies.scheduler)
        for suggestion in super().run():
            candidates = self._spare(suggestion.ts, short, again)
            if candidates is None:
                yield suggestion
            elif candidates:
                yield Suggestion("drop", suggestion.ts, candidates)

    def _spare(
        self, ts: TaskState, short: dict[WorkerState, bool], again: Recompute
    ) -> set[WorkerState] | None:
        """Return who may drop it (`policy.replication.copies.spare`); None: anybody."""
        copies = self._copies
        left = set(ts.who_has or ()) - self.manager.pending.get(ts, (set(), set()))[1]
        for ws in left - short.keys():
            short[ws] = not free_bytes(ws)
        found = spare(
            {ws.address: ReplicaHolder(copies.job_of(ws), short[ws]) for ws in left},
            ts.key in copies.kept,
            lambda: copies.copying.is_worth(nbytes_of(ts), again.seconds(ts)),
        )
        return None if found is None else {ws for ws in left if ws.address in found}
