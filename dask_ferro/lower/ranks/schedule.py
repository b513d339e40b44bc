"""Write the steps of a pipeline: the graph of a stage's ranks once for each micro-batch, in a schedule's order.

    RankCall of each micro-batch --> the action of each task --> the schedule's edges, rank by rank
                             \\-> gradients, added by rank in the order of micro-batches --> the optimizer's step

A schedule's edge between two actions becomes edges between each rank's tasks: the first tasks of an action on a rank
wait for the last tasks of the other action there.  If a rank has no task of an action, they wait for the actions
before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.dtypes import array_dtype
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.sharding.node_placement import NodePlacement
from dask_ferro.graph.sharding.parts import Port, holders_of
from dask_ferro.lower.ranks.calls import RankFunction
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.ranks.run import micro_batch_name
from dask_ferro.lower.ranks.sharded_array import Arrays
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.ranks.spmd_inputs import check_inputs, feed
from dask_ferro.lower.ranks.spmd_tasks import Home, PartPlace, Places, RankCall, RankTasks
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.rank_functions import add_terms, divide_sum, run_after
from dask_ferro.trace import ModelPart


class ScheduledRanks(RankFunction):
    """A pipeline as a function of all of its inputs by name.

    `step` is the graph of one micro-batch, and `end` an optimizer's step that is not part of it; `batch` are the
    inputs that carry the batch.  Sums over micro-batches are divided by `divisor`.
    """

    def __init__(
        self,
        schedule: Schedule,
        step: Ranks,
        end: Ranks | None,
        batch: frozenset[str],
        divisor: int,
        workers: RankWorkers,
    ) -> None:
        self.schedule, self.batch, self.workers, self.mesh = schedule, batch, workers, step.mesh
        self._step, self._end, self._divisor = step, end, divisor
        self._trains = any(schedule.peaks)
        ports = step.outputs
        if not self._trains:
            count = range(schedule.micro_batches)
            ports = tuple(replace(port, name=micro_batch_name(port.name, i)) for i in count for port in ports)
        if end is not None:
            # Gradients are the step's own.
            read = {port.name for port in end.spmd.inputs}
            ports = (*(port for port in ports if port.name not in read), *end.outputs)
        self.outputs = ports

    def check(self, arrays: Arrays) -> None:
        """Raise `InputError` if inputs by name have another dtype or layout."""
        for ranks in filter(None, (self._step, self._end)):
            names = (port.name for port in ranks.spmd.inputs)
            check_inputs(ranks.spmd, {name: arrays[name] for name in names if name in arrays})

    def tasks(self, name: str, arrays: Arrays, later: Collection[str] = ()) -> tuple[RankTasks, Places]:
        """Return the tasks of a call in the order of the schedule; each micro-batch has its graph."""
        spmd = self._step.spmd
        shared = self._step.call(f"{name}_shared")
        feed(shared, spmd, arrays, later, {port.name for port in spmd.inputs} - self.batch)
        calls: list[RankCall] = []
        m = self.schedule.micro_batches
        rows = next((arrays[name].shape[0] // m for name in self.batch), 0)
        for i in range(m):
            call = self._step.call(f"{name}_{i}")
            # Parameters are the same parts in every micro-batch, and in the graph once.
            call.values |= shared.values
            feed(call, spmd, arrays, later, self.batch, slice(i * rows, (i + 1) * rows))
            call.write()
            calls.append(call)
        step = StepTasks(self.schedule, calls, shared, name)
        places = step.sums(spmd.outputs, self._divisor) if self._trains else step.ends(spmd.outputs)
        step.order_actions()
        if self._end is None:
            return step, places
        end = self._end.call(f"{name}_end")
        feed(end, self._end.spmd, arrays, later, arrays)
        for port in self._end.spmd.inputs:
            if port.name in places:
                end.keep(port.parts, places[port.name])
        end.write()
        places |= end.ends(self._end.outputs)
        # After all actions: no action of another rank waits for the end of a step.
        step.update(end, step.bound)
        return step, {port.name: places[port.name] for port in self.outputs}


class StepTasks(RankTasks):
    """The tasks of a step: the tasks of one call for each micro-batch, and of the call with the inputs that all of
    them read.

    `action` has the action that each task is part of, and `bound` is an upper bound of the tasks' order.
    """

    def __init__(self, schedule: Schedule, calls: Sequence[RankCall], shared: RankCall, token: str) -> None:
        super().__init__()
        self.schedule, self.calls, self.shared, self.token = schedule, calls, shared, token
        self.action: dict[Key, Action] = {}
        # The levels of an action: inputs have -1, tasks 0 up to the last bucket.
        self._span = 2 + len(shared.source.pieces.buckets)
        self.bound = self._span * (max(schedule.steps.values()) + 1)

    def ends(self, ports: Sequence[Port]) -> dict[str, list[PartPlace]]:
        """Return the places of each output of each micro-batch."""
        return {
            micro_batch_name(name, i): places
            for i, call in enumerate(self.calls)
            for name, places in call.ends(ports).items()
        }

    def sums(self, ports: Sequence[Port], divisor: int) -> dict[str, list[PartPlace]]:
        """Build the sums over micro-batches; return the places of each output."""
        outputs = self.shared.source.model.graph.outputs
        dtypes = {v.name: array_dtype(v.dtype) for v in outputs if v.dtype is not None}
        groups: dict[tuple[int, int], list[str]] = {}
        for name, rank in holders_of(ports).items():
            groups.setdefault((self._chunk(name), rank), []).append(name)
        ends: dict[str, PartPlace] = {}
        for number, ((chunk, rank), names) in enumerate(groups.items()):
            home = (rank, NodePlacement(self.schedule.stage_of[chunk], action=f"{chunk}{WEIGHT_GRAD}"))
            last = self._sum(number, names, home)
            for index, name in enumerate(names):
                key = (f"gradient-{self.token}", number, index)
                task = Task(key, divide_sum, TaskRef(last), index, divisor, dtypes.get(name))
                self._put(key, task, home, len(self.calls) - 1)
                ends[name] = PartPlace(key, -1, home)
        return {port.name: [ends[name] for name in port.parts] for port in ports}

    def _sum(self, number: int, names: Sequence[str], home: Home) -> Key:
        """Build the tasks that sum values on a rank over micro-batches; return the key of the last."""
        last: Any = None
        # In the order of micro-batches, whatever the schedule, so that every schedule gives the same bits.
        for i, call in enumerate(self.calls):
            key = (f"gradient_sum-{self.token}", number, i)
            before = None if last is None else TaskRef(last)
            picks, arguments = call.reads(names, home)
            self._put(key, Task(key, add_terms, before, picks, *arguments), home, i)
            last = key
        return last

    def _chunk(self, name: str) -> int:
        """Return the chunk that computes a value; the last chunk has the values that no action computes."""
        copies = self.calls[0].values.get(name)
        home = next(iter(copies.values())).home if isinstance(copies, dict) else None
        action = None if home is None else home[1].action
        return self.schedule.chunks - 1 if action is None else int(action[:-1])

    def order_actions(self) -> None:
        """Add the tasks of all calls, in the order of their actions and with the waits of the schedule."""
        for i, call in [*enumerate(self.calls), (0, self.shared)]:
            self.below |= call.below
            self.later += call.later
            for key, task in call.tasks.items():
                # Inputs come slightly before their first readers.
                self._put(key, task, call.home[key], i, -1 if key in call.entries else call.order[key])
            for key, facts in call.about.items():
                stage = call.home[key][1].stage
                self.about[key] = tuple(ModelPart(*facts)._replace(stage=stage, micro_batch=i))
        # Inputs and weights compute nothing, so they run ahead of their action and wait for no other.
        self._wait(chain.from_iterable(call.tasks.keys() - call.entries for call in self.calls))

    def _put(self, key: Key, task: Task, home: Home, micro_batch: int, inner: int = 0) -> None:
        """Add a task; the order is by the schedule first, by the graph within an action."""
        # An input without readers is in the first chunk's forward.
        site = home[1].action or f"0{FORWARD}"
        action = Action(int(site[:-1]), site[-1], micro_batch)
        # Schedules with whole backwards have no I and no W: both are part of B.
        action = action if action in self.schedule.steps else action._replace(kind=BACKWARD)
        if action not in self.schedule.steps:
            raise InputError(
                f"parallelize: schedule {self.schedule.name!r} has only forwards, and an output is a"
                " gradient; pass the loss as `graph`, and the tensors that it is differentiated with"
                " respect to as `params`"
            )
        self.tasks[key], self.home[key], self.action[key] = task, home, action
        self.order[key] = inner + self._span * self.schedule.steps[action]

    def _wait(self, keys: Iterable[Key]) -> None:
        """Add the waits of the schedule to the tasks."""
        acts = {key: (self.action[key], self.home[key][0]) for key in keys}
        groups: dict[tuple[Action, int], list[Key]] = {}
        for key, act in acts.items():
            groups.setdefault(act, []).append(key)
        last = {act: self._last([*_input_grads(act, groups), *own]) for act, own in groups.items()}
        for (action, rank), own in groups.items():
            if action not in self.schedule.waits:
                continue
            # Rank by rank: the progress of rank 1 says nothing about the memory of rank 0.
            others = self._ends_of(self.schedule.waits[action], rank, last)
            for key in own:
                task = self.tasks[key]
                # Only the first ones, which depend on no other task of the action.
                if any(acts.get(other) == (action, rank) for other in task.dependencies):
                    continue
                refs = [TaskRef(other) for other in others if other not in task.dependencies]
                # Dask has no edge without data: the results come as arguments, which the task drops.
                self.tasks[key] = Task(key, run_after, len(refs), task.func, *task.args, *refs, **task.kwargs)

    def _last(self, own: Sequence[Key]) -> list[Key]:
        """Return the tasks of an action on a rank on which no other task of it depends."""
        waited = set(chain.from_iterable(self.tasks[key].dependencies for key in own))
        return [key for key in own if key not in waited]

    def _ends_of(
        self, action: Action, rank: int, last: Mapping[tuple[Action, int], Sequence[Key]]
    ) -> Iterable[Key]:
        """Return the last tasks of an action on a rank, or of the actions before it if it has no task there."""
        ends: dict[Key, None] = {}
        queue = [action]
        for here in queue:
            if (here, rank) in last:
                ends |= dict.fromkeys(last[here, rank])
            else:
                before = (*self.schedule.dependencies[here], self.schedule.waits.get(here))
                queue += [other for other in before if other is not None and other not in queue]
        return ends


def _input_grads(act: tuple[Action, int], groups: Mapping[tuple[Action, int], list[Key]]) -> Sequence[Key]:
    """Return the tasks of the I before a W: the W's own tasks may read only forward results, so it ends with both."""
    action, rank = act
    is_split = action.kind == WEIGHT_GRAD
    return groups.get((action._replace(kind=INPUT_GRAD), rank), ()) if is_split else ()
