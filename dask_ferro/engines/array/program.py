"""A bundle of nodes as one straight-line Python function over arrays.

`compile` checks the bundle and writes the source of a function: a line for each node, a local variable for
each value, `del` after a value's last use, so that memory is released as early as in hand-written code.
`Program.bind` parses attributes and turns weights into arrays, once.  A call then costs about 0.03 us per node
beyond the kernels (a loop over slots costs 0.05 to 0.27), and compiling 1,280 nodes takes 15 ms.

The source contains only generated names (v0, w1, k2), never text from a model.  The line number in the traceback
tells the node of a failing call, so successful calls have no overhead for it.

For a device, `unit` keeps shape computations on the host: there a weight w1 has a twin h1, a numpy array, and a
value computed on the host is uploaded where a kernel reads it: up(v3).
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import CodeType, FrameType
from typing import NamedTuple

import array_api_compat.numpy as numpy_namespace
import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace, OpHook
from dask_ferro.engines.array.kernel import Fn
from dask_ferro.engines.array.unit import Unit, mark, member_op, read_on_host, units_of
from dask_ferro.engines.device.oom import ran_out
from dask_ferro.errors import ConfigError

# Measured: code, closure and names of a node, rounded up.
_NODE_BYTES = 2048
# The first node's line in the source; lines 1 and 2 are the signature and the inputs.
_FIRST_LINE = 3


class ProgramLine(NamedTuple):
    """A unit of the program, the Python names of its inputs (None: omitted), and its arguments as source text."""

    unit: Unit
    arguments: tuple[str | None, ...]
    spelled: tuple[str, ...]


class Program:
    """A compiled bundle, independent of the array namespace.

    Attributes
    ----------
    inputs, outputs : tuple of str
        Value names, in the order of the call's arguments and results.
    host_inputs : frozenset of str
        Inputs that a program for a device takes as numpy arrays.
    nbytes : int
        Bytes of the weights, plus an estimate for the code.
    """

    def __init__(
        self,
        steps: Sequence[ProgramLine],
        inputs: Sequence[str],
        outputs: Sequence[str],
        weights: Mapping[str, tuple[str, ir.TensorProtocol]],
        code: CodeType,
        opset: int,
        host_inputs: frozenset[str] = frozenset(),
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.opset = opset
        self.host_inputs = host_inputs
        self._steps = tuple(steps)
        # By value name: Python name and tensor.
        self._weights = dict(weights)
        self._code = code
        self.nbytes = sum(t.nbytes for _, t in self._weights.values()) + _NODE_BYTES * len(self._steps)

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
        values = {name: _readable(tensor) for name, tensor in self._weights.values()}
        read = set(chain.from_iterable(step.spelled for step in self._steps))
        names: dict[str, Array] = {_twin(name): value for name, value in values.items()}
        returned = {self._weights[v][0] for v in self.outputs if v in self._weights}
        is_numpy = isinstance(xp.empty(0), np.ndarray)
        for name, tensor in self._weights.values():
            # A weight that only the host reads has no twin on the device.
            if upload is not None and name not in read and name not in returned:
                continue
            if weight is not None:
                names[name] = weight(tensor)
            else:
                names[name] = values[name] if is_numpy else xp.asarray(values[name])
        for i, step in enumerate(self._steps):
            constants = {k: values[a] for k, a in enumerate(step.arguments) if a in values}
            op = member_op(step.unit, self.opset, constants)
            names[f"k{i}"] = step.unit.build(numpy_namespace if step.unit.on_host else xp, op)
        names["up"] = upload
        # Kernels and weights are the function's globals.
        exec(self._code, names)
        return BoundProgram(self, xp, names.pop("run"), keeps_numpy=upload is not None)


class BoundProgram:
    """A program with its kernels and weights: a thread-safe function of arrays that returns a tuple of arrays."""

    def __init__(self, program: Program, xp: Namespace, run: Fn, *, keeps_numpy: bool = False) -> None:
        self.program = program
        self.nbytes = program.nbytes
        self._xp = xp
        self._run = run
        # On a device, values computed on the host stay there.
        self._keeps_numpy = keeps_numpy
        self._asarray = np.asarray if keeps_numpy else xp.asarray
        self._type = type(xp.empty(0))

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        try:
            # Infinities and NaN are results in ONNX, not warnings.
            with np.errstate(all="ignore"):
                outputs = self._run(arrays)
        except Exception as error:
            raise self._located(error, arrays) from error
        # numpy returns scalars for 0-d results.
        kind = self._type
        return tuple([y if type(y) is kind else self._asarray(y) for y in outputs])

    def watched(self, watch: OpHook) -> BoundProgram:
        """Return the same program on the same weights, with each kernel wrapped by `watch`."""
        names = dict(self._run.__globals__)
        for i, step in enumerate(self.program._steps):
            node = step.unit.node
            names[f"k{i}"] = watch("array", node.op_type, node.name or "", names[f"k{i}"])
        exec(self.program._code, names)
        return BoundProgram(self.program, self._xp, names.pop("run"), keeps_numpy=self._keeps_numpy)

    def _located(self, error: Exception, arrays: Sequence[Array]) -> Exception:
        """Return the error with its node and the inputs' types."""
        wanted = self.program.inputs
        # A wrong number of arrays raises before the first node.
        if len(arrays) != len(wanted):
            return ConfigError(
                f"the bundle takes {len(wanted)} arrays ({', '.join(wanted)}), got {len(arrays)}"
            )
        frame, line = _frame_of(error, self._run.__code__)
        step = self.program._steps[line - _FIRST_LINE]
        scope = {**frame.f_globals, **frame.f_locals}
        told = [
            "omitted" if a is None else f"{name}: {_type_of(scope.get(a, scope.get(_twin(a))))}"
            for a, name in zip(step.arguments, step.unit.inputs, strict=True)
        ]
        kind = MemoryError if ran_out(error) else RuntimeError
        node = step.unit.node
        return kind(
            f"node {node.name!r} ({node.op_type}, opset {self.program.opset}) failed: "
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
    names = _Names(inputs, weights)
    arguments_of, results_of = [], []
    for unit in units:
        reader = f"node {unit.node.name!r} ({unit.node.op_type})"
        arguments_of.append(tuple(None if v is None else names.of(v, reader) for v in unit.inputs))
        results_of.append([names.new(v) for v in unit.outputs])
    returned = [names.of(value, "the caller") for value in outputs]
    host_inputs = read_on_host(units, inputs, outputs) if on_device else frozenset()
    by_host = {names.scope[v] for v in host_inputs}
    for unit, results in zip(units, results_of, strict=True):
        if unit.on_host:
            by_host.update(results)
    steps = []
    for unit, arguments in zip(units, arguments_of, strict=True):
        spelled = _spelled(unit, arguments, by_host) if on_device else (name or "None" for name in arguments)
        steps.append(ProgramLine(unit, arguments, tuple(spelled)))
    source = "\n".join(_source([names.scope[v] for v in inputs], steps, results_of, returned))
    code = builtins.compile(source, "<bundle>", "exec")
    return Program(steps, inputs, outputs, names.weights, code, opset, host_inputs)


class _Names:
    """Python names of values, made at first use: v0 for a value, w1 for a weight.

    Attributes
    ----------
    scope : dict
        Python name by value name.
    weights : dict
        Python name and tensor of each weight that is read, by value name.
    """

    def __init__(self, inputs: Sequence[str], weights: Mapping[str, ir.TensorProtocol]) -> None:
        self.scope: dict[str, str] = {}
        self.weights: dict[str, tuple[str, ir.TensorProtocol]] = {}
        self._given = weights
        for value in inputs:
            self.scope[value] = f"v{len(self.scope)}"

    def new(self, value: str) -> str:
        """Return a name for a node's output, which may be omitted too."""
        name = f"v{len(self.scope)}"
        self.scope[value or f"unnamed {name}"] = name
        return name

    def of(self, value: str, reader: str) -> str:
        """Return the name of an input, a weight or an earlier result that `reader` reads."""
        if value not in self.scope and value in self._given:
            self.scope[value] = f"w{len(self.scope)}"
            self.weights[value] = (self.scope[value], self._given[value])
        if value not in self.scope:
            raise ConfigError(
                f"{reader} reads value {value!r}: not an input, a weight or an earlier node's output"
            )
        return self.scope[value]


def _spelled(unit: Unit, arguments: Sequence[str | None], by_host: set[str]) -> Iterator[str]:
    """Yield the arguments as source text: numpy where the host reads them, uploaded where the device does."""
    for position, name in enumerate(arguments):
        if name is None:
            yield "None"
        elif unit.on_host or position in unit.reads:
            yield _twin(name)
        else:
            yield f"up({name})" if name in by_host else name


def _twin(name: str) -> str:
    """Return the name of a weight's numpy array; any other name unchanged."""
    return f"h{name[1:]}" if name[0] == "w" else name


def _source(
    inputs: Sequence[str],
    steps: Sequence[ProgramLine],
    results_of: Sequence[Sequence[str]],
    returned: Sequence[str],
) -> Iterator[str]:
    """Yield the lines of `run(arrays)`; node i is on line i + _FIRST_LINE."""
    # By variable: the last node that reads it, or the node that makes it where none reads it.
    last = dict.fromkeys(inputs, -1)
    for i, (step, results) in enumerate(zip(steps, results_of, strict=True)):
        last.update(dict.fromkeys(results, i))
        last.update({a: i for a in step.arguments if a is not None and a[0] == "v"})
    dead: dict[int, list[str]] = {}
    for v, i in last.items():
        if v not in returned:
            dead.setdefault(i, []).append(v)

    yield "def run(arrays):"
    yield (
        f" {', '.join(inputs)}, = arrays; {_release(['arrays', *dead.get(-1, ())])}"
        if inputs
        else " () = arrays"
    )
    for i, (step, results) in enumerate(zip(steps, results_of, strict=True)):
        call = f"k{i}({', '.join(step.spelled)})"
        yield f" {', '.join(results)} = {call}; {_release(dead.get(i, ()))}"
    yield f" return ({''.join(f'{v}, ' for v in returned)})"


def _release(names: Sequence[str]) -> str:
    return f"del {', '.join(names)}" if names else "pass"


def _readable(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the tensor's values, read-only."""
    # Copied only where they are not aligned: in a file a tensor may begin at any byte.
    value = np.require(tensor.numpy(), requirements="A").view()
    value.flags.writeable = False
    return value


def _frame_of(error: Exception, code: CodeType) -> tuple[FrameType, int]:
    """Return the frame of the generated function in the error's traceback, and its line."""
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code is code:
            return tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next
    raise error


def _type_of(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
