"""What ONNX Runtime makes of values without elements: of each operator that is left to it, what the reference makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import onnx
import pytest

from dask_ferro.engines.emptiness import TAKEN
from tests.each import every
from tests.engines.array.cases import CASES, Case
from tests.engines.onnxruntime.special import Ran, by_reference, in_children
from tests.engines.onnxruntime.test_special import unlike

# Rows of each operator, and ways in which each of them loses axes.
_ROWS, _WAYS = 4, 12


def emptied(case: Case) -> Iterator[Case]:
    """The row with axes of size 0: all axes of one size, one axis of all inputs, one axis of one input."""
    shapes = [() if x is None else x.shape for x in case.inputs]
    sizes = sorted({e for s in shapes for e in s})
    found = [[tuple(0 if e == size else e for e in s) for s in shapes] for size in sizes]
    for axis in range(max(map(len, shapes), default=0)):
        found.append([tuple(0 if i == axis else e for i, e in enumerate(s)) for s in shapes])
        found += [
            [tuple(0 if (i, j) == (n, axis) else e for i, e in enumerate(s)) for j, s in enumerate(shapes)]
            for n in range(len(shapes))
        ]
    for new in list(dict.fromkeys(map(tuple, found)))[:_WAYS]:
        pairs = zip(case.inputs, new, strict=True)
        inputs = [x if x is None or x.shape == s else np.zeros(s, x.dtype) for x, s in pairs]
        if any(x is not None and x.size == 0 for x in inputs):
            yield case._replace(id=f"{case.id} {new}", inputs=inputs, expected=None, weights=())


def rows(op: str) -> list[Case]:
    some = [case for case in CASES if case.op == op and not case.domain][:_ROWS]
    return [row for case in some for row in emptied(case)]


def in_onnxruntime(case: Case) -> Ran:
    """What a session makes of a row, whatever the routes say."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    names = [f"x{i}" for i, x in enumerate(case.inputs) if x is not None]
    try:
        session = ort.InferenceSession(case.model(()).SerializeToString(), options)
        return Ran(tuple(map(np.asarray, session.run(None, dict(zip(names, case.feeds(()), strict=True))))))
    except Exception as error:  # noqa: BLE001 - what it refuses is no wrong number
        return Ran(None, f"{type(error).__name__}: {error}")


@pytest.fixture(scope="module")
def ran() -> dict[str, list[tuple[Case, Ran]]]:
    every = [row for op in sorted(TAKEN) for row in rows(op)]
    results = in_children(__name__, "in_onnxruntime", every)
    found: dict[str, list[tuple[Case, Ran]]] = defaultdict(list)
    for row, result in zip(every, results, strict=True):
        assert result is not None
        found[row.op].append((row, result))
    return found


# Without a row of the array table, run by tests/lower/worker/test_empty_inside.py by ONNX's suite, or without inputs.
WITHOUT_ROWS = {"Constant"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every("op", sorted(TAKEN))
def test_what_is_left_to_onnxruntime_is_right_of_nothing(op, ran):
    assert ran[op] or op in WITHOUT_ROWS
    problems = []
    for row, result in ran[op]:
        if result.outputs is None and "the process ended" not in result.error:
            continue
        wanted = by_reference(row)
        if result.outputs is None:
            problems.append(f"{row.id}: {result.error[:200]}")
        elif wanted.outputs is not None and (text := unlike(result.outputs, wanted.outputs)):
            problems.append(f"{row.id}: {text}")
    assert not problems, "\n".join(problems[:8])


def test_what_is_taken_is_in_the_standard() -> None:
    assert {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""} >= TAKEN
