"""A compiled bundle on a device, with host engines for nodes that the device lacks; each value is copied once.

    host engine -> device run -> host engine        inputs are uploaded if a device run reads them, values are
         numpy        arrays        numpy           downloaded if the host does; results are not moved

On a device, a run of nodes that ONNX Runtime has kernels for is one session if it has an operator of which the array
table makes several calls (a norm, a softmax, attention, pooling), a convolution, or many nodes.  A run of few products
and elementwise operators stays with the array table, which computes it with the same libraries without a session's
start and without its copy of the weights.  A node that neither has goes to an engine on the host, which costs copies.

Large weights are not part of the compiled bundle: each call gets them from `Residency`, which may evict them between
calls.  Nothing waits between the nodes of a device run; the bundle waits once, at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import onnx_ir as ir

from dask_ferro.engines import Array, Engine, array
from dask_ferro.engines.array.program import SMALL_BYTES
from dask_ferro.engines.compile import (
    NodeRun,
    host_step,
    node_runs,
    nodes_between,
    opset_of,
    plan_nodes,
    stamp,
)
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.executable import EngineStep, Executable, explain_loading, name_nodes
from dask_ferro.engines.onnxruntime.device_session import DeviceSessionRun
from dask_ferro.engines.onnxruntime.session import DEFAULTS, SessionSettings
from dask_ferro.engines.selection import engines_for, has_kernel
from dask_ferro.engines.subgraph import weights_of
from dask_ferro.graph.ir.dtypes import NAMES

# The array table makes 3 to 24 calls of each, and unrolls convolutions: 8 us a call, and a pass over memory each.
_SESSIONS = frozenset(
    {"Conv", "ConvTranspose", "Attention", "GRU", "LSTM", "RNN", "Softmax", "LogSoftmax", "AveragePool", "MaxPool"}
    | {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"}
    | {"GlobalAveragePool", "GlobalMaxPool", "LRN"}
)  # fmt: skip
_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum"})
# A node in a session takes 4 us less than a call, and the session's start 160 us (`benchmarks/gpu.py`, H100).
_MIN_NODES = 40


class DeviceValues:
    """The values of one call by name, with at most one copy on the host and one on the device.

    It keeps the values alive until the work that reads them is done.
    """

    def __init__(self, given: Mapping[str, Array], residency: Residency) -> None:
        self.made = dict(given)
        self._residency = residency
        self._up: dict[str, Array] = {}
        self._down: dict[str, Array] = {}

    def arguments(self, step: EngineStep) -> list[Array]:
        """Return the arguments of a step's run, each on the host or the device as the run reads it."""
        read = [self._device(n) if n in step.on_device else self._host(n) for n in step.reads]
        return read + [self._weight(name, tensor) for name, tensor in step.weights]

    def _device(self, name: str) -> Array:
        if name not in self._up:
            self._up[name] = self._residency.on_device(self.made[name])
        return self._up[name]

    def _host(self, name: str) -> Array:
        if name not in self._down:
            self._down[name] = self._residency.on_host(self.made[name])
        return self._down[name]

    def _weight(self, name: str, tensor: ir.TensorProtocol) -> Array:
        if name not in self._up:
            self._up[name] = self._residency.weight(tensor)
        return self._up[name]

    def settle(self, name: str, *, down: bool) -> None:
        """Copy an output that stays on the device out of a larger array; the copy is queued like other work."""
        value = self.made[name]
        stays = not down or self._residency.keeps_inputs  # known again, as an input
        if stays and isinstance(value, self._residency.device.array_type):
            self.made[name] = self._residency.owned(value)

    def released(self, name: str, *, down: bool) -> Array:
        """Return an output for the caller: numpy if it is downloaded or the host computed it, else a `DeviceArray`."""
        value = self.made[name]
        if not isinstance(value, self._residency.device.array_type):
            return self._host(name) if down else value
        if not down:
            return self._residency.keep(value)
        return self._residency.brought_down(value, self._down.get(name))


class DeviceExecutable(Executable):
    """A bundle compiled for a device: its outputs are `DeviceArray`, or numpy if the host computed them.

    Parameters
    ----------
    model, steps, inputs, outputs
        The same as in `Executable`.
    residency : Residency
    down : sequence of int
        Positions of the outputs that are downloaded; the other outputs are not moved.
    """

    def __init__(
        self,
        model: ir.Model,
        steps: Sequence[EngineStep],
        inputs: Sequence[str],
        outputs: Sequence[str],
        residency: Residency,
        down: Sequence[int],
    ) -> None:
        super().__init__(steps, inputs, outputs, model)
        self._residency = residency
        self._is_down = [(name, position in down) for position, name in enumerate(outputs)]

    def _computed(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        def queued() -> DeviceValues:
            values = DeviceValues(self._values(arrays), self._residency)
            for step in self._steps:
                values.made.update(zip(step.writes, step(values.arguments(step)), strict=True))
            for name, down in self._is_down:
                values.settle(name, down=down)
            return values

        def left(values: DeviceValues) -> tuple[Array, ...]:
            return tuple(values.released(name, down=down) for name, down in self._is_down)

        return self._residency.run(queued, left, arrays)


def compile_on_device(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    residency: Residency,
    *,
    settings: SessionSettings = DEFAULTS,
    provider: str | None = None,
    engines: Sequence[tuple[Engine, int]] = (),
    down: Sequence[int] = (),
) -> DeviceExecutable:
    """Return the bundle between `inputs` and `outputs`, compiled for a device.

    Parameters
    ----------
    model, inputs, outputs, settings
        The same as in `compile_bundle`.
    residency : Residency
    provider : str, optional
        ONNX Runtime's provider on the device; without one, the array table computes what it has.
    engines : sequence of (engine, count), optional
        Runs of nodes in topological order; default: from `device_route`.
    down
        The same as in `DeviceExecutable`.
    """
    if not engines:
        held, opsets = residency.device.dtypes, dict(model.opset_imports)
        engines = device_route(nodes_between(model, inputs, outputs), opsets, provider, held)
    nodes = plan_nodes(model, inputs, outputs, engines)
    steps = []
    for part in node_runs(model, nodes, outputs, engines):
        if part.engine == "array":
            steps.append(_array_step(part, residency))
        elif part.engine == "onnxruntime-device":
            steps.append(_session_step(part, residency, settings))
        else:
            steps.append(host_step(part, settings))
    return DeviceExecutable(model, steps, inputs, outputs, residency, down)


def _array_step(part: NodeRun, residency: Residency) -> EngineStep:
    reads, device = part.reads, residency.device
    weights = weights_of(part.model, part.nodes)
    large = {name: tensor for name, tensor in weights.items() if tensor.nbytes > SMALL_BYTES}
    small = {name: tensor for name, tensor in weights.items() if name not in large}

    def built() -> array.Program:
        return array.Program(
            *(part.nodes, (*reads, *large), part.writes),
            opset=opset_of(part.model),
            weights=small,
            xp=device.namespace,
            upload=device.to_device,
            weight=residency.weight,
        )

    program = residency.run(built, lambda ready: ready)
    return part.step(program, frozenset(reads) - program.host_inputs, tuple(large.items()))


def _session_step(part: NodeRun, residency: Residency, settings: SessionSettings) -> EngineStep:
    _, model, nodes, reads, writes = part
    opset = stamp(nodes, opset_of(model))

    def built() -> DeviceSessionRun:
        return DeviceSessionRun(
            *(model, nodes, reads, writes, opset, settings), device=residency.device, held=residency.slot()
        )

    with explain_loading(part.engine, name_nodes(nodes), len(nodes)):
        return part.step(residency.run(built, lambda ready: ready), frozenset(reads))


# ---- which engine computes a node there --------------------------------------------------------------------


def device_engines(
    node: ir.Node, opsets: dict[str, int], provider: str | None, held: frozenset[str]
) -> tuple[Engine, ...]:
    """Return the engines that compute `node` correctly for a bundle on a device; host engines only if it has no other.

    A node that the device supports stays there even if the host would be faster.  Whether a small bundle should run
    on a device at all is the scheduler's decision, which depends on the tasks before and after it.

    Parameters
    ----------
    provider : str or None
        ONNX Runtime's provider on the device; None without a working one.
    held : frozenset of str
        Names of the dtypes that the device supports.
    """
    able = engines_for(node, opsets)
    there: list[Engine] = []
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.type is not None]
    if all(isinstance(v.type, ir.TensorType) and NAMES.get(v.type.dtype) in held for v in values):
        if "array" in able:
            there.append("array")
        if provider is not None and "onnxruntime" in able and has_kernel(node, opsets, provider):
            there.append("onnxruntime-device")
    # The host is the last choice, because values are copied to it and back.
    return tuple(there) or tuple(engine for engine in able if engine != "array")


def device_route(
    nodes: Sequence[ir.Node], opsets: dict[str, int], provider: str | None, held: frozenset[str]
) -> tuple[tuple[Engine, int], ...]:
    """Return the engines of a bundle as runs (engine, number of nodes), for nodes in topological order.

    The parameters are the same as in `device_engines`.
    """
    able = [(node, device_engines(node, opsets, provider, held)) for node in nodes]
    picked: list[Engine] = []
    for has_session, group in groupby(able, lambda pair: "onnxruntime-device" in pair[1]):
        run = list(group)
        is_session = has_session and _gains([node for node, _ in run])
        picked += ["onnxruntime-device" if is_session else engines[0] for _, engines in run]
    return tuple((engine, len(list(run))) for engine, run in groupby(picked))


def _gains(nodes: Iterable[ir.Node]) -> bool:
    """Return whether a session makes up for its start."""
    others = [node.op_type for node in nodes if node.op_type not in _PRODUCTS]
    return len(others) >= _MIN_NODES or not _SESSIONS.isdisjoint(others)
