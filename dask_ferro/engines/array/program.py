"""A bundle of nodes as a program: kernels of the table one after the other, on values by name.

A program parses attributes and turns weights into arrays once, when it is created.  A value is released after its
last use, as in hand-written code.

Exported models compute shapes with tensors: Shape, Gather, Concat, Reshape.  On a device each of these operators would
be a kernel of one element, and a Reshape that reads the result would wait for all queued work.  A program on a device
therefore computes values that depend only on shapes and small weights with numpy on the host, and passes them as
numpy arrays to kernels that read integers on the host anyway (`Kernel.reads`).  A weight that both read exists as an
array of the device and as a numpy array.  A value of the host is uploaded if a kernel on the device reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import array_api_compat.numpy as numpy_namespace
import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace, OpHook
from dask_ferro.engines.array.kernel import Fn, Kernel, Op
from dask_ferro.engines.array.table import find
from dask_ferro.engines.device.oom import is_out_of_memory
from dask_ferro.errors import UnsupportedOpError
from dask_ferro.graph.ir.domain import STANDARD_DOMAINS

_ABOUT_SHAPES = frozenset({"Shape", "Size"})
# Operators with which exported models compute shapes.
_BOOKKEEPING = frozenset(
    {"Gather", "Concat", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity", "Range"}
    | {"ReduceProd", "Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Min", "Max", "Floor", "Ceil", "Sqrt"}
    | {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "Where"}
)
# A weight up to this size may be read on the host as well as on the device.
SMALL_BYTES = 64 * 1024
# Measured: kernel and names of a node, rounded up.
_NODE_BYTES = 2048


class Unit(NamedTuple):
    """A node, its row of the table, names of its inputs (None: omitted) and outputs, and whether it is the host's."""

    node: ir.Node
    row: Kernel
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    on_host: bool


class KernelCall(NamedTuple):
    """A unit's kernel, the keys of its arguments, positions of those that are uploaded, and values to release then."""

    unit: Unit
    kernel: Fn
    keys: tuple[Hashable, ...]
    uploads: tuple[int, ...]
    released: tuple[str, ...]


class Program:
    """The computation of `outputs` from `inputs` by `nodes`: a thread-safe function of arrays, which returns a tuple.

    Parameters
    ----------
    nodes : sequence of onnx_ir.Node
        Nodes in topological order.
    inputs, outputs : sequence of str
        Names of the values that a call takes and returns.
    opset : int
        Version of the default operator set.
    weights : mapping of str to onnx_ir.TensorProtocol
        The constants by value name.  On numpy, constants that are aligned in their file stay memory-mapped and
        read-only.
    xp : namespace, optional
        The array API of the arrays (from `array_api_compat.array_namespace`); default: numpy.
    upload : callable, optional
        Turns a numpy array into an array of `xp`, if that is a device's; shape computations then stay on the host.
    weight : callable, optional
        Turns a weight into an array of `xp`.

    Attributes
    ----------
    host_inputs : frozenset of str
        Inputs that a program on a device takes as numpy arrays.
    nbytes : int
        Bytes of the weights, plus an estimate for the kernels.

    Raises
    ------
    UnsupportedOpError
        If a node's op, opset or attributes are outside the table.
    """

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        opset: int,
        weights: Mapping[str, ir.TensorProtocol],
        xp: Namespace = numpy_namespace,
        upload: Callable[[np.ndarray], Array] | None = None,
        weight: Callable[[ir.TensorProtocol], Array] | None = None,
    ) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._opset, self._upload = opset, upload
        on_device = upload is not None
        units = _units(nodes, opset, weights, on_device=on_device)
        self.host_inputs = _read_on_host(units, inputs, outputs) if on_device else frozenset[str]()
        self.nbytes = sum(t.nbytes for t in weights.values()) + _NODE_BYTES * len(units)
        known = {name: _readable(tensor) for name, tensor in weights.items()}
        hosted = self.host_inputs.union(*(unit.outputs for unit in units if unit.on_host))

        def call(unit: Unit, released: tuple[str, ...]) -> KernelCall:
            keys: list[Hashable] = list(unit.inputs)
            uploads, constants = [], {}
            for i, name in enumerate(unit.inputs):
                on_host = on_device and (unit.on_host or i in unit.row.reads)
                if name is not None and name in known:
                    constants[i] = known[name]
                    keys[i] = _on_host(name) if on_host else name
                elif name in hosted and not on_host:
                    uploads.append(i)
            attributes = {name: attribute.value for name, attribute in unit.node.attributes.items()}
            given = tuple(name is not None for name in unit.inputs)
            op = Op(unit.node.op_type, opset, attributes, given, len(unit.outputs), constants)
            kernel = unit.row.build(numpy_namespace if unit.on_host else xp, op)
            return KernelCall(unit, kernel, tuple(keys), tuple(uploads), released)

        self._calls = [call(*pair) for pair in _releases(units, {*outputs, *weights})]
        # A weight that only the host reads has no array on the device.
        needed = {key for call in self._calls for key in call.keys}.union(outputs)
        self._weights: dict[Hashable, Array] = {None: None}
        for name, value in known.items():
            self._weights[_on_host(name)] = value
            if name in needed:
                self._weights[name] = xp.asarray(value) if weight is None else weight(weights[name])
        # On a device, values computed on the host stay there.
        self._asarray = np.asarray if on_device else xp.asarray
        self._type = type(xp.empty(0))

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        values: dict[Hashable, Array] = {**self._weights, **dict(zip(self.inputs, arrays, strict=True))}
        # Infinities and NaN are results in ONNX, not warnings.
        with np.errstate(all="ignore"):
            for call in self._calls:
                given = [values[key] for key in call.keys]
                try:
                    for i in call.uploads:
                        given[i] = self._upload(given[i])  # type: ignore[misc]  # set if something is uploaded
                    made = call.kernel(*given)
                except Exception as error:
                    raise self._located(error, call.unit, given) from error
                # An operator may have more outputs than the node lists.
                results = made if isinstance(made, tuple) else (made,)
                values.update(zip(call.unit.outputs, results, strict=False))
                for name in call.released:
                    del values[name]
        # numpy returns scalars for 0-d results.
        kind, found = self._type, [values[name] for name in self.outputs]
        return tuple([y if type(y) is kind else self._asarray(y) for y in found])

    def watched(self, watch: OpHook) -> Program:
        """Return the same program on the same weights, with each kernel wrapped by `watch`."""

        def wrapped(call: KernelCall) -> KernelCall:
            node = call.unit.node
            return call._replace(kernel=watch("array", node.op_type, node.name or "", call.kernel))

        watched = copy(self)
        watched._calls = [wrapped(call) for call in self._calls]
        return watched

    def _located(self, error: Exception, unit: Unit, given: Sequence[Array]) -> Exception:
        """Return the error with its node and the inputs' types."""
        told = [
            "omitted" if name is None else f"{name}: {_type_of(value)}"
            for name, value in zip(unit.inputs, given, strict=True)
        ]
        kind = MemoryError if is_out_of_memory(error) else RuntimeError
        return kind(
            f"node {unit.node.name!r} ({unit.node.op_type}, opset {self._opset}) failed: "
            f"{type(error).__name__}: {error}; inputs: {', '.join(told) or 'none'}"
        )


def _units(
    nodes: Sequence[ir.Node], opset: int, weights: Mapping[str, ir.TensorProtocol], *, on_device: bool
) -> list[Unit]:
    small = {name for name, tensor in weights.items() if tensor.nbytes <= SMALL_BYTES}
    hosted: set[str] = set()  # names of values on the host
    units = []
    for node in nodes:
        row = find(node, opset)
        if row is None:
            problem = (
                f"node {node.name!r}: no {node.op_type} of opset {opset} with these attributes and outputs"
            )
            raise UnsupportedOpError("cannot compile the bundle for array kernels", [problem])
        inputs = tuple(None if v is None or not v.name else v.name for v in node.inputs)
        outputs = tuple(v.name or "" for v in node.outputs)
        on_host = on_device and _is_hosts(node, {name for name in inputs if name}, hosted, small)
        if on_host:
            hosted.update(outputs)
        units.append(Unit(node, row, inputs, outputs, on_host))
    return units


def _is_hosts(node: ir.Node, given: set[str], hosted: set[str], small: set[str]) -> bool:
    """Return whether the host computes a node of a program on a device."""
    if node.domain not in STANDARD_DOMAINS:
        return False
    # The host knows every shape, also of an array on the device.
    if node.op_type in _ABOUT_SHAPES:
        return True
    follows = not hosted.isdisjoint(given) and given <= hosted | small
    # A mask is computed from positions too, but it is a matrix, so the device computes it.
    flat = all(v.shape is None or len(v.shape) <= 1 for v in node.outputs)
    return node.op_type in _BOOKKEEPING and follows and flat


def _read_on_host(units: Sequence[Unit], inputs: Sequence[str], outputs: Sequence[str]) -> frozenset[str]:
    """Return the inputs that only the host reads, and that therefore stay there."""
    reads: defaultdict[str, set[bool]] = defaultdict(set)
    for unit in units:
        if unit.node.op_type in _ABOUT_SHAPES and unit.on_host:
            # It reads only the shape.
            continue
        for position, name in enumerate(unit.inputs):
            reads[name or ""].add(unit.on_host or position in unit.row.reads)
    return frozenset(name for name in inputs if reads[name] == {True} and name not in outputs)


def _releases(units: Sequence[Unit], seen: set[str]) -> list[tuple[Unit, tuple[str, ...]]]:
    """Return each unit with the values that none after it reads; those that are `seen` stay."""
    found: list[tuple[Unit, tuple[str, ...]]] = []
    for unit in reversed(units):
        last = {*filter(None, unit.inputs), *unit.outputs} - seen
        # All omitted outputs have one name.
        seen |= last - {""}
        found.append((unit, tuple(last)))
    return found[::-1]


def _on_host(name: str) -> Hashable:
    """Return the key of a weight's numpy array."""
    return "host", name


def _readable(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the tensor's values, read-only."""
    # Copied only if they are not aligned: in a file a tensor may begin at any byte.
    value = np.require(tensor.numpy(), requirements="A").view()
    value.flags.writeable = False
    return value


def _type_of(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
