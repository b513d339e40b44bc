"""Recorded decisions of real clusters: replayed to the same moves, bounded, closed, and never in the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

import dask_ferro as ff
from dask_ferro.policy.stealing.decision import StealingDecision, replay
from dask_ferro.policy.stealing.policies import name_of
from dask_ferro.scheduler import decision_log
from dask_ferro.scheduler.decision_log import DecisionLog
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.scheduler.scheduling import Scheduling
from dask_ferro.scheduler.stealing import Stealing
from tests.clusters import running
from tests.policy.facts import task
from tests.policy.stealing.test_decisions import of_one_task
from tests.waiting import finished

ONE = of_one_task(task("x"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with running(3, processes=False) as client:
        yield client.cluster


@pytest.fixture
def client(cluster: Any) -> Any:
    with Client(cluster) as client:
        yield client
        ff.uninstall(client)


def slept(seconds: float, number: int, *inputs: int) -> int:
    time.sleep(seconds)
    return number


def pile(client: Client, count: int = 40) -> list[int]:
    """Compute tasks that would rather run on one worker, and readers of them."""
    where: Any = {"workers": [min(client.cluster.scheduler.workers)], "allow_other_workers": True}
    first = [client.submit(slept, 0.01, n, pure=False, **where) for n in range(count)]
    last = [client.submit(slept, 0.002, n, *first[n : n + 2], pure=False) for n in range(count - 2)]
    finished([*first, *last])
    return list(client.gather(last))


def stealing_of(client: Client) -> Stealing:
    found = part_of(client.cluster.scheduler, Scheduling).stealing
    assert isinstance(found, Stealing)
    return found


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize("policy", ["informed", "last-victim"])
def test_the_plugins_decisions_are_those_of_their_replay(client: Client, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "run.decisions"
    ff.install(client, stealing=policy, record=str(path))
    assert pile(client) == list(range(38))
    requests = stealing_of(client).counts["requests"]
    ff.uninstall(client)
    lines = lines_of(path)
    same = replay(lines, path.name)
    assert (same.decisions, same.difference) == (len(lines), None)
    assert same.moves >= requests > 0  # a move of a task that is gone meanwhile is not requested


def test_a_recording_has_the_configured_policy_and_goes_on_in_the_same_file(
    client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "run.decisions"
    counts = []
    with dask.config.set({"ferro.scheduler.stealing": "last-victim", "ferro.scheduler.record": str(path)}):
        for _ in range(2):
            ff.install(client)
            pile(client, 10)
            ff.uninstall(client)
            counts.append(len(lines_of(path)))
    assert 0 < counts[0] < counts[1]
    assert name_of(StealingDecision.of_line(lines_of(path)[0]).policy) == "last-victim"
    assert replay(lines_of(path), path.name).difference is None


def test_nothing_is_recorded_unless_it_is_asked_for(client: Client) -> None:
    ff.install(client)
    stealing = stealing_of(client)
    assert (stealing.core.on_decision, stealing.decision_log) == (None, None)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param("none/run.decisions", "No such file or directory", id="no folder"),
        pytest.param(".", "Is a directory", id="a folder"),
    ],
)
def test_a_path_that_cannot_be_written_is_told_once_and_the_scheduler_goes_on(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, wanted: str
) -> None:
    with caplog.at_level(logging.WARNING, decision_log.__name__):
        ff.install(client, record=str(tmp_path / name))
        assert pile(client, 10) == list(range(8))
        ff.uninstall(client)
    (told,) = [one.getMessage() for one in caplog.records if "records no more decisions" in one.getMessage()]
    assert wanted in told


def test_a_scheduler_that_closes_has_written_all(tmp_path: Path) -> None:
    path = tmp_path / "run.decisions"
    with running(2, processes=False) as client:
        ff.install(client, record=str(path))
        pile(client, 10)
        stealing = stealing_of(client)
    taken = sum(len(StealingDecision.of_line(line).moves) for line in lines_of(path))
    assert taken >= stealing.counts["requests"] > 0


# -- the log alone -------------------------------------------------------------------------------------------


def test_a_recording_that_is_full_ends_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.decisions"
    monkeypatch.setattr(decision_log, "_MAX_BYTES", 3 * len(ONE.line()))
    log = DecisionLog(str(path))
    with caplog.at_level(logging.WARNING, decision_log.__name__):
        for _ in range(9):
            log.put(ONE)
        log.close()
    assert len(lines_of(path)) == 2
    (told,) = [one.getMessage() for one in caplog.records]
    assert told.startswith(f"dask_ferro records no more decisions in {path}: it has the ")


def test_decisions_that_the_thread_has_no_time_for_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "_MAX_PENDING", 10)
    goes_on = Event()
    write = DecisionLog._write

    def slow(log: DecisionLog) -> None:
        goes_on.wait(60)
        write(log)

    monkeypatch.setattr(DecisionLog, "_write", slow)
    log = DecisionLog(str(tmp_path / "run.decisions"))
    for _ in range(12):
        log.put(ONE)
    goes_on.set()
    log.close()
    assert replay(lines_of(tmp_path / "run.decisions"), "run").decisions == 10


def test_a_full_disk_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a disk without room")
    log = DecisionLog("/dev/full")
    with caplog.at_level(logging.WARNING, decision_log.__name__):
        log.put(ONE)
        log.put(ONE)
        log.close()
    assert [one.getMessage() for one in caplog.records] == [
        "dask_ferro records no more decisions in /dev/full: [Errno 28] No space left on device"
    ]


def test_a_value_that_no_line_has_ends_the_recording_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = DecisionLog(str(tmp_path / "run.decisions"))
    with caplog.at_level(logging.WARNING, decision_log.__name__):
        log.put(of_one_task(task(object())))
        log.put(ONE)
        log.close()
    (told,) = [one.getMessage() for one in caplog.records]
    assert "got a object, which a recorded decision cannot have" in told
