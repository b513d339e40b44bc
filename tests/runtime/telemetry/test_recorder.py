"""Telemetry: what Dask reports of a task, as spans; on real schedulers and workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import distributed
import pytest
from distributed import Client, LocalCluster, Worker

import dask_ferro as ff
from dask_ferro.policy.events import Arrived, Settled
from dask_ferro.runtime.plugin.scheduler import Scheduling
from dask_ferro.runtime.scheduler_plugin import part_of
from dask_ferro.runtime.telemetry.recorder import Telemetry
from tests.waiting import finished


@contextmanager
def recorded(cluster: LocalCluster, telemetry: Telemetry) -> Iterator[Client]:
    """A client of a cluster that is stock Dask, except that our plugin feeds the telemetry."""
    with Client(cluster) as client:
        ff.install(client, stealing="none", placement=False, rank=False)
        part_of(cluster.scheduler, Scheduling).stealing.telemetry = telemetry
        for ws in cluster.scheduler.workers.values():
            telemetry.joined(ws.address, ws.nthreads)
        yield client
        ff.uninstall(client)


def threads(n_workers: int, **kwargs: Any) -> LocalCluster:
    """Workers of two threads each, in this process."""
    return LocalCluster(
        n_workers=n_workers, threads_per_worker=2, processes=False, dashboard_address=":0", **kwargs
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    with threads(3) as cluster:
        yield cluster


@pytest.fixture
def workers(shared: LocalCluster) -> list[str]:
    return sorted(w.address for w in shared.workers.values())


def arrived(key: Any, victim: str, thief: str, requested: float, started: float) -> Arrived:
    return Arrived(key, victim, thief, requested, started - requested, 1.0)


def slept(seconds: float, *inputs: object) -> bytes:
    time.sleep(seconds)
    return bytes(1000)


def ran_in(number: int) -> int:
    time.sleep(0.02)
    return threading.get_ident()


def test_a_run_is_recorded_with_its_values(shared: LocalCluster, workers: list[str]) -> None:
    telemetry = Telemetry()
    with recorded(shared, telemetry) as client:
        a = client.submit(slept, 0.05, key="load-1", workers=[workers[0]])
        b = client.submit(slept, 0.05, a, key=("join", 0), workers=[workers[1]])
        finished(b)
        trace = telemetry.trace()
    assert [(t.key, t.prefix, t.group, t.dependencies) for t in trace.tasks] == [
        ("load-1", "load", "load", ()),
        (("join", 0), "join", "join", ("load-1",)),
    ]
    assert all(0.05 <= t.seconds < 60 and t.nbytes == 1000 for t in trace.tasks)
    assert [(s.kind, s.key, s.worker, s.lane, s.nbytes, s.source) for s in trace.spans] == [
        ("compute", "load-1", workers[0], 0, 1000, ""),
        ("transfer", ("join", 0), workers[1], 0, 1000, workers[0]),
        ("compute", ("join", 0), workers[1], 0, 1000, ""),
    ]
    assert trace.workers == dict.fromkeys(workers, 2)
    assert trace.spans[0].start == 0.0
    assert trace.busy_seconds == pytest.approx(sum(t.seconds for t in trace.tasks))


def test_a_worker_has_a_lane_for_each_thread(shared: LocalCluster, workers: list[str]) -> None:
    telemetry = Telemetry()
    with recorded(shared, telemetry) as client:
        futures = client.map(ran_in, range(20), workers=workers[:1])
        threads = dict(zip([f.key for f in futures], client.gather(futures), strict=True))
        spans = list(telemetry.trace().of("compute"))
    assert {(s.worker, s.lane) for s in spans} == {(workers[0], 0), (workers[0], 1)}
    assert len({(threads[s.key], s.lane) for s in spans}) == 2


def test_since_cuts_and_sets_the_zero(shared: LocalCluster) -> None:
    telemetry = Telemetry()
    with recorded(shared, telemetry) as client:
        client.submit(slept, 0.01, key="before").result(timeout=60)
        since = time.time()
        client.submit(slept, 0.01, key="after").result(timeout=60)
        trace = telemetry.trace(since)
    assert [t.key for t in trace.tasks] == ["after"]
    assert 0 < trace.spans[0].start < 1.0


def test_it_records_while_somebody_wants_it(shared: LocalCluster) -> None:
    telemetry = Telemetry(length=0)
    lengths = []
    with recorded(shared, telemetry) as client:
        for act in (
            lambda: None,
            lambda: telemetry.record_for("page", 2),
            lambda: telemetry.record_for("trace", 5),
            lambda: telemetry.stop_for("trace"),
            lambda: telemetry.stop_for("trace"),
            lambda: telemetry.stop_for("page"),
        ):
            act()
            client.gather(client.map(slept, [0.0] * 4, pure=False))
            trace = telemetry.trace()
            lengths.append((telemetry.is_on, len(trace.tasks), len(trace.spans)))
    kept = [(False, 0, 0), (True, 2, 2), (True, 5, 5), (True, 2, 2), (True, 2, 2), (False, 0, 0)]
    assert lengths == kept
    assert telemetry.recorded == 16
    assert telemetry.wanted == ()


def test_a_task_that_ran_again_is_one_task_of_two_spans() -> None:
    telemetry = Telemetry()
    with threads(2) as cluster, recorded(cluster, telemetry) as client:
        name, first = next((n, w.address) for n, w in cluster.workers.items())
        lost = client.submit(slept, 0.01, key="lost", workers=[first], allow_other_workers=True)
        distributed.wait(lost, timeout=30)
        cluster.sync(cluster.workers[name].close, nanny=False)
        distributed.wait(client.submit(slept, 0.01, lost, key="after"), timeout=30)
        trace = telemetry.trace()
    assert [t.key for t in trace.tasks] == ["lost", "after"]
    assert [s.key for s in trace.of("compute")] == ["lost", "lost", "after"]


def test_a_copy_changes_no_more() -> None:
    telemetry = Telemetry()
    telemetry.joined("a", 1)
    telemetry.moved(arrived("k", "v", "a", 1.0, 2.0))
    copy, before = telemetry.copy(), telemetry.trace()
    telemetry.joined("b", 1)
    telemetry.left("a")
    telemetry.moved(arrived("k", "v", "a", 3.0, 4.0))
    assert copy.trace() == before
    assert telemetry.trace() != before


@pytest.mark.parametrize(
    ("who", "kept"),
    [
        pytest.param("few", 2, id="of a request for few, while others request more"),
        pytest.param("many", 5, id="of a request for many"),
        pytest.param(None, 5, id="of nobody's request"),
    ],
)
def test_a_copy_has_as_many_as_were_requested(who: str | None, kept: int) -> None:
    telemetry = Telemetry(0)
    telemetry.record_for("few", 2)
    telemetry.record_for("many", 100)
    mark = telemetry.mark()
    for i in range(5):
        telemetry.moved(arrived(f"k-{i}", "v", "a", float(i), i + 0.5))
    newest = [f"k-{i}" for i in range(5)][-kept:]
    assert [span.key for span in telemetry.copy(who).trace().spans] == newest
    assert telemetry.lost(mark, who) == (0, 5 - kept)


def test_workers_that_left_are_in_the_traces_of_what_they_ran() -> None:
    telemetry = Telemetry()
    telemetry.joined("stays", 2)
    telemetry.joined("leaves", 4)
    telemetry.joined("leaves-idle", 8)
    telemetry.moved(arrived("k", "stays", "leaves", 1.0, 2.0))
    telemetry.left("leaves")
    telemetry.left("leaves-idle")
    telemetry.left("never-came")
    assert telemetry.trace().workers == {"stays": 2, "leaves": 4}


@pytest.mark.parametrize(
    ("steals", "wanted"),
    [
        pytest.param(
            [(("p", 0), "v", "t", 10.0, 10.5)],
            [(("p", 0), "p", "t", 1.0, 1.5, "v")],
            id="a steal is in the trace",
        ),
        pytest.param(
            [("p-1", "v", "t", 8.0, 8.5), ("p-1", "v", "t", 10.0, 10.5)],
            [("p-1", "p", "t", 1.0, 1.5, "v")],
            id="what began before the recording is left out",
        ),
        pytest.param(
            [("k", "v", "t", 10.0, 10.5)],
            [("k", "k", "t", 1.0, 1.5, "v")],
            id="of a task that is not recorded",
        ),
    ],
)
def test_steals_are_spans_of_the_thief(steals: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> None:
    telemetry = Telemetry()
    for steal in steals:
        telemetry.moved(Settled(steal[0], "v", "t", "confirmed", 10.0, 1.0, 0.5))  # it is not done yet
        telemetry.moved(arrived(*steal))
    assert next(telemetry.trace().of("steal")).start == 0.0
    spans = telemetry.trace(9.0).of("steal")
    assert [(s.key, s.prefix, s.worker, s.start, s.stop, s.source) for s in spans] == wanted


class Shifted(Worker):
    """A worker that believes the scheduler's clock to be elsewhere."""

    delay = 0.0

    @property
    def scheduler_delay(self) -> float:
        return self.delay

    @scheduler_delay.setter
    def scheduler_delay(self, value: float) -> None:
        """Dask's own measurement is not taken."""


class Behind(Shifted):
    delay = -1000.0


class Ahead(Shifted):
    delay = 1000.0


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        pytest.param(Behind, -1000.0, id="workers shift their times themselves: not corrected twice"),
        pytest.param(Ahead, 0.0, id="no task ends after the scheduler heard of it"),
    ],
)
def test_clocks(kind: type[Worker], wanted: float) -> None:
    telemetry = Telemetry()
    with threads(1, worker_class=kind) as cluster, recorded(cluster, telemetry) as client:
        now = time.time()
        client.submit(slept, 0.01, key="k").result(timeout=60)
        (span,) = telemetry.trace(now - 5000.0).spans
    assert span.start - 5000.0 == pytest.approx(wanted, abs=10.0)
    assert 0.01 <= span.seconds < 60


def test_an_input_counts_once_whoever_sent_it(shared: LocalCluster, workers: list[str]) -> None:
    telemetry = Telemetry()
    with recorded(shared, telemetry) as client:
        a = client.submit(slept, 0.0, key="a", workers=workers[:1])
        b = client.submit(slept, 0.0, key="b", workers=workers[1:2])
        c = client.submit(slept, 0.0, a, b, key="c", workers=workers[2:])
        d = client.submit(slept, 0.0, a, c, key="d", workers=workers[2:])
        finished(d)
        moved = sorted((s.key, s.source, s.nbytes) for s in telemetry.trace().of("transfer"))
    assert moved == [("c", workers[0], 1000), ("c", workers[1], 1000)]


@pytest.mark.cluster
def test_processes_report_on_the_schedulers_clock() -> None:
    telemetry = Telemetry()
    processes = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with processes as cluster, recorded(cluster, telemetry) as client:
        before = time.time()
        futures = client.map(slept, [0.05] * 8, pure=False)
        finished(client.submit(slept, 0.0, *futures, key="total"))
        seconds = time.time() - before
        trace = telemetry.trace(before)
    assert len(trace.tasks) == 9
    assert all(-0.05 < s.start <= s.stop < seconds + 0.05 for s in trace.spans)
    at = next(s.worker for s in trace.of("compute") if s.key == "total")
    elsewhere = [s for s in trace.of("compute") if s.worker != at]
    assert sum(s.nbytes for s in trace.of("transfer")) == 1000 * len(elsewhere)
