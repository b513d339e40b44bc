"""The events that a scheduling core handles and the instructions that it returns, as values.

Durations and times are seconds on the caller's clock; `SchedulingCore.handle` takes the time with each event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from dask_ferro.policy.estimates import Estimate
from dask_ferro.policy.facts import Address, Key, Move

# A victim's answer to a request, and the outcome of the request.
Answer = Literal["given", "kept", "seceded", "gone"]
Settlement = Literal["confirmed", "refused", "stale"]
OUTCOMES: tuple[str, ...] = get_args(Settlement)

# ---- events --------------------------------------------------------------------------------------------------


class WorkerJoined(NamedTuple):
    """A worker joined, or the facts of a known worker changed."""

    worker: Address
    nthreads: int
    host: str = ""
    device: str = "cpu"
    accepts: bool = True
    resources: Mapping[str, float] | None = None


class WorkerLeft(NamedTuple):
    """A worker left; its tasks were taken back before."""

    worker: Address


class AcceptsTasks(NamedTuple):
    """A worker starts or stops accepting tasks: it paused, is about to retire, or does not answer."""

    worker: Address
    accepts: bool


class WorkerReported(NamedTuple):
    """A worker reported the tasks that it ran at some time."""

    worker: Address
    at: float
    running: frozenset[Key]


class TaskAssigned(NamedTuple):
    """A task was assigned to a worker.

    Attributes
    ----------
    annotated : float or Estimate or None
        The task's own estimate of its seconds.
    needs : mapping or None
        Amounts of the worker's resources that it takes while it runs.
    nbytes : int
        Device bytes of its result and its working memory.
    """

    key: Key
    worker: Address
    prefix: str
    priority: Any
    annotated: float | Estimate | None = None
    needs: Mapping[str, float] | None = None
    nbytes: int = 0


class TaskFinished(NamedTuple):
    """A task left its worker: done (in `seconds`, if the worker said so), in error, or taken back."""

    key: Key
    done: bool = False
    seconds: float | None = None


class StealAnswered(NamedTuple):
    """A victim answered a request.

    Attributes
    ----------
    answer : Answer
        "given" (the thief may take it), "kept" (the victim had started it), "seceded" (it has left its thread),
        "gone" (the victim does not have it, or no worker may take it).
    """

    key: Key
    answer: Answer


class RequestUnsent(NamedTuple):
    """A request could not be sent: the connection to the victim is closed."""

    key: Key


class RequestWithdrawn(NamedTuple):
    """A request got no answer for long: the task counts at its victim again, and its thief is free."""

    key: Key


class MoveOrdered(NamedTuple):
    """A move was ordered from outside, whatever the policy says."""

    move: Move


class MessagesSent(NamedTuple):
    """All pending messages have left: the tasks they assign start from now on."""


class WakeDue(NamedTuple):
    """The time of a `Wake` has come."""

    at: float


class Tick(NamedTuple):
    """Consider every worker, whatever the events were, and look for overdue tasks beside idle ones.

    Attributes
    ----------
    elsewhere : bool
        Whether idle workers are of interest even if no task waits at a worker.
    """

    elsewhere: bool = False


class DeviceReported(NamedTuple):
    """A worker reported its device class."""

    worker: Address
    device: str


class MemoryReported(NamedTuple):
    """A worker's device has this many bytes; None: they are not counted."""

    worker: Address
    most: int | None


class ResourcesReported(NamedTuple):
    """A worker's amounts of resources changed."""

    worker: Address
    resources: Mapping[str, float]


class EndAnnounced(NamedTuple):
    """The time on the caller's clock at which a worker, possibly one yet to join, will be gone; None: unknown."""

    worker: Address
    at: float | None


class DurationLearned(NamedTuple):
    """Tasks of a prefix took this many seconds on a device class, measured before the core existed."""

    prefix: str
    device: str
    seconds: float


class SpeedLearned(NamedTuple):
    """The measured speed of a device class: operations, and bytes read and written, per second; sent once."""

    device: str
    flops: float
    bandwidth: float


class TransferLearned(NamedTuple):
    """A transfer over a class of link took `seconds`."""

    link: str
    nbytes: int
    seconds: float


class LoopMeasured(NamedTuple):
    """The share of the last interval in which the scheduler's loop was busy, or ready to run without a core."""

    share: float


class StealingSwitched(NamedTuple):
    """Stealing was switched on, or off: then only a `Tick` leads to decisions, and no `Wake` is asked for."""

    on: bool


class SchedulerRestarted(NamedTuple):
    """All tasks are forgotten; learned costs are kept."""


Event = (
    WorkerJoined | WorkerLeft | AcceptsTasks | WorkerReported | TaskAssigned | TaskFinished | StealAnswered
    | RequestUnsent | RequestWithdrawn | MoveOrdered | MessagesSent | WakeDue | Tick | DeviceReported
    | MemoryReported | ResourcesReported | EndAnnounced | DurationLearned | SpeedLearned | TransferLearned
    | LoopMeasured | StealingSwitched | SchedulerRestarted
)  # fmt: skip

# ---- instructions --------------------------------------------------------------------------------------------


class Wake(NamedTuple):
    """Send `WakeDue` at that time; it replaces any time asked for before."""

    at: float


class Ask(NamedTuple):
    """Ask the victim for a task in its queue.

    Attributes
    ----------
    gain, cost : float
        As in `Move`.
    seconds : float
        Projected duration of the task on the victim.
    before, after : float
        Seconds until a task that joined the victim's and the thief's queue would have started.
    """

    key: Key
    victim: Address
    thief: Address
    gain: float
    cost: float
    seconds: float
    before: float
    after: float


class HandOver(NamedTuple):
    """Send the thief a task that its victim gave up."""

    key: Key
    victim: Address
    thief: Address


class PlaceAgain(NamedTuple):
    """Place a task again: its victim, if known, no longer has it, and its thief does not get it."""

    key: Key
    victim: Address
    thief: Address


class Hurry(NamedTuple):
    """Send messages to a worker soon, or batch them over Dask's usual interval."""

    worker: Address
    soon: bool


class RequestSettled(NamedTuple):
    """Report the outcome of a request; no action is needed.

    Attributes
    ----------
    outcome : Settlement
        "confirmed": the thief has the task; "refused": the victim keeps it; "stale": it was done or gone meanwhile,
        or the thief no longer accepts tasks.
    at : float
        When the outcome was known.
    gain, cost : float
        Projected, as in `Move`.  The gains of tasks that wait at the same time overlap: their sum means nothing.
    """

    key: Key
    victim: Address
    thief: Address
    outcome: Settlement
    at: float
    gain: float
    cost: float


class StealCompleted(NamedTuple):
    """Report that a stolen task is done; no action is needed.

    Attributes
    ----------
    requested : float
        When it was requested.
    delay : float
        Seconds from then to its start on the thief.
    """

    key: Key
    victim: Address
    thief: Address
    requested: float
    delay: float


Instruction = Wake | Ask | HandOver | PlaceAgain | Hurry | RequestSettled | StealCompleted
