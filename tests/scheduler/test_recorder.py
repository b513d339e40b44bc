"""The log's rings, and traces of it: what Dask reports of a task, as spans, on real schedulers and workers."""

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
from dask_ferro.policy.events import StealCompleted
from dask_ferro.scheduler.log import Log, Ring
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.scheduler.recorder import trace_of
from dask_ferro.scheduler.scheduling import Scheduling
from dask_ferro.trace import Trace
from tests.waiting import finished


@contextmanager
def recorded(cluster: LocalCluster) -> Iterator[Client]:
    """A client of a cluster that is stock Dask, except that our plugin records."""
    with Client(cluster) as client:
        ff.install(client, stealing="none", placement=False, rank=False)
        records_of(client).record_for("the test", 1000)
        yield client
        ff.uninstall(client)


def records_of(client: Client) -> Log:
    records = part_of(client.cluster.scheduler, Scheduling).stealing.records
    assert isinstance(records, Log)
    return records


def traced(client: Client, since: float = 0.0) -> Trace:
    records, workers = records_of(client), client.cluster.scheduler.workers.values()
    threads = {ws.address: ws.nthreads for ws in workers}
    return trace_of(records.tasks.since()[0], records.stolen.since()[0], threads, since)


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


def arrived(key: Any, victim: str, thief: str, requested: float, started: float) -> StealCompleted:
    return StealCompleted(key, victim, thief, requested, started - requested)


def slept(seconds: float, *inputs: object) -> bytes:
    time.sleep(seconds)
    return bytes(1000)


def ran_in(number: int) -> int:
    time.sleep(0.02)
    return threading.get_ident()


def test_a_run_is_recorded_with_its_values(shared: LocalCluster, workers: list[str]) -> None:
    with recorded(shared) as client:
        a = client.submit(slept, 0.05, key="load-1", workers=[workers[0]])
        b = client.submit(slept, 0.05, a, key=("join", 0), workers=[workers[1]])
        finished(b)
        trace = traced(client)
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
    assert trace.busy_seconds == pytest.approx(sum(t.seconds for t in trace.tasks))


def test_a_worker_has_a_lane_for_each_thread(shared: LocalCluster, workers: list[str]) -> None:
    with recorded(shared) as client:
        futures = client.map(ran_in, range(20), workers=workers[:1])
        threads = dict(zip([f.key for f in futures], client.gather(futures), strict=True))
        spans = list(traced(client).of("compute"))
    assert {(s.worker, s.lane) for s in spans} == {(workers[0], 0), (workers[0], 1)}
    assert len({(threads[s.key], s.lane) for s in spans}) == 2


def test_since_cuts_and_sets_the_zero(shared: LocalCluster) -> None:
    with recorded(shared) as client:
        client.submit(slept, 0.01, key="before").result(timeout=60)
        since = time.time()
        client.submit(slept, 0.01, key="after").result(timeout=60)
        trace = traced(client, since)
    assert [t.key for t in trace.tasks] == ["after"]
    assert abs(trace.spans[0].start) < 1.0  # the worker estimates the clock of the scheduler


def test_it_records_while_somebody_wants_it(shared: LocalCluster) -> None:
    lengths = []
    with recorded(shared) as client:
        records = records_of(client)
        records.stop_for("the test")
        for act in (
            lambda: None,
            lambda: records.record_for("page", 2),
            lambda: records.record_for("trace", 5),
            lambda: records.stop_for("trace"),
            lambda: records.stop_for("trace"),
            lambda: records.stop_for("page"),
        ):
            act()
            client.gather(client.map(slept, [0.0] * 4, pure=False))
            lengths.append((records.tasks.length, len(traced(client).tasks)))
        assert records.tasks.total == 16
        assert records.recordings == {}
    assert lengths == [(0, 0), (2, 2), (5, 5), (2, 2), (2, 2), (0, 0)]


def test_a_task_that_ran_again_is_one_task_of_two_spans() -> None:
    with threads(2) as cluster, recorded(cluster) as client:
        name, first = next((n, w.address) for n, w in cluster.workers.items())
        lost = client.submit(slept, 0.01, key="lost", workers=[first], allow_other_workers=True)
        distributed.wait(lost, timeout=30)
        cluster.sync(cluster.workers[name].close, nanny=False)
        distributed.wait(client.submit(slept, 0.01, lost, key="after"), timeout=30)
        trace = traced(client)
        assert first not in {w.address for w in cluster.scheduler.workers.values()}
    assert trace.workers[first] == 2  # it has left, and ran a task
    assert [t.key for t in trace.tasks] == ["lost", "after"]
    assert [s.key for s in trace.of("compute")] == ["lost", "lost", "after"]


@pytest.mark.parametrize(
    ("length", "read", "wanted"),
    [
        pytest.param(5, 0, ([0, 1, 2, 3], 0), id="all, of a ring that has room"),
        pytest.param(5, 3, ([3], 0), id="those after a position"),
        pytest.param(5, 4, ([], 0), id="none, to a reader that has read all"),
        pytest.param(2, 0, ([2, 3], 2), id="the newest, and how many were dropped"),
        pytest.param(2, 1, ([2, 3], 1), id="of the dropped ones, those that were not read"),
        pytest.param(0, 0, ([], 0), id="none is kept or counted without a length"),
    ],
)
def test_a_reader_gets_what_is_new_and_how_many_it_missed(
    length: int, read: int, wanted: tuple[list[int], int]
) -> None:
    ring: Ring[int] = Ring(length)
    for number in range(4):
        ring.append(number)
    assert ring.since(read) == wanted
    ring.resize(10)  # brings nothing back
    assert ring.since(read) == wanted
    assert ring.newest == (3 if length else None)


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
    trace = trace_of([], [arrived(*steal) for steal in steals], {"v": 2}, 9.0)
    assert [(s.key, s.prefix, s.worker, s.start, s.stop, s.source) for s in trace.of("steal")] == wanted
    assert trace.workers == {"v": 2, "t": 1}  # the thief has left


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
    with threads(1, worker_class=kind) as cluster, recorded(cluster) as client:
        now = time.time()
        client.submit(slept, 0.01, key="k").result(timeout=60)
        (span,) = traced(client, now - 5000.0).spans
    assert span.start - 5000.0 == pytest.approx(wanted, abs=10.0)
    assert 0.01 <= span.seconds < 60


def test_an_input_counts_once_whoever_sent_it(shared: LocalCluster, workers: list[str]) -> None:
    with recorded(shared) as client:
        a = client.submit(slept, 0.0, key="a", workers=workers[:1])
        b = client.submit(slept, 0.0, key="b", workers=workers[1:2])
        c = client.submit(slept, 0.0, a, b, key="c", workers=workers[2:])
        d = client.submit(slept, 0.0, a, c, key="d", workers=workers[2:])
        finished(d)
        moved = sorted((s.key, s.source, s.nbytes) for s in traced(client).of("transfer"))
    assert moved == [("c", workers[0], 1000), ("c", workers[1], 1000)]


@pytest.mark.cluster
def test_processes_report_on_the_schedulers_clock() -> None:
    processes = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with processes as cluster, recorded(cluster) as client:
        before = time.time()
        futures = client.map(slept, [0.05] * 8, pure=False)
        finished(client.submit(slept, 0.0, *futures, key="total"))
        seconds = time.time() - before
        trace = traced(client, before)
    assert len(trace.tasks) == 9
    assert all(-0.05 < s.start <= s.stop < seconds + 0.05 for s in trace.spans)
    at = next(s.worker for s in trace.of("compute") if s.key == "total")
    elsewhere = [s for s in trace.of("compute") if s.worker != at]
    assert sum(s.nbytes for s in trace.of("transfer")) == 1000 * len(elsewhere)
