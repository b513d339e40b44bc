"""A compiled bundle on a device, with host engines for nodes that the device lacks; each value is copied once.

    host engine -> device run -> host engine        inputs are uploaded where a device run reads them, values are
         numpy        arrays        numpy           downloaded where the host does; results stay where they are

Large weights are not part of the compiled bundle: each call gets them from `Residency`, which may evict them between
calls.  Nothing waits between the nodes of a device run; the bundle waits once, at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.engines import Array, array
from dask_ferro.engines.array.host_ops import SMALL_BYTES
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.device_selection import device_route
from dask_ferro.engines.executable import (
    BundleSteps,
    EngineStep,
    Executable,
    NodeRun,
    SessionSettings,
    ValueStore,
    assembled,
    build_run,
    node_runs,
    nodes_between,
    opset_of,
    planned_nodes,
    stamp,
)
from dask_ferro.engines.onnxruntime.device_session import DeviceSessionRun
from dask_ferro.engines.selection import Engine
from dask_ferro.engines.subgraph import weights_of


class DeviceValueStore(ValueStore):
    """The values of one call by name, with at most one copy on the host and one on the device.

    It keeps the values alive until the work that reads them is done.
    """

    def __init__(self, given: Mapping[str, Array], residency: Residency) -> None:
        super().__init__(given)
        self._residency = residency
        self._up: dict[str, Array] = {}
        self._down: dict[str, Array] = {}

    def arguments(self, step: EngineStep) -> list[Array]:
        """Return the arguments of a step's run, each on the host or the device as the run reads it."""
        read = [self.device(n) if n in step.on_device else self.host(n) for n in step.reads]
        return read + [self.weight(name, tensor) for name, tensor in step.weights]

    def device(self, name: str) -> Array:
        """Return a value on the device."""
        if name not in self._up:
            self._up[name] = self._residency.on_device(self.made[name])
        return self._up[name]

    def host(self, name: str) -> Array:
        """Return a value on the host."""
        if name not in self._down:
            self._down[name] = self._residency.on_host(self.made[name])
        return self._down[name]

    def weight(self, name: str, tensor: ir.TensorProtocol) -> Array:
        """Return a weight on the device."""
        if name not in self._up:
            self._up[name] = self._residency.weight(tensor)
        return self._up[name]

    def settle(self, names: Sequence[str], down: Collection[int]) -> None:
        """Copy outputs that stay on the device out of larger arrays; the copies are queued like other work."""
        for position, name in enumerate(names):
            value = self.made[name]
            stays = position not in down or self._residency.keeps_inputs  # known again, as an input
            if stays and isinstance(value, self._residency.device.array_type):
                self.made[name] = self._residency.owned(value)

    def released(self, name: str, *, down: bool) -> Array:
        """Return an output for the caller: numpy if it is downloaded or was made on the host, else a `DeviceArray`."""
        value = self.made[name]
        if not isinstance(value, self._residency.device.array_type):
            return self.host(name) if down else value
        if not down:
            return self._residency.keep(value)
        return self._residency.brought_down(value, self._down.get(name))


class DeviceSpace(NamedTuple):
    """A device's memory, and the form in which a bundle's values leave it.

    Attributes
    ----------
    residency : Residency
    down : frozenset of int
        Positions of the outputs that are downloaded; the other outputs stay where they were made.
    """

    residency: Residency
    down: frozenset[int] = frozenset()

    def compute(self, bundle: BundleSteps, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return a bundle's outputs: `DeviceArray`, or numpy where they were made on the host or are downloaded."""

        def queued() -> DeviceValueStore:
            store = DeviceValueStore(bundle.values(arrays), self.residency)
            bundle.fill(store)
            store.settle(bundle.outputs, self.down)
            return store

        def left(made: DeviceValueStore) -> tuple[Array, ...]:
            return tuple(made.released(n, down=i in self.down) for i, n in enumerate(bundle.outputs))

        return self.residency.run(queued, left, arrays)


def compile_on_device(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    residency: Residency,
    *,
    provider: str | None = None,
    engines: Sequence[tuple[Engine, int]] = (),
    down: Sequence[int] = (),
    threads: int = 1,
    prepack: bool = True,
    exact: bool = False,
) -> Executable:
    """Return the bundle between `inputs` and `outputs`, compiled for a device.

    Parameters
    ----------
    model : onnx_ir.Model
    inputs, outputs : sequence of str
        Value names.
    residency : Residency
    provider : str, optional
        ONNX Runtime's provider on the device; without one, the array table computes what it has.
    engines : sequence of (engine, count), optional
        Runs of nodes in topological order; default: from `device_selection`.
    down
        As in `DeviceSpace`.
    threads, prepack, exact
        As in `SessionSettings`.
    """
    if not engines:
        held, opsets = residency.device.dtypes, dict(model.opset_imports)
        engines = device_route(nodes_between(model, inputs, outputs), opsets, provider, held)
    nodes = planned_nodes(model, inputs, outputs, engines)
    settings = SessionSettings(threads, prepack, exact)
    steps = []
    for part in node_runs(model, nodes, outputs, engines):
        if part.engine == "array":
            steps.append(_array_step(part, residency))
        elif part.engine == "onnxruntime-device":
            steps.append(_session_step(part, settings, residency))
        else:
            steps.append(EngineStep(build_run(part, settings), part.reads, part.writes))
    space = DeviceSpace(residency, frozenset(down))
    return assembled(model, steps, inputs, outputs, space)


def _array_step(part: NodeRun, residency: Residency) -> EngineStep:
    reads, writes, opset = part.reads, part.writes, opset_of(part.model)
    weights = weights_of(part.model, part.nodes)
    large = {name: tensor for name, tensor in weights.items() if tensor.nbytes > SMALL_BYTES}
    small = {name: tensor for name, tensor in weights.items() if name not in large}
    program = array.compile(part.nodes, (*reads, *large), writes, opset=opset, weights=small, on_device=True)
    device = residency.device
    bound = residency.run(
        lambda: program.bind(device.namespace, device.to_device, residency.weight), lambda ready: ready
    )
    return EngineStep(bound, reads, writes, frozenset(reads) - program.host_inputs, tuple(large.items()))


def _session_step(part: NodeRun, settings: SessionSettings, residency: Residency) -> EngineStep:
    model, nodes, reads, writes = part.model, part.nodes, part.reads, part.writes

    def built() -> DeviceSessionRun:
        return DeviceSessionRun(
            model,
            nodes,
            reads,
            writes,
            stamp(nodes, opset_of(model)),
            device=residency.device,
            threads=settings.threads,
            exact=settings.exact,
            held=residency.slot(),
        )

    run = residency.run(built, lambda ready: ready)
    return EngineStep(run, reads, writes, frozenset(reads))
