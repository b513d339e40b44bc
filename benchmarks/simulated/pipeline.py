"""A simulated pipeline of stages: the duration of a schedule, run by its lists or by a scheduler that knows edges only.

Every stage is a worker of one thread that starts, among its ready actions, the one of the highest priority.  Without a
hop this reproduces the schedule exactly: times are computed by `+` and `max` alone.  A transfer delays the action that
waits for it and occupies no stage; links do not queue, since sending a micro-batch's activations takes much less time
than computing them.  Durations are seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, INPUT_GRAD, RELEASING, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.trace import ModelPart, Span, Trace, TracedTask

# The action that ends, and the one that waits for it.
Edge = tuple[Action, Action]


class StageSeconds(NamedTuple):
    """The seconds of one stage for one micro-batch: its forward, and the two gradients of its backward."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def backward(self) -> float:
        """The seconds of both gradients."""
        return self.input_grad + self.weight_grad

    def of(self, schedule: Schedule) -> Callable[[Action], float]:
        """Return a function from an action to its seconds: the stage's, in equal parts for its chunks."""
        parts = Counter(schedule.stage_of.values())
        whole = {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            INPUT_GRAD: self.input_grad,
            WEIGHT_GRAD: self.weight_grad,
        }
        return lambda action: whole[action.kind] / parts[schedule.stage_of[action.chunk]]


def simulate(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    *,
    waits: Mapping[Action, Action] | None = None,
    transfer: float = 0.0,
    hop: float = 0.0,
) -> Trace:
    """Return the trace of one step of training, or of inference.

    Parameters
    ----------
    schedule : Schedule
    seconds : callable (Action) -> float
        Seconds of each action; `StageSeconds.of` derives them from the seconds of whole stages.
    waits : mapping of Action to Action, optional
        The action that an action waits for beside its dependencies, as `Schedule.waits`; by default the one before it
        in its list, so that the lists are kept exactly.
    transfer : float
        From the end of an action until its result is on another stage.
    hop : float
        From the end of an action until a dependent may start, on any stage: the scheduler's answer.

    Returns
    -------
    Trace
        Workers are named "stage-0", ...; keys are the actions as text, prefixes their kinds.

    Raises
    ------
    ValueError
        For seconds below zero.
    """
    takes = {action: seconds(action) for action in schedule.actions}
    if min(transfer, hop, *takes.values()) < 0:
        raise ValueError("pipeline: got negative seconds, wanted those of an action, a transfer and a hop")
    own = (
        chain.from_iterable(map(pairwise, schedule.stages))
        if waits is None
        else map(_reversed, waits.items())
    )
    needs = schedule.dependencies
    control = [(before, after) for before, after in own if before not in needs[after]]
    computed = dict(_SimulatedStages(schedule, control, takes, transfer, hop).computed())
    spans = [*computed.values(), *_transfers(schedule, computed, transfer)]
    spans.sort(key=lambda span: (span.start, span.stop, span.worker))
    return Trace(
        tuple(spans), _tasks(schedule, computed), {_worker(s): 1 for s in range(len(schedule.stages))}
    )


def peaks(trace: Trace) -> dict[str, int]:
    """Return the largest number of activations that each stage of a pipeline's trace kept at one time.

    An activation is kept from the start of a forward until the end of the last backward or weight gradient that
    needs it; one that ends as another starts has made room for it.  Without a backward nothing is counted.
    """
    changes: dict[str, list[tuple[float, int]]] = {worker: [] for worker in trace.workers}
    # Without a backward, no activation would ever be released.
    trains = any(span.prefix in RELEASING for span in trace.of("compute"))
    for span in trace.of("compute"):
        if span.prefix in RELEASING:
            changes[span.worker].append((span.stop, -1))
        elif span.prefix == FORWARD and trains:
            changes[span.worker].append((span.start, 1))
    return {worker: _highest(rows) for worker, rows in changes.items()}


def bubbles(trace: Trace) -> dict[str, float]:
    """Return the seconds of a pipeline's trace in which each stage was idle."""
    return {worker: trace.makespan - busy for worker, busy in trace.busy.items()}


def _highest(changes: Iterable[tuple[float, int]]) -> int:
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _worker(stage: int) -> str:
    return f"stage-{stage}"


def _reversed(pair: tuple[Action, Action]) -> Edge:
    return pair[1], pair[0]


def _data(schedule: Schedule) -> Iterator[Edge]:
    for action, needs in schedule.dependencies.items():
        yield from ((need, action) for need in needs)


def _crosses(schedule: Schedule, edge: Edge) -> bool:
    before, after = edge
    return schedule.stage_of[before.chunk] != schedule.stage_of[after.chunk]


def _transfers(schedule: Schedule, computed: Mapping[Action, Span], transfer: float) -> Iterator[Span]:
    for before, after in _data(schedule):
        if transfer and _crosses(schedule, (before, after)):
            sent, to = computed[before], computed[after].worker
            yield sent._replace(
                kind="transfer", worker=to, start=sent.stop, stop=sent.stop + transfer, source=sent.worker
            )


def _tasks(schedule: Schedule, computed: Mapping[Action, Span]) -> tuple[TracedTask, ...]:
    """Return the actions as tasks, ordered by end and then by rank: each after its dependencies."""
    rank = schedule.steps
    return tuple(
        TracedTask(
            *(str(a), a.kind, f"{a.chunk}{a.kind}", computed[a].seconds, 0),
            *(tuple(map(str, schedule.dependencies[a])), rank[a]),
            ModelPart(stage=schedule.stage_of[a.chunk], micro_batch=a.micro_batch),
        )
        for a in sorted(computed, key=lambda action: (computed[action].stop, rank[action]))
    )


class _SimulatedStages:
    """The ready and running actions of each stage, and the number of inputs that each action lacks."""

    def __init__(
        self,
        schedule: Schedule,
        control: Iterable[Edge],
        takes: Mapping[Action, float],
        transfer: float,
        hop: float,
    ) -> None:
        self.schedule, self.takes = schedule, takes
        self.after: dict[Action, list[tuple[Action, float]]] = {action: [] for action in takes}
        self.missing = dict.fromkeys(takes, 0)
        self.ready_at = dict.fromkeys(takes, 0.0)
        self.ready: dict[int, list[tuple[int, Action]]] = {s: [] for s in range(len(schedule.stages))}
        self.idle = set(self.ready)
        # Future events: time, the action's rank, the action, and whether it is done or only ready.
        self.events: list[tuple[float, int, Action, bool]] = []
        for before, after in (*control, *_data(schedule)):
            self.missing[after] += 1
            # Each edge is a message; those between stages carry an activation too.
            self.after[before].append((after, hop + transfer * _crosses(schedule, (before, after))))

    def computed(self) -> Iterator[tuple[Action, Span]]:
        """Yield each action and its span; all events of one time are processed before a stage chooses."""
        for action in [action for action, count in self.missing.items() if not count]:
            self._expect(0.0, action, done=False)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, rank, action, done = heappop(self.events)
                if done:
                    self._finish(now, action)
                else:
                    heappush(self.ready[self._stage(action)], (rank, action))
            # A list, since a stage that starts an action leaves the idle ones.
            for stage in [stage for stage in self.idle if self.ready[stage]]:
                yield self._start(now, stage)

    def _stage(self, action: Action) -> int:
        return self.schedule.stage_of[action.chunk]

    def _expect(self, second: float, action: Action, *, done: bool) -> None:
        heappush(self.events, (second, self.schedule.steps[action], action, done))

    def _start(self, now: float, stage: int) -> tuple[Action, Span]:
        _, action = heappop(self.ready[stage])
        self.idle.remove(stage)
        stop = now + self.takes[action]
        self._expect(stop, action, done=True)
        return action, Span("compute", str(action), action.kind, _worker(stage), 0, now, stop)

    def _finish(self, now: float, action: Action) -> None:
        self.idle.add(self._stage(action))
        for after, delay in self.after[action]:
            self.missing[after] -= 1
            self.ready_at[after] = max(self.ready_at[after], now + delay)
            if not self.missing[after]:
                self._expect(self.ready_at[after], after, done=False)
