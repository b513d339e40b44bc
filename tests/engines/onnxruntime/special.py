"""Special values for every op of the array table, and a runner of ONNX Runtime that survives its crashes.

A row is a `Case`: one node with inputs that hold NaN, infinities, zeros of both signs, the largest and smallest
numbers of a dtype, or nothing at all.  What is expected comes from onnx.reference; where that is wrong or undefined the
row says what is declared here.  The ops that have no values of their own (moves, products, windows) take the
conformance rows of `array/cases.py` with some elements made special.

`in_children` runs rows in processes of their own, since ONNX Runtime may end the one that it is in.
"""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from dask_ferro.engines.compile import compile_bundle
from dask_ferro.engines.selection import engines_for
from tests.engines.array.cases import CASES, Case

FLOATS = (np.float32, np.float64, np.float16)
SIGNED = (np.int8, np.int16, np.int32, np.int64)
UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)
INTEGERS = (*SIGNED, *UNSIGNED)

UNARY = (
    "Neg Abs Sign Ceil Floor Round Sqrt Exp Log Reciprocal Erf Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh"
    " Asinh Acosh Atanh Relu LeakyRelu ThresholdedRelu Elu Selu Celu Gelu Swish HardSwish Mish Sigmoid"
    " HardSigmoid Softplus Softsign Shrink IsNaN IsInf Identity"
)
BINARY = (
    "Add Sub Mul Div Mod Pow Max Min Less LessOrEqual Greater GreaterOrEqual Equal BitwiseAnd BitwiseOr"
    " BitwiseXor PRelu Sum Mean"
)
REDUCED = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"]
ALONG = ["Softmax", "LogSoftmax", "Hardmax"]


def special(dtype: Any) -> np.ndarray:
    """The values of a dtype that tend to go wrong."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind == "f":
        of = np.finfo(dtype)
        ends = [of.max, of.min, of.tiny, of.smallest_subnormal]
        return np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1, -1, 0.5, -2.5, 1e3, *ends], dtype)
    ends = np.iinfo(dtype)
    return np.unique(
        np.array([ends.min, ends.min + 1, max(ends.min, -1), 0, 1, 2, ends.max - 1, ends.max], dtype)
    )


def _opset(op: str, dtype: Any = None) -> int:
    signed_shift = op == "BitShift" and np.dtype(dtype).kind == "i"
    return 28 if op in ("Celu", "CumProd", "SwiGLU") or signed_shift else 25


def _unary() -> Iterator[Case]:
    for op, dtype in itertools.product(UNARY.split(), (*FLOATS, *INTEGERS)):
        for values in (special(dtype), np.zeros((0, 3), dtype)):
            yield Case(f"{op} {np.dtype(dtype)} {values.shape}", op, [values], opset=_opset(op))
    for dtype in INTEGERS:
        yield Case(f"BitwiseNot {np.dtype(dtype)}", "BitwiseNot", [special(dtype)])
    yield Case("Not", "Not", [special(bool)])


def _binary() -> Iterator[Case]:
    for op, dtype in itertools.product(BINARY.split(), (*FLOATS, *INTEGERS)):
        values = special(dtype)
        integer = np.dtype(dtype).kind != "f"
        second = values[values != 0] if integer and op in ("Div", "Mod") else values
        if op == "Pow" and integer:
            second = np.array([0, 1, 2, 3], dtype)
        fmods: Sequence[dict[str, Any]] = [{"fmod": 1}] if op == "Mod" else [{}]
        if op == "Mod" and integer:
            fmods = [{}, {"fmod": 1}]
        for attributes in fmods:
            name = f"{op} {np.dtype(dtype)} {attributes}"
            pair = [values[:, None], second[None]]
            expected = _declared_binary(op, *pair, attributes)
            yield Case(name, op, pair, attributes, expected=expected)
            yield Case(f"{name} of nothing", op, [np.zeros((0, 3), dtype), np.ones((1, 3), dtype)], attributes,
                       expected=None if op != "Mean" else [np.zeros((0, 3), dtype)])  # fmt: skip
    for op in ("And", "Or", "Xor"):
        yield Case(op, op, [special(bool)[:, None], special(bool)[None]])


def _declared_binary(op: str, a: Any, b: Any, attributes: dict[str, Any]) -> list[Any] | None:
    with np.errstate(all="ignore"):
        if op == "Mean":  # the reference does not broadcast it
            return [(a + b) / a.dtype.type(2)]
        # The reference's fmod of int64 is numpy's: exact.
        if op == "Mod" and attributes and a.dtype.kind in "iu":
            return [np.fmod(a, b)]
        if op == "PRelu":  # the reference multiplies with both signs, so that an infinity times 0 is NaN
            return [np.where(a < 0, a * b, a)]
    return None


def _chosen() -> Iterator[Case]:
    for dtype in (*FLOATS, *INTEGERS):
        values, real = special(dtype), np.dtype(dtype).kind == "f"
        low = -1 if real else values.min()
        for bounds in itertools.product([low, 0, np.nan if real else 1], repeat=2):
            limits = [np.array(bound, dtype) for bound in bounds]
            for weights in ((), (1, 2)):
                name = f"Clip {np.dtype(dtype)} {bounds} {weights}"
                yield Case(name, "Clip", [values, *limits], weights=weights)
        yield Case(
            f"Where {np.dtype(dtype)}", "Where", [special(bool)[:, None], values[None], values[None, ::-1]]
        )
        for to in (*FLOATS, *INTEGERS, bool):
            yield from _casts(dtype, to, values)
        if not real:
            yield from _shifts(dtype, values)


def _casts(dtype: Any, to: Any, values: Any) -> Iterator[Case]:
    if np.dtype(dtype).kind == "f" and np.dtype(to).kind in "iu":  # of what does not fit, any number is right
        values = values[np.isfinite(values) & (np.abs(values) < 100)]
        values = values if np.dtype(to).kind == "i" else values[values > -1]
    target = helper.np_dtype_to_tensor_dtype(np.dtype(to))
    yield Case(f"Cast {np.dtype(dtype)} {np.dtype(to)}", "Cast", [values], {"to": target})
    yield Case(f"CastLike {np.dtype(dtype)} {np.dtype(to)}", "CastLike", [values, np.zeros(1, to)])


def _shifts(dtype: Any, values: Any) -> Iterator[Case]:
    bits = np.iinfo(dtype).bits
    by = np.array([0, 1, bits - 1], dtype)[None]
    for way in ("LEFT", "RIGHT"):
        with np.errstate(all="ignore"):
            shift = np.left_shift if way == "LEFT" else np.right_shift
            moved = shift(values[:, None], by)
        name, op = f"BitShift {way} {np.dtype(dtype)}", "BitShift"
        yield Case(name, op, [values[:, None], by], {"direction": way}, _opset(op, dtype), expected=[moved])


def table(dtype: Any) -> np.ndarray:
    """Rows of three special values each."""
    values = special(dtype)
    rows = np.stack([np.array(row, dtype) for row in itertools.product(values, values, values[:4])])
    if np.dtype(dtype).kind != "f":
        return rows
    huge = np.sum(np.abs(rows) > np.finfo(dtype).max / 2, axis=1)
    # Whether two of these overflow before or after a third comes depends on the order of a sum.
    return rows[huge < 2]


def long_rows(dtype: Any) -> np.ndarray:
    """Rows as long as vector instructions take, with NaN and infinities in each place in turn."""
    rng = np.random.default_rng(3)
    blocks = []
    for value in (np.nan, np.inf, -np.inf):
        block = rng.standard_normal((37, 37)).astype(dtype)
        block[np.arange(37), np.arange(37)] = value
        blocks.append(block)
    return np.concatenate(blocks)


def _wide(dtype: Any) -> np.ndarray:
    """Integers beyond the digits of a double, whose sums and products fit."""
    top = 53 if np.dtype(dtype).itemsize == 8 else 20
    return np.array([[2**top + 1, 1, 2, 3], [3, 2**top + 3, 1, 5], [1, 1, 2**top + 5, 7]], dtype)


def _along() -> Iterator[Case]:
    for dtype in (*FLOATS, *INTEGERS, np.bool_):
        blocks = {
            "table": table(dtype),
            "no rows": np.zeros((0, 3), dtype),
            "no columns": np.zeros((3, 0), dtype),
        }
        if np.dtype(dtype).kind == "f":
            blocks["long"] = long_rows(dtype)
        elif np.dtype(dtype).itemsize >= 4:
            blocks["wide"] = _wide(dtype)
        for name, x in blocks.items():
            yield from _over_rows(f"{np.dtype(dtype)} {name}", x)


def _over_rows(name: str, x: Any) -> Iterator[Case]:
    for kind in REDUCED:
        op = f"Reduce{kind}"
        yield Case(
            f"{op} {name}", op, [x, np.array([1])], weights=(1,), expected=_declared_reduction(kind, x)
        )
    if x.shape[1]:  # the place of the largest of nothing is an error everywhere
        for op, last in itertools.product(("ArgMax", "ArgMin"), (0, 1)):
            yield Case(f"{op} {last} {name}", op, [x], {"axis": 1, "select_last_index": last})
    for op in ("CumSum", "CumProd"):
        yield Case(f"{op} {name}", op, [x, np.array(1)], opset=_opset(op), weights=(1,))
    for largest in (0, 1):
        order = [x, np.array([x.shape[1]])]
        yield Case(
            f"TopK {largest} {name}", "TopK", order, {"axis": 1, "largest": largest}, outputs=2, weights=(1,)
        )
    for op in ALONG:
        yield Case(f"{op} {name}", op, [x], {"axis": 1}, expected=_declared_softmax(op, x))


def _declared_reduction(kind: str, x: Any) -> list[Any] | None:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if kind == "SumSquare" and x.dtype.kind in "iu":  # the reference gives 64 bits
            return [np.sum(x * x, axis=1, keepdims=True, dtype=x.dtype)]
        # The reference has NaN beside an infinity, and no sum over -inf.
        if kind == "LogSumExp" and x.dtype.kind == "f":
            top = np.max(x, axis=1, keepdims=True, initial=-np.inf).astype(np.float64)
            safe = np.where(np.isfinite(top), top, 0)
            total = np.log(np.sum(np.exp(x - safe), axis=1, keepdims=True)) + safe
            return [total.astype(x.dtype)]
    return None


def _declared_softmax(op: str, x: Any) -> list[Any] | None:
    if op != "LogSoftmax" or x.dtype.kind != "f" or 0 in x.shape:
        return None
    with np.errstate(all="ignore"):  # the reference takes the logarithm of what underflowed
        shifted = (x - np.max(x, axis=1, keepdims=True)).astype(np.float64)
        return [(shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))).astype(x.dtype)]


# Of a conformance row, this many elements of the first float input become special.
_POISONS = (np.nan, np.inf, -np.inf)


def _poisoned() -> Iterator[Case]:
    own = {case.op for case in _generated()}
    taken: dict[str, int] = {}
    for case in CASES:
        first = case.inputs[0] if case.inputs else None
        if case.op in own or first is None or first.dtype.kind != "f" or first.ndim == 0 or not first.size:
            continue
        taken[case.op] = taken.get(case.op, 0) + 1
        if taken[case.op] > 3:
            continue
        for value in _POISONS:
            x = first.copy()
            x.flat[x.size // 2] = value
            changed = case._replace(id=f"{case.id} with {value}", inputs=[x, *case.inputs[1:]], expected=None)
            yield changed


def _generated() -> Iterator[Case]:
    yield from _unary()
    yield from _binary()
    yield from _chosen()
    yield from _along()


def _is_legal(case: Case) -> bool:
    """Whether the standard has the operator for the dtype of the first input."""
    if case.domain:
        return False
    schema = onnx.defs.get_schema(case.op, case.opset)
    if not schema.inputs:
        return False
    formal = schema.inputs[0].type_str
    allowed = next(
        (c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == formal), [formal]
    )
    kind = helper.np_dtype_to_tensor_dtype(case.inputs[0].dtype)
    return f"tensor({onnx.helper.tensor_dtype_to_string(kind).rpartition('.')[2].lower()})" in allowed


ROWS: tuple[Case, ...] = tuple(filter(_is_legal, itertools.chain(_generated(), _poisoned())))


class Ran(NamedTuple):
    """What became of a row: its outputs, or a text that says why there are none."""

    outputs: tuple[Any, ...] | None
    error: str = ""


def by_reference(case: Case) -> Ran:
    """What is declared, or what onnx.reference gives; nothing where it fails."""
    if case.expected is not None:
        return Ran(tuple(case.expected))
    names = [f"x{i}" for i, x in enumerate(case.inputs) if x is not None]
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            feeds = dict(zip(names, case.feeds(()), strict=True))
            found = ReferenceEvaluator(case.model(())).run(None, feeds)
    except Exception as error:  # noqa: BLE001 - it has no rule for what it raises; a row without expectation is skipped
        return Ran(None, f"{type(error).__name__}: {error}")
    return Ran(tuple(np.asarray(y) for y in found))


def typed(case: Case) -> ir.Model:
    """The row's model as it is after loading: every value typed."""
    proto = onnx.shape_inference.infer_shapes(case.model(case.weights))
    return ir.from_proto(proto)


def on_engine(case: Case, engine: Any) -> Ran | None:
    """What an engine gives that the node may be routed to; None where it may not."""
    model = typed(case)
    (node,) = model.graph
    if engine not in engines_for(node, dict(model.opset_imports)):
        return None
    inputs = [v.name for v in model.graph.inputs if v.name not in model.graph.initializers]
    outputs = [v.name for v in model.graph.outputs]
    try:
        return Ran(compile_bundle(model, inputs, outputs, ((engine, 1),))(*case.feeds(case.weights)))
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is what the row is about
        return Ran(None, f"{type(error).__name__}: {error}")


def by_onnxruntime(rows: Sequence[Case]) -> list[Ran | None]:
    """What ONNX Runtime gives for each row that is routed to it."""
    return in_children("tests.engines.onnxruntime.special", "_on_onnxruntime", rows)


def _on_onnxruntime(case: Case) -> Ran | None:
    return on_engine(case, "onnxruntime")


def in_children(module: str, function: str, rows: Sequence[Any]) -> list[Ran | None]:
    """What a function gives for each row, in child processes: a row that kills one is reported, and the rest go on."""
    results: list[Ran | None] = []
    while len(results) < len(rows):
        code = f"from {module} import {function} as f; from tests.engines.onnxruntime.special import main; main(f)"
        left = pickle.dumps(list(rows[len(results) :]))
        done = subprocess.run([sys.executable, "-c", code], input=left, capture_output=True, timeout=300)
        stream = done.stdout
        while stream:
            size = int.from_bytes(stream[:8], "little")
            results.append(pickle.loads(stream[8 : 8 + size]))
            stream = stream[8 + size :]
        if done.returncode:
            results.append(Ran(None, f"the process ended with {done.returncode}: {done.stderr[-200:]!r}"))
    return results


def main(function: Callable[[Any], Ran | None]) -> None:
    """Run the rows that stand on stdin, one after the other."""
    for row in pickle.load(sys.stdin.buffer):
        data = pickle.dumps(function(row))
        sys.stdout.buffer.write(len(data).to_bytes(8, "little") + data)
        sys.stdout.buffer.flush()
