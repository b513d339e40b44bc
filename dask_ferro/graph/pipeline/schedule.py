"""A pipeline schedule as data: for each stage the list of its actions, in order.

Every `Schedule` can run: lists that lack an action, have one twice, spread a chunk over two stages or wait for each
other are refused when it is created.  It has no seconds, bytes or workers.

    stage 0  0F0 0F1   . 0B0 0F2 0B1 0F3 0B2   . 0B3        1f1b of 4 micro-batches on 2 stages:
    stage 1    . 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3            chunk, kind and micro-batch by step

In a task graph the order of a list is kept by edges that mean "not before" and carry no data (`Schedule.waits`).
Priorities do not suffice to bound memory: on 4 stages they keep 8, 7, 4 and 1 activations, and 1f1b keeps 4, 3, 2 and
1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from dask_ferro.errors import InputError
from dask_ferro.graph.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    KINDS,
    RELEASING,
    WEIGHT_GRAD,
    Action,
    dependencies,
)

Rows = Sequence[Sequence[Action]]

_IDLE = "."
# Maximum number of problems in a message: lists with more of them have to be rewritten.
_MOST_PROBLEMS = 10
_WHOLE_BACKWARD, _SPLIT_BACKWARD = {FORWARD, BACKWARD}, {FORWARD, INPUT_GRAD, WEIGHT_GRAD}


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of each stage of a pipeline, in order.

    Parameters
    ----------
    stages : tuple of tuples of Action
        The list of each stage; every chunk is on one stage, with F and B, or F, I and W, for every micro-batch.
        Without any backward it is a schedule of inference.
    name : str
        Name for messages.

    Raises
    ------
    InputError
        If the lists cannot run; the message lists all problems.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.parallel as fp
    >>> mine = fp.Schedule.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], name="mine")
    >>> print(mine)
    stage 0  0F0 0F1   . 0B0   . 0B1
    stage 1    . 1F0 1B0 1F1 1B1
    """

    stages: tuple[tuple[Action, ...], ...]
    name: str = "schedule"

    def __post_init__(self) -> None:
        if wrong := problems(self.stages):
            raise _refusal(f"schedule {self.name!r} cannot run:", wrong)

    @cached_property
    def micro_batches(self) -> int:
        """The number of micro-batches of one training step."""
        return 1 + max(action.micro_batch for action in self.actions)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions, stage after stage."""
        return tuple(chain.from_iterable(self.stages))

    @cached_property
    def stage_of(self) -> Mapping[int, int]:
        """The stage of each chunk, in the order of chunks."""
        homes: dict[int, int] = {}
        for stage, row in enumerate(self.stages):
            homes |= dict.fromkeys((action.chunk for action in row), stage)
        return dict(sorted(homes.items()))

    @property
    def chunks(self) -> int:
        """The number of chunks of the model."""
        return len(self.stage_of)

    @cached_property
    def dependencies(self) -> Mapping[Action, tuple[Action, ...]]:
        """The dependencies of every action, in an order in which the actions can run."""
        needs = dependencies(set(self.actions))
        order, _ = walk(self.stages, needs)
        return {action: needs[action] for action in order}

    @cached_property
    def steps(self) -> Mapping[Action, int]:
        """The step of each action if every action takes one step; it rises along every list and edge."""
        steps: dict[Action, int] = {}
        for action, needs in self.dependencies.items():
            waits = (*needs, self._before[action]) if action in self._before else needs
            steps[action] = 1 + max((steps[w] for w in waits), default=-1)
        return steps

    @cached_property
    def _before(self) -> Mapping[Action, Action]:
        """The action before each one in its list."""
        return dict(chain.from_iterable(zip(row[1:], row, strict=False) for row in self.stages))

    @cached_property
    def waits(self) -> Mapping[Action, Action]:
        """The action that each action waits for only to keep the order of its list: the one before it.

        There is none if every stage does all its forwards first: no order would save memory, and a worker that can
        choose from several actions waits for nothing.  If backwards are split and stages have several chunks, as in a
        V, one of Dask's hops for each action costs more than their order saves: then only a forward waits, for the
        release (B or W) that frees memory for one more activation.
        """
        forwards = [[action for action in row if action.kind == FORWARD] for row in self.stages]
        if not any(self.peaks) or self.peaks == tuple(map(len, forwards)):
            return {}
        before = self._before
        if self.chunks > len(self.stages) and any(action.kind == WEIGHT_GRAD for action in self.actions):
            releases = ([action for action in row if action.kind in RELEASING] for row in self.stages)
            rows = zip(forwards, releases, self.peaks, strict=True)
            before = dict(chain.from_iterable(zip(f[peak:], r, strict=False) for f, r, peak in rows))
        return {after: first for after, first in before.items() if first not in self.dependencies[after]}

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Maximum number of activations that each stage keeps at a time, for any durations.

        An activation belongs to one chunk and micro-batch, from its F to the end of its B or W; divide by the chunks
        of a stage to get activations of whole stages.  Without a backward none is kept.
        """
        return tuple(_peak(row) for row in self.stages)

    def forward(self) -> Schedule:
        """Return the schedule of inference: the forwards in their order."""
        forwards = (tuple(action for action in row if action.kind == FORWARD) for row in self.stages)
        return Schedule(tuple(forwards), f"{self.name}, forward")

    def __repr__(self) -> str:
        counts = f"{len(self.stages)} stages, {self.chunks} chunks, {self.micro_batches} micro-batches"
        return f"<Schedule {self.name!r}: {counts}, {len(self.actions)} actions>"

    def __str__(self) -> str:
        """Return the schedule as text: a line per stage, a column per step, a point if the stage is idle."""
        width = 1 + max(len(str(action)) for action in self.actions)
        lines = []
        for stage, row in enumerate(self.stages):
            cells = {self.steps[action]: str(action) for action in row}
            shown = (cells.get(step, _IDLE).rjust(width) for step in range(max(cells) + 1))
            lines.append(f"stage {stage:<{len(str(len(self.stages) - 1))}} {''.join(shown)}")
        return "\n".join(lines)

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action | str]], name: str = "schedule") -> Schedule:
        """Return the schedule of one list per stage, of actions or of texts like `2F0`.

        Raises
        ------
        InputError
            If a text is not an action, or the lists cannot run.

        """
        wrong: list[str] = []
        stages: list[tuple[Action, ...]] = []
        for stage, cells in enumerate(rows):
            row = []
            for at, cell in enumerate(cells):
                try:
                    row.append(Action.parse(cell) if isinstance(cell, str) else cell)
                except ValueError as error:
                    wrong.append(f"stage {stage}, action {at}: {error}")
            stages.append(tuple(row))
        if wrong:
            raise _refusal(f"schedule {name!r} cannot be read:", _first(wrong))
        return cls(tuple(stages), name)


def _peak(row: Sequence[Action]) -> int:
    if not any(action.kind in RELEASING for action in row):
        return 0
    most = kept = 0
    for action in row:
        kept += (action.kind == FORWARD) - (action.kind in RELEASING)
        most = max(most, kept)
    return most


# ---- checks ------------------------------------------------------------------------------------------------


def problems(rows: Rows) -> list[str]:
    """Return the problems of lists of actions, one list per stage; none if they are a schedule."""
    return (
        _first(_check_form(rows)) or _first(_check_place(rows)) or _first(_incomplete(rows)) or _locks(rows)
    )


def _first(wrong: Iterable[str]) -> list[str]:
    """Return the first problems, as many as fit into a message, and a note if there are more."""
    shown = list(islice(wrong, _MOST_PROBLEMS + 1))
    return [*shown[:_MOST_PROBLEMS], "and more"] if len(shown) > _MOST_PROBLEMS else shown


def _refusal(headline: str, wrong: Iterable[str]) -> InputError:
    return InputError("\n  - ".join([headline, *wrong]))


def _check_form(rows: Rows) -> Iterator[str]:
    if not rows:
        yield "has no stages; wanted a list of actions for each"
    for stage, row in enumerate(rows):
        if not row:
            yield f"stage {stage} has no actions; wanted some, or no such stage"
        for action in row:
            if not _is_action(action):
                form = f"Action(chunk, one of {', '.join(KINDS)}, micro_batch), numbers from 0"
                yield f"stage {stage}: got {action!r}, wanted {form}"


def _is_action(action: object) -> bool:
    if not isinstance(action, Action) or action.kind not in KINDS:
        return False
    # `type`, since isinstance(True, int) holds, and True would be chunk 1.
    return all(type(number) is int and number >= 0 for number in (action.chunk, action.micro_batch))


def _check_place(rows: Rows) -> Iterator[str]:
    for stage, row in enumerate(rows):
        for action, times in Counter(row).items():
            if times > 1:
                yield f"stage {stage}: got {action} {times} times, wanted it once"
    homes: dict[int, set[int]] = {}
    for stage, row in enumerate(rows):
        for action in row:
            homes.setdefault(action.chunk, set()).add(stage)
    for chunk, stages in sorted(homes.items()):
        if len(stages) > 1:
            yield f"chunk {chunk}: got stages {sorted(stages)}, wanted one: weights stay in one place"


def _incomplete(rows: Rows) -> Iterator[str]:
    """Yield missing actions lazily, since a list may have one action, of micro-batch 999999."""
    kinds: dict[tuple[int, int], set[str]] = {}
    for row in rows:
        for chunk, kind, micro_batch in row:
            kinds.setdefault((chunk, micro_batch), set()).add(kind)
    # Lists without any backward are a schedule of inference.
    trains = any(len(there) > 1 or FORWARD not in there for there in kinds.values())
    whole = "F and B (whole), or F, I and W (split)" if trains else "F only, as elsewhere"
    chunks, micro_batches = (1 + max(numbers) for numbers in zip(*kinds, strict=True))
    for chunk in range(chunks):
        for micro_batch in range(micro_batches):
            there = kinds.get((chunk, micro_batch), set())
            if there not in ((_WHOLE_BACKWARD, _SPLIT_BACKWARD) if trains else ({FORWARD},)):
                got = ", ".join(kind for kind in KINDS if kind in there) or "nothing"
                yield f"chunk {chunk}, micro-batch {micro_batch}: got {got}, wanted {whole}"


def _locks(rows: Rows) -> list[str]:
    needs = dependencies(set(chain.from_iterable(rows)))
    _, waits = walk(rows, needs)
    if not waits:
        return []
    return [f"deadlock: {'; '.join(waits)}"]


def walk(rows: Rows, needs: Mapping[Action, Sequence[Action]]) -> tuple[list[Action], list[str]]:
    """Return an order in which the actions can run, each stage following its list, and the waits of blocked stages.

    In this order every action comes after its dependencies and after the earlier actions of its list.
    """
    done: dict[Action, None] = {}
    at = [0] * len(rows)
    asleep: dict[Action, list[int]] = {}
    awake = deque(range(len(rows)))
    while awake:
        stage = awake.popleft()
        while at[stage] < len(rows[stage]):
            action = rows[stage][at[stage]]
            missing = next((need for need in needs[action] if need not in done), None)
            if missing is not None:
                asleep.setdefault(missing, []).append(stage)
                break
            done[action] = None
            at[stage] += 1
            # A blocked stage waits for one action, and is tried again only when that one is done.
            awake.extend(asleep.pop(action, ()))
    blocked = [(stage, need) for need, stages in asleep.items() for stage in stages]
    return list(done), [
        f"stage {stage} waits at {rows[stage][at[stage]]} for {need}" for stage, need in sorted(blocked)
    ]
