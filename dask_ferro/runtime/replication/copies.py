"""Copies of results that a preemption without warning would lose; `policy.replication.copies` chooses them.

Batch systems may end preemptible jobs at once, without time to save anything.  While the controller reports such
jobs, a round each second finds results that only such jobs have held for a while and that will not be released soon,
and lets other workers fetch some of them.  Dask's own memory manager would drop second replicas; while there are such
jobs, it keeps these copies, and drops replicas of preemptible workers before others. Durations are seconds, sizes
bytes.
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
from distributed.metrics import monotonic
from distributed.scheduler import TaskState, WorkerState
from tornado.ioloop import PeriodicCallback

from dask_ferro import config
from dask_ferro.lower.replicas import ReplicaRule, put_rule, remove_rule
from dask_ferro.policy.replication.copies import Copying, CopyTraffic, Exposed, Receiver, ReplicaHolder, spare
from dask_ferro.runtime import upstream
from dask_ferro.runtime.replication.anchors import Anchors
from dask_ferro.runtime.replication.kept import ReplicaLedger, Rounds
from dask_ferro.runtime.replication.recompute import Recompute
from dask_ferro.runtime.replication.sight import Sight, stays
from dask_ferro.runtime.upstream import nbytes_of
from dask_ferro.runtime.worker_memory import free_bytes, unspilled_bytes

logger = logging.getLogger(__name__)

# The name of the rule that Dask's memory manager follows meanwhile.
_RULE = "ferro-copies"

# Seconds between rounds, and the age from which a result is copied: most intermediate ones are gone by then.
_LOOK, _SETTLED = 1.0, 1.5
# A result that is released within this time is not copied, as it would hardly have arrived.
_SOON = 3.0
# One over the share of the scheduler's time for rounds: 1 %.
_SHARE = 100
# Results considered in a round, some 10 ms: a quarter of them the newest, a quarter those found worth a copy before,
# the others in turn.
_MOST = 1000
# Seconds after which a missing copy is requested from another receiver, and for which the first gets no more.
_LOST, _DOUBT = 30.0, 300.0
# The factor on the rate of a worker that has spilled: it reads results from disk to send them, and writes others.
_SPILLED = 1 / 8
# The part of a receiver's memory that stays free: copies that are dropped for lack of memory do not come back.
_MARGIN = 0.1


class _Worthy(NamedTuple):
    """A result worth a copy, and the seconds since the last anchor; 0: it is not to be held itself."""

    ts: TaskState
    result: Exposed
    dear: float


def _one_of_each(workers: Iterable[WorkerState]) -> Iterator[Key]:
    """Yield the keys of results on workers in turn, since a single worker could send only few in a round."""
    for row in zip_longest(*(ws.has_what for ws in workers)):
        yield from (ts.key for ts in row if ts is not None)


class Copies:
    """The copies of a scheduler's results.

    Attributes
    ----------
    made : Counter of str
        "results" and "bytes" copied so far.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.copying = Copying(share=config.value("elastic.copy-share"))
        self.made: Counter[str] = Counter()
        self.anchors = Anchors(scheduler)
        self._began = 0.0
        self._traffic = CopyTraffic()
        self._ticks = PeriodicCallback(self._tick, _LOOK * 1000)
        self._count = 0
        self._forget()

    def _forget(self) -> None:
        """Reset the state: reported jobs, copies and measurements."""
        self._jobs: dict[str, str] = {}  # by name of the workers that may be preempted
        self._not_before = 0.0
        self._since: dict[Key, float] = {}  # when results were computed, while there are such workers
        # the receiver, the bytes, and the time of the request
        self._coming: dict[Key, tuple[str, int, float]] = {}
        self.kept = ReplicaLedger()
        self._rounds = Rounds()
        # Results found worth a copy that exceeded the traffic.
        self._passed: list[Key] = []
        # Receivers that missed a copy, and until when they get no more.
        self._doubted: dict[str, float] = {}

    # -- who is exposed --------------------------------------------------------------------------------------

    def expose(self, jobs: Mapping[str, str]) -> None:
        """Set the jobs of the workers that may be preempted, by worker name; an empty mapping stops copying."""
        before, self._jobs = self._jobs, dict(jobs) if self.copying.share else {}
        if self._jobs and not before:
            self._began = monotonic()
        if self._jobs and not self._ticks.is_running():
            self._ticks.start()
            put_rule(self.scheduler, _RULE, self._sparing)
        elif not self._jobs:
            self.stop()

    def stop(self) -> None:
        """Stop copying, and restore the rule of Dask's memory manager.  Idempotent."""
        self._ticks.stop()
        self._forget()
        self.anchors.clear()
        remove_rule(self.scheduler, _RULE)

    def job_of(self, worker: WorkerState) -> str:
        """Return the job with which a worker may be preempted; empty: it is safe."""
        return self._jobs.get(str(worker.name), "")

    def came(self, key: Key) -> None:
        """Record that a result is in memory."""
        if self._jobs:
            self._since[key] = monotonic()

    def forget(self, key: Key) -> None:
        """Record that a result is gone: its copy and anchor are dropped."""
        self._since.pop(key, None)
        self._coming.pop(key, None)
        self.kept.drop(key)
        self.anchors.let_go_soon([key])

    # -- a look ----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = monotonic()
        if now < self._not_before:
            return
        began = time.thread_time()  # CPU time of this thread, without that of other programs
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
        """Return the results of exposed workers to consider in this round."""
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
        """Yield the results worth a copy, by the seconds to compute them again once their job's data is lost.

        Anchors count as lost for the results after them: with a copy of such a result, the anchor is released.
        Whether a result becomes an anchor depends on the seconds since the last one.
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
        """Return the workers that may receive copies, with their room; silent ones only if there are no others."""
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

    def _sparing(self) -> ReplicaRule:
        """Return the rule of who may drop a result (`policy.replication.copies.spare`), for a run of Dask's policy."""
        short: dict[WorkerState, bool] = {}
        again = Recompute(self.scheduler)

        def may(ts: TaskState, holders: set[WorkerState]) -> set[WorkerState]:
            for ws in holders - short.keys():
                short[ws] = not free_bytes(ws)
            found = spare(
                {ws.address: ReplicaHolder(self.job_of(ws), short[ws]) for ws in holders},
                ts.key in self.kept,
                lambda: self.copying.is_worth(nbytes_of(ts), again.seconds(ts)),
            )
            return holders if found is None else {ws for ws in holders if ws.address in found}

        return may

    def _is_copy(self, key: Key, to: str) -> bool:
        """Return whether a receiver has a copy, or will; without the original it is a copy only if it is anchored."""
        if key in self._coming:
            return True
        ts = self.scheduler.tasks.get(key)
        holders = (ts.who_has if ts is not None else None) or ()
        return any(h.address == to for h in holders) and (len(holders) > 1 or key in self.anchors.seconds)

    def _budget(self, now: float, coming: Mapping[str, int]) -> dict[str, float]:
        """Return the bytes that each worker may start to transfer; 0 while a second's worth is pending."""
        rate = float(self.copying.rate)
        rates = {
            ws.address: rate * (_SPILLED if ws.memory.spilled else 1)
            for ws in self.scheduler.workers.values()
        }
        allowed = self._traffic.allowed(now, rates)
        return {address: left if coming[address] < rate else 0.0 for address, left in allowed.items()}
