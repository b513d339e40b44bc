"""Random graphs while workers join, leave, pause and are killed: right results, and nothing left in the books."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import dask
import pytest
from dask._task_spec import Task, TaskRef
from distributed import Status, wait

import dask_ferro as ff
from tests.clusters import running, tuned
from tests.waiting import ended, until

pytestmark = pytest.mark.cluster

GRAPHS = 120
CHECKED = {
    "distributed.scheduler.validate": True,
    "distributed.worker.validate": True,
    "distributed.scheduler.allowed-failures": 100,  # a task may be killed again and again without being at fault
    "distributed.comm.timeouts.connect": "10s",
}


def added(seconds, nbytes, own, *parts):
    """A task's value: its own number and those of its inputs; and some bytes to carry about."""
    time.sleep(seconds)
    return own + sum(part[0] for part in parts), bytes(nbytes)


def random_graph(seed):
    """Return a graph of layers, its annotations, its last keys and the values that these must have."""
    rng = random.Random(seed)
    tasks, values, layer = {}, {}, []
    for depth in range(rng.randint(2, 6)):
        kind = f"kind{rng.randrange(4)}"
        new = []
        for index in range(rng.randint(1, 12)):
            key = (f"{kind}-{seed:08x}{depth:02x}abcdef", index)
            parts = rng.sample(layer, min(len(layer), rng.randrange(4)))
            seconds = rng.choice((0, 0, 0.002, 0.01, 0.03))
            nbytes = rng.choice((0, 100, 100_000))
            tasks[key] = Task(key, added, seconds, nbytes, index, *map(TaskRef, parts))
            values[key] = index + sum(values[p] for p in parts)
            new.append(key)
        layer = new
    return tasks, layer, [values[k] for k in layer]


class Disturbance:
    """Disturbs a random worker every now and then, until it is stopped."""

    def __init__(self, client, cluster, seed):
        self.client, self.cluster, self.rng = client, cluster, random.Random(seed)
        self.done = {"kill": 0, "pause": 0, "scale": 0}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        ended(self._thread)

    def _run(self):
        first = self.rng.sample(
            sorted(self.done), len(self.done)
        )  # each at least once, however slow the machine
        while not self._over.wait(self.rng.uniform(0.3, 0.9)):
            what = first.pop() if first else self.rng.choice(("kill", "pause", "pause", "scale"))
            getattr(self, f"_{what}")()
            self.done[what] += 1

    def _processes(self):
        nannies = list(self.cluster.workers.values())
        return [n.process.pid for n in nannies if n.process is not None and n.process.pid]

    def _kill(self):
        pids = self._processes()
        if len(self.client.scheduler_info(n_workers=-1)["workers"]) > 1:  # the others may still be starting
            os.kill(self.rng.choice(pids), signal.SIGKILL)

    def _pause(self):
        addresses = sorted(self.client.scheduler_info(n_workers=-1)["workers"])
        if len(addresses) > 1:
            chosen = [self.rng.choice(addresses)]
            self.client.run(_set_status, "paused", workers=chosen, on_error="ignore", wait=True)
            self._over.wait(0.1)
            self.client.run(_set_status, "running", workers=chosen, on_error="ignore", wait=True)

    def _scale(self):
        self.cluster.scale(self.rng.randint(2, 5))


def _set_status(name, dask_worker):
    if dask_worker.status in (Status.paused, Status.running):
        dask_worker.status = Status[name]


def _books(dask_scheduler):
    stealing = dask_scheduler.extensions["stealing"]
    return {
        "in flight": len(stealing.in_flight),
        "entries": len(stealing.ledger.entries),
        "waiting": stealing.ledger.waiting,
        "rows": sorted(stealing.ledger.rows) == sorted(dask_scheduler.workers),
        "resources": {
            amount for w in dask_scheduler.workers.values() for amount in w.used_resources.values()
        },
        "processing": sum(len(w.processing) for w in dask_scheduler.workers.values()),
    }


def test_random_graphs_under_disturbance_are_right_and_leave_clean_books(caplog):
    with (
        dask.config.set(CHECKED),
        running(3, threads=2, resources={"R": 2}) as client,
        tuned(shortest=0.0, margin=0.0),
    ):
        ff.install(client)
        rng = random.Random(7)
        with Disturbance(client, client.cluster, 11) as disturbance:
            for seed in range(GRAPHS):
                tasks, keys, values = random_graph(seed)
                resources = {"R": 1} if rng.random() < 0.3 else None
                futures = client.get(tasks, keys, resources=resources, sync=False)
                wait(futures, timeout=120)
                got = client.gather(futures)
                assert [value for value, _ in got] == values, f"graph {seed}"
        assert min(disturbance.done.values()) > 0, disturbance.done
        until(
            lambda: not client.run_on_scheduler(_books)["entries"],
            "an empty ledger",
            seen=lambda: client.run_on_scheduler(_books),
        )
        assert client.run_on_scheduler(_books) == {
            "in flight": 0, "entries": 0, "waiting": 0, "rows": True, "resources": {0}, "processing": 0,
        }  # fmt: skip
        assert client.cluster.scheduler.extensions["stealing"].counts["confirmed"] > 0
    assert "AssertionError" not in caplog.text
    assert "Plugin failed" not in caplog.text
    ours = ("dask_ferro", "tornado.application")
    assert not [r for r in caplog.records if r.levelname == "ERROR" and r.name.startswith(ours)]
