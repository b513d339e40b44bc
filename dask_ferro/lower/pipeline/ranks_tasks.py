"""The tasks of a pipeline over groups of ranks: a sharded graph once for each micro-batch, in a schedule's order.

    RankCall of each micro-batch --> whose action each task is --> what the schedule has it wait for, rank by rank
                             \\-> gradients, added by rank in the order of micro-batches

A schedule's edge between two actions is one between each rank's tasks: what an action begins with on a rank waits
for what the other one ends with there.  An action of which a rank computes nothing passes on what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dask.highlevelgraph import MaterializedLayer

from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.order_edges import Lowering
from dask_ferro.graph.sharding.node_placement import NodePlacement
from dask_ferro.graph.sharding.parts import Port, holders_of
from dask_ferro.graph.sharding.segments import Cut
from dask_ferro.lower.pipeline.tasks import first_in_line
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes
from dask_ferro.lower.ranks.spmd_tasks import PartReading, RankCall
from dask_ferro.lower.ranks.stage_workers import placed
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.segment_run import added, after, share, taken
from dask_ferro.trace import About

Home = tuple[int, NodePlacement]  # a rank, and where it is


class Share(NamedTuple):
    """What sums over micro-batches are divided by, and the dtypes of what they are of."""

    parts: int
    dtypes: Mapping[str, Any]


def lowest_priority(plan: Lowering, pieces: Cut) -> int:
    """Return a priority that no task of a step is below."""
    return _span(pieces) * (min(plan.priority.values()) - 1)


def _span(pieces: Cut) -> int:
    """How many priorities an action takes: inputs are at 1, and tasks fall from 0 to the last bucket's number."""
    return 2 + len(pieces.buckets)


class StepTasks:
    """The tasks of a step.

    Parameters
    ----------
    plan : Lowering
        The schedule as edges and priorities.
    calls : sequence of RankCall
        One for each micro-batch, with places for its inputs, written.
    shared : RankCall
        Of the inputs that all micro-batches read.
    ports : sequence of Port
        Loss and gradients.
    share : Share
    token : str
    """

    def __init__(
        self,
        plan: Lowering,
        calls: Sequence[RankCall],
        shared: RankCall,
        ports: Sequence[Port],
        share: Share,
        token: str,
    ) -> None:
        self.plan, self.calls, self.share, self.token = plan, calls, share, token
        self.tasks: dict[Key, Task] = {}
        self.home: dict[Key, Home] = {}
        self.action: dict[Key, Action] = {}
        self.about: dict[Key, tuple[Any, ...]] = {}
        self.inner: dict[Key, int] = {}  # urgency within an action
        # What reads a forward's result and no backward waits for, by the action that ends the activations' life.
        self.late: dict[tuple[Action, int], list[Key]] = {}
        self.keys = self._sums(ports)
        for i, call in [*enumerate(calls), (0, shared)]:
            self._take(call, i)
        self._wait([key for call in calls for key in call.tasks.keys() - call.entries])

    def layer(self, homes: Homes) -> MaterializedLayer:
        """Return the tasks as a layer, with workers where there are any."""
        workers = {key: homes.of(*home) for key, home in self.home.items()} if homes.by_name else {}
        stage = {key: site.stage or 0 for key, (_, site) in self.home.items()}
        return placed(self.tasks, self._priorities(), stage, workers, self.about)

    def _priorities(self) -> dict[Key, int]:
        """Of the schedule first, of the graph within an action."""
        span = _span(self.calls[0].source.pieces)
        return {key: span * self.plan.priority[self.action[key]] + self.inner[key] for key in self.tasks}

    def _take(self, call: RankCall, micro_batch: int) -> None:
        """Make a call's tasks those of actions; inputs are a little more urgent than what reads them first."""
        for key, task in call.tasks.items():
            self._put(
                key,
                task,
                (call.rank[key], call.site[key]),
                self._action(call.site[key], micro_batch),
                1 if key in call.entries else call.priority[key],
            )
        for key, told in call.about.items():
            self.about[key] = tuple(
                About(*told)._replace(stage=call.site[key].stage, micro_batch=micro_batch)
            )

    def _put(self, key: Key, task: Task, home: Home, action: Action, inner: int) -> None:
        self.tasks[key], self.home[key] = task, home
        self.action[key], self.inner[key] = action, inner

    def _action(self, site: NodePlacement, micro_batch: int) -> Action:
        """The action of the schedule that a site's is part of; what nobody reads goes with the first."""
        told = site.action or f"0{FORWARD}"
        action = Action(int(told[:-1]), told[-1], micro_batch)
        return action if action in self.plan.stage else action._replace(kind=BACKWARD)

    # Order.

    def _wait(self, keys: Iterable[Key]) -> None:
        """Let tasks wait for what the schedule says."""
        acts = {key: (self.action[key], self.home[key][0]) for key in keys}
        of: dict[tuple[Action, int], list[Key]] = {}
        for key, which in acts.items():
            of.setdefault(which, []).append(key)
        last = {which: [*self._last(mine), *self.late.get(which, ())] for which, mine in of.items()}
        ends = _ActionEnds(self.plan, last)
        waits: dict[Key, dict[Key, None]] = {}
        for edge in (*self.plan.control, *first_in_line(self.plan)):
            for rank in {rank for _, rank in of}:
                for key in self._first(of.get((edge.after, rank), ()), acts):
                    waits.setdefault(key, {}).update(dict.fromkeys(ends.of(edge.before, rank)))
        for key, others in waits.items():
            task = self.tasks[key]
            refs = [TaskRef(other) for other in others if other not in task.dependencies]
            self.tasks[key] = Task(key, after, len(refs), task.func, *task.args, *refs, **task.kwargs)

    def _first(self, mine: Sequence[Key], acts: Mapping[Any, tuple[Action, int]]) -> list[Key]:
        """Those of an action's tasks on a rank that wait for none of the others."""
        return [key for key in mine if all(acts.get(d) != acts[key] for d in self.tasks[key].dependencies)]

    def _last(self, mine: Sequence[Key]) -> list[Key]:
        """Those of an action's tasks on a rank for which none of the others waits."""
        waited = {d for key in mine for d in self.tasks[key].dependencies}
        return [key for key in mine if key not in waited]

    # Gradients.

    def _sums(self, ports: Sequence[Port]) -> dict[str, tuple[Key, ...]]:
        """Write the sums over micro-batches; return for each port the keys of its parts."""
        holder = holders_of(ports)
        dtypes = {name: self.share.dtypes[port.name] for port in ports for name in port.parts}
        groups: dict[tuple[int, str, int], list[str]] = {}
        for name, rank in holder.items():
            groups.setdefault((*self._maker(name), rank), []).append(name)
        ends: dict[str, Key] = {}
        for number, ((chunk, kind, rank), names) in enumerate(groups.items()):
            home = (rank, NodePlacement(self._stage(chunk), action=f"{chunk}{kind}"))
            last: Any = None
            for i, call in enumerate(self.calls):
                reads = call.reading([call.place(name, rank) for name in names], home)
                key = (f"gradient_sum-{self.token}", number, i)
                if kind == FORWARD:
                    reads = self._apart((f"loss-{self.token}", number, i), call, reads, home, i)
                before = None if last is None else TaskRef(last)
                arguments = (call.source.ref, reads.picks, reads.chances, before, *reads.reads)
                task = Task(key, added, *arguments, **(call.extra if reads.chances else {}))
                self._put(key, task, home, self._action(home[1], i), 0)
                last = key
            for index, name in enumerate(names):
                ends[name] = (f"gradient-{self.token}", number, index)
                task = Task(ends[name], share, TaskRef(last), index, self.share.parts, dtypes[name])
                self._put(ends[name], task, home, self._action(home[1], len(self.calls) - 1), 0)
        return {port.name: tuple(ends[name] for name in port.parts) for port in ports}

    def _apart(
        self, key: Key, call: RankCall, reads: PartReading, home: Home, micro_batch: int
    ) -> PartReading:
        """Take what a forward gives to a sum out of its result, which a sum of micro-batches would hold on to."""
        task = Task(key, taken, call.source.ref, *reads.arguments, **(call.extra if reads.chances else {}))
        self._put(key, task, home, self._action(home[1], micro_batch), 0)
        chunk = str(home[1].action)[:-1]
        released = self._action(NodePlacement(action=f"{chunk}{WEIGHT_GRAD}"), micro_batch)
        self.late.setdefault((released, home[0]), []).append(key)
        return PartReading(tuple((0, i) for i in range(len(reads.picks))), (), (TaskRef(key),))

    def _maker(self, name: str) -> tuple[int, str]:
        """Chunk and kind of the action that makes a value; the last chunk has what nobody makes.

        Loss and gradients are added apart, so that no sum of gradients holds on to a forward's result.
        """
        made = self.calls[0].source.made.get(name)
        if made is None or made.action is None:
            return max(action.chunk for action in self.plan.stage), WEIGHT_GRAD
        return int(made.action[:-1]), made.action[-1]

    def _stage(self, chunk: int) -> int:
        return next(stage for action, stage in self.plan.stage.items() if action.chunk == chunk)


class _ActionEnds:
    """What each action ends with on each rank; where that is nothing, what it waits for ends with."""

    def __init__(self, plan: Lowering, last: Mapping[tuple[Action, int], Sequence[Key]]) -> None:
        self.last = last
        self.before: dict[Action, list[Action]] = {}
        for edge in (*plan.data, *plan.control):
            self.before.setdefault(edge.after, []).append(edge.before)

    def of(self, action: Action, rank: int) -> list[Key]:
        """Return the keys of tasks."""
        found: dict[Key, None] = {}
        seen: set[Action] = set()
        asked = [action]
        while asked:
            here = asked.pop()
            if here in seen:
                continue
            seen.add(here)
            if (here, rank) in self.last:
                found.update(dict.fromkeys(self.last[here, rank]))
            else:
                asked += self.before.get(here, [])
        return list(found)
