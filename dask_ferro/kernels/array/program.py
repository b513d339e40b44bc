"""A bundle of nodes as one straight-line Python function over arrays.

`compile` checks the bundle and writes the source of a function: a line for each node, a local variable for
each value, `del` after a value's last use, so that memory is released as early as in hand-written code.
`Program.bind` parses attributes and turns weights into arrays, once.  A call then costs about 0.03 us a node
beyond the kernels (a loop over slots costs 0.05 to 0.27), and 1,280 nodes take 15 ms to compile.

The source holds only names that are made here (v0, w1, k2), never text from a model.  A failing call finds
its node from the line number in the traceback, so the good path pays nothing for it.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError, UnsupportedOp
from dask_ferro.kernels.watch import Watch

from .kernel import Array, Fn, Op
from .table import find

_NODE_BYTES = 2048  # measured: code, closure and names of a node, rounded up
_FIRST_LINE = 3  # line of the first node in the source; lines 1 and 2 are the signature and the inputs


class Step(NamedTuple):
    """A node of the program: its kernel's builder, the Python names of its inputs (None: one left out)."""

    node: ir.Node
    build: Any
    arguments: tuple[str | None, ...]


class Program:
    """A compiled bundle, independent of the array namespace.

    Attributes
    ----------
    inputs, outputs : tuple of str
        Value names, in the order of the call's arguments and results.
    nbytes : int
        Weights plus an estimate for the code: what a cache should account for.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[str],
        outputs: Sequence[str],
        weights: Mapping[str, tuple[str, ir.TensorProtocol]],
        code: CodeType,
        opset: int,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.opset = opset
        self._steps = tuple(steps)
        self._weights = dict(weights)  # value name -> (Python name, tensor)
        self._code = code
        self.nbytes = sum(t.nbytes for _, t in self._weights.values()) + _NODE_BYTES * len(self._steps)

    def bind(self, xp: Any) -> BoundProgram:
        """The program on arrays of the namespace `xp` (from `array_api_compat.array_namespace`).

        On numpy, weights that lie aligned in their file stay memory-mapped and read-only.
        """
        values = {name: _readable(tensor) for name, tensor in self._weights.values()}
        names: dict[str, Any] = {name: _array(xp, value) for name, value in values.items()}
        for i, step in enumerate(self._steps):
            constants = {k: values[a] for k, a in enumerate(step.arguments) if a in values}
            names[f"k{i}"] = step.build(xp, _op(step, self.opset, constants))
        exec(self._code, names)
        return BoundProgram(self, xp, names.pop("run"))


class BoundProgram:
    """A program with its kernels and weights: takes arrays, gives a tuple of arrays; safe in many threads."""

    def __init__(self, program: Program, xp: Any, run: Fn) -> None:
        self.program = program
        self._xp = xp
        self._run = run
        self._asarray = xp.asarray
        self._type = type(xp.empty(0))

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        try:
            with np.errstate(all="ignore"):  # infinities and NaN are ONNX's results, not news
                outputs = self._run(arrays)
        except Exception as error:
            raise self._located(error, arrays) from error
        kind = self._type  # numpy gives scalars for 0-d results
        return tuple([y if type(y) is kind else self._asarray(y) for y in outputs])

    def watched(self, watch: Watch) -> BoundProgram:
        """The same program on the same weights, with what `watch` gives in place of each kernel."""
        names = dict(self._run.__globals__)
        for i, step in enumerate(self.program._steps):
            node = step.node
            names[f"k{i}"] = watch.kernel("array", node.op_type, node.name or "", names[f"k{i}"])
        exec(self.program._code, names)
        return BoundProgram(self.program, self._xp, names.pop("run"))

    def _located(self, error: Exception, arrays: Sequence[Array]) -> Exception:
        """The error with its node and the inputs' types; what has no node is a wrong call."""
        wanted = self.program.inputs
        if len(arrays) != len(wanted):
            return ConfigError(
                f"the bundle takes {len(wanted)} arrays ({', '.join(wanted)}), got {len(arrays)}"
            )
        frame, line = _frame_of(error, self._run.__code__)
        step = self.program._steps[line - _FIRST_LINE]
        scope = {**frame.f_globals, **frame.f_locals}
        told = [
            "left out" if a is None else f"{getattr(v, 'name', '?')}: {_type_of(scope.get(a))}"
            for a, v in zip(step.arguments, step.node.inputs, strict=True)
        ]
        kind = MemoryError if isinstance(error, MemoryError) else RuntimeError
        return kind(
            f"node {step.node.name!r} ({step.node.op_type}, opset {self.program.opset}) failed: "
            f"{type(error).__name__}: {error}; inputs: {', '.join(told) or 'none'}"
        )


def compile(
    nodes: Sequence[ir.Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    opset: int,
    weights: Mapping[str, ir.TensorProtocol],
) -> Program:
    """The program that computes `outputs` from `inputs` by `nodes`.

    Parameters
    ----------
    nodes : sequence of onnx_ir.Node
        In topological order.
    inputs, outputs : sequence of str
        Names of the values that a call takes and gives.
    opset : int
        Version of the default operator set.
    weights : mapping of str to onnx_ir.TensorProtocol
        Constants by value name; those that the nodes do not read are ignored.

    Raises
    ------
    UnsupportedOp
        A node's op, opset or attributes are outside the table.
    ConfigError
        A value is read that nobody gives.
    """
    rows = [find(node, opset) for node in nodes]
    lacking = [
        f"node {n.name!r}: no {n.op_type} of opset {opset} with these attributes and outputs"
        for n, row in zip(nodes, rows, strict=True)
        if row is None
    ]
    if lacking:
        raise UnsupportedOp("cannot compile the bundle for array kernels", lacking)

    scope: dict[str, str] = {}  # value name -> Python name
    used: dict[str, tuple[str, ir.TensorProtocol]] = {}

    def name_of(value: str, reader: str) -> str:
        if value not in scope and value in weights:
            scope[value] = f"w{len(scope)}"
            used[value] = (scope[value], weights[value])
        if value not in scope:
            raise ConfigError(
                f"{reader} reads value {value!r}: not an input, a weight or an earlier node's output"
            )
        return scope[value]

    for value in inputs:
        scope[value] = f"v{len(scope)}"
    arguments_of, results_of = [], []
    for node in nodes:
        reader = f"node {node.name!r} ({node.op_type})"
        arguments_of.append(
            tuple(None if v is None or not v.name else name_of(v.name, reader) for v in node.inputs)
        )
        results = []
        for v in node.outputs:
            name = f"v{len(scope)}"
            scope[v.name or f"unnamed {name}"] = name  # an output may be left out too
            results.append(name)
        results_of.append(results)
    returned = [name_of(value, "the caller") for value in outputs]
    steps = [
        Step(n, row.build, a) for n, row, a in zip(nodes, rows, arguments_of, strict=True) if row is not None
    ]
    source = "\n".join(_source([scope[v] for v in inputs], arguments_of, results_of, returned))
    return Program(steps, inputs, outputs, used, builtins.compile(source, "<bundle>", "exec"), opset)


def _source(
    inputs: Sequence[str],
    arguments_of: Sequence[Sequence[str | None]],
    results_of: Sequence[Sequence[str]],
    returned: Sequence[str],
) -> Iterator[str]:
    """The lines of `run(arrays)`; the node i stands on line i + _FIRST_LINE."""
    last = dict.fromkeys(inputs, -1)  # variable -> the last node that reads (or makes) it
    for i, (arguments, results) in enumerate(zip(arguments_of, results_of, strict=True)):
        last.update(dict.fromkeys(results, i))
        last.update({a: i for a in arguments if a is not None and a[0] == "v"})
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
    for i, (arguments, results) in enumerate(zip(arguments_of, results_of, strict=True)):
        call = f"k{i}({', '.join(a or 'None' for a in arguments)})"
        yield f" {', '.join(results)} = {call}; {_release(dead.get(i, ()))}"
    yield f" return ({''.join(f'{v}, ' for v in returned)})"


def _release(names: Sequence[str]) -> str:
    return f"del {', '.join(names)}" if names else "pass"


def _op(step: Step, opset: int, constants: Mapping[int, np.ndarray[Any, Any]]) -> Op:
    node = step.node
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    given = tuple(a is not None for a in step.arguments)
    return Op(node.op_type, opset, attributes, given, len(node.outputs), constants)


def _readable(tensor: ir.TensorProtocol) -> np.ndarray[Any, Any]:
    """The tensor's values without a copy where they lie aligned; read-only either way."""
    value = np.require(tensor.numpy(), requirements="A").view()
    value.flags.writeable = False
    return value


def _array(xp: Any, value: np.ndarray[Any, Any]) -> Array:
    return value if isinstance(xp.empty(0), np.ndarray) else xp.asarray(value)


def _frame_of(error: Exception, code: CodeType) -> tuple[FrameType, int]:
    """The frame of the generated function in the error's traceback, and the line it stood on."""
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code is code:
            return tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next
    raise error


def _type_of(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
