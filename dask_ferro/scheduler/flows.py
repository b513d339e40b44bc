"""The admission of flows: all members of one are handed out in one turn, when each has a thread of a worker.

    members of a new graph  ->  held: bound to a worker that does not exist
    all are held, threads are free  ->  a run: each is bound to its worker, and told where the others run
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

from dask.typing import Key
from distributed import Scheduler, Status
from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.flow.admission import Claim, Threads, admit, next_step
from dask_ferro.flow.member import FIGURES, PLACES, is_pick, share_of
from dask_ferro.flow.run import MEMBER, MemberTask
from dask_ferro.flow.times import MemberFigures
from dask_ferro.flow.worker import METRIC, VOID
from dask_ferro.policy.facts import kind_of
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.annotations import estimate_of, wish_of
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.scheduler.log import Ring

logger = logging.getLogger(__name__)

# The client that wants the members of flows.
CLIENT = "ferro-flows"
# The newest flows, of which rows are kept.
_ROWS = 100
# Seconds between two attempts to admit a flow for which there are not enough threads.
_RETRY_INTERVAL = 0.05
_UNREACHABLE = (
    "the workers {} could not send each other results, {} times; let them connect to each other at any port, or leave"
    " ff.bundle_tasks out"
)


class _Flow:
    """A flow: its members' keys by number ("": not known), and its run."""

    def __init__(self, name: str, members: int) -> None:
        self.name = name
        self.keys: list[Key] = [""] * members
        self.run = ""
        self.voids = 0
        self.is_running = self.has_ended = False
        # Whether there are workers that have what its members require.
        self.can_run = True
        # Addresses of the workers of the newest run.
        self.workers: set[str] = set()
        # The keys of members that have ended in this run.
        self.ended: set[Key] = set()
        self.row = FlowRow(name.removeprefix("flow:").rpartition("-")[0], members, since=time())


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
        self.installation = uuid4().hex
        self._flows: dict[str, _Flow] = {}
        self.rows: Ring[FlowRow] = Ring(_ROWS)
        self._of_key: dict[Key, _Flow] = {}
        # A flow that is created again must not have the name of an earlier run, which hubs remember as ended.
        self.runs = 0
        self._is_due = self._keeps_waiting = False
        # Workers that were seen not to reach each other make no flows.
        self._is_unreachable = False

    @property
    def members(self) -> int:
        """How many members a flow may have now; called from any thread."""
        return 0 if self._is_unreachable else sum(ws.nthreads for ws in self._open())

    @property
    def are_known(self) -> bool:
        """Whether there are flows whose results may be needed again."""
        return bool(self._flows)

    def _open(self) -> list[WorkerState]:
        """Return the workers that can take part."""
        workers = self._scheduler.workers.copy().values()
        return [ws for ws in workers if ws.status == Status.running and self._hub(ws)]

    def _hub(self, ws: WorkerState) -> tuple[str, int] | None:
        """Return host and port of a worker's hub; None: it has told none of this installation."""
        told, *where = upstream.metrics_of(ws).get(METRIC) or ("",)
        return (where[0], where[1]) if told == self.installation else None

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
            flow = self._flows.get(share.flow)
            if flow is None:
                flow = self._flows[share.flow] = _Flow(share.flow, share.members)
                self.rows.append(flow.row)
            flow.row.tasks += share.total
            flow.keys[share.member] = key
            self._of_key[key] = flow
            upstream.hold(ts)
            scheduler.client_desires_keys([key], CLIENT)
            self._settle_soon(flow)
        if self._flows and not self._keeps_waiting:
            self._keep_waiting()

    def task_changed(self, ts: TaskState, start: str, finish: str) -> None:
        """Notice that a member is ready or lost, and that nobody needs a flow any more."""
        if start == finish:
            return
        flow = self._of_key.get(ts.key)
        if flow is None:
            if finish == "forgotten" and is_pick(ts.run_spec):
                for key in ts.run_spec.dependencies:  # type: ignore[union-attr]
                    self._release_soon(key)
            return
        if finish == "forgotten":
            self._forget(ts.key, flow)
        elif start == "memory":
            upstream.hold(ts)
            self._soon(lambda: self._keep(ts.key))
            if flow.is_running:
                # Its result is lost, while others still run.
                self._void(flow)
        self._settle_soon(flow)

    def task_left(
        self, ts: TaskState, finish: str, seconds: float | None, message: Mapping[str, Any]
    ) -> None:
        """Notice that a member has ended, or that its run is void."""
        flow = self._of_key.get(ts.key)
        if flow is None:
            return
        if finish == "memory" and flow.is_running:
            flow.ended.add(ts.key)
            flow.row.add(MemberFigures(*(message.get("metadata") or {}).get(FIGURES, ())))
            if len(flow.ended) == len(flow.keys):
                self._soon(lambda: self._end(flow))
            return
        upstream.hold(ts)
        if flow.is_running:
            are_there = flow.workers <= self._scheduler.workers.keys()
            flow.voids = flow.voids + 1 if are_there else 0
            self._void(flow)
        self._settle_soon(flow)

    def worker_changed(self, ws: WorkerState) -> None:
        """Admit flows, as a worker may accept tasks again."""
        self._admit_soon()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Admit flows, as there is a new worker."""
        self._admit_soon()

    def restart(self, scheduler: Scheduler) -> None:
        """Forget all flows."""
        for flow in self._flows.values():
            flow.row.drop()
        self._flows.clear()
        self._of_key.clear()

    # -- the end of runs and flows -------------------------------------------------------------------------

    def _void(self, flow: _Flow) -> None:
        """Tell the workers of a run that it has no future."""
        flow.is_running = False
        flow.row.void()
        for address in flow.workers:
            # A worker that is gone has no stream.
            if address in self._scheduler.stream_comms:
                self._scheduler.worker_send(address, {"op": VOID, "run": flow.run})

    def _settle(self, flow: _Flow) -> None:
        """Let a flow of which a member is needed run again as a whole, or fail where it cannot."""
        scheduler, tasks = self._scheduler, self._scheduler.tasks
        there = [tasks[key] for key in flow.keys if key in tasks]
        held = [ts for ts in there if ts.state == "no-worker"]
        if flow.is_running:
            return
        failed = next((t for ts in there for t in (ts, *ts.dependencies) if t.state == "erred"), None)
        step = next_step(len(flow.keys), [ts.state for ts in there], failed is not None, flow.voids)
        if step in ("admit", "again") and flow.has_ended:
            # What they read of this one is computed with what is needed first, and not by another run for each member.
            for later in self._later(flow):
                self._settle(later)
        if step == "fail" and failed is not None:
            flow.row.enter("failed")
            upstream.fail_like(scheduler, held, failed)
        elif step == "lose":
            flow.row.enter("failed")
            upstream.lose(scheduler, [ts for ts in there if ts.state != "memory"])
        elif step == "unreachable":
            self._is_unreachable = True
            flow.row.enter("failed")
            addresses = ", ".join(sorted(flow.workers))
            upstream.fail(scheduler, held, RuntimeError(_UNREACHABLE.format(addresses, flow.voids)))
        elif step == "admit":
            self._admit_soon()
        elif step == "again":
            scheduler.client_desires_keys(flow.keys, CLIENT)
            for ts in there:
                upstream.hold(ts)
            stimulus_id = f"ferro-flow-again-{time()}"
            scheduler.transitions({ts.key: "released" for ts in there if ts.state == "memory"}, stimulus_id)
            scheduler.transitions({ts.key: "waiting" for ts in there if ts.state == "released"}, stimulus_id)

    def _later(self, flow: _Flow) -> Iterator[_Flow]:
        """Yield the flows that read results of one, directly or not, each before those that it reads itself."""
        tasks, seen, done, stack = self._scheduler.tasks, set[_Flow](), set[_Flow](), [flow]
        while stack:
            one = stack[-1]
            if one not in seen:
                seen.add(one)
                read = (ts for key in one.keys if key in tasks for ts in tasks[key].dependents)
                readers = {self._of_key.get(reader.key) for ts in read for reader in ts.dependents}
                stack += [reader for reader in readers if reader is not None and reader not in seen]
                continue
            stack.pop()
            if one not in done and one is not flow:
                yield one
            done.add(one)

    def _end(self, flow: _Flow) -> None:
        """Let the results of members go that were picked, and keep the members known."""
        if not flow.is_running or len(flow.ended) < len(flow.keys):
            return
        flow.is_running, flow.has_ended, flow.voids = False, True, 0
        flow.row.enter("ended")
        tasks = self._scheduler.tasks
        there = [tasks[key] for key in flow.keys if key in tasks]
        for ts in there:
            # A member that is lost is held when it is needed again.
            upstream.hold(ts)
        # A tuple goes once its results are picked; without readers a member would be forgotten, and stays.
        self._scheduler.client_releases_keys([ts.key for ts in there if ts.dependents], CLIENT)
        self._release(flow)
        self._admit_soon()

    def _keep(self, key: Key) -> None:
        """Keep a member known whose tuple has gone, as long as any member has readers."""
        ts = self._scheduler.tasks.get(key)
        if ts is not None and ts.dependents:
            self._scheduler.client_desires_keys([key], CLIENT)

    def _release_soon(self, key: Key) -> None:
        """Forget a flow if no member has readers any more, one of which has lost one."""
        flow, tasks = self._of_key.get(key), self._scheduler.tasks
        if flow is not None and not any(tasks[k].dependents for k in flow.keys if k in tasks):
            self._soon(lambda: self._release(flow))

    def _release(self, flow: _Flow) -> None:
        tasks = self._scheduler.tasks
        keys = [key for key in flow.keys if key in tasks]
        if not any(tasks[key].dependents for key in keys) and CLIENT in self._scheduler.clients:
            self._scheduler.client_releases_keys(keys, CLIENT)

    def _forget(self, key: Key, flow: _Flow) -> None:
        del self._of_key[key]
        if not any(key in self._of_key for key in flow.keys):
            self._flows.pop(flow.name, None)
            flow.row.drop()
            self._admit_soon()
            if not self._flows:
                self._forgotten()

    # -- admission -----------------------------------------------------------------------------------------

    def _soon(self, call: Callable[[], None]) -> None:
        """Call outside the transition that is going on."""
        self._scheduler.loop.asyncio_loop.call_soon(call)  # type: ignore[attr-defined]

    def _settle_soon(self, flow: _Flow) -> None:
        self._soon(lambda: self._settle(flow))

    def _admit_soon(self) -> None:
        if not self._is_due and self._flows:
            self._is_due = True
            self._soon(self._admit)

    def _keep_waiting(self) -> None:
        """Let held members wait beyond `no-workers-timeout`, after which Dask fails tasks, for their turn."""
        timeout = self._scheduler.no_workers_timeout
        self._keeps_waiting = timeout is not None and bool(self._flows)
        if timeout is not None and self._flows:
            tasks = (self._scheduler.tasks.get(key) for key, flow in self._of_key.items() if flow.can_run)
            upstream.keep_waiting(self._scheduler, [ts for ts in tasks if ts is not None])
            self._scheduler.loop.call_later(timeout / 2, self._keep_waiting)

    def _admit(self) -> None:
        """Hand out the flows that are ready, in the order of their priorities."""
        self._is_due = False
        tasks, workers = self._scheduler.tasks, self._open()
        ready = [
            flow
            for flow in self._flows.values()
            if all(key in tasks and tasks[key].state == "no-worker" for key in flow.keys)
        ]
        ready.sort(key=lambda flow: tasks[flow.keys[0]].priority or ())
        claims = [[self._claim(tasks[key], workers) for key in flow.keys] for flow in ready]
        places = admit(claims, self._threads(workers))
        for flow, own, chosen in zip(ready, claims, places, strict=True):
            flow.can_run = all(claim.can_run for claim in own)
            if chosen is not None:
                self._hand_out(flow, [self._scheduler.workers[address] for address in chosen])
        if None in places:
            self._scheduler.loop.call_later(_RETRY_INTERVAL, self._admit_soon)

    def _threads(self, workers: Iterable[WorkerState]) -> list[Threads]:
        """Return the threads of workers; a member that has waited for long has left its own, which is free."""
        taken: Counter[str] = Counter()
        for key in self._of_key:
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.processing_on is not None:
                taken[ts.processing_on.address] += ts not in ts.processing_on.long_running
        return [Threads(ws.address, ws.nthreads, taken[ws.address], len(ws.processing)) for ws in workers]

    def _claim(self, ts: TaskState, workers: Iterable[WorkerState]) -> Claim:
        """Return what a member asks of its worker."""
        held: Counter[str] = Counter()
        for dts in ts.dependencies:
            for ws in dts.who_has or ():
                held[ws.address] += dts.get_nbytes()
        annotations, able = ts.annotations or {}, None
        must, kinds = wish_of(annotations).must, {ws.address: _kind(ws) for ws in workers}
        # Workers tell their devices where the scheduler plugin is installed.
        if must and any(kinds.values()):
            able = [address for address, kind in kinds.items() if kind == must]
        home = MemberTask(*annotations[MEMBER]).worker if MEMBER in annotations else ""
        return Claim(held, home, able)

    def _hand_out(self, flow: _Flow, workers: list[WorkerState]) -> None:
        scheduler = self._scheduler
        self.runs += 1
        flow.run = f"{flow.name}/{self.runs}"
        flow.ended.clear()
        flow.is_running = True
        flow.workers = {ws.address for ws in workers}
        homes = tuple((ws.address, *(self._hub(ws) or ("", 0))) for ws in workers)
        for key, ws in zip(flow.keys, workers, strict=True):
            ts = scheduler.tasks[key]
            ts.annotations = {**(ts.annotations or {}), PLACES: (flow.run, homes)}
            upstream.bind(ts, ws.address)
        own = [estimate_of(scheduler.tasks[key].annotations) for key in flow.keys]
        projected = max((seconds for seconds in own if isinstance(seconds, float)), default=0.0)
        flow.row.begin(tuple(ws.address for ws in workers), projected)
        scheduler.transitions(dict.fromkeys(flow.keys, "processing"), f"ferro-flow-{flow.run}")
        if any(scheduler.tasks[key].state != "processing" for key in flow.keys):
            logger.warning("dask_ferro: flow %s could not begin, and is tried again", flow.run)
            self._void(flow)
            scheduler.loop.call_later(_RETRY_INTERVAL, self._settle_soon, flow)


def _kind(ws: WorkerState) -> str:
    """Return the kind of a worker's device; "": it has told none."""
    return kind_of(upstream.metrics_of(ws).get("ferro", {}).get("device", ""))
