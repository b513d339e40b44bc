"""What the controller makes of workers that pause and of device classes that were seen, and a cluster that pauses."""

from __future__ import annotations

from typing import Any

import dask
import pytest
from distributed import Status, Worker, wait

import dask_ferro as ff
from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.runtime.elastic import facts
from dask_ferro.runtime.elastic.facts import PAUSED, staffed
from dask_ferro.runtime.site_jobs import SiteJob
from tests.clusters import running
from tests.waiting import finished

NOW = 1000.0
WORKER = {
    "threads": 2, "status": "running", "idle_for": 7.0, "paused_for": 0.0, "processing": 0, "nbytes": 100,
    "unique": 60, "free": 900, "ends_in": None, "resources": {}, "device": "cpu", "host": "h",
}  # fmt: skip
SHORT = {"status": "paused", "paused_for": PAUSED / 2}
LONG = {"status": "paused", "paused_for": PAUSED}
LEAVES = {"status": "closing_gracefully"}


class Site:
    """The pools of a site, which declares nothing of their workers."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def pools(self) -> tuple[Pool, ...]:
        return tuple(Pool(name) for name in self._names)


def job(name: str, pool: str, count: int) -> SiteJob:
    return SiteJob(name, pool, "", "running", tuple(f"{name}-{n}" for n in range(count)), NOW - 20, 0)


@pytest.mark.parametrize(
    ("workers", "threads", "stalled", "free"),
    [
        pytest.param([{}, {}], 4, False, 1800, id="both work"),
        pytest.param([{}, SHORT], 4, False, 900, id="a short pause costs no threads, but takes no data"),
        pytest.param([{}, LONG], 2, False, 900, id="a long one costs its threads"),
        pytest.param([LONG, LONG], 0, True, 0, id="if all pause for long the job does nothing"),
        pytest.param([LONG, SHORT], 2, False, 0, id="not while one of them has just begun to"),
        pytest.param([LONG, LEAVES], 0, True, 900, id="who leaves does nothing either"),
        pytest.param([LEAVES, LEAVES], 0, False, 1800, id="those that leave are not those that pause"),
        pytest.param([], 0, False, 0, id="a job without workers is on its way"),
    ],
)
def test_a_worker_that_pauses_for_long_has_no_threads(
    workers: list[dict[str, Any]], threads: int, stalled: bool, free: int
) -> None:
    rows = {f"tcp://{n}": WORKER | told | {"name": f"a-{n}"} for n, told in enumerate(workers)}
    facts = {"workers": rows, "demands": []}
    (found,) = staffed(NOW, Site("default"), [job("a", "default", 2)], facts, ()).jobs
    assert (found.threads, found.stalled, found.free) == (threads, stalled, free)


def test_nothing_is_known_of_a_pool_that_has_the_name_of_one_that_was_removed() -> None:
    demand = {
        "profile": ((1.0, 4.0),), "longest": 1.0, "resources": {"disk": 1.0}, "workers": None, "device": None,
        "speeds": {},
    }  # fmt: skip
    site, rows = Site("cpu", "big"), {"tcp://1": WORKER | {"name": "b-0", "resources": {"disk": 2.0}}}

    def admitted(jobs: list[SiteJob], workers: dict[str, Any]) -> frozenset[str] | None:
        (found,) = staffed(NOW, site, jobs, {"workers": workers, "demands": [demand]}, ()).demands
        return found.pools

    assert admitted([job("b", "big", 1)], rows) == {"big"}
    assert admitted([], {}) == {"big"}
    site._names = ("cpu",)
    assert admitted([], {}) == frozenset()
    site._names = ("cpu", "big")
    assert admitted([], {}) == frozenset()


def test_the_device_class_of_a_pool_is_known_when_its_workers_have_left() -> None:
    """Else a cpu worker would be asked for, again and again, for a task that requires a gpu."""
    demand = {
        "profile": ((1.0, 4.0),), "longest": 1.0, "resources": {}, "workers": None, "device": "gpu", "speeds": {},
    }  # fmt: skip
    site, both = Site("cpu", "gpu"), [job("a", "cpu", 1), job("b", "gpu", 1)]
    rows = {"tcp://1": WORKER | {"name": "a-0"}, "tcp://2": WORKER | {"name": "b-0", "device": "gpu"}}

    def admitted(jobs: list[SiteJob], workers: dict[str, Any]) -> frozenset[str] | None:
        (found,) = staffed(NOW, site, jobs, {"workers": workers, "demands": [demand]}, ()).demands
        return found.pools

    assert admitted([], {}) is None  # nothing is known: any may be it
    assert admitted(both[:1], {"tcp://1": rows["tcp://1"]}) == {"gpu"}
    assert admitted([], {}) == {"gpu"}
    assert admitted(both, rows) == {"gpu"}
    site = Site("cpu")  # another one
    assert admitted([], {}) is None


def pause(dask_worker: Worker) -> None:
    dask_worker.status = Status.paused


@pytest.mark.cluster
def test_tasks_that_nobody_takes_as_all_workers_pause_are_run_by_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, five tiny tasks were not worth another job, and waited for ever."""
    monkeypatch.setattr(facts, "PAUSED", 0.5)
    with (
        dask.config.set({"distributed.worker.memory.pause": False}),  # it would resume by itself
        running(1, processes=False) as client,
    ):
        client.cluster.adapt(Adaptive=ff.Elastic, minimum=1, maximum=4, interval=0.1)
        held = client.submit(bytes, 1000)
        finished([held])
        client.run(pause)
        futures = client.map(int, range(5), pure=False)
        done, _ = wait(futures, timeout=20)
        assert len(done) == 5
        assert len(client.cluster.scheduler.workers) == 2
