"""The answers of a scheduler's `scheduler_rpc.ScalingRPC` to its clients.

All of them are msgpack's types: dictionaries, lists, strings and numbers.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class WorkerRow(TypedDict):
    """The facts of a worker.

    `idle_for` is 0 while it has a task, `paused_for` while it accepts tasks; `unique` are the bytes of results that
    no other worker holds, `free` is from `evacuation.free_bytes`; `ends_in` is None if unknown.
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
NO_LOSSES: Mapping[str, int] = {"results": 0, "nbytes": 0, "for_good": 0}


class LeaveAnswer(TypedDict):
    """The workers that left, those that stayed and why, the loss, and whether the cluster ends."""

    left: list[str]
    stayed: dict[str, str]
    lost: Mapping[str, int]
    over: bool
