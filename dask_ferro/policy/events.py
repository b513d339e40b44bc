"""What a scheduling core hears, and what it wants done: values, which can be pickled and fed to another core again.

Durations and times are seconds on the caller's clock, which `SchedulingCore.handle` is told with each event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from dask_ferro.policy.estimates import Estimate
from dask_ferro.policy.facts import Address, Key, Move

# What a victim says of a task that it is asked for, and what becomes of the request.
Answer = Literal["given", "kept", "seceded", "gone"]
Settlement = Literal["confirmed", "refused", "stale"]
OUTCOMES: tuple[str, ...] = get_args(Settlement)

# ---- events --------------------------------------------------------------------------------------------------


class Joined(NamedTuple):
    """A worker is there; of one that is known, its facts changed."""

    worker: Address
    nthreads: int
    host: str = ""
    device: str = "cpu"
    accepts: bool = True
    resources: Mapping[str, float] | None = None


class Left(NamedTuple):
    """A worker is gone; its tasks were taken back before."""

    worker: Address


class AcceptsTasks(NamedTuple):
    """A worker accepts tasks, or no longer: it paused, is about to leave, or does not answer."""

    worker: Address
    accepts: bool


class Heard(NamedTuple):
    """A worker said what it ran at some time."""

    worker: Address
    at: float
    running: frozenset[Key]


class Assigned(NamedTuple):
    """A task was given to a worker.

    Attributes
    ----------
    annotated : float or Estimate or None
        The task's own estimate of its seconds.
    needs : mapping or None
        Amounts of the worker's resources that it takes while it runs.
    nbytes : int
        Device bytes of its result, and what it works in.
    """

    key: Key
    worker: Address
    prefix: str
    priority: Any
    annotated: float | Estimate | None = None
    needs: Mapping[str, float] | None = None
    nbytes: int = 0


class Finished(NamedTuple):
    """A task has left its worker: done (in so many seconds, where its worker said so), in error, or taken back."""

    key: Key
    done: bool = False
    seconds: float | None = None


class Answered(NamedTuple):
    """A victim answered a request.

    Attributes
    ----------
    answer : Answer
        "given" (and the thief may take it), "kept" (it had started it), "seceded" (it has left its thread), "gone" (the
        victim does not have it, or nobody may take it).
    """

    key: Key
    answer: Answer


class Unsent(NamedTuple):
    """A request could not be sent: the connection to the victim is closed."""

    key: Key


class Withdrawn(NamedTuple):
    """Nothing is heard of a request for long: the task counts where it is, and its thief is free."""

    key: Key


class Ordered(NamedTuple):
    """Somebody wants a move, whatever the policy says."""

    move: Move


class MessagesSent(NamedTuple):
    """All messages that were to be sent have left: what was given away is thought to start from now on."""


class Due(NamedTuple):
    """The time of a `Wake` has come."""

    at: float


class Tick(NamedTuple):
    """Look at every worker, whatever the events said."""


class Sweep(NamedTuple):
    """Look for overdue tasks beside idle workers.

    Attributes
    ----------
    elsewhere : bool
        Whether idle workers are to be found even if no task waits at any worker.
    """

    elsewhere: bool = False


class DeviceTold(NamedTuple):
    """A worker is of a device class, as it says itself."""

    worker: Address
    device: str


class MemoryTold(NamedTuple):
    """A worker's device has so many bytes; None: nobody counts them."""

    worker: Address
    most: int | None


class ResourcesTold(NamedTuple):
    """A worker has these amounts of resources, other ones than it was said to have."""

    worker: Address
    resources: Mapping[str, float]


class EndTold(NamedTuple):
    """A worker, there or still to come, will be gone at that time on the caller's clock; None: nobody knows."""

    worker: Address
    at: float | None


class DurationLearned(NamedTuple):
    """Tasks of a prefix took so many seconds on a device class before the core was there."""

    prefix: str
    device: str
    seconds: float


class SizeLearned(NamedTuple):
    """The first result of a prefix has so many bytes."""

    prefix: str
    nbytes: int


class SpeedLearned(NamedTuple):
    """A device class does so many operations, and reads and writes so many bytes, in a second; said once."""

    device: str
    flops: float
    bandwidth: float


class TransferLearned(NamedTuple):
    """Bytes took so many seconds on a class of link, in which they left or entered a device so many times as well."""

    link: str
    nbytes: int
    seconds: float
    copies: int = 0


class LoopMeasured(NamedTuple):
    """The scheduler's loop was busy, or ready to run and without a core, for this share of the time since the last."""

    share: float


class Switched(NamedTuple):
    """Stealing is on, or off: then nothing is decided but at a `Tick`, and no `Wake` is asked for."""

    on: bool


class Restarted(NamedTuple):
    """All tasks are forgotten; what things cost stays known."""


Event = (
    Joined | Left | AcceptsTasks | Heard | Assigned | Finished | Answered | Unsent | Withdrawn | Ordered | MessagesSent
    | Due | Tick | Sweep | DeviceTold | MemoryTold | ResourcesTold | EndTold | DurationLearned | SizeLearned
    | SpeedLearned | TransferLearned | LoopMeasured | Switched | Restarted
)  # fmt: skip

# ---- instructions --------------------------------------------------------------------------------------------


class Wake(NamedTuple):
    """Say `Due` at that time, instead of at any time that was asked for before."""

    at: float


class Ask(NamedTuple):
    """Ask the victim for a task that waits there.

    Attributes
    ----------
    gain, cost : float
        As `Move` has them.
    seconds : float
        Projected, of the task on the victim.
    before, after : float
        Seconds until a task that joined the victim's, and the thief's, queue would have started.
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
    """Place a task anew: its victim, if it is known, does not have it any more, and its thief does not get it."""

    key: Key
    victim: Address
    thief: Address


class Hurry(NamedTuple):
    """Send messages to a worker soon, or gather them for as long as the scheduler does by itself."""

    worker: Address
    soon: bool


class Settled(NamedTuple):
    """Note what became of a request, once it is known: nothing has to be done about it.

    Attributes
    ----------
    outcome : Settlement
        "confirmed": the thief has the task; "refused": its victim keeps it; "stale": it was done or gone meanwhile, or
        its thief takes none any more.
    at : float
        When that was known.
    gain, cost : float
        Projected, as `Move` has them.  The gains of tasks that wait at once overlap: their sum means nothing.
    """

    key: Key
    victim: Address
    thief: Address
    outcome: Settlement
    at: float
    gain: float
    cost: float


class Arrived(NamedTuple):
    """Note that a stolen task is done: nothing has to be done about it.

    Attributes
    ----------
    requested : float
        When it was asked for.
    delay : float
        Seconds from then to its start on the thief.
    worked : float
        Seconds that the thief worked in it, and that passed here since.
    """

    key: Key
    victim: Address
    thief: Address
    requested: float
    delay: float
    worked: float


Instruction = Wake | Ask | HandOver | PlaceAgain | Hurry | Settled | Arrived


def _apart(cls: type[tuple[object, ...]]) -> None:
    """Let values of a class be equal to none of another one: tuples of the same content are.

    Tuples, because one is made for each task twice: a frozen dataclass takes 1 us.
    """

    def is_equal(self: tuple[object, ...], other: object) -> bool:
        return type(self) is type(other) and tuple.__eq__(self, other)

    def is_other(self: tuple[object, ...], other: object) -> bool:
        return not is_equal(self, other)

    def hashed(self: tuple[object, ...]) -> int:
        return hash((cls.__name__, *self))

    for name, method in (("__eq__", is_equal), ("__ne__", is_other), ("__hash__", hashed)):
        setattr(cls, name, method)


for _kind in (*get_args(Event), *get_args(Instruction)):
    _apart(_kind)
