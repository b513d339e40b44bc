"""Placements of a graph, written and read as ONNX's own device configurations (IR version 11 and later).

    ModelProto.configuration                  a device for each rank; its name has rank, device class and worker
    NodeProto.device_configurations           pipeline_stage: the node's stage
      sharding_spec.device                    on which devices the node computes
      sharding_spec.sharded_dim               which dimensions of a value are split

A device's name has the position of its rank on each axis of the mesh, and the device class and worker that a plan
gives it, as in "data=0 tensor=1 on gpu worker 3".  A value that a plan replicates is on one device group.  A value that
no plan places has a list of devices without a group, and only if its node would have no devices otherwise.  Other
tools' configurations are neither changed nor read.  Region, chunk and action have no field in the standard and stay
metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import NamedTuple, TypeAlias
from urllib.parse import quote, unquote

import onnx_ir as ir

from dask_ferro.errors import ModelError
from dask_ferro.graph.model.check import shown
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

# The name of our configuration; a file may have other tools' configurations too.
NAME = "dask_ferro"
# The first IR version with device configurations; a lower one would drop them on save.
IR_VERSION = 11

# The most axes of a mesh: numpy has at most 64 dimensions, and a file may name thousands.
_MOST_AXES = 32
# Six digits, since no cluster has a million workers.
_DEVICE_NAME = re.compile(
    r"([^\s=]*=\d{1,6}(?: [^\s=]*=\d{1,6})*)(?: on(?: (cpu|gpu))?(?: worker (\d{1,6}))?)?"
)

ByAxis: TypeAlias = Mapping[str, Placement]
# The axes that split each dimension, from the slowest to the fastest.
Splits: TypeAlias = Mapping[int, tuple[str, ...]]
# The devices (or ranks) of each shard.
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
    """The placements of a graph's nodes, and of its values on a mesh.

    Attributes
    ----------
    mesh : Mesh or None
        None if no value is placed.
    values : mapping of str to (axis to Placement)
    nodes : mapping of onnx_ir.Node to NodePlacement
        The nodes that are placed.
    """

    mesh: Mesh | None = None
    values: Mapping[str, ByAxis] = field(default_factory=dict)
    nodes: Mapping[ir.Node, NodePlacement] = field(default_factory=dict)


def configure(model: ir.Model, placements: Placements) -> None:
    """Write placements into a model, replacing its earlier ones.

    Parameters
    ----------
    model : onnx_ir.Model
        Changed in place; a lower IR version becomes 11.
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
    # onnx_ir only warns when it drops the device configurations of a model of a lower IR version.
    model.ir_version = max(model.ir_version or 0, IR_VERSION)


def _clear(model: ir.Model) -> None:
    if any(configuration.name == NAME for configuration in model.device_configurations):
        model.remove_device_configuration(NAME, cascade=True)
    for node in model.graph:
        # Earlier versions wrote these keys; left in place, they would contradict the new plan.
        for key in (STAGE, DEVICE, WORKERS):
            node.metadata_props.pop(key, None)


class _SpecWriter:
    """The numbers of a configuration's devices, and the sharding specs of nodes on them."""

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
        # A worker may have different ranks in different stages, so a device is a rank on a worker, not a worker.
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
        for ranks in _shards(split, self.mesh):
            # Keys of groups are negative, to differ from numbers of devices.
            entries.append(-1 - len(groups) if len(ranks) > 1 else devices[ranks[0]])
            if len(ranks) > 1:
                group = tuple(devices[rank] for rank in ranks)
                groups.append(ir.IndexToDeviceGroupMapEntry(entries[-1], group))
        dims = tuple(
            ir.ShardedDim(dim, (ir.SimpleShardedDim(_size(value, dim), self._count(axes)),))
            for dim, axes in split.items()
        )
        return ir.ShardingSpec(value, tuple(entries), tuple(groups), dims)

    def _count(self, axes: Iterable[str]) -> int:
        return prod(self.mesh.axes[axis] for axis in axes)


def _splits(placed: ByAxis, mesh: Mesh) -> Splits:
    """Return the axes that split each dimension; an axis of one rank splits none."""
    found: dict[int, tuple[str, ...]] = {}
    for axis, size in mesh.axes.items():
        placement = placed.get(axis, WHOLE)
        if isinstance(placement, Shard) and size > 1:
            found[placement.dim] = (*found.get(placement.dim, ()), axis)
    return found


def _shards(split: Splits, mesh: Mesh) -> Shards:
    """Return the ranks of each shard; the last dimension of `split` runs fastest, as in ONNX."""
    axes = tuple(mesh.axes)
    places = [axes.index(axis) for axis in chain.from_iterable(split.values())]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.ranks):
        coordinates = mesh.coordinates(rank)
        found.setdefault(tuple(coordinates[place] for place in places), []).append(rank)
    return tuple(tuple(found[at]) for at in sorted(found))


def _size(value: ir.Value, dim: int) -> int | ir.SymbolicDim:
    shape = value.shape
    known = shape is not None and -len(shape) <= dim < len(shape)
    return shape[dim] if shape is not None and known else ir.SymbolicDim(None)


# Reading. A file may contain anything, so each number is checked before it is used.


def placements_in(model: ir.Model) -> Placements:
    """Return the placements in a model: its device configuration, or else the metadata of its nodes.

    Raises
    ------
    ModelError
        Our configuration fits no mesh; the error lists every node.
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
    """A configuration that fits no mesh."""


class _SpecReader:
    """The placements of values that are read so far, and the problems found."""

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
        """Return the placement in a node's metadata, where files had it before device configurations."""
        try:
            return placement_of(node)
        except ValueError as problem:
            self.problems.append(f"node {node.name!r}: its metadata has {problem}")
            return UNPLACED

    def node(self, node: ir.Node) -> NodePlacement:
        """Return the placement of a node by our configuration, and keep those of its values."""
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
                    raise _Unfit(f"value {name!r} is placed differently by another node")
        return found

    def _shards(self, spec: ir.ShardingSpec, mesh: Mesh) -> tuple[Shards, list[RankDevice]]:
        """Return the ranks of each shard, and the device of each rank."""
        groups = {entry.key: entry.value for entry in spec.index_to_device_group_map}
        device_of: dict[int, RankDevice] = {}
        shards, count = [], 0
        for entry in spec.device:
            numbers = groups.get(entry, (entry,))
            # Counted before the numbers are read: many entries may name one long group.
            count += len(numbers)
            if count > mesh.ranks:
                raise _Unfit(f"it has more devices than the {mesh.ranks} ranks")
            if not all(0 <= number < len(self.devices) for number in numbers):
                raise _Unfit(f"device {entry} is not one of the configuration's {len(self.devices)}")
            ranks = tuple(mesh.rank(self.devices[number].position) for number in numbers)
            device_of |= {r: self.devices[number] for r, number in zip(ranks, numbers, strict=True)}
            shards.append(ranks)
        # Both counts, since a duplicate device would hide a missing one.
        if sum(map(len, shards)) != mesh.ranks or len(device_of) != mesh.ranks:
            raise _Unfit(f"its devices are not those of the {mesh.ranks} ranks, each once")
        return tuple(shards), [device_of[rank] for rank in range(mesh.ranks)]


def _mesh_of(names: Sequence[str]) -> tuple[Mesh, tuple[RankDevice, ...]]:
    """Return the mesh and the devices that names of devices describe."""
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
    # Counted before any rank is enumerated: a name may contain tensor=999999.
    if axes is None or prod(sizes) != len(positions):
        raise _Unfit(f"its {len(names)} devices are not all the ranks of a mesh")
    return Mesh(dict(zip(axes, sizes, strict=True))), tuple(devices)


def _with_devices(placement: NodePlacement, ranks: Sequence[RankDevice]) -> NodePlacement:
    """Return a placement with the device class and the workers of all ranks."""
    classes = {device.device for device in ranks}
    workers = [device.worker for device in ranks if device.worker is not None]
    if len(classes) > 1 or len(workers) not in (0, len(ranks)):
        raise _Unfit("its ranks have different device classes, or workers for some of them only")
    return placement._replace(device=classes.pop(), workers=tuple(workers) or None)


def _placed(spec: ir.ShardingSpec, shards: Shards, mesh: Mesh) -> ByAxis:
    """Return the placement of a value by axis of the mesh, derived from the shards of its spec."""
    counts = []
    for dim in spec.sharded_dims:
        if len(dim.simple_shardings) != 1 or dim.simple_shardings[0].num_shards < 2:
            raise _Unfit(f"axis {dim.axis} of its value is split in a way that fits no mesh")
        counts.append(dim.simple_shardings[0].num_shards)
    strides = _strides(shards, mesh)
    # The axis whose shards make up so many, from the slowest to the fastest.
    axis_of = {stride * mesh.axes[axis]: axis for axis, stride in strides.items()}
    split: dict[int, tuple[str, ...]] = {}
    placed: dict[str, Placement] = dict.fromkeys(mesh.axes, WHOLE)
    unit = prod(counts)
    for dim, count in zip(spec.sharded_dims, counts, strict=True):
        end = unit // count
        while unit > end and (axis := axis_of.get(unit)) is not None:
            split[dim.axis] = (*split.get(dim.axis, ()), axis)
            placed[axis], unit = Shard(dim.axis), strides[axis]
    # The placement, written again, has to give the same shards: a check that covers all other faults.
    if split != _splits(placed, mesh) or _shards(split, mesh) != shards:
        raise _Unfit("its shards fit no mesh")
    return placed


def _strides(shards: Shards, mesh: Mesh) -> dict[str, int]:
    """Return the distance between the shards of neighbours on each axis that splits anything."""
    shard_of: dict[int, int] = {}
    for number, ranks in enumerate(shards):
        shard_of |= dict.fromkeys(ranks, number)
    found = {}
    for place, (axis, size) in enumerate(mesh.axes.items()):
        # The first rank of every axis has shard 0.
        second = mesh.rank([int(i == place) for i in range(len(mesh.axes))]) if size > 1 else 0
        if shard_of[second]:
            found[axis] = shard_of[second]
    return found
