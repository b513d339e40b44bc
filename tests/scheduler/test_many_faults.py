"""Random graphs under kills, pauses, joins and cancels while tasks move all the time: nothing wrong, lost, or leaked.

The workers are in this process, over TCP, so that a graph takes a fraction of a second and the scheduler's books can be
held against its state at any moment.  `test_faults` does the same with processes that are killed.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import dask
import pytest
from distributed import Client, Scheduler, Status, Worker

import dask_ferro as ff
from tests.clusters import tuned
from tests.scheduler import test_faults
from tests.scheduler.test_faults import added, random_graph
from tests.waiting import BOUND_S, until_async

CHECKED = {
    **test_faults.CHECKED,
    "distributed.scheduler.allowed-failures": 1000,
    "distributed.worker.memory.target": False,  # all that this process holds would count as each worker's
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
}
# Workers that there are at least and at most; seconds between two faults.
FEWEST, MOST = 2, 5
PAUSE = (0.05, 0.25)
# Tasks beside each graph, on one worker, that the others take from it.
PILE = 16
# No graph takes longer by far: one that does hangs.
PATIENCE = 120.0


class Faults:
    """Kills, pauses, adds workers and cancels, one thing after the other, in an order that a seed gives."""

    def __init__(self, scheduler, client, seed):
        self.scheduler, self.client, self.rng = scheduler, client, random.Random(seed)
        self.workers = []
        self.done = Counter()
        self.closing = set()
        self.is_over = False

    async def join(self):
        self.workers.append(await Worker(self.scheduler.address, nthreads=2, resources={"R": 2}))

    async def kill(self):
        """Cut a worker's connection, in the midst of whatever it sends, and end it."""
        if len(self.workers) > FEWEST:
            worker = self.workers.pop(self.rng.randrange(len(self.workers)))
            worker.batched_stream.comm.abort()
            task = asyncio.create_task(worker.close(executor_wait=False))
            self.closing.add(task)
            task.add_done_callback(self.closing.discard)
            await self.join()

    async def leave(self):
        if len(self.workers) > FEWEST:
            worker = self.workers.pop(self.rng.randrange(len(self.workers)))
            await self.client.retire_workers([worker.address])
            await worker.close()

    async def pause(self):
        worker = self.rng.choice(self.workers)
        if worker.status == Status.running:
            worker.status = Status.paused
            await asyncio.sleep(0.03)
            if worker.status == Status.paused:
                worker.status = Status.running

    async def cancel(self):
        """Submit a graph, and want it no more when it has begun."""
        tasks, keys, _ = random_graph(self.rng.randrange(2**31, 2**32))
        futures = self.client.get(tasks, keys, sync=False)
        await asyncio.sleep(self.rng.uniform(0.0, 0.05))
        await self.client.cancel(futures)

    async def run(self):
        while not self.is_over:  # cut off in the midst of one, its frames would keep futures
            await asyncio.sleep(self.rng.uniform(*PAUSE))
            what = self.rng.choice(("kill", "leave", "pause", "pause", "cancel", "join"))
            if what == "join" and len(self.workers) >= MOST:
                continue
            await getattr(self, what)()
            self.done[what] += 1
            check(self.scheduler)

    async def close(self):
        await asyncio.gather(*(worker.close(executor_wait=False) for worker in self.workers), *self.closing)


def check(scheduler):
    """Assert that the ledger says what the scheduler's state says: at any moment, between two messages."""
    stealing = scheduler.extensions["stealing"]
    ledger = stealing.ledger
    processing = {
        ts.key: ws.address
        for ws in scheduler.workers.values()
        for ts in ws.processing
        if ts not in ws.long_running
    }
    assert {key: entry.worker.address for key, entry in ledger.entries.items()} == processing
    assert sorted(ledger.rows) == sorted(scheduler.workers)
    on_the_way = {key for key, entry in ledger.entries.items() if entry.state == "requested"}
    assert set(ledger.requests) == on_the_way
    standing = [entry.key for row in ledger.rows.values() for entry in row.running.values()]
    waiting = [entry.key for row in ledger.rows.values() for _, _, entry in row.queue]
    assert sorted(map(str, [*standing, *waiting, *on_the_way])) == sorted(map(str, ledger.entries))
    assert ledger.waiting == len(waiting)
    announced = Counter(request.thief.address for request in ledger.requests.values())
    assert {a: row.incoming for a, row in ledger.rows.items() if row.incoming} == {
        a: n for a, n in announced.items() if a in ledger.rows
    }
    for row in ledger.rows.values():
        assert row.waiting_seconds == pytest.approx(sum(e.seconds for _, _, e in row.queue), abs=1e-6)


async def quiet(scheduler):
    """Wait until nothing is left of all that was submitted; where Dask gathered again, cycles hold the futures."""
    stealing = scheduler.extensions["stealing"]

    def is_left():
        gc.collect()
        return scheduler.tasks or stealing.in_flight or stealing.ledger.entries

    await until_async(
        lambda: not is_left(),
        "the end of all tasks and moves",
        every=0.1,
        seen=lambda: f"{len(scheduler.tasks)} tasks, {len(stealing.in_flight)} moves",
    )


async def soak(graphs, seed):
    """Run graphs, and return how many tasks moved and what faults there were."""
    rng = random.Random(seed)
    async with (
        Scheduler(port=0, dashboard_address=":0") as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        with tuned(shortest=0.0, margin=0.0, coalesce=0.0):
            await ff.install(client)
        faults = Faults(scheduler, client, seed)
        for _ in range(FEWEST + 1):
            await faults.join()
        at_work = asyncio.create_task(faults.run())
        try:
            for number in range(graphs):
                tasks, keys, values = random_graph(seed * 10_000 + number)
                pile = rng.choice(list(scheduler.workers))  # it all begins there, so that the others steal
                options = {"workers": [pile], "allow_other_workers": True} if rng.random() < 0.8 else {}
                options["resources"] = {"R": 1} if rng.random() < 0.2 else None
                futures = client.get(tasks, keys, sync=False, **options)
                where = {"workers": [pile], "allow_other_workers": True}
                beside = client.map(added, [0.01] * PILE, [100] * PILE, range(PILE), pure=False, **where)
                got = await asyncio.wait_for(client.gather([*futures, *beside]), PATIENCE)
                assert [value for value, _ in got] == [*values, *range(PILE)], f"graph {number}"
                assert not at_work.done(), at_work.exception()
                del futures, beside, got
            faults.is_over = True
            await asyncio.wait({at_work}, timeout=BOUND_S)
            assert at_work.done(), f"waited {BOUND_S:g} s for the faults to end"
            await quiet(scheduler)
            check(scheduler)
            stealing = scheduler.extensions["stealing"]
            assert {
                w: sum(ws.used_resources.values()) for w, ws in scheduler.workers.items()
            } == dict.fromkeys(scheduler.workers, 0)
            assert not stealing.in_flight
            return stealing.counts["confirmed"], faults.done
        finally:
            at_work.cancel()
            await faults.close()


def run(graphs, seed, caplog):
    with dask.config.set(CHECKED):
        moved, faults = asyncio.run(soak(graphs, seed))
    print(f"{graphs} graphs, {moved:.0f} tasks moved, {dict(faults)}")
    for wrong in ("AssertionError", "Plugin failed", "lost track"):
        assert wrong not in caplog.text
    return moved, faults


@pytest.mark.cluster
def test_a_few_random_graphs_under_faults(caplog):
    moved, faults = run(15, 3, caplog)
    assert moved >= 30
    assert sum(faults.values()) >= 5


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_five_hundred_random_graphs_under_faults(caplog):
    moved, faults = run(500, 5, caplog)
    assert moved >= 2000
    assert min(faults[what] for what in ("kill", "leave", "pause", "cancel", "join")) >= 10, faults
