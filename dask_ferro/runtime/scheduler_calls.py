"""The types of calls and answers between a scheduler's `scheduler_rpc.Roster` and its clients.

All of them are msgpack's types: dictionaries, lists, strings and numbers.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypedDict


class WorkerRow(TypedDict):
    """The facts of a worker.

    `idle_for` is 0 while it has a task, `paused_for` while it accepts tasks; `unique` are the bytes of results that
    no other worker holds, `free` is from `worker_memory.free_bytes`; `ends_in` is None if unknown.
    """

    name: object
    threads: int
    status: str
    idle_for: float
    paused_for: float
    nbytes: int
    unique: int
    free: int
    ends_in: float | None
    resources: dict[str, float]
    device: str


class DemandRow(TypedDict):
    """The remaining work of tasks with the same requirements.

    `profile` has (seconds, width), `longest` is over the ready tasks; `workers` are addresses (None: any), `device`
    is a class (None: any), and `speeds` are by device class.
    """

    profile: Sequence[tuple[float, float]]
    longest: float
    resources: dict[str, float]
    workers: list[str] | None
    device: str | None
    speeds: Mapping[str, float]


class RosterAnswer(TypedDict):
    """The workers by address, and the remaining work."""

    workers: dict[str, WorkerRow]
    demands: list[DemandRow]


# The number of lost results, their bytes, and how many of them cannot be computed again.
NOTHING: Mapping[str, int] = {"results": 0, "nbytes": 0, "for_good": 0}


class LeaveAnswer(TypedDict):
    """The workers that left, those that stayed and why, the loss, and whether the cluster ends."""

    left: list[str]
    stayed: dict[str, str]
    lost: Mapping[str, int]
    over: bool


class RosterCalls(Protocol):
    """The calls, as methods of a connection to the scheduler."""

    async def ferro_roster(
        self,
        *,
        ends: Mapping[str, float | None] | None = None,
        fresh: float | None = None,
        exposed: Mapping[str, str] | None = None,
    ) -> RosterAnswer:
        """Call `Roster.roster`."""

    async def ferro_leave(
        self, *, addresses: Iterable[str], seconds: float | None, must: bool = False, ordered: bool = False
    ) -> LeaveAnswer:
        """Call `Roster.leave`."""

    async def ferro_ends(self, *, ends: Mapping[str, float]) -> None:
        """Call `Roster.ends`."""

    async def ferro_fail(self, *, why: str, resources: Mapping[str, float] | None) -> int:
        """Call `Roster.fail`."""

    async def register_scheduler_plugin(self, *, plugin: bytes, name: str, idempotent: bool) -> None:
        """Install a plugin on the scheduler."""

    async def retire_workers(self, *, workers: Iterable[str], close_workers: bool) -> Mapping[str, object]:
        """Retire workers as Dask does."""

    async def log_event(self, *, topic: str, msg: object) -> None:
        """Publish an event."""
