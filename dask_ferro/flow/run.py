"""The state of one run of a flow on one worker: which inner tasks are ready, and which values are still read.

    share (tasks of one member) + inputs  ->  add
    a value of another worker             ->  receive
    a task that ended                     ->  finish
    another worker has no ready task      ->  give, and there accept
    it cannot run what it was given       ->  take_back

A worker may have several members of a flow; whichever of its threads is free takes the next task of any of them.  A
task that another worker runs stays in its member's count: its value comes back, and goes to all readers from there.
An inner task that fails has a `TaskFailure` as its value, and so have the tasks that read it; the other tasks are
computed, like without flows.  Nothing here locks, sends or waits.

A bundle is a flow of one member.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush, nlargest
from typing import Any, NamedTuple, Protocol

from dask.typing import Key


class Call(Protocol):
    """The call of an inner task: the task of a Dask graph."""

    @property
    def dependencies(self) -> Collection[Key]: ...

    def __call__(self, values: dict[Any, Any]) -> Any: ...


# The annotation of tasks whose member is decided before they are submitted, such as the tasks of ranks.
MEMBER = "ferro-member"


class MemberTask(NamedTuple):
    """The member that computes a task: its worker, if that is present, and its number there; the lowest order first."""

    worker: str
    lane: str
    order: float


class InnerTask(NamedTuple):
    """A task of a flow; the ready task of the lowest rank runs first."""

    key: Key
    call: Call
    rank: float
    # The other members with tasks that read the result.
    readers: tuple[int, ...] = ()
    # A `trace.ModelPart`, or nothing.
    about: tuple[Any, ...] = ()


class Repeat(NamedTuple):
    """Tasks of one member that run several times, each time on results of the previous time (`flow.repeat`)."""

    # The part of the keys before the repeat's number.
    name: str
    # The calls of the first repeat.
    tasks: tuple[InnerTask, ...]
    # By input, the key of the first repeat's task whose result the next repeat reads instead.
    carry: Mapping[Key, Key]
    # For each repeat, the values that only this repeat reads, by the first repeat's keys for them.
    inputs: Sequence[Mapping[Key, Any]]
    # By key, the members with tasks of the next repeat that read the result.
    next_readers: Mapping[Key, tuple[int, ...]]


class StolenTask(NamedTuple):
    """A task of another worker, which runs here, with its inputs and a member on the worker that gave it away."""

    task: InnerTask
    inputs: dict[Key, Any]
    owner: int


class Share(NamedTuple):
    """The part of a flow that one member computes."""

    # The flow's name, the member's number, and how many there are.
    flow: str
    member: int
    members: int
    tasks: tuple[InnerTask, ...]
    # Keys of its tasks whose values are the member's results.
    outputs: tuple[Key, ...]
    repeats: tuple[Repeat, ...] = ()
    # Whether its tasks may run on other members' workers.
    steals: bool = False

    @property
    def total(self) -> int:
        """Number of tasks, all repeats included."""
        return len(self.tasks) + sum(len(one.tasks) * len(one.inputs) for one in self.repeats)


class TaskFailure(NamedTuple):
    """The value of an inner task that raised an error, and of tasks that read such a value."""

    error: Exception


class FlowRun:
    """One run of a flow on one worker, which has some of its members."""

    def __init__(self, members: Collection[int]) -> None:
        self._coming = set(members)
        self._values: dict[Key, Any] = {}
        # How often each value is still read here; an output is read once more, by its member's result.
        self._left: Counter[Key] = Counter()
        self._readers: defaultdict[Key, list[InnerTask]] = defaultdict(list)
        self._missing: dict[Key, int] = {}
        self._ready: list[tuple[float, int, InnerTask]] = []
        self._entered = 0
        self._unfinished = 0
        # Tasks that other workers run for this one, and that this one runs for others; whether it gives tasks away.
        self._away: dict[Key, InnerTask] = {}
        self._stolen: dict[Key, StolenTask] = {}
        self._gives = True

    @property
    def is_done(self) -> bool:
        """Whether all tasks of all members here have ended."""
        return not self._coming and not self._unfinished

    @property
    def is_ready(self) -> bool:
        return bool(self._ready)

    def add(self, share: Share, inputs: Mapping[Key, Any]) -> None:
        """Begin with a member's tasks, which read `inputs` and values of other members."""
        self._values.update(inputs)
        self._left.update(share.outputs)
        self._unfinished += len(share.tasks)
        for task in share.tasks:
            missing = 0
            for key in task.call.dependencies:
                self._left[key] += 1
                if key not in self._values:
                    self._readers[key].append(task)
                    missing += 1
            self._missing[task.key] = missing
            if not missing:
                self._push(task)
        self._coming.discard(share.member)

    def receive(self, key: Key, value: Any) -> None:
        """Store a value that another worker has computed."""
        if key in self._away:
            self.finish(self._away.pop(key), value)
        elif key not in self._values:
            self._values[key] = value
            self._wake(key)

    def take(self) -> InnerTask:
        """Return the ready task of the lowest rank, which the caller runs."""
        return heappop(self._ready)[2]

    def inputs_of(self, task: InnerTask) -> dict[Key, Any]:
        if task.key in self._stolen:
            return self._stolen[task.key].inputs
        return {key: self._values[key] for key in task.call.dependencies}

    def finish(self, task: InnerTask, value: Any) -> None:
        """Store the result of a task that ended, and drop inputs without further readers."""
        self._unfinished -= 1
        if self._stolen.pop(task.key, None) is not None:
            if self._left[task.key] or self._coming:
                self.receive(task.key, value)
            return
        # A member that has not begun yet may read it.
        if self._left[task.key] or self._coming:
            self._values[task.key] = value
            self._wake(task.key)
        for key in task.call.dependencies:
            self._left[key] -= 1
            if not self._left[key] and not self._coming:
                del self._values[key]

    def results(self, share: Share) -> tuple[Any, ...]:
        """Return the results of a member of a run that is done."""
        return tuple(self._values[key] for key in share.outputs)

    # -- stealing ------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        return len(self._ready)

    def spare(self, most: int) -> list[InnerTask]:
        """Return ready tasks that another worker may run; the task that would begin last comes first."""
        last = nlargest(most, self._ready) if self._gives else ()
        return [task for _, _, task in last if task.key not in self._stolen]

    def give(self, tasks: Collection[InnerTask], owner: int) -> list[StolenTask]:
        """Return ready tasks with their inputs, which another worker runs now."""
        keys = {task.key for task in tasks}
        self._ready = [entry for entry in self._ready if entry[2].key not in keys]
        heapify(self._ready)
        self._away.update((task.key, task) for task in tasks)
        return [StolenTask(task, self.inputs_of(task), owner) for task in tasks]

    def take_back(self, key: Key) -> None:
        """Run a task here that cannot be sent, or whose result cannot; the next ones stay, since each try is logged."""
        if key in self._away:
            self._gives = False
            self._push(self._away.pop(key))

    def accept(self, stolen: StolenTask) -> None:
        """Run a task of another worker."""
        self._stolen[stolen.task.key] = stolen
        self._unfinished += 1
        self._push(stolen.task)

    def owner_of(self, task: InnerTask) -> int | None:
        """Return a member on the worker that gave a task away; None: the task belongs to this worker."""
        stolen = self._stolen.get(task.key)
        return None if stolen is None else stolen.owner

    def drop(self, task: InnerTask) -> None:
        """Forget a task of another worker, which runs the task itself."""
        del self._stolen[task.key]
        self._unfinished -= 1

    def _wake(self, key: Key) -> None:
        for task in self._readers.pop(key, ()):
            self._missing[task.key] -= 1
            if not self._missing[task.key]:
                self._push(task)

    def _push(self, task: InnerTask) -> None:
        self._entered += 1
        heappush(self._ready, (task.rank, self._entered, task))
