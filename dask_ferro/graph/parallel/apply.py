"""A plan applied to a graph: the nodes of each region, and the placements of values and nodes.

    applied = apply(graph, "plan.yaml")       the graph's results do not depend on the plan
    applied.spmd()                            nodes and collectives of all ranks; one rank without a plan

A region is a signal's path and all paths below it ("layer1" includes "layer1/attention"), or a pattern over paths; if
no path matches, a pattern over names of nodes.  Where several regions match, the longest name takes precedence, key by
key.  Backward nodes belong to the region of their forward nodes, or to the one that it names as `backward`.  A value of
`shard` is an input or output of the region's nodes, also one behind a cast: by its name, its last part, or a pattern.
`sequence` splits activations of the region (`parallel.sequence`).

A plan changes no node, and adds those that a region with `remat` computes again (`parallel.remat`).  Stage, device and
workers are written into the metadata of a copy's nodes, and the plan's text into that of the copy: a file keeps it, and
needs no other plan.  Workers are numbers here, not addresses.
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

from dask_ferro.errors import ConfigError, did_you_mean
from dask_ferro.graph.ir.inference import declared_type
from dask_ferro.graph.ir.regions import BACKWARD, region_of
from dask_ferro.graph.model.load import load
from dask_ferro.graph.parallel.config import Asked, PlanFile, RegionPlan, at, parse_plan, read_plan, together
from dask_ferro.graph.parallel.node_values import (
    Placed,
    front_dims,
    named,
    ranks_along,
    shown,
    sized,
    sources,
    split_dims,
    split_or_whole,
    with_rows,
)
from dask_ferro.graph.parallel.remat import draws, rematerialized, units_of
from dask_ferro.graph.parallel.sequence import mark, misfits, with_sequences
from dask_ferro.graph.sharding.given import split_problem
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement, place
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.sharding.placements import WHOLE, Shard
from dask_ferro.graph.sharding.plan import Sharding
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.graph.tensor.emit import Built, build
from dask_ferro.graph.tensor.tensor import Tensor
from dask_ferro.words import few

DATA, TENSOR = "data", "tensor"
# The key of a model's metadata with the text of its plan.
PLAN = "dask_ferro.plan"

_ONE = Mesh({TENSOR: 1})
_NOTHING = RegionPlan()


@dataclass(frozen=True, repr=False)
class Applied:
    """A graph with the placements that a plan gives it.

    Attributes
    ----------
    model : onnx_ir.Model
        The graph itself without a plan, otherwise a copy with the plan in its metadata; weights are shared.
    plan : PlanFile or None
        None if there is none, or it is disabled.
    mesh : Mesh
        One rank if nothing is split.
    given : mapping of str to (axis to Placement)
        The values that the plan places.
    regions : mapping of str to RegionPlan
        The plan's settings of each node, by its name.
    optimizer_state : mapping of str to int
        The dimension that each axis splits of the optimizer's state, as `state_layouts` takes it.
    """

    model: ir.Model
    plan: PlanFile | None = None
    mesh: Mesh = _ONE
    given: Mapping[str, Placed] = field(default_factory=dict)
    regions: Mapping[str, RegionPlan] = field(default_factory=dict)
    optimizer_state: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        plan = "no plan" if self.plan is None else f"plan {self.plan.source}"
        mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in self.mesh.axes.items())
        placed = f"{len(self.given)} values placed, {len(self.regions)} nodes in regions"
        return f"<Applied: {len(self.model.graph)} nodes, {plan}, mesh {mesh}, {placed}>"

    @property
    def workers(self) -> tuple[int, ...] | None:
        """The number of each rank's worker, if the plan names workers and all regions agree."""
        named = {region.workers for region in self.regions.values() if region.workers is not None}
        return named.pop() if len(named) == 1 else None

    def shard(
        self,
        *,
        follow: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
        terms: Collection[str] = (),
        outputs: Mapping[str, Placed] | None = None,
    ) -> Sharding:
        """Return the plan of the sharding.

        Parameters
        ----------
        follow : mapping of str to str, optional
            Output to input: the output gets the input's layout, to be the input of the next call.
        dims : mapping of str to int, optional
            Sizes of symbolic dimensions.
        terms : collection of str, optional
            Outputs whose all-reduces are left to the caller, as `sharding.propagate` takes them.
        outputs : mapping of str to (axis to Placement), optional
            The placements of other outputs.

        Raises
        ------
        ConfigError, UnsupportedOp
            As `sharding.propagate`; and an input in `follow` that the graph does not have.
        """
        known = {value.name for value in self.model.graph.inputs}
        if wrong := sorted(set((follow or {}).values()) - known):
            raise ConfigError(f"follow: the graph has no input {wrong}; it has {sorted(map(str, known))}")
        types = sized(self.model, dims)
        given = with_rows(self.given, self.model, types, self.mesh)
        placed = {end: given.get(start, {}) for end, start in (follow or {}).items()}
        placed |= outputs or {}
        return propagate(self.model, types, self.mesh, given, outputs=placed, terms=terms)

    def spmd(self, **options: Any) -> Spmd:
        """Return the graph of all ranks; options and errors are those of `shard`."""
        return lower(self.shard(**options))


def apply(graph: Any, plan: str | os.PathLike[str] | Mapping[str, Any] | PlanFile | None = None) -> Applied:
    """Return a graph with a plan applied to it.

    Parameters
    ----------
    graph : Tensor, outputs of `build`, Built, onnx_ir.Model, onnx.ModelProto, bytes or path
    plan : path, mapping, PlanFile or None
        As described in `parallel.config`.  It replaces the graph's own plan, which a file that `ff.save_onnx` wrote may
        have; without a plan, that one is applied.

    Raises
    ------
    ConfigError
        Regions and values that the graph does not have, and settings that conflict; with line and key.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> with ff.signal("layer1"):
    ...     y = ff.argument("x", (4, 8)) @ ff.argument("weight", (8, 6))
    >>> ff.apply(y, {"layer1": {"shard": {"weight": 1}, "workers": [0, 1]}}).shard().outputs
    ((Shard(dim=1),),)
    """
    model = model_of(graph)
    found = plan if plan is None or isinstance(plan, PlanFile) else read_plan(plan)
    if (found is None or not found.enabled) and (text := model.metadata_props.get(PLAN)) is not None:
        found = parse_plan(f"of {model.graph.name!r}", text)
    if found is not None and found.enabled:
        return _Applying(model, found).applied()
    for node in model.graph:
        # A file may have any placement in its metadata.
        place(node, UNPLACED)
    return Applied(model)


def model_of(graph: Any) -> ir.Model:
    """Return the model of a graph in any form that `apply` takes."""
    if isinstance(graph, ir.Model):
        return graph
    if isinstance(graph, Built):
        return graph.model
    if isinstance(graph, str | bytes | os.PathLike | onnx.ModelProto):
        return load(graph).model
    if isinstance(graph, Tensor | Sequence | Mapping):
        return build(graph).model
    raise ConfigError(f"apply: got {type(graph).__name__}, wanted tensors, a model, or the path of one")


class _Applying:
    """The application of one plan to one model, and the problems found."""

    def __init__(self, model: ir.Model, plan: PlanFile) -> None:
        self.model, self.plan = model, plan
        # The keys are the problems: each is reported once.
        self.problems: dict[str, None] = {}
        self.by_name = {region.name: region for region in plan.regions}
        self.mesh = self._mesh()

    def applied(self) -> Applied:
        regions = self._regions()
        given = self._placements(regions)
        asked = self.plan.optimizer_state
        state = {} if asked is None else split_dims(self._placed(asked, DATA))
        self._check_workers()
        self._check_stages(regions)
        self._check_remat(regions)
        for asked, problem in misfits(regions, self._placed, self.mesh):
            self._wrong(asked, problem)
        if self.problems:
            raise self.plan.refusal(list(self.problems))
        by_node = {node.name or "": region for node, region in regions.items()}
        # A clone shares the weights: a plan costs nodes, not arrays.
        copy = self.model.clone()
        placed = {node: found for node in copy.graph if (found := by_node.get(node.name or "")) is not None}
        for node in copy.graph:
            # A plan replaces the placements in the graph.
            sequence = placed.get(node, _NOTHING).sequence
            mark(node, {} if sequence is None else self._placed(sequence))
        placed |= self._repeated(copy, placed)
        by_node |= {node.name or "": found for node, found in placed.items()}
        for node in copy.graph:
            region = placed.get(node, _NOTHING)
            place(node, NodePlacement(region.stage, region.device, region.workers))
        copy.metadata_props[PLAN] = self.plan.text
        given = with_sequences(copy, given, self.mesh)
        return Applied(copy, self.plan, self.mesh, given, by_node, state)

    def _repeated(self, model: ir.Model, placed: Mapping[ir.Node, RegionPlan]) -> dict[ir.Node, RegionPlan]:
        """Add the nodes that regions with `remat` compute again to the model, and return their settings."""
        made = rematerialized(model, units_of(placed))
        return {node: self._backward(placed[repeats]) for node, repeats in made.items()}

    def _backward(self, settings: RegionPlan) -> RegionPlan:
        """Return the settings of a region's backward nodes."""
        if settings.backward is None:
            return settings
        return together([settings, self.by_name[settings.backward]])

    def _check_remat(self, regions: Mapping[ir.Node, RegionPlan]) -> None:
        """Check that what is computed again is in a signal, and draws no random numbers, which would differ."""
        problems = {}
        for node, region in regions.items():
            if region.remat and not region_of(node).path:
                problems[region.name] = (
                    f"{node.name!r} has no signal, so its backward nodes are not known; write it in one"
                )
            elif region.remat and draws(node):
                problems[region.name] = (
                    f"{node.name!r} draws random numbers, which would differ; use ff.nn.dropout"
                )
        for name, problem in problems.items():
            self._wrong_in(self.by_name[name], "remat", problem)

    def _wrong(self, asked: Asked, problem: str) -> None:
        self.problems[at(asked.line, asked.key, problem)] = None

    def _wrong_in(self, region: RegionPlan, key: str, problem: str) -> None:
        self.problems[at(region.lines.get(key, region.line), f"{region.name}.{key}", problem)] = None

    # Regions.

    def _regions(self) -> dict[ir.Node, RegionPlan]:
        """Return the plan's settings for each node in a region."""
        paths = {node: region_of(node).path for node in self.model.graph}
        backward = {region.backward for region in self.plan.regions}
        by_path = {region.name: _covered(region.name, paths.values()) for region in self.plan.regions}
        found: dict[ir.Node, RegionPlan] = {}
        used: set[str] = set()
        for node, path in paths.items():
            name = node.name or ""
            mine = [
                r
                for r in self.plan.regions
                if (path in by_path[r.name] if by_path[r.name] else fnmatchcase(name, r.name))
            ]
            used.update(region.name for region in mine)
            if mine:
                # Sorted by length, so that the longest name is last and takes precedence key by key.
                settings = together(sorted(mine, key=lambda r: len(r.name)))
                is_backward = region_of(node).phase == BACKWARD
                found[node] = self._backward(settings) if is_backward else settings
        for region in self.plan.regions:
            # A region that is only another one's `backward` need not match any path.
            if region.name not in used and region.name not in backward:
                there = sorted({p for p in paths.values() if p}) or [n.name or "" for n in self.model.graph]
                wanted = f"its signals or nodes are like {', '.join(map(repr, there[:6]))}"
                problem = at(region.line, region.name, f"the graph has no such region; {wanted}")
                self.problems[problem] = None
        return found

    # Placements.

    def _mesh(self) -> Mesh:
        if self.plan.mesh is not None:
            return Mesh(self.plan.mesh)
        sizes = {len(region.workers) for region in self.plan.regions if region.workers}
        if len(sizes) > 1:
            region = next(region for region in self.plan.regions if region.workers)
            self._wrong_in(region, "workers", f"regions have {sorted(sizes)}; give a `mesh`")
        return Mesh({TENSOR: max(sizes)}) if sizes else _ONE

    def _placements(self, regions: Mapping[ir.Node, RegionPlan]) -> dict[str, Placed]:
        """Return the placements of values: those of `inputs`, those by name in regions, and then all others'."""
        found = self._inputs()
        for value, asked in self._region_values(regions):
            self._put(found, value, self._split(value, asked), asked)
        by_name = frozenset(found)
        for node, region in regions.items():
            for asked in (asked for asked in region.shard.values() if asked.is_general):
                # Scalars are constants of the expression.
                values = [
                    v for v in sources(node) if v.name not in by_name and v.shape is not None and len(v.shape)
                ]
                for value in values:
                    self._put(found, value, split_or_whole(self._placed(asked), value, self.mesh), asked)
        return {name: placed for name, (placed, _) in found.items()}

    def _put(
        self, found: dict[str, tuple[Placed, Asked]], value: ir.Value, placed: Placed, asked: Asked
    ) -> None:
        first, by = found.setdefault(value.name or "", (placed, asked))
        if first != placed:
            has = f"which is {shown(first)} by {by.key}"
            remedy = "keep one of them, or place it in `inputs` alone"
            self._wrong(asked, f"got {shown(placed)} for {value.name!r}, {has}; {remedy}")

    def _inputs(self) -> dict[str, tuple[Placed, Asked]]:
        """Return the placements of inputs and weights by `inputs`, of which later entries override earlier ones."""
        graph = self.model.graph
        known = {v.name or "": v for v in (*graph.inputs, *graph.initializers.values())}
        found: dict[str, tuple[Placed, Asked]] = {}
        for pattern, asked in self.plan.inputs.items():
            names = [name for name in known if fnmatchcase(name, pattern)]
            if not names:
                # A number has no dimension to split.
                others = [v.name or "" for v in graph.inputs if v.shape is None or len(v.shape)] or [*known]
                close = did_you_mean(pattern, others)
                self._wrong(asked, f"no such input; the graph has {', '.join(others)}{close}")
            found.update((name, (self._split(known[name], asked, DATA), asked)) for name in names)
        return found

    def _region_values(self, regions: Mapping[ir.Node, RegionPlan]) -> Iterator[tuple[ir.Value, Asked]]:
        """Yield the values that regions name, each with its split."""
        used: set[str] = set()
        for node, region in regions.items():
            for key, asked in region.shard.items():
                for value in named(node, key) if not asked.is_general else ():
                    used.add(asked.key)
                    yield value, asked
        for region in self.plan.regions:
            mine = [node for node, r in regions.items() if region.shard.items() <= r.shard.items()]
            for asked in region.shard.values():
                if asked.key not in used and not asked.is_general:
                    there = sorted({v.name or "" for v in chain.from_iterable(map(sources, mine))})
                    listed = ", ".join(map(repr, there[:6])) or "none"
                    close = did_you_mean(asked.key.rsplit(".", 1)[-1], [n.rsplit(".", 1)[-1] for n in there])
                    problem = f"no such value in the region; its weights and inputs are {listed}{close}"
                    self._wrong(asked, problem)

    def _split(self, value: ir.Value, asked: Asked, axis: str = TENSOR) -> Placed:
        """Return the placement of a value that the plan names, after a check of the sizes that are known."""
        placed = front_dims(self._placed(asked, axis), value)
        shape = declared_type(value).shape
        if shape is None:
            return placed
        for dim, ranks in ranks_along(placed, self.mesh).items():
            is_open = 0 <= dim < len(shape) and not isinstance(shape[dim], int)
            if not is_open and (problem := split_problem(dim, shape, ranks)):
                self._wrong(asked, f"{value.name!r}: {problem}")
        return placed

    def _placed(self, asked: Asked, axis: str = TENSOR) -> Placed:
        """Return a placement for each named axis of the mesh; a bare dimension is split along `axis`."""
        axes = list(self.mesh.axes)
        if asked.split is None:
            return dict.fromkeys(axes, WHOLE)
        if not isinstance(asked.split, int):
            for name in asked.split:
                if name not in axes:
                    self._wrong(asked, f"no axis {name!r}; the mesh has {', '.join(axes)}")
            return {name: Shard(dim) for name, dim in asked.split.items() if name in axes}
        if axis not in axes and len(axes) > 1:
            wanted = f"name one of {', '.join(axes)}, as in {{{axes[0]}: {asked.split}}}"
            self._wrong(asked, f"which axis? {wanted}")
        return {axis if axis in axes else axes[0]: Shard(asked.split)}

    def _check_workers(self) -> None:
        """Check that a region names one worker per rank, and that regions of one stage name the same workers."""
        of_stage: dict[int | None, RegionPlan] = {}
        for region in self.plan.regions:
            if region.workers is None:
                continue
            if len(region.workers) != self.mesh.ranks:
                wanted = f"wanted {self.mesh.ranks}, one for each rank of {dict(self.mesh.axes)}"
                self._wrong_in(region, "workers", f"got {len(region.workers)} workers, {wanted}")
            first = of_stage.setdefault(region.stage, region)
            if first.workers != region.workers:
                got = f"got {list(region.workers)}, and {first.name!r} has {list(first.workers or ())}"
                self._wrong_in(region, "workers", f"{got}; regions of one stage share their workers")

    def _check_stages(self, regions: Mapping[ir.Node, RegionPlan]) -> None:
        """Check that stages are numbered from 0 without a gap; nodes without a stage are in stage 0."""
        named = {r.stage: r for r in reversed(self.plan.regions) if r.stage is not None}
        rest = {0} if any(regions.get(node, _NOTHING).stage is None for node in self.model.graph) else set()
        missing = sorted(set(range(max(named, default=0))) - named.keys() - rest)
        if missing:
            problem = (
                f"got {max(named)}, and no region has {few(missing)}; number them 0, 1, ... without a gap"
            )
            self._wrong_in(named[max(named)], "stage", problem)


def _covered(name: str, paths: Iterable[str]) -> set[str]:
    """Return the paths that belong to a region."""
    return {path for path in paths if path and (fnmatchcase(path, name) or fnmatchcase(path, f"{name}/*"))}
