"""Recordings for tests: of simulated runs, and of files; and how they are changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from dask_ferro.policy.recording.recorder import Lines, Record, Recorder
from dask_ferro.policy.recording.values import text
from dask_ferro.simulate.core_adapter import CoreAdapter
from dask_ferro.simulate.engine import VirtualSite, simulate
from tests.simulate.test_engine import LATE, hoard


class InMemory:
    """A sink that keeps lines, as many as are wanted."""

    def __init__(self, most: float = float("inf")) -> None:
        self.lines: list[str] = []
        self.most = most
        self._text = Lines()

    def begin(self, head: dict[str, Any]) -> None:
        self.lines.append(text(head) + "\n")

    def put(self, record: Record) -> bool:
        self.lines.append(self._text.line(record) + "\n")
        return len(self.lines) <= self.most


def recorded(policy: str, *, from_event: int = 0, tasks: int = 120) -> list[str]:
    """Return a recording of a simulated run in which most tasks lie with one worker, from some event on."""
    sink = InMemory()

    def attach(site: VirtualSite) -> None:
        decider = site.scheduler.decider
        assert isinstance(decider, CoreAdapter)
        recorder, heard = Recorder(decider.core, policy), 0

        def handle(event: Any, now: float) -> Any:
            nonlocal heard
            heard += 1
            if heard == from_event:
                recorder.add(sink)
            return recorder.handle(event, now)

        decider.handle = handle
        if not from_event:
            recorder.add(sink)

    trace = simulate(hoard(tasks), LATE, policy=policy, attach=attach)
    assert policy == "none" or trace.counts["confirmed"] > 0
    return sink.lines


def changed(line: str, change: Callable[[dict[str, Any]], object]) -> str:
    """Return a line of a recording after a change to what it says."""
    read = json.loads(line)
    change(read)
    return text(read) + "\n"


def shuffled(lines: Iterable[str], seed: int) -> list[str]:
    """Return lines whose mappings and sets, of events and of facts, are in another order."""
    random = Random(seed)

    def mixed(read: Any) -> Any:
        if isinstance(read, list):
            return [mixed(one) for one in read]
        if not isinstance(read, dict):
            return read
        found = {name: mixed(one) for name, one in read.items()}
        for name in {"map", "set"} & set(found):
            random.shuffle(found[name])
        return found

    def change(read: dict[str, Any]) -> None:
        for name in {"event", "facts"} & set(read):
            read[name] = mixed(read[name])

    return [changed(line, change) for line in lines]
