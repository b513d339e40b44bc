"""Special values: every op of the array table against the reference, and ONNX Runtime where nodes are routed to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dask_ferro.engines.onnxruntime.known_defects import UNLIKE
from dask_ferro.engines.selection import is_affected
from tests.each import every
from tests.engines.array.cases import Case
from tests.engines.onnxruntime.special import ROWS, Ran, by_onnxruntime, by_reference, on_engine, typed

TOLERANCE = {
    "float16": 4e-3,
    "float32": 1e-5,
    "float64": 2e-7,
}  # the reference's erf of doubles is one of floats

BY_OP: dict[str, list[int]] = defaultdict(list)
for _position, _case in enumerate(ROWS):
    BY_OP[_case.op].append(_position)

# Where onnx.reference is wrong of these values, or has none: the engines are held against each other alone.
NO_REFERENCE = {
    "AveragePool": "drops NaN from a window",
    "LpPool": "drops NaN from a window",
    "LRN": "counts channels by the batch",
    "LpNormalization": "divides by the sum, not by that of the absolute values",
    "QuantizeLinear": "an infinity becomes the other end",
    "DynamicQuantizeLinear": "casts NaN, which has no integer",
    "ReduceMean": "of integers by way of doubles; of float16 in float16, which overflows",
}


@pytest.fixture(scope="module")
def onnxruntime() -> list[Ran | None]:
    return by_onnxruntime(ROWS)


def is_told_apart(case: Case) -> bool:
    """Whether the engines are declared to differ, so that small bundles stay with the first of them."""
    (node,) = typed(case).graph
    return is_affected(UNLIKE, node, case.opset)


def unlike(got: Sequence[Any], wanted: Sequence[Any]) -> str:
    """Where results differ, the sign of a zero aside; "" where they do not."""
    for y, z in zip(got, wanted, strict=True):
        if y.dtype != z.dtype or y.shape != z.shape:
            return f"{y.dtype}{y.shape} for {z.dtype}{z.shape}"
        close = TOLERANCE.get(y.dtype.name, 0)
        with np.errstate(all="ignore"):
            same = np.isclose(y, z, rtol=close, atol=close, equal_nan=True) if y.dtype.kind == "f" else y == z
        if not np.all(same):
            return f"{y[~same][:4]} for {z[~same][:4]} at {np.argwhere(~same)[:4].tolist()}"
    return ""


@every("op", sorted(BY_OP))
def test_each_engine_gives_what_the_reference_gives(op: str, onnxruntime: list[Ran | None]) -> None:
    problems = []
    for position in BY_OP[op]:
        case = ROWS[position]
        wanted = by_reference(case) if op not in NO_REFERENCE else Ran(None)
        runs = {"array": on_engine(case, "array"), "onnxruntime": onnxruntime[position]}
        both = runs["array"], runs["onnxruntime"]
        apart = is_told_apart(case)
        for engine, run in runs.items():
            if run is not None and run.outputs is None:
                problems.append(f"{case.id}: {engine} {run.error[:160]}")
            elif run is not None and wanted.outputs is not None and not apart:
                text = unlike(run.outputs, wanted.outputs)
                problems += [f"{case.id}: {engine} {text}"] if text else []
        results = [run.outputs for run in both if run is not None and run.outputs is not None]
        if len(results) == 2 and not apart and (text := unlike(*results)):
            problems.append(f"{case.id}: array beside onnxruntime {text}")
    assert not problems, "\n".join(problems[:12])
