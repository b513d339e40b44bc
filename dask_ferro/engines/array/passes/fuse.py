"""Elementwise chains as one call.

On a GPU an elementwise operator is bound by memory: each reads and writes whole arrays.  A chain, or any tree of such
operators whose inner values no other unit reads, becomes one unit.  On CuPy a unit is one generated kernel, which reads
each input once and writes the result once; CuPy caches compiled kernels on disk by their source, so a process compiles
only new ones.  On other namespaces the unit calls its members one after the other.

float16 is computed in float32 and rounded once, at the end.  Only floats of one dtype and of equal declared shapes are
fused; a scalar weight becomes a literal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Op
from dask_ferro.engines.array.passes.formulas import PREAMBLE, formula_of, number
from dask_ferro.engines.array.passes.unit import Unit, makers_of, member_op, readers_of
from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.dtypes import FLOAT, NAMES

# Most nodes per kernel: its arguments have to fit 4 kB, and its variables the registers of a thread.
_MEMBERS = 24


def fuse(
    units: Sequence[Unit], outputs: Sequence[str], weights: Mapping[str, ir.TensorProtocol], opset: int
) -> list[Unit]:
    """Return the units, with each elementwise tree merged into one unit at the position of its last member."""
    readers = readers_of(units)
    root = list(range(len(units)))
    members: defaultdict[int, list[int]] = defaultdict(list)
    # From the end, so that the tree of a reader is known before its inputs are visited.
    for i in reversed(range(len(units))):
        name = units[i].outputs[0]
        reading = readers.get(name, [])
        # A value that two units read, or that is an output, has to be written to memory in any case.
        alone = len(units[i].outputs) == 1 and len(reading) == 1 and name not in outputs
        if alone and _fits(units[i], units[reading[0]], opset):
            target = root[reading[0]]
            root[i] = target if len(members[target]) < _MEMBERS else i
        members[root[i]].insert(0, i)
    fused = []
    for i, unit in enumerate(units):
        if root[i] == i:
            tree = [units[k] for k in members[i]]
            fused.append(unit if len(tree) == 1 else _fused(tree, weights, opset))
    return fused


def _fits(unit: Unit, reader: Unit, opset: int) -> bool:
    """Return whether both units are elementwise, on floats of one dtype, with results of one shape."""
    kinds = {_kind(unit, opset), _kind(reader, opset)}
    here, there = unit.node.outputs[0].shape, reader.node.outputs[0].shape
    return len(kinds) == 1 and None not in kinds and here is not None and str(here) == str(there)


def _kind(unit: Unit, opset: int) -> ir.DataType | None:
    """Return the one dtype of an elementwise unit's values; None for every other unit."""
    node = unit.node
    if node.domain not in STANDARD_DOMAINS or len(unit.outputs) != 1 or unit.several or unit.on_host:
        return None
    if formula_of(node.op_type, opset, len(unit.inputs)) is None:
        return None
    dtypes = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.name}
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return dtype if dtype in FLOAT else None


def _fused(units: Sequence[Unit], weights: Mapping[str, ir.TensorProtocol], opset: int) -> Unit:
    made = makers_of(units)
    inputs = tuple(name for name in readers_of(units) if name not in made)
    last = units[-1]
    kind = last.node.outputs[0].dtype
    assert kind is not None

    def build(xp: Namespace, op: Op) -> Fn:
        # By name, because CuPy may not be installed; only CuPy takes kernels in C.
        if xp.__name__.rpartition(".")[2] == "cupy":
            return _kernel(units, inputs, literals(inputs, weights), NAMES[kind], opset)
        return _one_by_one(units, inputs, xp, op)

    return Unit(last.node, build, inputs, last.outputs, several=True)


def literals(inputs: Sequence[str], weights: Mapping[str, ir.TensorProtocol]) -> dict[str, str]:
    """Return the scalar weights among the inputs as literals; at least one input stays an argument."""
    scalars = [n for n in inputs if n in weights and len(weights[n].shape) == 0]
    return {n: number(float(weights[n].numpy())) for n in scalars} if len(scalars) < len(inputs) else {}


def _one_by_one(units: Sequence[Unit], inputs: Sequence[str], xp: Namespace, whole: Op) -> Fn:
    """Return a kernel that calls the members in order, for a namespace that takes no kernels in C."""
    known = {inputs[i]: value for i, value in whole.constants.items()}
    calls: list[tuple[Fn, tuple[str | None, ...], str]] = []
    for unit in units:
        constants = {i: known[n] for i, n in enumerate(unit.inputs) if n in known}
        calls.append((unit.build(xp, member_op(unit, whole.opset, constants)), unit.inputs, unit.outputs[0]))

    def fn(*arrays: Array) -> Array:
        values = dict(zip(inputs, arrays, strict=True))
        for call, names, output in calls:
            values[output] = call(*(None if n is None else values[n] for n in names))
        return values[calls[-1][2]]

    return fn


def body(units: Sequence[Unit], inputs: Sequence[str], scalars: Mapping[str, str], opset: int) -> str:
    """Return the statements that compute one element ``y`` from ``x0, x1, ...``."""
    names = {name: f"a{i}" for i, name in enumerate(inputs)} | dict(scalars)
    lines = [f"const Real a{i} = x{i};" for i, name in enumerate(inputs) if name not in scalars]
    for k, unit in enumerate(units):
        formula = formula_of(unit.node.op_type, opset, len(unit.inputs))
        assert formula is not None
        arguments = ["" if n is None else names[n] for n in unit.inputs]
        lines.append(f"const Real t{k} = {formula(member_op(unit, opset, {}), *arguments)};")
        names[unit.outputs[0]] = f"t{k}"
    return "\n".join([*lines, f"y = t{len(units) - 1};"])


def computed_in(dtype: str) -> str:
    """Return the C type in which elements of a dtype are computed."""
    return "double" if np.dtype(dtype).itemsize == 8 else "float"


def _kernel(
    units: Sequence[Unit], inputs: Sequence[str], scalars: Mapping[str, str], dtype: str, opset: int
) -> Fn:
    import cupy

    wanted = [i for i, name in enumerate(inputs) if name not in scalars]
    kernel = cupy.ElementwiseKernel(
        ", ".join(f"{dtype} x{i}" for i in wanted),
        f"{dtype} y",
        body(units, inputs, scalars, opset),
        "ferro_fused",
        preamble=f"{PREAMBLE}typedef {computed_in(dtype)} Real;",
    )
    if len(wanted) == len(inputs):
        fn: Fn = kernel
        return fn
    return lambda *arrays: kernel(*(arrays[i] for i in wanted))
