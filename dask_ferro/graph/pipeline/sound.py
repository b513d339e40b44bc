"""Checks of lists of actions: each action once, on one stage, and no deadlock.

The problems are returned as text, all at once.  Deadlocks are checked only in complete lists, since a missing action
blocks every later stage.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    KINDS,
    WEIGHT_GRAD,
    Action,
    dependencies,
)

Rows = Sequence[Sequence[Action]]

# The most problems in a message: lists with more of them have to be rewritten.
MOST_PROBLEMS = 10
_WHOLE, _SPLIT = {FORWARD, BACKWARD}, {FORWARD, INPUT_GRAD, WEIGHT_GRAD}


class BlockedStage(NamedTuple):
    """A blocked stage: the action that cannot start, and one that it waits for."""

    stage: int
    action: Action
    for_: Action


def problems(rows: Rows) -> list[str]:
    """Return the problems of lists of actions, one list per stage; none if they are a schedule."""
    return first(_malformed(rows)) or first(_misplaced(rows)) or first(_incomplete(rows)) or _stuck(rows)


def first(found: Iterable[str]) -> list[str]:
    """Return the first problems, as many as fit into a message, and a note if there are more."""
    shown = list(islice(found, MOST_PROBLEMS + 1))
    return [*shown[:MOST_PROBLEMS], "and more"] if len(shown) > MOST_PROBLEMS else shown


def refusal(headline: str, found: Iterable[str]) -> ConfigError:
    """Return the error of a schedule with these problems, one per line."""
    return ConfigError("\n  - ".join([headline, *found]))


def _malformed(rows: Rows) -> Iterator[str]:
    if not rows:
        yield "has no stages; wanted a list of actions for each"
    for stage, row in enumerate(rows):
        if not row:
            yield f"stage {stage} has no actions; wanted some, or no such stage"
        for action in row:
            if not _is_action(action):
                wanted = f"Action(chunk, one of {', '.join(KINDS)}, micro_batch), numbers from 0"
                yield f"stage {stage}: got {action!r}, wanted {wanted}"


def _is_action(action: object) -> bool:
    if not isinstance(action, Action) or action.kind not in KINDS:
        return False
    # `type`, since isinstance(True, int) holds, and True would be chunk 1.
    return all(type(number) is int and number >= 0 for number in (action.chunk, action.micro_batch))


def _misplaced(rows: Rows) -> Iterator[str]:
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
    """Yield missing actions lazily, since a file may have one action, of micro-batch 999999."""
    kinds: dict[tuple[int, int], set[str]] = {}
    for row in rows:
        for chunk, kind, micro_batch in row:
            kinds.setdefault((chunk, micro_batch), set()).add(kind)
    # With no backward anywhere the lists are a schedule of inference.
    trains = any(len(there) > 1 or FORWARD not in there for there in kinds.values())
    wanted = "F and B (whole), or F, I and W (split)" if trains else "F only, as elsewhere"
    chunks, micro_batches = (1 + max(numbers) for numbers in zip(*kinds, strict=True))
    for chunk in range(chunks):
        for micro_batch in range(micro_batches):
            there = kinds.get((chunk, micro_batch), set())
            if there not in ((_WHOLE, _SPLIT) if trains else ({FORWARD},)):
                got = ", ".join(kind for kind in KINDS if kind in there) or "nothing"
                yield f"chunk {chunk}, micro-batch {micro_batch}: got {got}, wanted {wanted}"


def _stuck(rows: Rows) -> list[str]:
    needs = dependencies(set(chain.from_iterable(rows)))
    _, waits = walk(rows, needs)
    if not waits:
        return []
    listed = "; ".join(f"stage {w.stage} waits at {w.action} for {w.for_}" for w in waits)
    return [f"deadlock: {listed}"]


def walk(rows: Rows, needs: Mapping[Action, Sequence[Action]]) -> tuple[list[Action], list[BlockedStage]]:
    """Return an order in which the actions can run, each stage following its list, and the blocked stages.

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
    waits: list[BlockedStage] = []
    for need, stages in asleep.items():
        waits += [BlockedStage(stage, rows[stage][at[stage]], need) for stage in stages]
    return list(done), sorted(waits)
