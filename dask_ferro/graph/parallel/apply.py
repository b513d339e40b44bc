"""Apply a plan to a graph: the nodes of each region, and the placements of values and nodes.

    applied = apply(graph, "plan.yaml")       the graph's results do not depend on the plan
    applied.spmd()                            nodes and collectives of all ranks; one rank without a plan

A region is its path and all paths below it ("layer1" includes "layer1/attention"), or a pattern over paths; if
no path matches, a pattern over names of nodes.  If several regions match, the longest name takes precedence, key by
key.  Backward nodes belong to the region of their forward nodes, or to the region that it names as `backward`.  A
value of `shard` is an input or output of the region's nodes, also behind a cast; its key is its name, the last part
of the name, or a pattern.  `sequence` splits activations of the region (`parallel.sequence`).

A plan changes no node, and adds the nodes that a region with `remat` computes again (`parallel.remat`).  Stage,
device and workers are written into the metadata of a copy's nodes, and the plan's text into the metadata of the copy:
a file keeps it, and needs no other plan.  Workers are numbers here, not addresses.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import onnx
import onnx_ir as ir

from dask_ferro.errors import InputError, did_you_mean
from dask_ferro.graph.ir.inference import declared_type
from dask_ferro.graph.ir.regions import BACKWARD, region_of
from dask_ferro.graph.model.load import load
from dask_ferro.graph.parallel import config
from dask_ferro.graph.parallel.config import ALL_VALUES, PlanFile, RegionPlan, Split, format_problem, merge
from dask_ferro.graph.parallel.node_values import (
    find_values,
    front_dims,
    infer_types,
    place_rows,
    read_sources,
    split_dims,
    split_or_whole,
)
from dask_ferro.graph.parallel.remat import draws, rematerialize, units_of
from dask_ferro.graph.parallel.sequence import misfits, place_sequences
from dask_ferro.graph.sharding.node_placement import NO_PLACE, NodePlacement, place
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Shard
from dask_ferro.graph.sharding.plan import Sharding
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import ByAxis, Mesh
from dask_ferro.graph.sharding.requests import ranks_by_dim, split_problem
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.graph.tensor.emit import BuiltModel, build
from dask_ferro.graph.tensor.tensor import Tensor
from dask_ferro.words import list_names

DATA, TENSOR = "data", "tensor"
# The key of a model's metadata with the text of its plan.
PLAN = "dask_ferro.plan"

_ONE_RANK = Mesh({TENSOR: 1})
_NO_PLAN = RegionPlan()


@dataclass(frozen=True, repr=False)
class PlannedGraph:
    """A graph with a plan's placements of values and settings of nodes, by name.

    `model` is the graph itself without a plan, otherwise a copy with the plan in its metadata; weights are shared.
    `plan` is None if there is none, or it is disabled.  `optimizer_state` has the dimension of the optimizer's state
    that each axis splits, `sequences` the shards that nodes of sequence parallel regions read and compute.
    """

    model: ir.Model
    plan: PlanFile | None = None
    mesh: Mesh = _ONE_RANK
    placements: Mapping[str, ByAxis] = field(default_factory=dict)
    regions: Mapping[str, RegionPlan] = field(default_factory=dict)
    sequences: Mapping[str, ByAxis] = field(default_factory=dict)
    optimizer_state: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        plan = "no plan" if self.plan is None else f"plan {self.plan.source}"
        mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in self.mesh.axes.items())
        placed = f"{len(self.placements)} values placed, {len(self.regions)} nodes in regions"
        return f"<PlannedGraph: {len(self.model.graph)} nodes, {plan}, mesh {mesh}, {placed}>"

    @property
    def workers(self) -> tuple[int, ...] | None:
        """The number of each rank's worker, if the plan names workers and all regions agree."""
        workers = {region.workers for region in self.regions.values() if region.workers is not None}
        return workers.pop() if len(workers) == 1 else None

    def shard(
        self,
        *,
        follow: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
        terms: Collection[str] = (),
        outputs: Mapping[str, ByAxis] | None = None,
    ) -> Sharding:
        """Return the plan of the sharding.

        Parameters
        ----------
        follow : mapping of str to str, optional
            Output to input: the output gets the input's layout, to be the input of the next call.
        dims : mapping of str to int, optional
            Sizes of symbolic dimensions.
        terms : collection of str, optional
            Outputs whose all-reduces are left to the caller: along an axis on which such an output is not requested
            split, it may be a Partial sum or mean.
        outputs : mapping of str to (axis to Placement), optional
            The placements of other outputs.

        Raises
        ------
        InputError, UnsupportedOpError
            If `sharding.propagate` raises them, or the graph does not have an input in `follow`.
        """
        known = {value.name for value in self.model.graph.inputs}
        if wrong := sorted(set((follow or {}).values()) - known):
            raise InputError(f"follow: the graph has no input {wrong}; it has {sorted(map(str, known))}")
        types = infer_types(self.model, dims)
        placed = place_rows(self.placements, self.model, types, self.mesh)
        ends = {end: placed.get(start, {}) for end, start in (follow or {}).items()} | dict(outputs or {})
        for end in terms:
            left = {axis: Partial() for axis in self.mesh.axes}
            split = {axis: p for axis, p in ends.get(end, {}).items() if p != WHOLE}
            ends[end] = {**left, **split}
        return propagate(self.model, types, self.mesh, placed, outputs=ends, sequences=self.sequences)

    def spmd(self, **options: Any) -> Spmd:
        """Return the graph of all ranks; options and errors are the same as in `shard`."""
        return lower(self.shard(**options))


def apply_plan(
    graph: Any, plan: str | os.PathLike[str] | Mapping[str, Any] | PlanFile | None = None
) -> PlannedGraph:
    """Return a graph with a plan applied to it.

    Parameters
    ----------
    graph : Tensor, outputs of `build`, Built, onnx_ir.Model, onnx.ModelProto, bytes or path
    plan : path, mapping, PlanFile or None
        The plan (`parallel.config`).  It replaces the graph's own plan, which a file from `ft.save_onnx` may have;
        without a plan, the graph's own plan is applied.

    Raises
    ------
    InputError
        If the graph does not have a region or a value, or settings conflict; the message has line and key.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> with ft.region("layer1"):
    ...     y = ft.input("x", (4, 8)) @ ft.input("weight", (8, 6))
    >>> ff.apply_plan(y, {"layer1": {"shard": {"weight": 1}, "workers": [0, 1]}}).shard().outputs
    ((Shard(dim=1),),)
    """
    model = model_of(graph)
    own = plan if plan is None or isinstance(plan, PlanFile) else config.read_plan(plan)
    if (own is None or not own.enabled) and (text := model.metadata_props.get(PLAN)) is not None:
        own = config.parse_plan(f"of {model.graph.name!r}", text)
    if own is not None and own.enabled:
        return _Application(model, own).run()
    for node in model.graph:
        # A file may have any placement in its metadata.
        place(node, NO_PLACE)
    return PlannedGraph(model)


def model_of(graph: Any) -> ir.Model:
    """Return the model of a graph in any form that `apply` takes."""
    if isinstance(graph, ir.Model):
        return graph
    if isinstance(graph, BuiltModel):
        return graph.model
    if isinstance(graph, str | bytes | os.PathLike | onnx.ModelProto):
        return load(graph).model
    if isinstance(graph, Tensor | Sequence | Mapping):
        return build(graph).model
    raise InputError(f"apply_plan: got {type(graph).__name__}, wanted tensors, a model, or the path of one")


class _Application:
    """The application of one plan to one model, with the problems so far."""

    def __init__(self, model: ir.Model, plan: PlanFile) -> None:
        self.model, self.plan = model, plan
        self.problems: list[str] = []
        self.by_name = {region.name: region for region in plan.regions}
        self.mesh = self._mesh()

    def run(self) -> PlannedGraph:
        regions = self._regions()
        placements = self._placements(regions)
        split = self.plan.optimizer_state
        state = {} if split is None else split_dims(self._placed(split, DATA))
        self._check_workers()
        self._check_stages(regions)
        self._check_remat(regions)
        for split, problem in misfits(regions, self._placed, self.mesh):
            self._report(split, problem)
        if self.problems:
            raise self.plan.refusal(self.problems)
        by_node = {node.name or "": region for node, region in regions.items()}
        # A clone shares the weights: a plan costs nodes, not arrays.
        copy = self.model.clone()
        settings = {
            node: region for node in copy.graph if (region := by_node.get(node.name or "")) is not None
        }
        repeats = rematerialize(copy, units_of(settings))
        settings |= {node: self._backward(settings[repeated]) for node, repeated in repeats.items()}
        by_node |= {node.name or "": region for node, region in settings.items()}
        for node in copy.graph:
            region = settings.get(node, _NO_PLAN)
            # A plan replaces the placements in the graph.
            place(node, NodePlacement(region.stage, region.device, region.workers))
        copy.metadata_props[PLAN] = self.plan.text
        sequences = {
            name: {axis: p for axis, p in self._placed(region.sequence).items() if p != WHOLE}
            for name, region in by_node.items()
            if region.sequence is not None
        }
        placements = place_sequences(copy, placements, sequences)
        return PlannedGraph(copy, self.plan, self.mesh, placements, by_node, sequences, state)

    def _backward(self, settings: RegionPlan) -> RegionPlan:
        """Return the settings of a region's backward nodes."""
        if settings.backward is None:
            return settings
        return merge([settings, self.by_name[settings.backward]])

    def _report(self, split: Split, problem: str) -> None:
        self.problems.append(format_problem(split.line, split.key, problem))

    def _report_key(self, region: RegionPlan, key: str, problem: str) -> None:
        self.problems.append(
            format_problem(region.lines.get(key, region.line), f"{region.name}.{key}", problem)
        )

    # Regions.

    def _regions(self) -> dict[ir.Node, RegionPlan]:
        """Return the plan's settings for each node in a region."""
        paths = {node: region_of(node).path for node in self.model.graph}
        by_path = {region.name: _covered_paths(region.name, paths.values()) for region in self.plan.regions}
        regions: dict[ir.Node, RegionPlan] = {}
        # A region that is only the `backward` of another region need not match any path.
        used = {region.backward for region in self.plan.regions}
        for node, path in paths.items():
            name = node.name or ""
            matches = [
                region
                for region in self.plan.regions
                if (path in covered if (covered := by_path[region.name]) else fnmatchcase(name, region.name))
            ]
            used.update(region.name for region in matches)
            if matches:
                # Sorted by length, so that the longest name is last and takes precedence key by key.
                settings = merge(sorted(matches, key=lambda region: len(region.name)))
                is_backward = region_of(node).phase == BACKWARD
                regions[node] = self._backward(settings) if is_backward else settings
        for region in self.plan.regions:
            if region.name not in used:
                names = sorted({p for p in paths.values() if p}) or [n.name or "" for n in self.model.graph]
                like = f"its regions or nodes are like {', '.join(map(repr, names[:6]))}"
                self.problems.append(
                    format_problem(region.line, region.name, f"the graph has no such region; {like}")
                )
        return regions

    def _check_workers(self) -> None:
        """Check that a region names one worker per rank, and that regions of one stage name the same workers."""
        of_stage: dict[int | None, RegionPlan] = {}
        for region in self.plan.regions:
            if region.workers is None:
                continue
            if len(region.workers) != self.mesh.ranks:
                count = f"wanted {self.mesh.ranks}, one for each rank of {dict(self.mesh.axes)}"
                self._report_key(region, "workers", f"got {len(region.workers)} workers, {count}")
            first = of_stage.setdefault(region.stage, region)
            if first.workers != region.workers:
                got = f"got {list(region.workers)}, and {first.name!r} has {list(first.workers or ())}"
                self._report_key(region, "workers", f"{got}; regions of one stage share their workers")

    def _check_stages(self, regions: Mapping[ir.Node, RegionPlan]) -> None:
        """Check that stages are numbered from 0 without a gap; nodes without a stage are in stage 0."""
        named = {r.stage: r for r in reversed(self.plan.regions) if r.stage is not None}
        rest = {0} if any(regions.get(node, _NO_PLAN).stage is None for node in self.model.graph) else set()
        if missing := sorted(set(range(max(named, default=0))) - named.keys() - rest):
            problem = f"got {max(named)}, and no region has {list_names(missing)}; number them 0, 1, ... without a gap"
            self._report_key(named[max(named)], "stage", problem)

    def _check_remat(self, regions: Mapping[ir.Node, RegionPlan]) -> None:
        """Check that nodes to compute again are in a region, and draw no random numbers, which would differ."""
        problems = {}
        for node, region in regions.items():
            if region.remat and not region_of(node).path:
                problem = "has no region, so its backward nodes are not known; write it in one"
                problems[region.name] = f"{node.name!r} {problem}"
            elif region.remat and draws(node):
                problem = "draws random numbers, which would differ; use dask_ferro.tensor.nn.dropout"
                problems[region.name] = f"{node.name!r} {problem}"
        for name, problem in problems.items():
            self._report_key(self.by_name[name], "remat", problem)

    # Placements.

    def _mesh(self) -> Mesh:
        if self.plan.mesh is not None:
            return Mesh(self.plan.mesh)
        sizes = {len(region.workers) for region in self.plan.regions if region.workers}
        if len(sizes) > 1:
            region = next(region for region in self.plan.regions if region.workers)
            self._report_key(region, "workers", f"regions have {sorted(sizes)}; give a `mesh`")
        return Mesh({TENSOR: max(sizes)}) if sizes else _ONE_RANK

    def _placements(self, regions: Mapping[ir.Node, RegionPlan]) -> dict[str, ByAxis]:
        """Return the placements of values: first of `inputs`, then of names in regions, and then of all others."""
        placed = self._inputs()
        for value, split in self._region_values(regions):
            self._put(placed, value, self._split(value, split), split)
        by_name = frozenset(placed)
        for node, region in regions.items():
            for value in read_sources(node) if ALL_VALUES in region.shard else ():
                # Scalars are constants of the expression.
                if value.name not in by_name and value.shape is not None and len(value.shape):
                    split = region.shard[ALL_VALUES]
                    self._put(placed, value, split_or_whole(self._placed(split), value, self.mesh), split)
        return {name: placement for name, (placement, _) in placed.items()}

    def _put(
        self, placed: dict[str, tuple[ByAxis, Split]], value: ir.Value, placement: ByAxis, split: Split
    ) -> None:
        first, by = placed.setdefault(value.name or "", (placement, split))
        if first != placement:
            got, has = (split_dims(each) or "whole" for each in (placement, first))
            remedy = "keep one of them, or place it only in `inputs`"
            self._report(split, f"got {got} for {value.name!r}, which is {has} by {by.key}; {remedy}")

    def _inputs(self) -> dict[str, tuple[ByAxis, Split]]:
        """Return the placements of inputs and weights from `inputs`, whose later entries override earlier entries."""
        graph = self.model.graph
        known = {v.name or "": v for v in (*graph.inputs, *graph.initializers.values())}
        placed: dict[str, tuple[ByAxis, Split]] = {}
        for pattern, split in self.plan.inputs.items():
            names = [name for name in known if fnmatchcase(name, pattern)]
            if not names:
                # A number has no dimension to split.
                others = [v.name or "" for v in graph.inputs if v.shape is None or len(v.shape)] or [*known]
                close = did_you_mean(pattern, others)
                self._report(split, f"no such input; the graph has {', '.join(others)}{close}")
            placed.update((name, (self._split(known[name], split, DATA), split)) for name in names)
        return placed

    def _region_values(self, regions: Mapping[ir.Node, RegionPlan]) -> Iterator[tuple[ir.Value, Split]]:
        """Yield the values that regions name, each with its split."""
        used: set[str] = set()
        for node, region in regions.items():
            for key, split in region.shard.items():
                for value in find_values(node, key) if key != ALL_VALUES else ():
                    used.add(split.key)
                    yield value, split
        for region in self.plan.regions:
            for key, split in region.shard.items():
                if split.key not in used and key != ALL_VALUES:
                    own = [node for node, r in regions.items() if r.shard.get(key) == split]
                    names = sorted({v.name or "" for v in chain.from_iterable(map(read_sources, own))})
                    listed = ", ".join(map(repr, names[:6])) or "none"
                    close = did_you_mean(key, [name.rsplit(".", 1)[-1] for name in names])
                    problem = f"no such value in the region; its weights and inputs are {listed}{close}"
                    self._report(split, problem)

    def _split(self, value: ir.Value, split: Split, axis: str = TENSOR) -> ByAxis:
        """Return the placement of a value that the plan names, after a check of the sizes that are known."""
        placed = front_dims(self._placed(split, axis), value)
        shape = declared_type(value).shape
        if shape is None:
            return placed
        for dim, ranks in ranks_by_dim(placed, self.mesh).items():
            is_open = 0 <= dim < len(shape) and not isinstance(shape[dim], int)
            if not is_open and (problem := split_problem(dim, shape, ranks)):
                self._report(split, f"{value.name!r}: {problem}")
        return placed

    def _placed(self, split: Split, axis: str = TENSOR) -> ByAxis:
        """Return a placement for each named axis of the mesh; a bare dimension is split along `axis`."""
        axes = list(self.mesh.axes)
        if split.dims is None:
            return dict.fromkeys(axes, WHOLE)
        if not isinstance(split.dims, int):
            for name in split.dims:
                if name not in axes:
                    self._report(split, f"no axis {name!r}; the mesh has {', '.join(axes)}")
            return {name: Shard(dim) for name, dim in split.dims.items() if name in axes}
        if axis not in axes and len(axes) > 1:
            remedy = f"name one of {', '.join(axes)}, as in {{{axes[0]}: {split.dims}}}"
            self._report(split, f"which axis? {remedy}")
        return {axis if axis in axes else axes[0]: Shard(split.dims)}


def _covered_paths(name: str, paths: Iterable[str]) -> set[str]:
    """Return the paths that belong to a region."""
    return {path for path in paths if path and (fnmatchcase(path, name) or fnmatchcase(path, f"{name}/*"))}
