"""Hubs that talk to each other in one process: who is woken, and what an error of a connection ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from dask._task_spec import Task

from dask_ferro.flow import hub as hubs
from dask_ferro.flow.hub import Home, Hub, Message
from dask_ferro.flow.run import InnerTask, Share
from dask_ferro.flow.times import TaskTimes
from dask_ferro.policy.stealing import peers

# No thread wakes by itself within a test.
LONG_S = 300.0


class Watched(Hub):
    """A hub that counts what arrives by kind."""

    def __init__(self, worker: str, relay: Callable[[str, bytes], None]) -> None:
        self.seen = dict.fromkeys(("value", "ask", "give", "back", "done"), 0)
        self.arrived = threading.Condition()
        super().__init__(worker, "127.0.0.1", b"t" * 32, (None, None), relay)

    def deliver(self, message: Message) -> None:
        """Count a message that is stored."""
        super().deliver(message)
        with self.arrived:
            self.seen[message.kind] += 1
            self.arrived.notify_all()

    def has_got(self, kind: str, count: int) -> bool:
        """Wait for messages of a kind."""
        with self.arrived:
            return self.arrived.wait_for(lambda: self.seen[kind] >= count, 20)


class Lab:
    """Workers of one run, and the threads of their members."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self.hubs, self.ends = stack, list[Watched](), dict[int, Any]()
        self._threads: list[threading.Thread] = []

    def hub(self, relay: Callable[[str, bytes], None] = lambda address, message: None) -> Watched:
        """Add a worker."""
        one = Watched(f"tcp://{len(self.hubs)}", relay)
        self._stack.callback(one.close)
        self.hubs.append(one)
        return one

    @property
    def homes(self) -> list[Home]:
        return [Home(one.worker, "127.0.0.1", one.port) for one in self.hubs]

    def begin(self, member: int, share: Share, homes: list[Home]) -> None:
        """Run a member in a thread; what it returns or raises is its end."""

        def run() -> None:
            try:
                self.ends[member] = self.hubs[member].run("r", share, {}, homes, TaskTimes())
            except BaseException as error:  # noqa: BLE001
                self.ends[member] = error

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        """Wait for the ends of all members."""
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(hubs, "_PATIENCE", LONG_S)
    monkeypatch.setattr(peers, "LOST_S", LONG_S)
    with ExitStack() as stack:
        yield Lab(stack)


def share(member: int, *tasks: InnerTask) -> Share:
    return Share("f", member, 2, tasks, tuple(task.key for task in tasks), steals=True)


def test_a_thief_asks_again_once_an_answer_without_tasks_arrives(lab: Lab) -> None:
    thief, victim, gate = lab.hub(), lab.hub(), threading.Event()
    lab.begin(0, share(0), lab.homes)
    lab.begin(1, share(1, InnerTask("x", Task("x", gate.wait), 0)), lab.homes)
    assert victim.has_got("ask", 3)
    assert thief.has_got("give", 2)
    gate.set()
    lab.join()
    assert lab.ends == {0: (), 1: (True,)}


def test_a_worker_says_that_it_is_done_once_its_last_value_comes_back(lab: Lab) -> None:
    victim, thief, gate, runs = lab.hub(), lab.hub(), threading.Event(), threading.Event()

    def first() -> bool:
        runs.set()
        return gate.wait()

    tasks = InnerTask("x", Task("x", first), 0), InnerTask("y", Task("y", gate.wait), 1)
    lab.begin(0, share(0, *tasks), lab.homes)
    assert runs.wait(20)
    here = victim._runs["r"]
    with here.changed:
        assert here.run is not None
        here.run.give(tasks[1:], 0)
    gate.set()
    # The victim waits for an answer, and for the value.
    assert thief.has_got("ask", 1)
    victim.deliver(Message("r", "value", "y", 5))
    assert thief.has_got("done", 1)
    victim.deliver(Message("r", "done", None, 1))
    lab.join()
    assert lab.ends == {0: (True, 5)}


def test_an_error_of_a_relay_voids_the_run_and_others_are_answered(lab: Lab) -> None:
    def closed(address: str, message: bytes) -> None:
        raise RuntimeError("the event loop is closed")

    victim, gate = lab.hub(closed), threading.Event()
    gone = Home("tcp://gone", "127.0.0.1", 1)
    lab.begin(0, share(0, InnerTask("x", Task("x", gate.wait), 0)), [*lab.homes, gone])
    victim.deliver(Message("r", "ask", None, 1))
    answered = threading.Event()
    victim._answers.put(answered.set)
    assert answered.wait(20)
    gate.set()
    lab.join()
    assert isinstance(lab.ends[0], hubs.Void)
    assert not victim._runs


def test_no_member_begins_once_the_hub_is_closed(lab: Lab) -> None:
    hub, _ = lab.hub(), lab.hub()
    hub.close()
    lab.begin(0, share(0), lab.homes)
    lab.join()
    assert isinstance(lab.ends[0], hubs.Void)


class Secret(Exception):
    """An error that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise Secret(self)


class Unsendable:
    """A result whose pickling fails with an error that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise Secret(self)


def test_a_result_is_failed_elsewhere_whatever_its_pickling_raises(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, _ = lab.hub(), lab.hub()
    # As of other processes.
    monkeypatch.setattr(hubs, "_hubs", {})
    task = InnerTask("x", Task("x", Unsendable), 0, (0,))
    lab.begin(1, Share("f", 1, 2, (task,), ()), lab.homes)
    assert reader.has_got("value", 1)
    (message,) = reader._runs["r"].early
    assert "Secret" in str(message.value.error)
    lab.join()
    assert lab.ends == {1: ()}
