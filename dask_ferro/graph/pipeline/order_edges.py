"""A schedule for a scheduler of task graphs: the stage, the priority and the predecessors of each action.

The order of a list is kept by control edges, which mean "not before" and carry no data, in one of three forms.

- *window*: a forward waits until its stage may keep one more activation.  If a stage keeps at most L activations, the
  k-th forward of its list waits for the list's (k - L)-th release (B or W); priorities do the rest.  A worker then has
  several tasks to choose from and seldom waits for the scheduler, but may deviate from the list's order.  Memory is
  bounded as by the list, since each forward but the first L follows a release.  With one chunk per stage this is "F(i)
  after the backward of i - w": w = m for gpipe (no edge at all), p - s for 1f1b, p for zb-h1.
- *chain*: every action waits for the previous one in its list.  The order is exact, but each task costs a round trip
  to the scheduler, during which its worker is idle.
- *queue*: every action waits for the last but one in its list, and for the last one's dependencies on other stages.
  When an action is ready, so is the previous one: with priorities the order is as exact as a chain's, and the worker
  has its next task before the current one ends.  A worker may swap two tasks that become ready at the same time, as
  Dask's do, and then keeps one more activation.  A value from another stage is kept for one more action.

Priorities alone do not bound memory: on 4 stages, 8, 7, 4 and 1 activations are kept where 1f1b keeps 4, 3, 2 and 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import FORWARD, RELEASING, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.schedule import Schedule

WINDOW, CHAIN, QUEUE = "window", "chain", "queue"
FORMS = (WINDOW, CHAIN, QUEUE)

# The hop, as a share of an action's seconds, above which a window beats a chain: the simulator's makespans crossed
# here for (p, m) = (4, 8), (4, 16) and (8, 32), seconds varying by 10 %.  A list with one chunk per stage and whole
# backwards has no entry: its window keeps the exact order (1f1b), or lets forwards run ahead without harm (gpipe).
# Nor has looped-bfs, whose window is shorter at any hop: by 0.1 % without one, by 20 to 23 % at 0.4.
#
# A queue is never the default, since it may swap two actions.  Measured: Dask 2026.8 on two shared cores, 4 processes,
# sleeps of 100 ms, (p, m) = (4, 8), two to six runs each; per cent over the time without any overhead:
#
#                    window      chain       queue
#   1f1b             5 to 8      6 to 7      4 to 10    6 to 12 of 64 actions out of their place
#   interleaved      8 to 10     5 to 10     3 to 7     6 to 18 of 128
#   zb-v             8 to 11     10 to 15    4 to 8     10 to 14 of 192
#   zb-h1            21 to 23    8 to 14     13 to 35   6 to 18 of 96: here another stage waits for each of them
#
# So it is an option for schedules with several chunks per stage.
_HOP_OF_SPLIT, _HOP_OF_CHUNKS, _HOP_OF_BOTH = 0.2, 0.4, 0.1


class Edge(NamedTuple):
    """An ordering of two actions: `after` starts once `before` is done."""

    before: Action
    after: Action


@dataclass(frozen=True)
class Lowering:
    """The stages, priorities and edges that keep a schedule's order in a task graph.

    Attributes
    ----------
    form : str
        "window", "chain" or "queue".
    stage : mapping of Action to int
        The stage of each action: one worker, or one set of workers.
    priority : mapping of Action to int
        Higher runs first.  It falls along every list and every edge, so priorities of all stages are comparable.
    data : tuple of Edge
        The schedule's dependencies.
    control : tuple of Edge
        The edges that only keep the order; none of them is in `data`.  Those of a queue may lead from one stage to
        another where data does too.
    """

    form: str
    stage: Mapping[Action, int]
    priority: Mapping[Action, int]
    data: tuple[Edge, ...]
    control: tuple[Edge, ...]


def lowering(schedule: Schedule, form: str | None = None, *, hop: float = 0.0) -> Lowering:
    """Return the stage, the priority and the edges of each action of a schedule.

    Parameters
    ----------
    form : str, optional
        "window", "chain" or "queue"; `best_form` chooses by default.
    hop : float
        The time from the end of a task to the start of a dependent one on the same worker, as a share of the shortest
        action's seconds.

    Raises
    ------
    ConfigError
        There is no such form.
    """
    check_form(form)
    form = best_form(schedule, hop) if form is None else form
    edges = {WINDOW: _windows, CHAIN: _chains, QUEUE: _queues}[form](schedule)
    needs = schedule.dependencies
    data: list[Edge] = []
    for action, its in needs.items():
        data += [Edge(need, action) for need in its]
    return Lowering(
        form,
        {action: schedule.stage_of[action.chunk] for action in schedule.actions},
        {action: -step for action, step in schedule.steps.items()},
        tuple(data),
        tuple(edge for edge in dict.fromkeys(edges) if edge.before not in needs[edge.after]),
    )


def check_form(form: str | None) -> None:
    """Raise `ConfigError` for an unknown form; None selects the best one."""
    if form is not None and form not in FORMS:
        raise ConfigError(f"lowering: form: got {form!r}, wanted one of {', '.join(FORMS)}")


def best_form(schedule: Schedule, hop: float = 0.0) -> str:
    """Return the form with the shorter makespan: a window for plain lists and for long hops, else a chain.

    A chain delays actions that are ready too early: a weight gradient before an input gradient that other stages wait
    for, or a chunk that overtakes another.  That is worth a hop per task only if hops are short.
    """
    split = any(action.kind == WEIGHT_GRAD for action in schedule.actions)
    several = schedule.chunks > len(schedule.stages) and not _fills(schedule)
    if not split and not several:
        return WINDOW
    crossing = _HOP_OF_BOTH if split and several else _HOP_OF_SPLIT if split else _HOP_OF_CHUNKS
    return WINDOW if hop >= crossing else CHAIN


def _fills(schedule: Schedule) -> bool:
    """Return whether every stage does all its forwards first: then there is no memory that an order would save."""
    forwards = Counter(
        schedule.stage_of[action.chunk] for action in schedule.actions if action.kind == FORWARD
    )
    return schedule.peaks == tuple(forwards[stage] for stage in range(len(schedule.stages)))


def _windows(schedule: Schedule) -> Iterator[Edge]:
    for row, peak in zip(schedule.stages, schedule.peaks, strict=True):
        forwards = [action for action in row if action.kind == FORWARD]
        releases = [action for action in row if action.kind in RELEASING]
        yield from map(Edge, releases, forwards[peak:])


def _chains(schedule: Schedule) -> Iterator[Edge]:
    for row in schedule.stages:
        yield from (Edge(*pair) for pair in pairwise(row))


def _queues(schedule: Schedule) -> Iterator[Edge]:
    home = schedule.stage_of
    for row in schedule.stages:
        yield from map(Edge, row, row[2:])
        for last, action in pairwise(row):
            needs = schedule.dependencies[last]
            yield from (Edge(need, action) for need in needs if home[need.chunk] != home[last.chunk])
