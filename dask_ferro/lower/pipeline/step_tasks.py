"""The tasks of a pipeline: the graph of a stage's ranks once for each micro-batch, in a schedule's order.

    RankCall of each micro-batch --> the action of each task --> the schedule's edges, rank by rank
                             \\-> gradients, added by rank in the order of micro-batches --> the optimizer's step

A schedule's edge between two actions becomes edges between each rank's tasks: the first tasks of an action on a rank
wait for the last tasks of the other action there.  Where a rank has no task of an action, they wait for the actions
before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from dask_ferro.graph.ir.dtypes import array_dtype
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.sharding.node_placement import NodePlacement
from dask_ferro.graph.sharding.parts import Port, holders_of
from dask_ferro.lower.pipeline.batch import shares, slices
from dask_ferro.lower.pipeline.run import of_micro_batch
from dask_ferro.lower.ranks.calls import CallGraph, RankFunction
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.ranks.spmd_inputs import checked, feed
from dask_ferro.lower.ranks.spmd_tasks import Home, PartPlace, RankCall, RankTasks
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.rank_functions import added, after, share
from dask_ferro.trace import About


class RankGraphs(NamedTuple):
    """The graphs of all ranks: of a micro-batch of some size, and of an optimizer's step that is not in it."""

    step: Ranks
    end: Ranks | None


class BatchCall(RankFunction):
    """A pipeline as a function of all of its inputs by name, for micro-batches of these rows.

    Parameters
    ----------
    schedule : Schedule
    rows : tuple of int
        The rows of each micro-batch.
    graphs : sequence of RankGraphs
        Those of each micro-batch; the optimizer's step is that of the first.
    batch : frozenset of str
        The inputs that carry the batch.
    reduction : str
        As `parallel` takes it.
    workers : RankWorkers
    """

    def __init__(
        self,
        schedule: Schedule,
        rows: tuple[int, ...],
        graphs: Sequence[RankGraphs],
        batch: frozenset[str],
        reduction: str,
        workers: RankWorkers,
    ) -> None:
        self.schedule, self.rows, self.batch, self.workers = schedule, rows, batch, workers
        self._steps, self._end = [each.step for each in graphs], graphs[0].end
        self._shares = shares(rows, reduction)
        first = self._steps[0]
        self.mesh = first.mesh
        self._spmds = [ranks.spmd for ranks in (first, self._end) if ranks is not None]
        ports = first.outputs
        if not first.source.trains:
            ports = tuple(replace(p, name=of_micro_batch(p.name, i)) for i in range(len(rows)) for p in ports)
        if self._end is not None:
            # Gradients are the step's own.
            read = {port.name for port in self._end.spmd.inputs}
            ports = (*(port for port in ports if port.name not in read), *self._end.outputs)
        self.outputs = self.results = ports

    def check(self, arrays: Arrays) -> None:
        """Raise `ConfigError` for inputs by name that have another dtype or layout."""
        for spmd in self._spmds:
            checked(spmd, {port.name: arrays[port.name] for port in spmd.inputs if port.name in arrays})

    def tasks(self, name: str, arrays: Arrays) -> CallGraph:
        """Return the tasks of a call in the order of the schedule; each micro-batch has its graph."""
        spmd = self._steps[0].spmd
        whole = {port.name for port in spmd.inputs} - self.batch
        shared = self._steps[0].call(f"{name}_shared")
        feed(shared, spmd, arrays, whole)
        calls: list[RankCall] = []
        for i, (ranks, rows) in enumerate(zip(self._steps, slices(self.rows), strict=True)):
            call = ranks.call(f"{name}_{i}")
            # Parameters are the same parts in every micro-batch, and in the graph once.
            call.share(shared)
            feed(call, ranks.spmd, arrays, self.batch, rows)
            call.write()
            calls.append(call)
        step = StepTasks(self.schedule, calls, shared, spmd.outputs, self._shares, name)
        places = step.places
        actions = {key: (action, step.home[key][0]) for key, action in step.action.items()}
        if self._end is not None:
            end = self._end.call(f"{name}_end")
            feed(end, self._end.spmd, arrays, arrays)
            for port in self._end.spmd.inputs:
                if port.name in places:
                    end.keep(port.parts, places[port.name])
            end.write()
            places = places | self._end.places(end)
            # After all actions: no action of another rank waits for the end of a step.
            step.update(end, step.bound)
            calls.append(end)
        return CallGraph(step, places, [shared, *calls], actions)


class StepTasks(RankTasks):
    """The tasks of a step.

    Parameters
    ----------
    schedule : Schedule
    calls : sequence of RankCall
        One for each micro-batch, with its inputs placed and its tasks written.
    shared : RankCall
        The call that holds the inputs read by all micro-batches.
    ports : sequence of Port
        Loss and gradients, or the outputs of a graph without backward.
    shares : tuple of (tuple of int, int)
        The weights of micro-batches and the divisor, as `shares` returns them.
    token : str

    Attributes
    ----------
    places : mapping of str to list of PartPlace
        The place of each rank's part of each port.
    action : mapping
        By key, the action that a task is part of.
    bound : int
        An upper bound of the order of the tasks.
    """

    def __init__(
        self,
        schedule: Schedule,
        calls: Sequence[RankCall],
        shared: RankCall,
        ports: Sequence[Port],
        shares: tuple[tuple[int, ...], int],
        token: str,
    ) -> None:
        super().__init__()
        self.schedule, self.calls, self.token = schedule, calls, token
        self.weights, self.divisor = shares
        self.action: dict[Key, Action] = {}
        # The levels of an action: inputs have -1, tasks 0 up to the last bucket.
        self._span = 2 + max(len(call.source.pieces.buckets) for call in calls)
        self.bound = self._span * (max(schedule.steps.values()) + 1)
        self.places = self._sums(ports) if calls[0].source.trains else self._ends(ports)
        for i, call in [*enumerate(calls), (0, shared)]:
            self._take(call, i)
        # Inputs and weights compute nothing, so they run ahead of their action and wait for no other.
        self._wait(chain.from_iterable(call.tasks.keys() - call.entries for call in calls))

    def _take(self, call: RankCall, micro_batch: int) -> None:
        """Assign the tasks of a call to actions; inputs come slightly before their first readers."""
        for key, task in call.tasks.items():
            home, inner = call.home[key], -1 if key in call.entries else call.order[key]
            self._put(key, task, home, self._action(home[1], micro_batch), inner)
        for key, told in call.about.items():
            stage = call.home[key][1].stage
            self.about[key] = tuple(About(*told)._replace(stage=stage, micro_batch=micro_batch))

    def _put(self, key: Key, task: Task, home: Home, action: Action, inner: int) -> None:
        """Add a task; the order is by the schedule first, by the graph within an action."""
        self.tasks[key], self.home[key], self.action[key] = task, home, action
        self.order[key] = inner + self._span * self.schedule.steps[action]

    def _action(self, site: NodePlacement, micro_batch: int) -> Action:
        """Return the action of the schedule at a site; an input without readers is in the first chunk's forward."""
        # Schedules with whole backwards have no I and no W: both are part of B.
        told = site.action or f"0{FORWARD}"
        action = Action(int(told[:-1]), told[-1], micro_batch)
        return action if action in self.schedule.steps else action._replace(kind=BACKWARD)

    def _wait(self, keys: Iterable[Key]) -> None:
        """Add the waits of the schedule to the tasks."""
        acts = {key: (self.action[key], self.home[key][0]) for key in keys}
        of: dict[tuple[Action, int], list[Key]] = {}
        for key, which in acts.items():
            of.setdefault(which, []).append(key)
        last = {which: self._last([*_input_grads(which, of), *mine]) for which, mine in of.items()}
        waits: dict[Key, Action] = {}
        for which, mine in of.items():
            if which[0] in self.schedule.waits:
                waits |= dict.fromkeys(self._first(mine, acts), self.schedule.waits[which[0]])
        for key, before in waits.items():
            task = self.tasks[key]
            # Rank by rank: the progress of rank 1 says nothing about the memory of rank 0.
            others = self._ends_of(before, acts[key][1], last)
            refs = [TaskRef(other) for other in others if other not in task.dependencies]
            # Dask has no edge without data: the results come as arguments, which the task drops.
            self.tasks[key] = Task(key, after, len(refs), task.func, *task.args, *refs, **task.kwargs)

    def _first(self, mine: Sequence[Key], acts: Mapping[Any, tuple[Action, int]]) -> list[Key]:
        """Return the tasks of an action on a rank that depend on no other task of it."""

        def waits(key: Key) -> bool:
            return any(acts.get(other) == acts[key] for other in self.tasks[key].dependencies)

        return [key for key in mine if not waits(key)]

    def _last(self, mine: Sequence[Key]) -> list[Key]:
        """Return the tasks of an action on a rank on which no other task of it depends."""
        waited = set(chain.from_iterable(self.tasks[key].dependencies for key in mine))
        return [key for key in mine if key not in waited]

    def _ends_of(
        self, action: Action, rank: int, last: Mapping[tuple[Action, int], Sequence[Key]]
    ) -> Iterable[Key]:
        """Return the last tasks of an action on a rank; where it has none there, those of the actions before it."""
        found: dict[Key, None] = {}
        asked = [action]
        for here in asked:
            if (here, rank) in last:
                found |= dict.fromkeys(last[here, rank])
            else:
                before = (*self.schedule.dependencies[here], self.schedule.waits.get(here))
                asked += [other for other in before if other is not None and other not in asked]
        return found

    def _ends(self, ports: Sequence[Port]) -> dict[str, list[PartPlace]]:
        """Return the places of the parts of each output of each micro-batch, rank by rank."""
        holder = holders_of(ports)
        found: dict[str, list[PartPlace]] = {}
        for i, call in enumerate(self.calls):
            ends = call.ends(holder)
            # Ranks with the same part of an output share its key.
            found |= {of_micro_batch(p.name, i): [ends[name] for name in p.parts] for p in ports}
        return found

    def _sums(self, ports: Sequence[Port]) -> dict[str, list[PartPlace]]:
        """Build the sums over micro-batches; return the places of each port's parts."""
        holder = holders_of(ports)
        outputs = self.calls[0].source.model.graph.outputs
        dtypes = {v.name: array_dtype(v.dtype) for v in outputs if v.dtype is not None}
        groups: dict[tuple[int, int], list[str]] = {}
        for name, rank in holder.items():
            groups.setdefault((self._chunk(name), rank), []).append(name)
        ends: dict[str, PartPlace] = {}
        for number, ((chunk, rank), names) in enumerate(groups.items()):
            home = (rank, NodePlacement(self.schedule.stage_of[chunk], action=f"{chunk}{WEIGHT_GRAD}"))
            last = self._added(number, names, home)
            for index, name in enumerate(names):
                key = (f"gradient-{self.token}", number, index)
                task = Task(key, share, TaskRef(last), index, self.divisor, dtypes.get(name))
                self._put(key, task, home, self._action(home[1], len(self.calls) - 1), 0)
                ends[name] = PartPlace(key)
        return {port.name: [ends[name] for name in port.parts] for port in ports}

    def _added(self, number: int, names: Sequence[str], home: Home) -> Key:
        """Build the tasks that sum values on a rank over micro-batches; return the key of the last."""
        last: Any = None
        # In the order of micro-batches, whatever the schedule, so that every schedule gives the same bits.
        for i, call in enumerate(self.calls):
            key = (f"gradient_sum-{self.token}", number, i)
            before = None if last is None else TaskRef(last)
            picks, arguments = call.reads(names, home)
            task = Task(key, added, before, self.weights[i], picks, *arguments)
            self._put(key, task, home, self._action(home[1], i), 0)
            last = key
        return last

    def _chunk(self, name: str) -> int:
        """Return the chunk that makes a value; the last one has those that no action makes."""
        made = self.calls[0].source.home.get(name)
        if made is None or made[1].action is None:
            return self.schedule.chunks - 1
        return int(made[1].action[:-1])


def _input_grads(which: tuple[Action, int], of: Mapping[tuple[Action, int], list[Key]]) -> Sequence[Key]:
    """Return the tasks of the I before a W: the W's own may all read forward results alone, so it ends with both."""
    action, rank = which
    return of.get((action._replace(kind=INPUT_GRAD), rank), ()) if action.kind == WEIGHT_GRAD else ()
