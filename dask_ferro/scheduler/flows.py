"""The admission of flows: all members of one are handed out in one turn, when each has a thread of a worker.

    members of a new graph  ->  held: bound to a worker that does not exist
    all are ready, threads are free  ->  a run: each is bound to its worker, and told where the others run
    a member ends without a result  ->  the run is void: workers are told, members that ran are held again
    all have ended  ->  the flow ends

Flows are admitted in the order of their priorities, and none overtakes another one that waits for threads: two flows
that each have half of their threads would wait for each other.

A member's result is wanted until the flow ends: a run needs all of its members, so that a member that has ended runs
again if another one is lost.  Later the tuples go, as the tasks that pick results have them; members stay known while
any of them has readers, since what is lost is computed by all of them again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dask.typing import Key
from distributed import Scheduler, Status
from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.flow.member import PLACES, is_pick, share_of
from dask_ferro.flow.worker import METRIC, VOID
from dask_ferro.scheduler import upstream

logger = logging.getLogger(__name__)

# The client that wants the members of flows.
CLIENT = "ferro-flows"
# No worker has this address.
HELD = "ferro-held"
# Seconds between two attempts to admit a flow for which there are not enough threads.
_AGAIN = 0.05


class _Flow:
    """A flow: its members' keys by number, and its run."""

    def __init__(self, name: str, members: int) -> None:
        self.name = name
        self.keys: list[Key] = [""] * members
        self.runs = 0
        self.is_running = False
        # Addresses of the workers of the newest run.
        self.workers: set[str] = set()
        # The keys of members that have ended in this run, or in the last one.
        self.ended: set[Key] = set()

    @property
    def run(self) -> str:
        """The name of the newest run."""
        return f"{self.name}/{self.runs}"


class Flows:
    """The flows of one scheduler.

    Parameters
    ----------
    scheduler : Scheduler
    forgotten : callable ()
        Called when the last flow was forgotten.
    """

    def __init__(self, scheduler: Scheduler, forgotten: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._forgotten = forgotten
        self._flows: dict[str, _Flow] = {}
        self._of_key: dict[Key, _Flow] = {}
        self._is_due = False

    @property
    def members(self) -> int:
        """How many members a flow may have now."""
        return sum(ws.nthreads for ws in self._open())

    @property
    def are_known(self) -> bool:
        """Whether there are flows whose results may be needed again."""
        return bool(self._flows)

    def _open(self) -> list[WorkerState]:
        """Return the workers that can take part."""
        workers = self._scheduler.workers.values()
        return [ws for ws in workers if ws.status == Status.running and METRIC in upstream.metrics_of(ws)]

    # -- what happens --------------------------------------------------------------------------------------

    def update_graph(self, scheduler: Scheduler, *, tasks: Iterable[Key], **facts: object) -> None:
        """Hold the members of new flows."""
        for key in tasks:
            # Most keys are not ours, and this costs 0.1 us.
            if type(key) is not tuple or key in self._of_key or not str(key[0]).startswith("flow:"):
                continue
            ts = scheduler.tasks.get(key)
            share = None if ts is None else share_of(ts.run_spec)
            if ts is None or share is None or share.members == 1:
                continue
            flow = self._flows.setdefault(share.flow, _Flow(share.flow, share.members))
            flow.keys[share.member] = key
            self._of_key[key] = flow
            upstream.bind(ts, HELD)
            scheduler.client_desires_keys([key], CLIENT)

    def task_changed(self, ts: TaskState, start: str, finish: str) -> None:
        """Admit members that are ready, and notice that a result is lost or that nobody needs a flow any more."""
        flow = self._of_key.get(ts.key)
        if flow is None:
            if finish == "forgotten" and is_pick(ts.run_spec):
                for key in ts.run_spec.dependencies:  # type: ignore[union-attr]
                    self._release(key)
            return
        if finish == "no-worker":
            if not flow.is_running:
                self._again(flow, besides=ts)
            self._admit_soon()
        elif finish == "forgotten":
            self._forget(flow, ts)
        elif start == "memory":
            upstream.bind(ts, HELD)
            if flow.is_running:
                # Its result is lost, while others still run.
                flow.ended.discard(ts.key)
                self._void(flow)
            else:
                # It stays known as long as any member has readers.
                self._scheduler.client_desires_keys([ts.key], CLIENT)

    def task_left(
        self, ts: TaskState, finish: str, seconds: float | None, message: Mapping[str, Any]
    ) -> None:
        """Notice that a member has ended, or that its run is void."""
        flow = self._of_key.get(ts.key)
        if flow is None:
            return
        if finish == "memory":
            flow.ended.add(ts.key)
            if len(flow.ended) == len(flow.keys):
                self._soon(lambda: self._end(flow))
        else:
            upstream.bind(ts, HELD)
            if flow.is_running:
                self._void(flow)

    def worker_changed(self, ws: WorkerState) -> None:
        """Admit flows, as a worker may accept tasks again."""
        self._admit_soon()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Admit flows, as there is a new worker."""
        self._admit_soon()

    def restart(self, scheduler: Scheduler) -> None:
        """Forget all flows."""
        self._flows.clear()
        self._of_key.clear()

    # -- the end of runs and flows -------------------------------------------------------------------------

    def _void(self, flow: _Flow) -> None:
        """Tell the workers of a run that it has no future; what has ended runs again with the others."""
        flow.is_running = False
        for address in flow.workers:
            # A worker that is gone has no stream.
            if address in self._scheduler.stream_comms:
                self._scheduler.worker_send(address, {"op": VOID, "run": flow.run})
        ended, flow.ended = flow.ended, set()
        self._soon(lambda: self._release_results(flow, ended))

    def _release_results(self, flow: _Flow, keys: Collection[Key]) -> None:
        tasks = self._scheduler.tasks
        in_memory = [key for key in keys if key in tasks and tasks[key].state == "memory"]
        for key in in_memory:
            upstream.bind(tasks[key], HELD)
        self._scheduler.transitions(dict.fromkeys(in_memory, "released"), f"ferro-flow-void-{time()}")

    def _again(self, flow: _Flow, besides: TaskState) -> None:
        """Let all members of a flow run, one of which is needed."""
        tasks = self._scheduler.tasks
        failed = [key for key in flow.keys if key in tasks and tasks[key].state == "erred"]
        if failed:
            self._soon(lambda: self._fail(besides, failed[0]))
            return
        others = [key for key in flow.keys if key in tasks and tasks[key] is not besides]
        if all(tasks[key].state in ("waiting", "no-worker") for key in others):
            return
        self._soon(lambda: self._run_again(flow))

    def _fail(self, ts: TaskState, like: Key) -> None:
        """Fail a member of a flow that cannot run, as one of its members failed: Dask gave it up."""
        other = self._scheduler.tasks.get(like)
        if ts.state == "no-worker" and other is not None and other.state == "erred":
            upstream.fail_like(self._scheduler, ts, other)

    def _run_again(self, flow: _Flow) -> None:
        tasks, scheduler = self._scheduler.tasks, self._scheduler
        if flow.is_running or not all(key in tasks for key in flow.keys):
            return
        scheduler.client_desires_keys(flow.keys, CLIENT)
        states = {key: tasks[key].state for key in flow.keys}
        flow.ended.clear()
        stimulus = f"ferro-flow-again-{time()}"
        for key in flow.keys:
            upstream.bind(tasks[key], HELD)
        scheduler.transitions({k: "released" for k, state in states.items() if state == "memory"}, stimulus)
        scheduler.transitions({k: "waiting" for k, state in states.items() if state == "released"}, stimulus)

    def _end(self, flow: _Flow) -> None:
        """Let the results of members go that were picked, and keep the members known."""
        if not flow.is_running or len(flow.ended) < len(flow.keys):
            return
        flow.is_running = False
        scheduler = self._scheduler
        keys = [key for key in flow.keys if key in scheduler.tasks]
        for key in keys:
            # A member that is lost is held when it is needed again.
            upstream.bind(scheduler.tasks[key], HELD)
        # A tuple goes once its results are picked.
        scheduler.client_releases_keys(keys, CLIENT)
        self._admit_soon()

    def _release(self, key: Key) -> None:
        """Forget a flow of which no member has readers any more."""
        flow = self._of_key.get(key)
        if flow is None:
            return
        tasks = self._scheduler.tasks
        if not any(tasks[k].dependents for k in flow.keys if k in tasks):
            self._soon(lambda: self._release_all(flow))

    def _release_all(self, flow: _Flow) -> None:
        tasks = self._scheduler.tasks
        keys = [key for key in flow.keys if key in tasks]
        if not any(tasks[key].dependents for key in keys) and CLIENT in self._scheduler.clients:
            self._scheduler.client_releases_keys(keys, CLIENT)

    def _forget(self, flow: _Flow, ts: TaskState) -> None:
        self._of_key.pop(ts.key, None)
        if not any(key in self._of_key for key in flow.keys):
            self._flows.pop(flow.name, None)
            self._admit_soon()
            if not self._flows:
                self._forgotten()

    # -- admission -----------------------------------------------------------------------------------------

    def _soon(self, call: Any) -> None:
        """Call outside the transition that is going on."""
        self._scheduler.loop.asyncio_loop.call_soon(call)  # type: ignore[attr-defined]

    def _admit_soon(self) -> None:
        if not self._is_due and self._flows:
            self._is_due = True
            self._soon(self._admit)

    def _admit(self) -> None:
        """Hand out the flows that are ready, in the order of their priorities, until there is no thread for one."""
        self._is_due = False
        tasks = self._scheduler.tasks
        ready = [
            flow
            for flow in self._flows.values()
            if not flow.is_running
            and all(key in tasks and tasks[key].state == "no-worker" for key in flow.keys)
        ]
        for flow in sorted(ready, key=lambda flow: tasks[flow.keys[0]].priority or ()):
            places = self._places(flow)
            if places is None:
                upstream.keep_waiting(self._scheduler, [tasks[key] for each in ready for key in each.keys])
                self._scheduler.loop.call_later(_AGAIN, self._admit_soon)
                return
            self._hand_out(flow, *places)

    def _places(self, flow: _Flow) -> tuple[list[WorkerState], bool] | None:
        """Return the workers of a flow's members, and whether these leave the threads; None: there are too few threads.

        Members leave the pool of threads where the cluster has fewer threads than the flow has members, and where a
        member that runs has left it: its task may wait for this flow, for which the others of its flow keep threads.
        """
        workers = self._open()
        taken: Counter[str] = Counter()
        has_left = False
        for key in self._of_key:
            ts = self._scheduler.tasks.get(key)
            ws = None if ts is None else ts.processing_on
            if ws is not None:
                is_out = ts in ws.long_running
                has_left = has_left or is_out
                taken[ws.address] += not is_out
        threads = {ws: ws.nthreads - taken[ws.address] for ws in workers}
        free = [ws for ws in workers if threads[ws] > 0]
        is_crowded = sum(threads[ws] for ws in free) < len(flow.keys)
        if is_crowded:
            are_too_few = not taken and sum(ws.nthreads for ws in workers) < len(flow.keys)
            if not free or not (are_too_few or has_left):
                return None
            each, more = divmod(len(flow.keys), len(free))
            threads = {ws: each + (i < more) for i, ws in enumerate(free)}
        places: list[WorkerState] = []
        for key in flow.keys:
            held = self._held(self._scheduler.tasks[key])
            best = max(
                (ws for ws in free if threads[ws] > 0),
                key=lambda ws: (held.get(ws.address, 0), threads[ws] / ws.nthreads),
            )
            threads[best] -= 1
            places.append(best)
        return places, is_crowded

    def _held(self, ts: TaskState) -> dict[str, int]:
        held: dict[str, int] = {}
        for dts in ts.dependencies:
            for ws in dts.who_has or ():
                held[ws.address] = held.get(ws.address, 0) + dts.get_nbytes()
        return held

    def _hand_out(self, flow: _Flow, workers: list[WorkerState], is_crowded: bool) -> None:
        scheduler = self._scheduler
        flow.runs += 1
        flow.ended.clear()
        flow.is_running = True
        flow.workers = {ws.address for ws in workers}
        homes = tuple((ws.address, *upstream.metrics_of(ws)[METRIC]) for ws in workers)
        for key, ws in zip(flow.keys, workers, strict=True):
            ts = scheduler.tasks[key]
            ts.annotations = {**(ts.annotations or {}), PLACES: (flow.run, homes, is_crowded)}
            upstream.bind(ts, ws.address)
        scheduler.transitions(dict.fromkeys(flow.keys, "processing"), f"ferro-flow-{flow.run}")
        if any(scheduler.tasks[key].state != "processing" for key in flow.keys):
            logger.warning("dask_ferro: flow %s could not begin, and is tried again", flow.run)
            for key in flow.keys:
                upstream.bind(scheduler.tasks[key], HELD)
            self._void(flow)
            self._scheduler.loop.call_later(_AGAIN, self._admit_soon)
