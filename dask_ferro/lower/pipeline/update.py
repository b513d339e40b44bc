"""The optimizer's part of a training step: each parameter is updated on the stage where its gradient is made.

    last sum of a chunk ──share, rounded──> optimizer's nodes ──> parameter and state after the step, one key each

An optimizer is array math, so its step is a model of its own: parameters, gradients and state in, parameters and state
out.  It is cut by the chunks whose gradients each of its outputs needs.  An output of a plain optimizer needs its own
parameter's gradient alone, so nothing leaves the stage; with a norm over all parameters it needs all gradients, which
are sent to it.  Other inputs, such as a learning rate that changes from step to step, are arguments of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import onnx_ir as ir
from dask.highlevelgraph import MaterializedLayer

from dask_ferro.engines.executable import nodes_between
from dask_ferro.graph.pipeline.order_edges import Lowering
from dask_ferro.graph.pipeline.stages import LOSS, ChunkActions
from dask_ferro.graph.pipeline.update import UpdateGraph, after
from dask_ferro.lower.layer import Key, KeySeries, KeysOrValue
from dask_ferro.lower.pipeline.tasks import bundle_between, chunks_of_results
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.ranks.stage_workers import placed
from dask_ferro.lower.signature import Signature
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.actions import UpdateRef, run_share, run_update
from dask_ferro.lower.worker.bundle_ref import BundleRef
from dask_ferro.lower.worker.task import pick


class UpdatePart(NamedTuple):
    """The part of an update on a chunk's stage: its bundle, and the chunks whose sums it reads, its own first."""

    chunk: int
    bundle: BundleRef
    reads: tuple[int, ...]


class Update(NamedTuple):
    """An optimizer's step as a model, cut by chunks.

    Attributes
    ----------
    graph : UpdateGraph
    opened : PreparedModel
    parts : tuple of UpdatePart
    settings : Signature
        Its other inputs: arguments of each call, none of which carries the batch.
    """

    graph: UpdateGraph
    opened: PreparedModel
    parts: tuple[UpdatePart, ...]
    settings: Signature

    @property
    def given(self) -> frozenset[str]:
        """Names of the inputs that the caller passes: parameters, state and settings."""
        return frozenset((*self.graph.params, *self.graph.state, *(s.name for s in self.settings.inputs)))

    def chunk_of(self, name: str) -> int:
        """The chunk that makes the next value of a parameter or of a part of the state, or reads a setting first."""
        made = [part.chunk for part in self.parts if after(name) in part.bundle.outputs]
        return made[0] if made else next(p.chunk for p in self.parts if name in p.bundle.inputs)


def update(
    graph: UpdateGraph, pieces: Sequence[ChunkActions], opened: Callable[[ir.Model], PreparedModel]
) -> Update:
    """Return an optimizer's step, cut by the chunks that make its gradients.

    Parameters
    ----------
    pieces : sequence of ChunkActions
        The chunks of the model that computes the gradients.
    opened : callable
        Returns the `PreparedModel` of a model.
    """
    ready = opened(graph.model)
    homes = chunks_of_results(pieces)
    given = {*graph.params, *graph.grads, *graph.state}
    return Update(graph, ready, _cut(ready, homes, len(pieces)), _settings(ready, given))


def _settings(opened: PreparedModel, given: Collection[str]) -> Signature:
    """Return the inputs of the step that are not parameters, gradients or state."""
    specs = tuple(spec for spec in opened.signature.inputs if spec.name not in given)
    return Signature(specs, (), None, (False,) * len(specs), ())


def _cut(opened: PreparedModel, homes: Mapping[str, int], chunks: int) -> tuple[UpdatePart, ...]:
    """Return the step's parts: its outputs grouped by the last chunk whose gradients they need."""
    model = opened.loaded.model
    entries = {str(v.name) for v in model.graph.inputs}
    reads: dict[str, dict[str, None]] = {}
    needs: dict[str, set[int]] = {}
    alone: dict[int, list[str]] = {}
    for out in (str(value.name) for value in model.graph.outputs):
        read = chain.from_iterable(node.inputs for node in nodes_between(model, (), (out,)))
        reads[out] = {str(v.name): None for v in read if v is not None and v.name in entries}
        needs[out] = {homes[name] for name in reads[out] if name in homes}
        # Backwards run from the last chunk to the first; an output that reads no gradient waits for none.
        alone.setdefault(max(needs[out], default=chunks - 1), []).append(out)

    def part(chunk: int, outputs: list[str]) -> UpdatePart:
        inputs = tuple(dict.fromkeys(chain.from_iterable(reads[out] for out in outputs)))
        wanted = set().union(*(needs[out] for out in outputs)) - {chunk}
        bundle = bundle_between(opened, inputs, tuple(outputs), f"chunk {chunk} update")
        return UpdatePart(chunk, bundle, (chunk, *sorted(wanted)))

    return tuple(part(chunk, outputs) for chunk, outputs in sorted(alone.items()))


class SumKeys(NamedTuple):
    """The key of each chunk's sums, their divisor, and the dtypes of their terms."""

    sums: Mapping[int, Key]
    share: int
    dtypes: Mapping[str, Any]


def update_layer(
    step: Update,
    ends: SumKeys,
    plan: Lowering,
    sources: Mapping[str, KeysOrValue],
    extra: Mapping[str, Any],
    homes: Sequence[str],
    token: str,
) -> tuple[MaterializedLayer, list[Any]]:
    """Return the layer of the optimizer's tasks, and the keys of loss, parameters and state after the step.

    Parameters
    ----------
    sources : mapping of str to KeySeries or Literal
        The sources of parameters, state and settings.
    extra : mapping
        Keyword arguments of the updates: the model's content, where workers cannot see its path.
    homes : sequence of str
        The address of each stage's worker; empty: tasks run anywhere.
    """
    stages = {action.chunk: stage for action, stage in plan.stage.items()}
    tasks: dict[Key, Task] = {}
    stage: dict[Key, int] = {}
    found: dict[str, Key] = {}
    for part in step.parts:
        given = tuple(name for name in part.bundle.inputs if name in sources)
        reads = [ends.sums[chunk] for chunk in part.reads if chunk in ends.sums]
        ref = UpdateRef(part.bundle, given, ends.share, dict(ends.dtypes))
        whole = (f"update-{token}", part.chunk)
        arguments = [_argument(sources[name]) for name in given] + [TaskRef(key) for key in reads]
        # One task returns a dict; each value has a key of its own, so that the next step reads it alone.
        tasks[whole] = Task(whole, run_update, step.opened.ref, ref, *arguments, **extra)
        number = count()
        for out in part.bundle.outputs:
            found[out] = key = (f"updated-{token}", part.chunk, next(number))
            tasks[key] = Task(key, pick, TaskRef(whole), out)
        stage.update(dict.fromkeys((k for k in tasks if k not in stage), stages[part.chunk]))
    last = max(ends.sums)
    loss = (f"loss-{token}", last)
    tasks[loss] = Task(loss, run_share, TaskRef(ends.sums[last]), LOSS, ends.share, ends.dtypes[LOSS])
    stage[loss] = stages[last]
    # Below all actions: no action of another stage waits for an update.
    lowest = min(plan.priority.values()) - 1
    workers = {key: homes[s] for key, s in stage.items()} if homes else {}
    params, state = (
        [found[after(n)] for n in step.graph.params],
        [found[after(n)] for n in step.graph.state],
    )
    return placed(tasks, dict.fromkeys(tasks, lowest), stage, workers), [loss, params, state]


def _argument(source: KeysOrValue) -> Any:
    return TaskRef(source.at(0)) if isinstance(source, KeySeries) else source.at(0)
