"""What scaling reads of what a scheduler and a site say, and a cluster all of whose workers pause."""

from __future__ import annotations

from math import inf
from typing import Any

import dask
import pytest
from distributed import Status, Worker, wait

import dask_ferro as ff
from dask_ferro.elastic import facts
from dask_ferro.elastic.facts import SPILL_TIME, scaling_facts
from dask_ferro.elastic.site_jobs import SiteJob
from dask_ferro.policy.scaling.facts import LEAVING, PENDING, RUNNING, Pool
from tests.clusters import running
from tests.waiting import finished

NOW = 1000.0
WORKER = {
    "threads": 2, "status": "running", "idle_for": 7.0, "paused_for": 0.0, "processing": 0, "nbytes": 100,
    "unique": 60, "free": 900, "ends_in": None, "resources": {}, "device": "cpu", "host": "h",
}  # fmt: skip
SHORT = {"status": "paused", "paused_for": SPILL_TIME / 2}
LONG = {"status": "paused", "paused_for": SPILL_TIME}
LEAVES = {"status": "closing_gracefully"}
NEEDS = {"resources": {}, "workers": None, "device": None}


def job(name: str, pool: str, count: int) -> SiteJob:
    return SiteJob(name, pool, "running", tuple(f"{name}-{n}" for n in range(count)), NOW - 20, 0)


class Site:
    """The pools of a site, with the resources that each declares of its workers."""

    def __init__(self, **declared: dict[str, float]) -> None:
        self.declared = declared

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(Pool(name) for name in self.declared)

    def resources(self, pool: str) -> dict[str, float]:
        return self.declared[pool]


def rows(jobs: list[SiteJob], workers: dict[str, Any], leaving: tuple[str, ...] = ()) -> Any:
    return scaling_facts(NOW, Site(default={}), jobs, {"workers": workers, "demands": []}, leaving).jobs


def admitted(site: Site, needs: dict[str, Any], jobs: list[SiteJob], workers: dict[str, Any]) -> Any:
    """Which pools may run a demand with these needs; None: any."""
    row = {"profile": ((1.0, 4.0),), "longest": 1.0, "speeds": {}, **NEEDS, **needs}
    (found,) = scaling_facts(NOW, site, jobs, {"workers": workers, "demands": [row]}, ()).demands
    assert found.profile == row["profile"]
    return found.pools


def test_a_job_is_what_all_its_processes_are():
    job = SiteJob("a", "default", "running", ("a-0", "a-1"), NOW - 20, 3)
    workers = {
        "tcp://1": WORKER | {"name": "a-0"},
        "tcp://2": WORKER | {"name": "a-1", "idle_for": 0.0, "ends_in": 50.0},
        "tcp://3": WORKER | {"name": "b"},
    }
    (row,) = rows([job], workers)
    assert row._asdict() == {
        "name": "a", "pool": "default", "state": RUNNING, "age": 20.0, "order": 3, "idle_for": 0.0, "ends_in": 50.0,
        "nbytes": 200, "unique": 120, "free": 1800, "threads": 4, "held": False, "stalled": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "leaving", "expected"),
    [
        pytest.param("submitting", (), PENDING, id="one that is not submitted yet is pending"),
        pytest.param("pending", (), PENDING, id="pending"),
        pytest.param("running", ("a",), LEAVING, id="one that leaves is leaving, whatever its site says"),
    ],
)
def test_states(state, leaving, expected):
    (row,) = rows([SiteJob("a", "default", state, ("a",), NOW, 0)], {}, leaving)
    assert (row.state, row.idle_for, row.ends_in) == (expected, 0.0, inf)


@pytest.mark.parametrize(
    ("needs", "wanted"),
    [
        pytest.param({}, None, id="who needs nothing may go anywhere"),
        pytest.param({"resources": {"GPU": 1}}, {"gpu"}, id="resources say which pool"),
        pytest.param({"resources": {"GPU": 2}}, set(), id="more than any worker has: nobody"),
        pytest.param({"device": "gpu"}, {"gpu"}, id="so does a device class"),
        pytest.param({"workers": ["tcp://1"]}, {"cpu"}, id="and workers by address"),
    ],
)
def test_demands_say_which_pools_may_run_them(needs, wanted):
    workers = {
        "tcp://1": WORKER | {"name": "cpu-0"},
        "tcp://2": WORKER | {"name": "gpu-0", "device": "gpu", "resources": {"GPU": 1}},
    }
    jobs = [job("cpu", "cpu", 1), job("gpu", "gpu", 1)]
    assert admitted(Site(cpu={}, gpu={"GPU": 1}), needs, jobs, workers) == wanted


SHUT = Pool("cpu", closed="no more", closed_until=NOW + 30, output="    a\n    b")


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
    told = {f"tcp://{n}": WORKER | told | {"name": f"a-{n}"} for n, told in enumerate(workers)}
    (found,) = rows([job("a", "default", 2)], told)
    assert (found.threads, found.stalled, found.free) == (threads, stalled, free)


def test_the_device_class_of_a_pool_is_known_when_its_workers_have_left() -> None:
    """Else a cpu worker would be asked for, again and again, for a task that requires a gpu."""
    site, needs, both = Site(cpu={}, gpu={}), {"device": "gpu"}, [job("a", "cpu", 1), job("b", "gpu", 1)]
    workers = {"tcp://1": WORKER | {"name": "a-0"}, "tcp://2": WORKER | {"name": "b-0", "device": "gpu"}}
    assert admitted(site, needs, [], {}) is None  # nothing is known: any may be it
    assert admitted(site, needs, both[:1], {"tcp://1": workers["tcp://1"]}) == {"gpu"}
    assert admitted(site, needs, [], {}) == {"gpu"}
    assert admitted(site, needs, both, workers) == {"gpu"}
    assert admitted(Site(cpu={}), needs, [], {}) is None  # another one


def pause(dask_worker: Worker) -> None:
    dask_worker.status = Status.paused


@pytest.mark.cluster
def test_tasks_that_nobody_takes_as_all_workers_pause_are_run_by_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, five tiny tasks were not worth another job, and waited for ever."""
    monkeypatch.setattr(facts, "SPILL_TIME", 0.5)
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
