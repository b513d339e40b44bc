"""The layout of a scheduler's graph as nodes and edges: single tasks, or groups if there are many.

A graph of up to two thousand tasks and ten thousand dependencies is drawn by tasks; a larger one by groups, or by
prefixes.  So a layout is of bounded size, and it is computed only when nodes change, not when states do; a picture
that took long is not renewed soon.  A node's layer is one to the right of the last node that it depends on.

The critical path is the chain with the most projected seconds; for groups, with one task of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from statistics import fmean
from typing import NamedTuple

from distributed import Scheduler
from distributed.metrics import monotonic
from distributed.scheduler import TaskGroup, TaskPrefix, TaskState

from dask_ferro.policy.estimates import Durations
from dask_ferro.policy.ranking import upward_ranks
from dask_ferro.runtime import upstream
from dask_ferro.runtime.telemetry.timeline_feed import bundle_of
from dask_ferro.runtime.upstream import nbytes_of

# The most tasks drawn singly, the most groups drawn as such, and the most edges.
TASKS = 2_000
GROUPS = 500
EDGES = 6_000
# The most dependencies of a layout: 20 to 100 ms of the loop.  Beyond them groups replace tasks, and prefixes replace
# groups; any two of this many prefixes may depend on each other.
LINKS = 10_000
PREFIXES = 100
# One over the share of the scheduler's time for pictures.
_SHARE = 20
# States in the order in which the least advanced one describes a group.
STATES = ("erred", "no-worker", "processing", "queued", "waiting", "memory", "released")


class DrawnNode(NamedTuple):
    """A node for one task or several, with its position and progress.

    Attributes
    ----------
    name, prefix, note : str
        The key or the group's name; the prefix; a description of the bundle.
    x, y : float
        Layer, and position in the layer around 0.
    state : str
        For several tasks, the state of those that hold up the others.
    tasks, done : int
    seconds : float
        Projected seconds of one task.
    nbytes : int
        Bytes of results in memory.
    critical : bool
    """

    name: str
    prefix: str
    note: str
    x: float
    y: float
    state: str
    tasks: int
    done: int
    seconds: float
    nbytes: int
    critical: bool


class DrawnEdge(NamedTuple):
    """An edge between the positions of two nodes, from a dependency to its dependent."""

    start: int
    stop: int
    critical: bool


class GraphPicture(NamedTuple):
    """The content of the page of the graph.

    Attributes
    ----------
    grain : str
        "tasks", "groups" or "prefixes".
    tasks : int
    states : mapping of str to int
        Number of tasks by state.
    nodes : tuple of DrawnNode
    edges : tuple of DrawnEdge
        If there are too many to draw, the critical ones and the first.
    hidden : int
        Number of edges left out.
    path : float
        Projected seconds of the critical path.
    layout : int
        A number that changes when nodes change their positions.
    """

    grain: str
    tasks: int
    states: Mapping[str, int]
    nodes: tuple[DrawnNode, ...]
    edges: tuple[DrawnEdge, ...]
    hidden: int
    path: float
    layout: int = 0


class _GraphLayout(NamedTuple):
    """The part of a picture that does not depend on states: nodes in order, their positions, and edges."""

    grain: str
    names: tuple[Hashable, ...]
    places: tuple[tuple[float, float], ...]
    notes: tuple[str, ...]
    critical: frozenset[Hashable]
    edges: tuple[DrawnEdge, ...]
    hidden: int
    path: float


# The tasks or groups of each node.
_Things = dict[Hashable, Sequence[TaskState | TaskGroup]]


class Chart:
    """The graph of one open page, with a new layout only when tasks come or go."""

    def __init__(self, scheduler: Scheduler, durations: Durations) -> None:
        self._scheduler = scheduler
        self._durations = durations
        self._plan = _GraphLayout("", (), (), (), frozenset(), (), 0, 0.0)
        self._last: tuple[int, GraphPicture] | None = None
        self._due = 0.0
        self._layouts = 0

    def picture(self) -> GraphPicture:
        """Return the current graph; the previous picture is reused if nothing happened or it was made a moment ago."""
        scheduler = self._scheduler
        count, began = scheduler.transition_counter, monotonic()
        if self._last is not None and (self._last[0] == count or began < self._due):
            return self._last[1]
        picture = self._drawn()
        self._last = count, picture
        self._due = monotonic() + _SHARE * (monotonic() - began)
        return picture

    def _drawn(self) -> GraphPicture:
        grain, things = self._things()
        if (grain, tuple(things)) != (self._plan.grain, self._plan.names):
            self._layouts += 1
            self._plan = self._laid_out(grain, things)
        plan = self._plan
        rows = zip(plan.names, plan.places, plan.notes, strict=True)
        nodes = tuple(self._node(n, things[n], note, *at, n in plan.critical) for n, at, note in rows)
        states, tasks = _counted(upstream.prefixes(self._scheduler)), len(self._scheduler.tasks)
        return GraphPicture(grain, tasks, states, nodes, plan.edges, plan.hidden, plan.path, self._layouts)

    def _things(self) -> tuple[str, _Things]:
        """Return the kind of nodes and their tasks: tasks by key, groups by name, or the groups of each prefix."""
        scheduler = self._scheduler
        if len(scheduler.tasks) <= TASKS and _links(scheduler.tasks.values()) <= LINKS:
            return "tasks", {key: [ts] for key, ts in scheduler.tasks.items()}
        groups = upstream.groups(scheduler)
        if len(groups) <= GROUPS and _links(groups.values()) <= LINKS:
            return "groups", {name: [group] for name, group in groups.items()}
        found: dict[str, list[TaskState | TaskGroup]] = {}
        sizes: Counter[str] = Counter()
        for group in groups.values():
            if group.prefix is not None:
                found.setdefault(group.prefix.name, []).append(group)
                sizes[group.prefix.name] += len(group)
        busiest = sorted(found, key=lambda name: -sizes[name])[:PREFIXES]
        return "prefixes", {name: found[name] for name in busiest}

    def _laid_out(self, grain: str, things: _Things) -> _GraphLayout:
        before = _before(things)
        after: dict[Hashable, list[Hashable]] = {name: [] for name in things}
        for name, earlier in before.items():
            for one in earlier:
                after[one].append(name)
        seconds = {name: self._seconds(own[0]) for name, own in things.items()}
        ranks = upward_ranks(after, seconds)
        path = critical_path(after, ranks, before)
        layers = layered(before, after)
        positions = {name: i for i, name in enumerate(things)}
        steps = set(pairwise(path))
        edges: list[DrawnEdge] = []
        for one, place in positions.items():
            edges += (DrawnEdge(positions[a], place, (a, one) in steps) for a in before[one])
        edges.sort(key=lambda e: not e.critical)
        places = tuple(layers[name] for name in things)
        longest = sum(seconds[name] for name in path)
        notes = tuple(bundle_of(self._scheduler, name)[0] if grain == "tasks" else "" for name in things)
        shown, hidden = tuple(edges[:EDGES]), max(len(edges) - EDGES, 0)
        return _GraphLayout(grain, tuple(things), places, notes, frozenset(path), shown, hidden, longest)

    def _seconds(self, one: TaskState | TaskGroup) -> float:
        return float(self._durations.of(_prefix(one), "cpu", None)[0])

    def _node(
        self,
        name: Hashable,
        own: Sequence[TaskState | TaskGroup],
        note: str,
        x: float,
        y: float,
        critical: bool,
    ) -> DrawnNode:
        first, state = own[0], ""
        if isinstance(first, TaskState):
            is_done = first.state == "memory" or (first.state == "released" and not first.waiting_on)
            state, tasks, done = first.state, 1, int(is_done)
            nbytes = nbytes_of(first) if state == "memory" else 0
        else:
            groups = [one for one in own if isinstance(one, TaskGroup)]
            states = _counted(groups)
            tasks, done = states.total(), states["memory"] + states["released"]
            state = next((s for s in STATES if states[s]), "released")
            nbytes = sum(group.nbytes_total for group in groups)
        return DrawnNode(
            str(name), _prefix(first), note, x, y, state, tasks, done, self._seconds(first), nbytes, critical
        )


def _counted(things: Iterable[TaskGroup | TaskPrefix]) -> Counter[str]:
    """Return the number of tasks of groups or prefixes in each state."""
    states: Counter[str] = Counter()
    for thing in things:
        states.update({s: c for s, c in thing.states.items() if c and s != "forgotten"})
    return states


def _prefix(one: TaskState | TaskGroup) -> str:
    return one.prefix.name if one.prefix is not None else ""


def _links(things: Iterable[TaskState | TaskGroup]) -> int:
    """Return the number of dependencies of tasks or groups."""
    return sum(len(thing.dependencies) for thing in things)


def _before(things: _Things) -> dict[Hashable, list[Hashable]]:
    """Return the dependencies of each node; groups may depend on themselves and on each other."""
    home: dict[int, Hashable] = {}
    for name, groups in things.items():
        home |= dict.fromkeys(map(id, groups), name)
    before: dict[Hashable, list[Hashable]] = {}
    for name, groups in things.items():
        earlier = (home.get(id(d), name) for d in chain.from_iterable(g.dependencies for g in groups))
        before[name] = list(dict.fromkeys(one for one in earlier if one != name))
    return before


def critical_path(
    after: Mapping[Hashable, Sequence[Hashable]],
    ranks: Mapping[Hashable, float],
    before: Mapping[Hashable, Sequence[Hashable]],
) -> list[Hashable]:
    """Return the chain with the most seconds, from its first node to its last.

    Nodes on a cycle, which groups may form, are left out.

    >>> critical_path({"a": ["b", "c"], "b": [], "c": []}, {"a": 3.0, "b": 1.0, "c": 2.0}, {})
    ['a', 'c']
    """
    path: list[Hashable] = []
    options: Sequence[Hashable] = [name for name in ranks if not before.get(name)]
    while options and len(path) < len(ranks):
        # The rank of a node is the longest path from it to an end, so that its best successor has the highest rank.
        path.append(max(options, key=lambda name: ranks[name]))
        options = after[path[-1]]
    return path


def _height(earlier: Iterable[Hashable], places: Mapping[Hashable, tuple[float, float]]) -> float:
    """Return the mean height of a node's dependencies, at which its edges are short."""
    found = [places[name][1] for name in earlier if name in places]
    return fmean(found) if found else 0.0


def layered(
    before: Mapping[Hashable, Sequence[Hashable]], after: Mapping[Hashable, Sequence[Hashable]]
) -> dict[Hashable, tuple[float, float]]:
    """Return each node's place: its layer, and its position there around 0, near its dependencies.

    >>> layered({"a": [], "b": ["a"], "c": ["a"]}, {"a": ["b", "c"], "b": [], "c": []})
    {'a': (0.0, 0.0), 'b': (1.0, -0.5), 'c': (1.0, 0.5)}
    """
    depths = dict.fromkeys(before, 0)
    waiting = {name: len(earlier) for name, earlier in before.items()}
    ready = [name for name, count in waiting.items() if not count]
    # The list grows in its loop; nodes on a cycle never become ready, and keep the layer after their dependencies.
    for name in ready:
        for later in after[name]:
            depths[later] = max(depths[later], depths[name] + 1)
            waiting[later] -= 1
            if not waiting[later]:
                ready.append(later)
    layers: dict[int, list[Hashable]] = {}
    for name, depth in depths.items():
        layers.setdefault(depth, []).append(name)
    places: dict[Hashable, tuple[float, float]] = {}
    for depth in sorted(layers):
        row = layers[depth]
        if depth:
            row = sorted(row, key=lambda name: _height(before[name], places))
        middle = (len(row) - 1) / 2
        for order, name in enumerate(row):
            places[name] = (float(depth), order - middle)
    return places
