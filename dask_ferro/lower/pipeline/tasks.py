"""The tasks of a pipeline: one per action, and one for each sum of gradients that is part of no action.

The task of a weight gradient that is an action of its own (W) adds it to the sum of the micro-batches before it.
Weight gradients of a whole backward (B) are added by a small task, on which no action depends: another stage reads
the backward's result too, so the sum is kept apart from it.  A task depends on the tasks that make the values it
reads and, so that it can compute a lost activation again, on the tasks that make that activation's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, takewhile
from typing import Any, NamedTuple

from dask.highlevelgraph import MaterializedLayer

from dask_ferro.engines.executable import nodes_between
from dask_ferro.engines.selection import first_engines
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, INPUT_GRAD, KIND_NAMES, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.order_edges import WINDOW, Edge, Lowering
from dask_ferro.graph.pipeline.stages import ChunkActions
from dask_ferro.lower.annotations import about
from dask_ferro.lower.layer import Key, KeySeries, KeysOrValue
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.ranks.stage_workers import placed
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.actions import ActionRef, run_action, run_sum
from dask_ferro.lower.worker.bundle_ref import BundleRef, ModelRef
from dask_ferro.trace import About

# The bundles of its chunk that an action can compute; those before its own run only where their results were lost.
_STEPS = {FORWARD: "F", INPUT_GRAD: "FI", WEIGHT_GRAD: "FIW", BACKWARD: "FIW"}
_SUM = "gradient_sum"

# The bundles "F", "I" and "W" of each chunk, where there is anything to compute: the first chunk needs no I.
Refs = tuple[Mapping[str, BundleRef], ...]
# The regions of the nodes of each of those bundles.
Regions = tuple[Mapping[str, str], ...]


class Wiring(NamedTuple):
    """The input of `stage_layer`: the schedule's edges, the chunks, their bundles and regions, whether the pipeline
    trains, and a token.
    """

    plan: Lowering
    pieces: tuple[ChunkActions, ...]
    refs: Refs
    regions: Regions
    trains: bool
    token: str


def action_refs(opened: PreparedModel, pieces: Sequence[ChunkActions]) -> Refs:
    """Return the bundles of each chunk's actions."""

    def refs(chunk: int, piece: ChunkActions) -> dict[str, BundleRef]:
        parts = {kind: part for kind, part in zip("FIW", piece[:3], strict=True) if part.outputs}
        return {
            kind: bundle_between(opened, part.inputs, part.outputs, f"chunk {chunk} {kind}")
            for kind, part in parts.items()
        }

    return tuple(refs(chunk, piece) for chunk, piece in enumerate(pieces))


def chunks_of_results(pieces: Sequence[ChunkActions]) -> dict[str, int]:
    """Return the chunk that makes each output of the model."""
    found: dict[str, int] = {}
    for chunk, piece in enumerate(pieces):
        found |= dict.fromkeys(piece.results, chunk)
    return found


def bundle_between(
    opened: PreparedModel, inputs: tuple[str, ...], outputs: tuple[str, ...], title: str
) -> BundleRef:
    """Return the bundle from `inputs` to `outputs`, with results by name and the same bits wherever the cut lies."""
    positions = {node: i for i, node in enumerate(opened.loaded.model.graph)}
    nodes = nodes_between(opened.loaded.model, inputs, outputs)
    return BundleRef(
        inputs,
        outputs,
        first_engines(opened.support, [positions[node] for node in nodes]),
        tuple((i, -1) for i in range(len(inputs))),
        by_name=True,
        exact=True,
        title=title,
    )


def action_regions(opened: PreparedModel, refs: Refs) -> Regions:
    """Return the regions of the nodes of each chunk's bundles."""
    model = opened.loaded.model

    def regions(chunk: Mapping[str, BundleRef]) -> dict[str, str]:
        between = {kind: nodes_between(model, ref.inputs, ref.outputs) for kind, ref in chunk.items()}
        return {kind: about(nodes).region for kind, nodes in between.items()}

    return tuple(map(regions, refs))


class _ActionCall(NamedTuple):
    """The call of a task: its function, the results that it reads, and the sum that it adds to, if any."""

    run: Callable[..., Any]
    ref: ActionRef
    results: tuple[Key, ...]
    before: tuple[Key | None, ...] = ()


class _Wirer:
    """The keys and calls of all tasks."""

    def __init__(self, wiring: Wiring) -> None:
        self.plan, self.pieces, self.refs, _, self.trains, self.token = wiring
        self.actions = list(self.plan.stage)
        self.made_by: dict[str, tuple[int, str]] = {}
        for chunk, refs in enumerate(self.refs):
            for kind, ref in refs.items():
                self.made_by |= dict.fromkeys(ref.outputs, (chunk, kind))
        self.folding = {c: self._folds(c) for c in range(len(self.pieces))}

    def key(self, action: Action) -> Key:
        """The key of an action's task; all actions of one kind are one group of keys."""
        # Dask learns durations by the name before the token: forwards and backwards take different times.
        return (f"{KIND_NAMES[action.kind]}-{self.token}", action.chunk, action.micro_batch)

    def sum_key(self, chunk: int, micro_batch: int) -> Key:
        """The key of the sum up to a micro-batch: the key of the W where that task holds the sum."""
        if self.folding[chunk]:
            return self.key(Action(chunk, WEIGHT_GRAD, micro_batch))
        return (f"{_SUM}-{self.token}", chunk, micro_batch)

    def _folds(self, chunk: int) -> bool:
        """Whether a chunk's Ws are in the order of micro-batches in their list, so that they can hold the sum."""
        order = [
            a.micro_batch for a in self.actions if a.chunk == chunk and a.kind in (WEIGHT_GRAD, BACKWARD)
        ]
        # Out of order, a W would have to wait for one that comes later in its own list.
        split = not any(a.chunk == chunk and a.kind == BACKWARD for a in self.actions)
        return self.trains and split and all(i < j for i, j in pairwise(order))

    def call(self, action: Action) -> _ActionCall:
        """Return the call of an action's task."""
        chunk, kind, micro_batch = action
        piece = self.pieces[chunk]
        frees: tuple[str, ...] = ()
        if kind == FORWARD:
            sent, kept = piece.forward.sent, piece.forward.kept
        elif kind == INPUT_GRAD:
            sent, kept = piece.input_grad.sent, piece.input_grad.kept
        else:
            sent, kept = (piece.input_grad.sent if kind == BACKWARD else ()), piece.results
            frees = (*piece.forward.kept, *piece.input_grad.kept)
        ref, results = self._reads(action, _STEPS[kind], sent, kept)
        ref = ref._replace(frees=frees)
        if kind == WEIGHT_GRAD and self.folding[chunk]:
            return _ActionCall(run_sum, ref, results, (self._before(chunk, micro_batch),))
        return _ActionCall(run_action, ref, results)

    def sum_call(self, action: Action) -> _ActionCall:
        """Return the call of the task that adds the gradients of a B, or of a W out of order."""
        ref, results = self._reads(action, "FIW", (), self.pieces[action.chunk].results)
        own = self.key(action)
        # The last reader of the action's gradients frees them: else they would live as long as the action's result.
        ref = ref._replace(results=ref.results + 1, frees=ref.kept)
        return _ActionCall(run_sum, ref, (*results, own), (self._before(action.chunk, action.micro_batch),))

    def _before(self, chunk: int, micro_batch: int) -> Key | None:
        return self.sum_key(chunk, micro_batch - 1) if micro_batch else None

    def _reads(
        self, action: Action, kinds: str, sent: tuple[str, ...], kept: tuple[str, ...]
    ) -> tuple[ActionRef, tuple[Key, ...]]:
        """Return the reference of an action, and the results that it reads, or would read to compute lost ones."""
        chunk, _, micro_batch = action
        steps = tuple(self.refs[chunk][kind] for kind in kinds if kind in self.refs[chunk])
        wanted = dict.fromkeys(chain.from_iterable(step.inputs for step in steps))
        makers = [self.made_by[name] for name in wanted if name in self.made_by]
        keys = dict.fromkeys(
            key for maker in makers if (key := self._maker_key(maker, micro_batch)) != self.key(action)
        )
        inputs = tuple(name for name in wanted if name not in self.made_by)
        return ActionRef(steps, inputs, len(keys), sent, kept), tuple(keys)

    def _maker_key(self, maker: tuple[int, str], micro_batch: int) -> Key:
        action = Action(*maker, micro_batch)
        return self.key(action if action in self.plan.stage else Action(maker[0], BACKWARD, micro_batch))


def stage_layer(
    wiring: Wiring,
    model: ModelRef,
    sources: Mapping[str, KeysOrValue],
    extra: Mapping[str, Any],
    homes: Sequence[str],
) -> tuple[MaterializedLayer, list[Any]]:
    """Return the layer of a pipeline's tasks, and the keys that hold its results.

    Parameters
    ----------
    sources : mapping of str to KeySeries or Literal
        The source of each model input, by micro-batch.
    extra : mapping
        Keyword arguments of all tasks: the model's content, where workers cannot see its path.
    homes : sequence of str
        The address of each stage's worker; empty: tasks run anywhere.

    Returns
    -------
    layer, keys
        The keys in training: for each chunk that has results, the sum over all micro-batches; in inference: for each
        such chunk, its forwards.
    """
    wirer = _Wirer(wiring)
    waits: dict[Action, list[Key]] = {action: [] for action in wirer.actions}
    for edge in (*wiring.plan.control, *first_in_line(wiring.plan)):
        waits[edge.after].append(wirer.key(edge.before))
    tasks: dict[Key, Task] = {}
    home: dict[Key, Action] = {}
    for action in wirer.actions:
        calls = {wirer.key(action): (wirer.call(action), waits[action])}
        if _needs_sum(wirer, action):
            calls[wirer.sum_key(action.chunk, action.micro_batch)] = (wirer.sum_call(action), [])
        for key, (call, after) in calls.items():
            tasks[key] = _task(key, call, after, model, sources, action.micro_batch, extra)
            home[key] = action
    plan = wiring.plan
    stage = {key: plan.stage[action] for key, action in home.items()}
    priority = {key: plan.priority[action] for key, action in home.items()}
    told = {key: _about(wiring, action) for key, action in home.items()}
    workers = {key: homes[s] for key, s in stage.items()} if homes else {}
    return placed(tasks, priority, stage, workers, told), _result_keys(wirer)


def first_in_line(plan: Lowering) -> Iterator[Edge]:
    """Yield edges that keep the first chunk's first forwards in order, where the schedule's edges are a window.

    Without them these forwards wait for nothing, reach an idle worker together and start in any order.  The hops that
    the edges cost are recovered before the first gradient is back.
    """
    free = {edge.after for edge in plan.control}.isdisjoint
    rows: dict[int, list[Action]] = {}
    for action, stage in plan.stage.items():
        rows.setdefault(stage, []).append(action)
    if plan.form == WINDOW and plan.control:
        for row in rows.values():
            first = takewhile(lambda a: a.chunk == 0 and a.kind == FORWARD and free([a]), row)
            yield from (Edge(*pair) for pair in pairwise(first))


def _needs_sum(wirer: _Wirer, action: Action) -> bool:
    ends = action.kind in (BACKWARD, WEIGHT_GRAD)
    return ends and not wirer.folding[action.chunk] and bool(wirer.pieces[action.chunk].results)


def _task(
    key: Key,
    call: _ActionCall,
    after: Sequence[Key],
    model: ModelRef,
    sources: Mapping[str, KeysOrValue],
    micro_batch: int,
    extra: Mapping[str, Any],
) -> Task:
    given = [sources[name] for name in call.ref.inputs]
    inputs = [TaskRef(s.at(micro_batch)) if isinstance(s, KeySeries) else s.at(micro_batch) for s in given]
    results = [TaskRef(k) for k in call.results]
    before = [None if k is None else TaskRef(k) for k in call.before]
    # A task depends on the results that it reads already.
    there = {*call.results, *call.before}
    waited = [TaskRef(k) for k in after if k not in there]
    return Task(key, call.run, model, call.ref, *inputs, *results, *before, *waited, **extra)


def _about(wiring: Wiring, action: Action) -> tuple[Any, ...]:
    regions = wiring.regions[action.chunk]
    # It computes none of the bundles before its own, unless a result was lost.
    parts = "IW" if action.kind == BACKWARD else _STEPS[action.kind][-1]
    region = "; ".join(dict.fromkeys(regions[part] for part in parts if regions.get(part)))
    return tuple(About(region, "", wiring.plan.stage[action], action.micro_batch))


def _result_keys(wirer: _Wirer) -> list[Any]:
    micro_batches = 1 + max(action.micro_batch for action in wirer.actions)
    chunks = [c for c, piece in enumerate(wirer.pieces) if piece.results]
    if wirer.trains:
        return [wirer.sum_key(c, micro_batches - 1) for c in chunks]

    def forwards(chunk: int) -> list[Key]:
        return [wirer.key(Action(chunk, FORWARD, i)) for i in range(micro_batches)]

    return list(map(forwards, chunks))
