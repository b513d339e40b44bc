"""Placements of a graph as ONNX's own device configurations, of IR version 11 on: written, and read again.

    ModelProto.configuration                  a device for each rank; its name says rank, device class and worker
    NodeProto.device_configurations           pipeline_stage: the node's stage
      sharding_spec.device                    on which devices the node computes
      sharding_spec.sharded_dim               which dimensions of a value are split

A device is named by the position of its rank on each axis of the mesh, and by what a plan says of it, as in "data=0
tensor=1 on gpu worker 3".  A value that a plan wants whole lies on one device group; a value that a plan says nothing
of has a list of devices and no group, only where the node would have none otherwise.  Other tools' configurations
stay as they are and are not read.  What the standard has no field for (region, chunk, action) stays metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeAlias
from urllib.parse import quote, unquote

import onnx_ir as ir

from dask_ferro.errors import ModelError
from dask_ferro.graph.model.checks.problems import shown
from dask_ferro.graph.sharding.node_placement import (
    DEVICE,
    STAGE,
    UNPLACED,
    WORKERS,
    NodePlacement,
    placement_of,
)
from dask_ferro.graph.sharding.placements import WHOLE, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Mesh

# The name of our configuration; a file may have those of other tools beside it.
NAME = "dask_ferro"
# The first IR version with device configurations; a lower one would drop them on save.
IR_VERSION = 11

# Axes of a mesh: numpy has 64 dimensions at most, and a file may name thousands.
_MOST_AXES = 32
# Six digits: no cluster has a million workers, and a longer text is no number of one.
_DEVICE_NAME = re.compile(
    r"([^\s=]*=\d{1,6}(?: [^\s=]*=\d{1,6})*)(?: on(?: (cpu|gpu))?(?: worker (\d{1,6}))?)?"
)

ByAxis: TypeAlias = Mapping[str, Placement]
# The devices (or ranks) that have each shard.
Shards: TypeAlias = tuple[tuple[int, ...], ...]


class RankDevice(NamedTuple):
    """The device of one rank: its position on each axis of the mesh, its class, and the number of its worker."""

    position: tuple[int, ...]
    device: str | None = None
    worker: int | None = None

    def name(self, axes: Sequence[str]) -> str:
        """Return the device's name in a file."""
        at = " ".join(f"{quote(axis, safe='')}={i}" for axis, i in zip(axes, self.position, strict=True))
        worker = None if self.worker is None else f"worker {self.worker}"
        said = [part for part in (self.device, worker) if part is not None]
        return f"{at} on {' '.join(said)}" if said else at


@dataclass(frozen=True)
class Placements:
    """The placements of a graph: those of its nodes, and those of its values on a mesh.

    Attributes
    ----------
    mesh : Mesh or None
        None where no value is placed.
    values : mapping of str to (axis to Placement)
    nodes : mapping of onnx_ir.Node to NodePlacement
        Of the nodes that have one.
    """

    mesh: Mesh | None = None
    values: Mapping[str, ByAxis] = field(default_factory=dict)
    nodes: Mapping[ir.Node, NodePlacement] = field(default_factory=dict)


def configure(model: ir.Model, placements: Placements) -> None:
    """Write placements into a model, in the place of those that it had.

    Parameters
    ----------
    model : onnx_ir.Model
        Changed; its IR version becomes 11 if it was lower.
    placements : Placements
        Stages, device classes and workers of nodes; actions are not written.
    """
    _clear(model)
    mesh = placements.mesh or Mesh({"tensor": 1})
    writer = _SpecWriter(mesh, placements)
    specs = {node: tuple(writer.specs(node)) for node in model.graph}
    if not writer.devices:
        writer.devices_of(UNPLACED)
    names = [device.name(tuple(mesh.axes)) for device in writer.devices]
    configuration = model.add_device_configuration(NAME, device_names=names)
    for node, its in specs.items():
        stage = placements.nodes.get(node, UNPLACED).stage
        if its or stage is not None:
            made = ir.NodeDeviceConfiguration(configuration, its, stage)
            node.device_configurations = (*node.device_configurations, made)
    # onnx_ir writes no device configuration into a model of a lower IR version, and only warns.
    model.ir_version = max(model.ir_version or 0, IR_VERSION)


def _clear(model: ir.Model) -> None:
    if any(configuration.name == NAME for configuration in model.device_configurations):
        model.remove_device_configuration(NAME, cascade=True)
    for node in model.graph:
        # Versions before this form wrote these keys; left in place, they would speak against the new plan.
        for key in (STAGE, DEVICE, WORKERS):
            node.metadata_props.pop(key, None)


class _SpecWriter:
    """The devices of a configuration as they are numbered, and the sharding specs of nodes on them."""

    def __init__(self, mesh: Mesh, placements: Placements) -> None:
        self.mesh, self.placements = mesh, placements
        self.devices: dict[RankDevice, int] = {}

    def specs(self, node: ir.Node) -> Iterator[ir.ShardingSpec]:
        """Yield the sharding specs of a node."""
        placement = self.placements.nodes.get(node, UNPLACED)
        named = {value: None for value in (*node.outputs, *node.inputs) if value is not None and value.name}
        placed = [value for value in named if value.name in self.placements.values]
        for value in placed:
            yield self._spec(value, self.placements.values[value.name or ""], self.devices_of(placement))
        if not placed and (placement.workers is not None or placement.device is not None):
            for value in list(named)[:1]:
                yield ir.ShardingSpec(value, self.devices_of(placement))

    def devices_of(self, placement: NodePlacement) -> tuple[int, ...]:
        """Return the number of each rank's device."""
        # A worker may be another rank in another stage, so a device is a rank on a worker, not a worker.
        workers = placement.workers or (None,) * self.mesh.ranks
        ranks = [
            RankDevice(self.mesh.coordinates(rank), placement.device, worker)
            for rank, worker in enumerate(workers)
        ]
        return tuple(self.devices.setdefault(device, len(self.devices)) for device in ranks)

    def _spec(self, value: ir.Value, placed: ByAxis, devices: Sequence[int]) -> ir.ShardingSpec:
        split = _splits(placed, self.mesh)
        entries: list[int] = []
        groups: list[ir.IndexToDeviceGroupMapEntry] = []
        for ranks in _shards(tuple(split), self.mesh):
            # Keys of groups are below 0, since a device's number is not.
            entries.append(-1 - len(groups) if len(ranks) > 1 else devices[ranks[0]])
            if len(ranks) > 1:
                group = tuple(devices[rank] for rank in ranks)
                groups.append(ir.IndexToDeviceGroupMapEntry(entries[-1], group))
        dims = tuple(
            ir.ShardedDim(dim, (ir.SimpleShardedDim(_size(value, dim), self.mesh.axes[axis]),))
            for axis, dim in split.items()
        )
        return ir.ShardingSpec(value, tuple(entries), tuple(groups), dims)


def _splits(placed: ByAxis, mesh: Mesh) -> dict[str, int]:
    """Return the dimension that each axis of several ranks splits; one rank has all of every dimension."""
    found = {}
    for axis, size in mesh.axes.items():
        placement = placed.get(axis, WHOLE)
        if isinstance(placement, Shard) and size > 1:
            found[axis] = placement.dim
    return found


def _shards(split: Sequence[str], mesh: Mesh) -> Shards:
    """Return the ranks of each shard; the last axis of `split` runs fastest, as in ONNX."""
    axes = tuple(mesh.axes)
    places = [axes.index(axis) for axis in split]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.ranks):
        coordinates = mesh.coordinates(rank)
        found.setdefault(tuple(coordinates[place] for place in places), []).append(rank)
    return tuple(tuple(found[at]) for at in sorted(found))


def _size(value: ir.Value, dim: int) -> int | ir.SymbolicDim:
    shape = value.shape
    known = shape is not None and -len(shape) <= dim < len(shape)
    return shape[dim] if shape is not None and known else ir.SymbolicDim(None)


# Reading. A file may say anything, so each number is checked before it is used.


def placements_in(model: ir.Model) -> Placements:
    """Return the placements that a model carries: its device configuration, or else the metadata of its nodes.

    Raises
    ------
    ModelError
        A configuration of ours that no mesh has; it lists every node.
    """
    configuration = next((c for c in model.device_configurations if c.name == NAME), None)
    reader = _SpecReader(model, configuration)
    if configuration is None:
        nodes = {node: reader.metadata(node) for node in model.graph}
    else:
        nodes = {node: reader.node(node) for node in model.graph}
    if reader.problems:
        raise ModelError(f"cannot read the placements of {model.graph.name!r}", shown(reader.problems))
    placed = {node: placement for node, placement in nodes.items() if placement != UNPLACED}
    return Placements(reader.mesh, reader.values, placed)


class _Unfit(Exception):
    """A configuration that no mesh has."""


class _SpecReader:
    """The values' placements read so far, and the problems found."""

    def __init__(self, model: ir.Model, configuration: ir.ModelConfiguration | None) -> None:
        self.values: dict[str, ByAxis] = {}
        self.problems: list[str] = []
        self.mesh: Mesh | None = None
        self.devices: tuple[RankDevice, ...] = ()
        if configuration is not None:
            try:
                self.mesh, self.devices = _mesh_of(configuration.device_names)
            except _Unfit as problem:
                self.problems.append(f"configuration {NAME!r}: {problem}")

    def metadata(self, node: ir.Node) -> NodePlacement:
        """Return the placement in a node's metadata, as files had it before they had device configurations."""
        try:
            return placement_of(node)
        except ValueError as problem:
            self.problems.append(f"node {node.name!r}: its metadata has {problem}")
            return UNPLACED

    def node(self, node: ir.Node) -> NodePlacement:
        """Return the placement of a node by our configuration, and remember those of its values."""
        for told in node.device_configurations:
            if told.configuration is not None and told.configuration.name == NAME and self.mesh is not None:
                try:
                    return self._placement(told, self.mesh)
                except _Unfit as problem:
                    self.problems.append(f"node {node.name!r}: {problem}")
        return UNPLACED

    def _placement(self, told: ir.NodeDeviceConfiguration, mesh: Mesh) -> NodePlacement:
        stage = told.pipeline_stage
        if stage is not None and stage < 0:
            raise _Unfit(f"pipeline_stage is {stage}, wanted 0 or more")
        found = NodePlacement(stage)
        for spec in told.sharding_specs:
            name = spec.value.name if spec.value is not None and spec.value.name else ""
            shards, ranks = self._shards(spec, mesh)
            placement = _with_devices(NodePlacement(stage), ranks)
            if found not in (placement, NodePlacement(stage)):
                raise _Unfit(f"value {name!r} is on other devices than the values before it")
            found = placement
            if spec.sharded_dims or spec.index_to_device_group_map:
                placed = _placed(spec, shards, mesh)
                if self.values.setdefault(name, placed) != placed:
                    raise _Unfit(f"value {name!r} is placed otherwise by another node")
        return found

    def _shards(self, spec: ir.ShardingSpec, mesh: Mesh) -> tuple[Shards, list[RankDevice]]:
        """Return the ranks of each shard, and the device of each rank."""
        groups = {entry.key: entry.value for entry in spec.index_to_device_group_map}
        device_of: dict[int, RankDevice] = {}
        shards, count = [], 0
        for entry in spec.device:
            numbers = groups.get(entry, (entry,))
            # Counted before they are looked at: many entries may name one long group.
            count += len(numbers)
            if count > mesh.ranks:
                raise _Unfit(f"it has more devices than the {mesh.ranks} ranks")
            if not all(0 <= number < len(self.devices) for number in numbers):
                raise _Unfit(f"device {entry} is none of the {len(self.devices)} of the configuration")
            ranks = tuple(_rank(self.devices[number].position, mesh) for number in numbers)
            device_of |= {r: self.devices[number] for r, number in zip(ranks, numbers, strict=True)}
            shards.append(ranks)
        # Both counts: a device twice would hide one that is missing.
        if sum(map(len, shards)) != mesh.ranks or len(device_of) != mesh.ranks:
            raise _Unfit(f"its devices are not those of the {mesh.ranks} ranks, each once")
        return tuple(shards), [device_of[rank] for rank in range(mesh.ranks)]


def _mesh_of(names: Sequence[str]) -> tuple[Mesh, tuple[RankDevice, ...]]:
    """Return the mesh that names of devices tell, and the devices."""
    axes: tuple[str, ...] | None = None
    devices = []
    for name in names:
        found = _DEVICE_NAME.fullmatch(name)
        if found is None:
            raise _Unfit(f"device {name[:60]!r}: wanted a name such as 'tensor=0 on gpu worker 1'")
        pairs = [pair.rpartition("=") for pair in found[1].split(" ")]
        if len(pairs) > _MOST_AXES:
            raise _Unfit(f"device {name[:60]!r}: wanted at most {_MOST_AXES} axes, got {len(pairs)}")
        own = tuple(unquote(axis) for axis, _, _ in pairs)
        if own != (axes or own) or len(set(own)) < len(own):
            raise _Unfit(f"device {name[:60]!r}: wanted each axis of {list(axes or own)} once")
        axes = own
        position = tuple(int(at) for _, _, at in pairs)
        devices.append(RankDevice(position, found[2], None if found[3] is None else int(found[3])))
    positions = {device.position for device in devices}
    sizes = [max(column) + 1 for column in zip(*positions, strict=True)]
    # Counted before any rank is enumerated: a name may say tensor=999999.
    if axes is None or prod(sizes) != len(positions):
        raise _Unfit(f"its {len(names)} devices are not all the ranks of a mesh")
    return Mesh(dict(zip(axes, sizes, strict=True))), tuple(devices)


def _rank(position: Sequence[int], mesh: Mesh) -> int:
    rank = 0
    for at, size in zip(position, mesh.sizes, strict=True):
        rank = rank * size + at
    return rank


def _with_devices(placement: NodePlacement, ranks: Sequence[RankDevice]) -> NodePlacement:
    """Return a placement on the devices of all ranks."""
    classes = {device.device for device in ranks}
    workers = [device.worker for device in ranks if device.worker is not None]
    if len(classes) > 1 or len(workers) not in (0, len(ranks)):
        raise _Unfit("its ranks have different device classes, or workers for some of them alone")
    return placement._replace(device=classes.pop(), workers=tuple(workers) or None)


def _placed(spec: ir.ShardingSpec, shards: Shards, mesh: Mesh) -> ByAxis:
    """Return the placement of a value by axis of the mesh: the one that gives the shards of its spec."""
    counts = []
    for dim in spec.sharded_dims:
        if len(dim.simple_shardings) != 1 or dim.simple_shardings[0].num_shards < 2:
            raise _Unfit(f"axis {dim.axis} of its value is split in a way that no mesh has")
        counts.append(dim.simple_shardings[0].num_shards)
    shard_of: dict[int, int] = {}
    for number, ranks in enumerate(shards):
        shard_of |= dict.fromkeys(ranks, number)
    split: dict[str, int] = {}
    unit = prod(counts)
    for dim, count in zip(spec.sharded_dims, counts, strict=True):
        unit //= count
        for place, (axis, size) in enumerate(mesh.axes.items()):
            # The shard of the second rank of the axis, since the first rank of all has shard 0.
            second = _rank([int(i == place) for i in range(len(mesh.axes))], mesh)
            if size == count and axis not in split and shard_of[second] == unit:
                split[axis] = dim.axis
                break
    # Writing the placement again has to give the same shards, which covers every other way to be wrong.
    if len(split) != len(counts) or _shards(tuple(split), mesh) != shards:
        raise _Unfit("its shards lie in a way that no mesh has")
    return {axis: Shard(split[axis]) if axis in split else WHOLE for axis in mesh.axes}
