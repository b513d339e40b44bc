"""A bundle of nodes as a program: kernels of the table one after the other, on values by name.

`compile` checks the bundle; `Program.bind` parses attributes and turns weights into arrays, once.  A value is released
after its last use, as in hand-written code.

For a device, `unit` keeps shape computations on the host: a weight that both read is an array there and a numpy array,
and a value computed on the host is uploaded where a kernel on the device reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import array_api_compat.numpy as numpy_namespace
import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace, OpHook
from dask_ferro.engines.array.kernel import Fn
from dask_ferro.engines.array.unit import Unit, mark, read_on_host, units_of
from dask_ferro.engines.device.oom import ran_out
from dask_ferro.errors import ConfigError

# Measured: kernel and names of a node, rounded up.
_NODE_BYTES = 2048


class Program:
    """A compiled bundle, independent of the array namespace.

    Attributes
    ----------
    inputs, outputs : tuple of str
        Value names, in the order of the call's arguments and results.
    host_inputs : frozenset of str
        Inputs that a program for a device takes as numpy arrays.
    nbytes : int
        Bytes of the weights, plus an estimate for the kernels.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        inputs: Sequence[str],
        outputs: Sequence[str],
        weights: Mapping[str, ir.TensorProtocol],
        opset: int,
        *,
        on_device: bool,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.opset = opset
        self.host_inputs = read_on_host(units, inputs, outputs) if on_device else frozenset()
        self._units = tuple(units)
        self._weights = dict(weights)
        self._on_device = on_device
        self._made_on_host = self.host_inputs.union(*(u.outputs for u in units if u.on_host))
        self.nbytes = sum(t.nbytes for t in self._weights.values()) + _NODE_BYTES * len(self._units)

    def bind(
        self,
        xp: Namespace,
        upload: Callable[[np.ndarray], Array] | None = None,
        weight: Callable[[ir.TensorProtocol], Array] | None = None,
    ) -> BoundProgram:
        """Return the program on arrays of the namespace `xp` (from `array_api_compat.array_namespace`).

        On numpy, weights that lie aligned in their file stay memory-mapped and read-only.

        Parameters
        ----------
        upload, weight : callable, optional
            Functions that turn a numpy array, and a weight, into an array of `xp`, where `xp` is a device's namespace.
        """
        known = {name: _readable(tensor) for name, tensor in self._weights.items()}
        calls = [self._call(unit, released, known, xp) for unit, released in self._releases()]
        # A weight that only the host reads has no array on the device.
        needed = {key for call in calls for key in call.keys}.union(self.outputs)
        arrays: dict[Hashable, Array]
        if weight is None:
            is_numpy = isinstance(xp.empty(0), np.ndarray)
            arrays = {
                n: value if is_numpy else xp.asarray(value) for n, value in known.items() if n in needed
            }
        else:
            arrays = {name: weight(tensor) for name, tensor in self._weights.items() if name in needed}
        twins = {_on_host(name): value for name, value in known.items()}
        values: dict[Hashable, Array] = {None: None, **arrays, **twins}
        return BoundProgram(self, xp, calls, values, upload)

    def _releases(self) -> list[tuple[Unit, tuple[str, ...]]]:
        """Return each unit with the values that none after it reads."""
        seen, found = set(self.outputs) | self._weights.keys(), []
        for unit in reversed(self._units):
            last = {*filter(None, unit.inputs), *unit.outputs} - seen
            # All omitted outputs have one name.
            seen |= last - {""}
            found.append((unit, tuple(last)))
        return found[::-1]

    def _call(
        self, unit: Unit, released: tuple[str, ...], known: Mapping[str, np.ndarray], xp: Namespace
    ) -> KernelCall:
        keys: list[Hashable] = list(unit.inputs)
        uploads, constants = [], {}
        for i, name in enumerate(unit.inputs):
            on_host = self._on_device and (unit.on_host or i in unit.reads)
            if name is not None and name in known:
                constants[i] = known[name]
                keys[i] = _on_host(name) if on_host else name
            elif name in self._made_on_host and not on_host:
                uploads.append(i)
        kernel = unit.build(numpy_namespace if unit.on_host else xp, unit.op(self.opset, constants))
        return KernelCall(unit, kernel, tuple(keys), tuple(uploads), released)


class KernelCall(NamedTuple):
    """A unit's kernel, the keys of its arguments, positions of those that are uploaded, and values to release then."""

    unit: Unit
    kernel: Fn
    keys: tuple[Hashable, ...]
    uploads: tuple[int, ...]
    released: tuple[str, ...]


class BoundProgram:
    """A program with its kernels and weights: a thread-safe function of arrays that returns a tuple of arrays."""

    def __init__(
        self,
        program: Program,
        xp: Namespace,
        calls: Sequence[KernelCall],
        weights: Mapping[Hashable, Array],
        upload: Callable[[np.ndarray], Array] | None,
    ) -> None:
        self.program = program
        self.nbytes = program.nbytes
        self._bound = xp, weights, upload
        self._calls = tuple(calls)
        # On a device, values computed on the host stay there.
        self._asarray = xp.asarray if upload is None else np.asarray
        self._type = type(xp.empty(0))

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        wanted, (_, weights, upload) = self.program.inputs, self._bound
        if len(arrays) != len(wanted):
            raise ConfigError(
                f"the bundle takes {len(wanted)} arrays ({', '.join(wanted)}), got {len(arrays)}"
            )
        values: dict[Hashable, Array] = {**weights, **dict(zip(wanted, arrays, strict=True))}
        # Infinities and NaN are results in ONNX, not warnings.
        with np.errstate(all="ignore"):
            for call in self._calls:
                given = [values[key] for key in call.keys]
                try:
                    for i in call.uploads:
                        given[i] = upload(given[i])  # type: ignore[misc]  # it is there where something is uploaded
                    made = call.kernel(*given)
                except Exception as error:
                    raise self._located(error, call.unit, given) from error
                # An operator may have more outputs than the node lists.
                results = made if isinstance(made, tuple) else (made,)
                values.update(zip(call.unit.outputs, results, strict=False))
                for name in call.released:
                    del values[name]
        # numpy returns scalars for 0-d results.
        kind, found = self._type, [values[name] for name in self.program.outputs]
        return tuple([y if type(y) is kind else self._asarray(y) for y in found])

    def watched(self, watch: OpHook) -> BoundProgram:
        """Return the same program on the same weights, with each kernel wrapped by `watch`."""
        xp, weights, upload = self._bound
        nodes = [call.unit.node for call in self._calls]
        calls = [
            call._replace(kernel=watch("array", node.op_type, node.name or "", call.kernel))
            for node, call in zip(nodes, self._calls, strict=True)
        ]
        return BoundProgram(self.program, xp, calls, weights, upload)

    def _located(self, error: Exception, unit: Unit, given: Sequence[Array]) -> Exception:
        """Return the error with its node and the inputs' types."""
        told = [
            "omitted" if name is None else f"{name}: {_type_of(value)}"
            for name, value in zip(unit.inputs, given, strict=True)
        ]
        kind = MemoryError if ran_out(error) else RuntimeError
        return kind(
            f"node {unit.node.name!r} ({unit.node.op_type}, opset {self.program.opset}) failed: "
            f"{type(error).__name__}: {error}; inputs: {', '.join(told) or 'none'}"
        )


def compile(
    nodes: Sequence[ir.Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    opset: int,
    weights: Mapping[str, ir.TensorProtocol],
    on_device: bool = False,
) -> Program:
    """Return the program that computes `outputs` from `inputs` by `nodes`.

    Parameters
    ----------
    nodes : sequence of onnx_ir.Node
        In topological order.
    inputs, outputs : sequence of str
        Names of the values that a call takes and returns.
    opset : int
        Version of the default operator set.
    weights : mapping of str to onnx_ir.TensorProtocol
        Constants by value name; constants that no node reads are ignored.
    on_device : bool
        Whether it is to run on a device: shape computations stay on the host.

    Raises
    ------
    UnsupportedOp
        A node's op, opset or attributes are outside the table.
    ConfigError
        A node reads a value that is not an input, a weight or an earlier result.
    """
    units = units_of(nodes, opset)
    if on_device:
        units = mark(units, weights)
    known, read = set(inputs), dict[str, ir.TensorProtocol]()

    def look_up(name: str, reader: str) -> None:
        if name not in known and name not in weights:
            raise ConfigError(
                f"{reader} reads value {name!r}: not an input, a weight or an earlier node's output"
            )
        if name not in known:
            read[name] = weights[name]

    for unit in units:
        for name in filter(None, unit.inputs):
            look_up(name, f"node {unit.node.name!r} ({unit.node.op_type})")
        known.update(unit.outputs)
    for name in outputs:
        look_up(name, "the caller")
    return Program(units, inputs, outputs, read, opset, on_device=on_device)


def _on_host(name: str) -> Hashable:
    """Return the key of a weight's numpy array."""
    return "host", name


def _readable(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the tensor's values, read-only."""
    # Copied only where they are not aligned: in a file a tensor may begin at any byte.
    value = np.require(tensor.numpy(), requirements="A").view()
    value.flags.writeable = False
    return value


def _type_of(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
