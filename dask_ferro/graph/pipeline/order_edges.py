"""A schedule as a scheduler of task graphs understands it: where, how urgent, and which tasks wait for which.

Three forms keep the order of a list, by edges that mean "not before" and carry nothing.

- *window*: a forward waits until its stage may keep one activation more.  With L activations at a stage's peak, the
  k-th forward of its list waits for the (k - L)-th release (B or W) of it; priorities do the rest.  A worker then has
  several tasks to choose from and seldom waits for the scheduler's answer, and may leave the list's order.  Memory is
  the list's all the same: each forward but L has a release that came before.  With one chunk a stage this is "F(i)
  after the backward of i - w": w = m for gpipe (no edge at all), p - s for 1f1b, p for zb-h1.
- *chain*: every action waits for the one before it in its list.  The order is exact, and each task costs a hop to
  the scheduler and back, in which its worker has nothing to do.
- *queue*: every action waits for the one before the last, and for what the last one waits for from other stages.
  When it is ready the last one is, so by priority the order is as exact as a chain's, and the worker has its next
  task at hand before it is done with this one.  A worker that starts either of two tasks that get ready at one
  instant, as Dask's do, may swap those, and keeps an activation more then.  What came from another stage is kept an
  action longer.

Priorities alone keep no memory: on 4 stages, 8, 7, 4 and 1 activations are kept where 1f1b keeps 4, 3, 2 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import FORWARD, RELEASING, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.schedule import Schedule

WINDOW, CHAIN, QUEUE = "window", "chain", "queue"
FORMS = (WINDOW, CHAIN, QUEUE)

# The hop, as a share of an action's seconds, from which on a window beats a chain: the simulator's makespans crossed
# here for (p, m) = (4, 8), (4, 16) and (8, 32), seconds varying by 10 %.  A list with one chunk a stage and whole
# backwards has no entry: its window keeps the exact order (1f1b), or lets forwards run ahead to no harm (gpipe).
#
# A queue is nobody's default, since it may swap.  Measured: Dask 2026.8 on two cores that had other work too, four
# processes, sleeps of 100 ms, (p, m) = (4, 8), two to six runs each; per cent over the time without any overhead:
#
#                    window      chain       queue
#   1f1b             5 to 8      6 to 7      4 to 10    6 to 12 of 64 actions out of their place
#   interleaved      8 to 10     5 to 10     3 to 7     6 to 18 of 128
#   zb-v             8 to 11     10 to 15    4 to 8     10 to 14 of 192
#   zb-h1            21 to 23    8 to 14     13 to 35   6 to 18 of 96: here each of them is waited for
#
# So it is one to ask for with several chunks a stage.
_HOP_OF_SPLIT, _HOP_OF_CHUNKS, _HOP_OF_BOTH = 0.2, 0.4, 0.1


class Edge(NamedTuple):
    """An action, and one that starts only when it is done."""

    before: Action
    after: Action


@dataclass(frozen=True)
class Lowering:
    """What keeps a schedule where a scheduler starts whatever is ready.

    Attributes
    ----------
    form : str
        "window", "chain" or "queue".
    stage : mapping of Action to int
        Where it runs: one worker, or one set of workers, for each stage.
    priority : mapping of Action to int
        The higher runs first.  It falls along every list and every edge, so it means the same on all stages.
    data : tuple of Edge
        What actions need of each other; the schedule's own dependencies.
    control : tuple of Edge
        What else has to wait, for order's sake; none of them is in `data`.  Those of a queue may lead from one
        stage to another, there where the data goes anyway.
    """

    form: str
    stage: Mapping[Action, int]
    priority: Mapping[Action, int]
    data: tuple[Edge, ...]
    control: tuple[Edge, ...]


def lowering(schedule: Schedule, form: str | None = None, *, hop: float = 0.0) -> Lowering:
    """Return where, how urgently and after what each action of a schedule runs.

    Parameters
    ----------
    form : str, optional
        "window", "chain" or "queue"; `best_form` chooses if not given.
    hop : float
        From the end of a task until one that waited for it starts on the same worker, as a share of the shortest
        action's seconds.

    Raises
    ------
    ConfigError
        For another form.
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
    """Raise `ConfigError` for a form that is not known; None is whichever is best."""
    if form is not None and form not in FORMS:
        raise ConfigError(f"lowering: form: got {form!r}, wanted one of {', '.join(FORMS)}")


def best_form(schedule: Schedule, hop: float = 0.0) -> str:
    """Return the form that keeps the list's memory and ends sooner: a window for plain lists and for long hops.

    A chain forbids what is ready too early: weight gradients that take the place of an input gradient that others
    wait for, or a chunk that overtakes another.  That is worth a hop a task only while hops are short.
    """
    split = any(action.kind == WEIGHT_GRAD for action in schedule.actions)
    several = schedule.chunks > len(schedule.stages)
    if not split and not several:
        return WINDOW
    crossing = _HOP_OF_BOTH if split and several else _HOP_OF_SPLIT if split else _HOP_OF_CHUNKS
    return WINDOW if hop >= crossing else CHAIN


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
