"""What a task costs the scheduler's thread, without workers, processes or a network.

    python benchmarks/bookkeeping.py                       # stock Dask and the plugin, in turn
    python benchmarks/bookkeeping.py --tasks 2000 --calls  # and which of our functions are called how often a task

A real scheduler is told that workers joined, that a graph came, and, some messages a turn of its loop, that tasks are
done; what it would send is put in lists.  All that is left is bookkeeping: Dask's own and ours.  The figure is the
lowest of several rounds, as whatever else a machine does can only add to it; calls are the same in every round, but
for a few of timers.

roots   tasks that do nothing, of one group and without inputs: what Dask queues at the scheduler.
free    tasks that do nothing and are not queued: one group each, no inputs.
chains  pairs of tasks, the second reads the first.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask  # noqa: E402
import measure  # noqa: E402
from dask._task_spec import Task  # noqa: E402
from dask.typing import Key  # noqa: E402
from distributed import Scheduler  # noqa: E402
from distributed.comm.core import CommClosedError  # noqa: E402
from distributed.scheduler import ClientState  # noqa: E402

from dask_ferro.scheduler.plugin import put_on  # noqa: E402
from dask_ferro.scheduler.scheduling import Scheduling  # noqa: E402

STOCK, FERRO = "stock", "ferro"
CLIENT = "client"
WORKERS = 8
SHAPES = ("roots", "free", "chains")
# What Dask wants of a worker's heartbeat.
HEARTBEAT: Mapping[str, Any] = {
    "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
    "digests_total_since_heartbeat": {},
    "memory": 0,
    "spilled_bytes": {"memory": 0, "disk": 0},
    "managed_bytes": 0,
}
# Messages a turn of the loop: a flood of tasks that do nothing had 2.6 of them, on 8 worker processes and two cores.
BATCH = 3
# Functions that are listed.
LISTED = 45


class Running(NamedTuple):
    """A scheduler, and what it sent to each of its workers."""

    scheduler: Scheduler
    sent: Mapping[str, Inbox]


class Inbox:
    """What a worker is sent, instead of a stream to it."""

    def __init__(self) -> None:
        self.tasks: deque[dict[str, Any]] = deque()
        self.interval = 0.0

    def send(self, *messages: dict[str, Any]) -> None:
        self.tasks.extend(message for message in messages if message["op"] == "compute-task")

    def closed(self) -> bool:
        return False

    def abort(self) -> None:
        """Nothing is open."""

    async def close(self) -> None:
        """Nothing is open."""


class SilentComm:
    """A worker's connection, on which nothing comes until it is closed."""

    name = peer_address = local_address = "silent"

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    async def write(self, *message: object, **options: object) -> None:
        """Drop what is said to the worker as it registers."""

    async def read(self, *deserializers: object) -> object:
        await self._closed.wait()
        raise CommClosedError

    async def close(self) -> None:
        self.abort()

    def closed(self) -> bool:
        return self._closed.is_set()

    def abort(self) -> None:
        self._closed.set()


async def started(stack: AsyncExitStack, contender: str, workers: int) -> Running:
    """Return a scheduler with so many workers of one thread, under stock Dask or the plugin."""
    with dask.config.set({"distributed.scheduler.active-memory-manager.start": False}):
        scheduler = await stack.enter_async_context(Scheduler(host="127.0.0.1", dashboard_address=":0"))
    if contender == FERRO:
        await put_on(Scheduling(), dask_scheduler=scheduler)
    scheduler.clients[CLIENT] = ClientState(CLIENT)
    sent = {}
    for number in range(workers):
        address = f"tcp://127.0.0.1:{1000 + number}"
        comm = SilentComm()
        joined = asyncio.create_task(
            scheduler.add_worker(
                comm, address=address, status="running", server_id=f"id-{number}", nthreads=1, name=str(number),
                now=time.time(), resources={}, memory_limit=2**30, metrics=HEARTBEAT, services={}, local_directory="",
                versions={}, nanny="", extra={}, stimulus_id="joined",
            )  # type: ignore[arg-type]
        )  # fmt: skip
        while address not in scheduler.stream_comms and not joined.done():
            await asyncio.sleep(0)
        sent[address] = scheduler.stream_comms[address] = Inbox()  # type: ignore[assignment]
        stack.push_async_callback(asyncio.wait, [joined])
        stack.callback(comm.abort)  # before that wait: what came last goes first
    return Running(scheduler, sent)


# ---- one run -----------------------------------------------------------------------------------------------


def submit(scheduler: Scheduler, shape: str, tasks: int, name: str) -> list[Key]:
    """Give the scheduler a graph as its client's messages would; return the keys that the client wants."""
    client = scheduler.clients[CLIENT]
    made: list[Key] = []
    for number in range(tasks):
        is_second = shape == "chains" and number % 2 == 1
        group = f"{name}-{number}" if shape == "free" else f"{name}{'second' if is_second else ''}"
        key: Key = (f"{group}-{0:032x}", number)
        ts = scheduler.new_task(key, Task(key, len, ()), "released")
        ts.priority = (0, 1, number)
        if is_second:
            ts.add_dependency(scheduler.tasks[made[-1]])
        made.append(key)
    wanted = made[1::2] if shape == "chains" else made
    for key in wanted:
        scheduler.tasks[key].who_wants = {client}
        client.wants_what.add(scheduler.tasks[key])
    scheduler.transitions(dict.fromkeys(reversed(made), "waiting"), "submitted")
    scheduler.stimulus_queue_slots_maybe_opened(stimulus_id="submitted")
    return wanted


async def finish(on: Running) -> int:
    """Let the workers be done with all that they are sent, in turn; return how many tasks that were."""
    done, busy = 0, True
    while busy:
        busy = False
        for address, inbox in on.sent.items():
            if not inbox.tasks:
                continue
            busy = True
            message = inbox.tasks.popleft()
            now = time.time()
            spans = [{"action": "compute", "start": now - 2e-5, "stop": now - 1e-5}]
            on.scheduler.handle_task_finished(
                key=message["key"], worker=address, stimulus_id=f"done-{done}", run_id=message["run_id"], nbytes=16,
                startstops=spans, type=b"", typename="NoneType", thread=1, metadata={},
            )  # fmt: skip
            done += 1
            if done % BATCH == 0:
                await asyncio.sleep(0)
    return done


async def once(on: Running, shape: str, tasks: int, name: str) -> float:
    """Return the seconds of the scheduler's thread for each task, from its submission until it is forgotten."""
    gc.collect()
    start = time.thread_time()
    keys = submit(on.scheduler, shape, tasks, name)
    await asyncio.sleep(0)
    done = await finish(on)
    await asyncio.sleep(0)
    on.scheduler.client_releases_keys(keys=keys, client=CLIENT, stimulus_id="released")
    seconds = time.thread_time() - start
    if done != tasks or on.scheduler.tasks:
        raise RuntimeError(f"{done} of {tasks} tasks are done, {len(on.scheduler.tasks)} not forgotten")
    return seconds / tasks


async def measured(shape: str, tasks: int, rounds: int, workers: int = WORKERS) -> dict[str, list[float]]:
    """Return the seconds of a task of each contender, one number a round, in turn; the first round is a warm-up."""
    async with AsyncExitStack() as stack:
        running = {name: await started(stack, name, workers) for name in (STOCK, FERRO)}
        found: dict[str, list[float]] = {name: [] for name in running}
        for number in range(-1, rounds):
            for name in (STOCK, FERRO) if number % 2 else (FERRO, STOCK):
                seconds = await once(running[name], shape, tasks, f"r{number}")
                if number >= 0:
                    found[name].append(seconds)
        return found


# ---- calls -------------------------------------------------------------------------------------------------


async def calls(shape: str, tasks: int, workers: int = WORKERS) -> Counter[str]:
    """Return how often each Python function of dask_ferro, and whatever it calls, is called: by name."""
    counted: Counter[str] = Counter()
    ours: list[bool] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            code = frame.f_code
            is_ours = "dask_ferro" in code.co_filename
            ours.append(is_ours)
            if is_ours:
                place = Path(code.co_filename)
                counted[f"{place.parent.name}/{place.stem}.{code.co_qualname}"] += 1
        elif event == "return" and ours:
            ours.pop()
        elif event == "c_call" and ours and ours[-1]:
            counted[f"built-in {getattr(called, '__qualname__', called)}"] += 1

    async with AsyncExitStack() as stack:
        on = await started(stack, FERRO, workers)
        await once(on, shape, tasks, "warm")
        sys.setprofile(note)
        try:
            await once(on, shape, tasks, "counted")
        finally:
            sys.setprofile(None)
    return counted


# ---- all ---------------------------------------------------------------------------------------------------


def show(shape: str, found: Mapping[str, Sequence[float]], tasks: int) -> None:
    least = {name: min(seconds) for name, seconds in found.items()}
    rows = [
        (
            name,
            f"{1e6 * least[name]:.1f}",
            f"{1e6 * measure.Summary.of(seconds).median:.1f}",
            f"{1e6 * (least[name] - least[STOCK]):+.1f}",
            f"{least[name] / least[STOCK]:.3f}",
        )
        for name, seconds in found.items()
    ]
    columns = (shape, "least", "median", "more", "x stock")
    measure.show(f"{tasks:,} tasks on {WORKERS} workers: us of the scheduler's thread a task", columns, rows)


def show_calls(shape: str, counted: Counter[str], tasks: int) -> None:
    rows = [(name, f"{count / tasks:.2f}") for name, count in counted.most_common(LISTED)]
    total = sum(count for name, count in counted.items() if not name.startswith("built-in "))
    both = (f"{total / tasks:.1f} of Python", f"{(counted.total() - total) / tasks:.1f} built in")
    measure.show(f"{shape}: calls a task in dask_ferro ({', '.join(both)})", ("", "a task"), rows)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("What a task costs the scheduler's thread.", rounds=9)
    parser.add_argument("--tasks", type=int, default=3000)
    parser.add_argument("--only", choices=SHAPES, action="append", help="these shapes alone")
    parser.add_argument("--calls", action="store_true", help="count calls as well")
    options = parser.parse_args(arguments)
    logging.getLogger("distributed").setLevel(logging.WARNING)
    tasks, rounds = (400, 1) if options.toy else (options.tasks, options.rounds)
    record = measure.provenance(tasks=tasks, rounds=rounds, toy=options.toy, cores=os.cpu_count())
    record["results"] = {}
    for shape in options.only or SHAPES:
        found = asyncio.run(measured(shape, tasks, rounds))
        show(shape, found, tasks)
        record["results"][shape] = {name: measure.Summary.of(seconds) for name, seconds in found.items()}
        if options.calls:
            counted = asyncio.run(calls(shape, tasks))
            show_calls(shape, counted, tasks)
            record["results"][shape]["calls"] = {name: count / tasks for name, count in counted.items()}
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
