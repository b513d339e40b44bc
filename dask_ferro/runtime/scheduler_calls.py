"""What travels between a scheduler's `scheduler_rpc.Roster` and those who ask it: its calls and its answers, by type.

All of it is msgpack's: dictionaries, lists, strings and numbers.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypedDict


class WorkerRow(TypedDict):
    """A worker.

    `idle_for` is 0 while it has a task, `paused_for` while it takes tasks; `unique` are bytes of results that nobody
    else holds, `free` is as `evacuation.free_bytes` has it; `ends_in` None: nobody knows.
    """

    name: object
    threads: int
    status: str
    idle_for: float
    paused_for: float
    processing: int
    nbytes: int
    unique: int
    free: int
    ends_in: float | None
    resources: dict[str, float]
    device: str


class DemandRow(TypedDict):
    """The remaining work of one kind of needs.

    `profile` is of (seconds, width), `longest` of the ready tasks; `workers` are addresses (None: anyone), `device` is
    a class (None: any), and `speeds` are by device class.
    """

    profile: Sequence[tuple[float, float]]
    longest: float
    resources: dict[str, float]
    workers: list[str] | None
    device: str | None
    speeds: Mapping[str, float]


class RosterAnswer(TypedDict):
    """Who is there, by address, and what is left to do.

    `queue` counts tasks that are ready, those that run included; `copies` the "results" and "bytes" that were copied so
    far, lest a preemption lose them.
    """

    workers: dict[str, WorkerRow]
    demands: list[DemandRow]
    queue: int
    copies: dict[str, int]


class LostCount(TypedDict):
    """Results that nobody holds any more, their bytes, and how many of them nothing computes again."""

    results: int
    nbytes: int
    for_good: int


class LeaveAnswer(TypedDict):
    """Who left, who stayed and why, what is lost, and whether the cluster ends."""

    left: list[str]
    stayed: dict[str, str]
    lost: LostCount
    over: bool


class RosterCalls(Protocol):
    """The calls, as the methods of a connection to the scheduler."""

    async def ferro_roster(self) -> RosterAnswer:
        """Call `Roster.roster`."""

    async def ferro_leave(
        self, *, addresses: Iterable[str], seconds: float | None, must: bool = False, ordered: bool = False
    ) -> LeaveAnswer:
        """Call `Roster.leave`."""

    async def ferro_stay(self, *, addresses: Iterable[str]) -> None:
        """Call `Roster.stay`."""

    async def ferro_ends(self, *, ends: Mapping[str, float | None], fresh: float) -> None:
        """Call `Roster.ends`."""

    async def ferro_fail(self, *, why: str, resources: Mapping[str, float] | None) -> int:
        """Call `Roster.fail`."""

    async def ferro_exposed(self, *, jobs: Mapping[str, str]) -> None:
        """Call `Roster.exposed`."""

    async def register_scheduler_plugin(self, *, plugin: bytes, name: str, idempotent: bool) -> None:
        """Put a plugin on the scheduler."""

    async def retire_workers(self, *, workers: Iterable[str], close_workers: bool) -> Mapping[str, object]:
        """Let workers go as Dask does."""

    async def log_event(self, *, topic: str, msg: object) -> None:
        """Publish an event."""
