"""Recordings of events on real clusters: replayed to the same instructions, bounded, closed, and never in the way."""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import pytest
from distributed import Client, LocalCluster

import dask_ferro as ff
from dask_ferro.errors import ConfigError
from dask_ferro.policy.events import Joined, Tick
from dask_ferro.policy.recording.recorder import Record, Recorder
from dask_ferro.policy.recording.replay import replay
from dask_ferro.runtime.plugin import event_log
from dask_ferro.runtime.plugin.event_log import EventLog, EventsInMemory, in_file
from dask_ferro.runtime.plugin.scheduler import NAME
from dask_ferro.runtime.plugin.stealing import Stealing
from tests.clusters import running, tuned
from tests.policy.test_scheduling_core import Scene
from tests.waiting import finished, until

HEAD: dict[str, Any] = {"ferro-events": 1}


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


def held(number: int, gate: str) -> int:
    until(Path(gate).exists, "the test goes on")
    return number


def preferred(client: Client) -> dict[str, Any]:
    return {"workers": [min(client.cluster.scheduler.workers)], "allow_other_workers": True}


def pile(client: Client, count: int = 40) -> list[int]:
    """Compute tasks that would rather run on one worker, and readers of them."""
    where = preferred(client)
    first = [client.submit(slept, 0.01, n, pure=False, **where) for n in range(count)]
    last = [client.submit(slept, 0.002, n, *first[n : n + 2], pure=False) for n in range(count - 2)]
    finished([*first, *last])
    return list(client.gather(last))


def stealing_of(client: Client) -> Stealing:
    found = client.cluster.scheduler.plugins[NAME].stealing
    assert isinstance(found, Stealing)
    return found


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def asks(lines: Any) -> int:
    return "".join(lines).count('{"is":"Ask"')


# -- on a cluster --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["informed", "last-victim"])
def test_a_recorded_run_is_decided_upon_again_to_the_same(
    client: Client, tmp_path: Path, policy: str
) -> None:
    path = tmp_path / "run.events"
    ff.install(client, stealing=policy, record=str(path))
    assert pile(client) == list(range(38))
    requests = stealing_of(client).counts["requests"]
    ff.uninstall(client)
    lines = lines_of(path)
    found = replay(lines)
    assert (found.policy, found.events, found.difference, found.cut) == (policy, len(lines) - 1, None, False)
    assert json.loads(lines[0])["core"] is None
    assert asks(lines) == requests > 0


def test_a_recording_that_begins_in_the_midst_is_decided_upon_again(client: Client, tmp_path: Path) -> None:
    ff.install(client)
    pile(client)
    stealing = stealing_of(client)
    gate = tmp_path / "gate"
    running = client.map(held, range(30), gate=str(gate), pure=False, **preferred(client))
    until(lambda: stealing.ledger.waiting > 0, "tasks in queues", seen=lambda: stealing.ledger.waiting)
    handled = stealing._handle
    with ff.trace(client, events=True) as t:
        assert stealing._handle != handled
        gate.touch()
        finished(running)
        pile(client)
        with pytest.raises(ConfigError, match="when a block"):
            assert t.events
    assert stealing._handle == handled == stealing.core.handle
    assert stealing.core.facts is stealing.shown
    head = json.loads(t.events[0])
    assert len([kind for kind, _ in head["core"]["rows"] if kind == "WorkerLoad"]) == 3
    assert "Entry" in {kind for kind, _ in head["core"]["rows"]}
    found = replay(t.events)
    assert (found.events, found.difference) == (len(t.events) - 1, None)
    assert asks(t.events) > 0
    assert any(span.kind == "steal" for span in t.trace.spans)


def test_the_head_has_the_parameters(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    with tuned(learning={"guess": 2.0}, plenty=0.05):
        ff.install(client, record=str(path))
    ff.uninstall(client)
    head = json.loads(lines_of(path)[0])
    assert (head["learning"]["guess"], head["parameters"]["plenty"]) == (2.0, 0.05)
    assert replay(lines_of(path)).difference is None


def test_two_recordings_are_made_at_once(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "all.events"
    ff.install(client, record=str(path))
    pile(client, 10)
    with ff.trace(client, events=True) as t:
        pile(client, 10)
    t.save_events(tmp_path / "some.events")
    ff.uninstall(client)
    everything, some = lines_of(path), lines_of(tmp_path / "some.events")
    assert replay(everything).difference is replay(some).difference is None
    assert len(everything) > len(some) > 10
    events = [[json.loads(line).get("event") for line in lines] for lines in (everything, some)]
    assert all(event in events[0] for event in events[1][1:])


def test_nothing_is_recorded_unless_it_is_asked_for(client: Client) -> None:
    ff.install(client)
    with ff.trace(client) as t:
        pile(client, 5)
    with pytest.raises(ConfigError, match=r"ff\.trace\(client, events=True\)"):
        assert t.events
    stealing = stealing_of(client)
    assert stealing._handle == stealing.core.handle
    assert stealing.core.facts is stealing.shown
    assert not stealing.logs


def test_a_recording_of_a_client_that_went_ends(cluster: Any, client: Client) -> None:
    ff.install(client)
    stealing = stealing_of(client)
    with Client(cluster) as other:
        ff.trace(other, events=True).__enter__()
        assert len(stealing.logs) == 1
    until(lambda: not stealing.logs, "the recording ends")
    assert stealing._handle == stealing.core.handle


def test_resources_that_change_are_told(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    with tuned(tick=0.05):
        ff.install(client, record=str(path))
    worker = next(iter(client.cluster.workers.values()))
    client.sync(worker.set_resources, GPU=2)
    rows = stealing_of(client).ledger.rows
    until(lambda: rows[worker.address].resources == {"GPU": 2}, "the ledger hears of it")
    ff.uninstall(client)
    client.sync(worker.set_resources, GPU=0)
    assert '"resources":{"map":[["GPU",2]]}' in path.read_text()
    assert replay(lines_of(path)).difference is None


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param("none/run.events", "No such file or directory", id="no folder"),
        pytest.param(".", "Is a directory", id="a folder"),
        pytest.param("notes.txt", "the file exists, and is not a recording", id="another file"),
    ],
)
def test_a_path_that_cannot_be_written_is_told_once_and_the_scheduler_goes_on(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, wanted: str
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING, event_log.__name__):
        ff.install(client, record=str(tmp_path / name))
        assert pile(client, 10) == list(range(8))
        stealing = stealing_of(client)
        until(lambda: stealing.logs[stealing.settings.record].is_over, "the log gives up")
        assert pile(client, 10) == list(range(8))
    assert stealing._handle == stealing.core.handle
    (told,) = [one.getMessage() for one in caplog.records if "records no more events" in one.getMessage()]
    assert wanted in told
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_scheduler_that_closes_has_written_all(tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    with running(2, processes=False) as client:
        ff.install(client, record=str(path))
        pile(client, 10)
    lines = lines_of(path)
    assert sum('"is":"Finished"' in line for line in lines) >= 18
    assert replay(lines)[1:5] == (len(lines) - 1, replay(lines).instructions, None, False)


# -- the log alone -------------------------------------------------------------------------------------------


def recorder(log: EventLog) -> Recorder:
    scene = Scene()
    found = Recorder(scene.core, "informed")
    found.add(log, fresh=True)
    return found


def test_a_recording_that_is_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    for count in (3, 1):
        log = in_file(str(path), 10**6)
        core = recorder(log)
        for n in range(count):
            core.handle(Tick(), float(n))
        log.close()
        assert len(lines_of(path)) == 1 + count


def test_a_recording_ends_with_a_reason_when_it_is_full(caplog: pytest.LogCaptureFixture) -> None:
    log = EventsInMemory(5_000, "ff.trace")
    core = recorder(log)
    core.handle(Joined("a", 1, "h"), 0.0)
    with caplog.at_level(logging.WARNING, event_log.__name__):
        until(lambda: core.handle(Tick(), 1.0) is not None and log.is_over, "the log is full")
    core.handle(Tick(), 2.0)
    assert not core.sinks
    lines = gzip.decompress(log.taken()).decode().splitlines(keepends=True)
    assert 4_000 < sum(map(len, lines)) < 5_100
    found = replay(lines)
    assert (found.events, found.difference) == (len(lines) - 2, None)
    assert found.ended == "it has the 5,000 bytes that it may have"
    (told,) = [one.getMessage() for one in caplog.records]
    assert told == f"dask_ferro records no more events in ff.trace: {found.ended}"


def test_a_recording_whose_thread_falls_behind_ends_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_PENDING", 10)
    opened, packed = Event(), EventsInMemory(10**6, "ff.trace")
    open_ = packed._open

    def slow() -> BinaryIO:
        opened.wait(60)
        return open_()

    monkeypatch.setattr(packed, "_open", slow)
    core = recorder(packed)
    for n in range(12):
        core.handle(Tick(), float(n))
    assert not core.sinks  # the core is alone again
    opened.set()
    found = replay(gzip.decompress(packed.taken()).decode().splitlines(keepends=True))
    assert (found.events, found.difference) == (10, None)
    assert found.ended == "10 events waited to be written"


def test_a_full_disk_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a disk without room")
    log = EventLog(partial(open, "/dev/full", "wb"), 10**6, "run.events")
    core = recorder(log)
    with caplog.at_level(logging.WARNING, event_log.__name__):
        until(lambda: core.handle(Tick(), 1.0) is not None and log.is_over, "the disk is full")
        core.handle(Tick(), 2.0)
        log.close()
    assert [one.getMessage() for one in caplog.records] == [
        "dask_ferro records no more events in run.events: [Errno 28] No space left on device"
    ]
    assert not core.sinks


def test_a_value_that_no_line_has_ends_the_recording_alone(caplog: pytest.LogCaptureFixture) -> None:
    log = EventsInMemory(10**6, "ff.trace")
    log.begin(HEAD)
    with caplog.at_level(logging.WARNING, event_log.__name__):
        assert log.put(Record(0.0, Tick(), [(("holds", "a"), object())], []))
        log.close()
    assert not log.put(Record(0.0, Tick(), [], []))
    (told,) = [one.getMessage() for one in caplog.records]
    assert "got a object, which recordings do not support" in told
