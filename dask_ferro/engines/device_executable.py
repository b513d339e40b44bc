"""One bundle on a device: what the array table computes there, what it does not on the host, each value moved once.

    host engine -> device run -> host engine        inputs go up where a device run reads them, values come
         numpy        arrays        numpy           down where the host does; results stay where they are

Large weights are no part of the compiled bundle: it asks `Residency` for them at each call, so that room can be made.
Nothing waits between the nodes of a device run; the bundle waits once, at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from array_api_compat import array_namespace

from dask_ferro.engines import array
from dask_ferro.engines.array.passes.host_ops import SMALL_BYTES
from dask_ferro.engines.device.device import Device
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.device.results import results_of
from dask_ferro.engines.device_selection import device_engines
from dask_ferro.engines.errors import Run
from dask_ferro.engines.executable import CHECK, Check, boundary, build_run, checked, nodes_between, stamp
from dask_ferro.engines.hooks import Watch
from dask_ferro.engines.onnxruntime.device_session import DeviceSessionRun
from dask_ferro.engines.selection import Engine
from dask_ferro.engines.subgraph import weights_of


class Values:
    """The values of one call by name, on either side of the device at most once.

    It keeps what it holds alive until the work that reads it is done.
    """

    def __init__(self, given: Mapping[str, Any], residency: Residency) -> None:
        self.made = dict(given)
        self._residency = residency
        self._up: dict[str, Any] = {}
        self._down: dict[str, Any] = {}

    def put(self, names: Sequence[str], results: Sequence[Any]) -> None:
        """Add results as they were made."""
        self.made.update(zip(names, results, strict=True))

    def on_device(self, name: str) -> Any:
        """Return a value on the device."""
        if name not in self._up:
            self._up[name] = self._residency.on_device(self.made[name])
        return self._up[name]

    def on_host(self, name: str) -> Any:
        """Return a value on the host."""
        if name not in self._down:
            self._down[name] = self._residency.on_host(self.made[name])
        return self._down[name]

    def weight(self, name: str, tensor: ir.TensorProtocol) -> Any:
        """Return a weight on the device."""
        if name not in self._up:
            self._up[name] = self._residency.weight(tensor)
        return self._up[name]

    def settle(self, names: Sequence[str], down: Collection[int]) -> None:
        """Let outputs that will stay on the device keep no memory but their own; before the wait for what is queued."""
        for position, name in enumerate(names):
            value = self.made[name]
            stays = position not in down or self._residency.keeps_inputs  # known again, as an input
            if stays and isinstance(value, self._residency.device.array_type):
                self.made[name] = self._residency.owned(value)

    def leaving(self, name: str, *, down: bool) -> Any:
        """Return an output as it leaves: numpy where it comes down or was made on the host, else a `DeviceArray`."""
        value = self.made[name]
        if not isinstance(value, self._residency.device.array_type):
            return self.on_host(name) if down else value
        if not down:
            return self._residency.keep(value)
        return self._residency.brought_down(value, self._down.get(name))


class HostStep(NamedTuple):
    """A run of a host engine: numpy arrays in and out."""

    run: Run
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def __call__(self, values: Values) -> None:
        """Compute, with what it reads brought down."""
        values.put(self.writes, self.run(*map(values.on_host, self.reads)))

    def watched(self, watch: Watch) -> HostStep:
        """Return the same step, with its ops handed to `watch`."""
        return self._replace(run=self.run.watched(watch))


class DeviceStep(NamedTuple):
    """A run on the device: of the array table, or a session there."""

    run: Run
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[tuple[str, ir.TensorProtocol], ...] = ()
    on_host: frozenset[str] = frozenset()  # of what it reads: bookkeeping that stays numpy

    def __call__(self, values: Values) -> None:
        """Queue the run, with what it reads brought up."""
        read = [values.on_host(n) if n in self.on_host else values.on_device(n) for n in self.reads]
        weights = [values.weight(name, tensor) for name, tensor in self.weights]
        values.put(self.writes, self.run(*read, *weights))

    def watched(self, watch: Watch) -> DeviceStep:
        """Return the same step, with its ops handed to `watch`: seconds are of queueing them."""
        return self._replace(run=self.run.watched(watch))


Step = HostStep | DeviceStep


class DeviceExecutable:
    """A compiled bundle on a device; call it with the bundle's input values, in the order of its inputs.

    Parameters
    ----------
    steps : sequence of Step
    inputs, outputs : sequence of str
    residency : Residency
        Of the device that the steps are bound to.
    given : mapping of str to array
        Weights that are outputs themselves.
    down : collection of int
        Outputs by position that come down to the host; the others stay where they were made.
    split : sequence of bool
        For a model of batch 1 over a longer batch: which inputs carry the batch; empty: takes whatever comes.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[str],
        outputs: Sequence[str],
        residency: Residency,
        *,
        given: Mapping[str, Any] | None = None,
        down: Sequence[int] = (),
        split: Sequence[bool] = (),
        nbytes: int = 0,
        check: Check | None = None,
    ) -> None:
        self._check = check
        self._steps = tuple(steps)
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._residency = residency
        self._given = dict(given or {})
        self._down = frozenset(down)
        self._split = tuple(split)
        self.nbytes = nbytes

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Return results: `DeviceArray`, or numpy where they were made on the host or come down."""
        return checked(
            self._check,
            lambda *given: self._residency.run(lambda: self._computed(given), self._left, given),
            values,
        )

    def is_current(self) -> bool:
        """Whether what its weights are mapped from is as it was when it was compiled."""
        return self._check is None or self._check.are_unchanged()

    def watched(self, watch: Watch) -> DeviceExecutable:
        """Return the same bundle, with its ops handed to `watch`."""
        return DeviceExecutable(
            [step.watched(watch) for step in self._steps],
            self._inputs,
            self._outputs,
            self._residency,
            given=self._given,
            down=tuple(self._down),
            split=self._split,
            check=self._check,
        )

    def _computed(self, values: Sequence[Any]) -> Values:
        made = self._row_by_row(values) if self._split else self._stepped(values)
        made.settle(self._outputs, self._down)
        return made

    def _stepped(self, values: Sequence[Any]) -> Values:
        known = Values(self._given | dict(zip(self._inputs, values, strict=True)), self._residency)
        for step in self._steps:
            step(known)
        return known

    def _row_by_row(self, values: Sequence[Any]) -> Values:
        """A model of batch 1 over a longer batch; an input of one row serves every row."""
        arrays = [self._residency.on_device(v) for v in values]
        carried = [s and len(v) != 1 for v, s in zip(values, self._split, strict=True)]
        total = next((len(v) for v, cut in zip(values, carried, strict=True) if cut), 1)
        rows = [
            self._stepped([_row(a, r) if cut else a for a, cut in zip(arrays, carried, strict=True)])
            for r in range(max(total, 1))  # an empty batch still has the shapes of its outputs
        ]
        joined = {name: self._joined([row.made[name] for row in rows]) for name in self._outputs}
        if not total:
            joined = {name: value[:0, ...] for name, value in joined.items()}
        return Values(joined | {"": rows}, self._residency)

    def _joined(self, parts: Sequence[Any]) -> Any:
        device = self._residency.device
        if isinstance(parts[0], device.array_type):
            return device.namespace.concat(tuple(parts), axis=0)
        return np.concatenate(parts)

    def _left(self, values: Values) -> tuple[Any, ...]:
        """The outputs as they leave the bundle."""
        return results_of(values.leaving(n, down=i in self._down) for i, n in enumerate(self._outputs))


def _row(array: Any, number: int) -> Any:
    """One row of a batch as a batch; of an empty one, zeros."""
    if array.shape[0]:
        return array[number : number + 1, ...]
    shape = (1, *array.shape[1:])
    if isinstance(array, np.ndarray):
        return np.zeros(shape, array.dtype)
    xp = array_namespace(array)
    return xp.zeros(shape, dtype=array.dtype)


def compile_on_device(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    residency: Residency,
    *,
    engines: Sequence[tuple[Engine, int]] = (),
    down: Sequence[int] = (),
    split: Sequence[bool] = (),
    threads: int = 1,
    prepack: bool = True,
    exact: bool = False,
) -> DeviceExecutable:
    """Return the bundle between `inputs` and `outputs`, compiled for a device.

    Parameters
    ----------
    model : onnx_ir.Model
    inputs, outputs : sequence of str
        Value names.
    residency : Residency
    engines : sequence of (engine, count), optional
        Runs of nodes in topological order, as `device_selection` gives them; default: `default_engines`.
    down, split
        As `DeviceExecutable` takes them.
    threads, prepack
        Of host engines' sessions.
    exact : bool
        Of all sessions, as `compile_bundle` takes it.
    """
    nodes = nodes_between(model, inputs, outputs)
    engines = engines or default_engines(model, nodes, residency.device)
    steps: list[Step] = []
    start = 0
    for engine, count in engines:
        mine = nodes[start : start + count]
        start += count
        reads, writes = boundary(model, mine, nodes[start:], outputs)
        if engine == "array":
            steps.append(_array_step(model, mine, reads, writes, residency))
            continue
        if engine == "onnxruntime-device":
            steps.append(_session_step(model, mine, reads, writes, residency, threads, exact))
            continue
        run = build_run(engine, model, mine, reads, writes, threads, prepack, exact=exact)
        steps.append(HostStep(run, reads, writes))
    constants = model.graph.initializers
    given = {n: constants[n].const_value for n in outputs if n in constants}
    return DeviceExecutable(
        steps,
        inputs,
        outputs,
        residency,
        given={name: tensor.numpy() for name, tensor in given.items() if tensor is not None},
        down=down,
        split=split,
        nbytes=sum(step.run.nbytes for step in steps),
        check=model.meta.get(CHECK),
    )


def default_engines(
    model: ir.Model, nodes: Sequence[ir.Node], device: Device
) -> tuple[tuple[Engine, int], ...]:
    """Return the engines of a bundle as runs: the array table on the device, a host engine where it has no row."""
    opsets = dict(model.opset_imports)
    picked = [device_engines(node, opsets, None, device.dtypes)[0] for node in nodes]
    return tuple((engine, len(list(run))) for engine, run in groupby(picked))


def _array_step(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    residency: Residency,
) -> DeviceStep:
    weights = weights_of(model, nodes)
    large = {name: tensor for name, tensor in weights.items() if tensor.nbytes > SMALL_BYTES}
    small = {name: tensor for name, tensor in weights.items() if name not in large}
    opset = model.opset_imports.get("", 1)
    program = array.compile(nodes, (*reads, *large), writes, opset=opset, weights=small, on_device=True)
    device = residency.device
    bound = residency.run(
        lambda: program.bind(device.namespace, device.to_device, residency.weight), lambda ready: ready
    )
    return DeviceStep(bound, reads, writes, tuple(large.items()), program.host_inputs)


def _session_step(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    residency: Residency,
    threads: int,
    exact: bool,
) -> DeviceStep:
    opset, device = stamp(nodes, model.opset_imports.get("", 1)), residency.device

    def built() -> DeviceSessionRun:
        return DeviceSessionRun(
            model,
            nodes,
            reads,
            writes,
            opset,
            device=device,
            threads=threads,
            exact=exact,
            held=residency.slot(),
        )

    return DeviceStep(residency.run(built, lambda ready: ready), reads, writes)
