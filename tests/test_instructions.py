"""The tape of a trace: its rows, their order, and the content of each cell."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated.pipeline import simulate

import dask_ferro as ff
import dask_ferro.parallel as fp
from dask_ferro.errors import InputError
from dask_ferro.instructions import Instruction
from dask_ferro.trace import ModelPart, Span, Trace, TracedTask
from tests.runs import RUN, W0, W1


def test_a_task_is_its_ops_where_they_were_recorded_and_one_row_elsewhere() -> None:
    assert list(ff.list_instructions(RUN)) == [
        Instruction("MatMul", "", "", None, None, W0, 0.25, 40),
        Instruction("load", "", "", None, None, W0, 0.5, 100),
        Instruction("Relu", "", "", None, None, W0, 0.75, 60),
        Instruction("transfer", "", "", None, None, W1, 0.25, 100),
        Instruction("transfer", "", "", None, None, W1, pytest.approx(0.4), 100),
        Instruction("sum", "", "", None, None, W1, 2.5, 8),
    ]


def told() -> Trace:
    """Return the trace of a pipeline task with two ops, one with a region of its own and one without."""
    return Trace(
        spans=(
            Span("compute", "f", "forward", "w", 0, 0.0, 3.0, 8),
            Span("op", "f", "MatMul", "w", 0, 0.0, 1.0, 8, "array/mm", "layer1", "S(1)"),
            Span("op", "f", "2 nodes", "w", 0, 1.0, 3.0, 8, "onnxruntime/"),
        ),
        tasks=(TracedTask("f", "forward", "forward", 3.0, 8, (), 0, ModelPart("layer1; layer2", "R", 2, 5)),),
        counts={"dropped": 3.0, "dropped_ops": 20.0},
    )


def test_an_op_says_where_it_was_written_and_its_task_the_rest() -> None:
    assert list(ff.list_instructions(told())) == [
        Instruction("MatMul", "layer1", "S(1)", 2, 5, "w", 1.0, 8),
        Instruction("2 nodes", "layer1; layer2", "R", 2, 5, "w", 2.0, 8),
    ]


def test_what_is_missing_is_said() -> None:
    found = ff.list_instructions(told())
    assert found.missing == "3 tasks and 20 ops"
    assert str(found).splitlines() == [
        "op       region          placement  stage  micro_batch  worker  seconds  nbytes",
        "MatMul   layer1          S(1)       2      5            w       1.0      8",
        "2 nodes  layer1; layer2  R          2      5            w       2.0      8",
        "without 3 tasks and 20 ops",
    ]
    assert ff.list_instructions(RUN).missing == ""


def test_the_file_of_a_trace_has_the_same_tape(tmp_path: Path) -> None:
    told().save(tmp_path / "run.ferrotrace.gz")
    assert ff.list_instructions(tmp_path / "run.ferrotrace.gz") == ff.list_instructions(told())


def test_a_simulated_pipeline_has_stages_and_micro_batches() -> None:
    rows = ff.list_instructions(simulate(fp.make_schedule("gpipe", 2, 2), lambda action: 1.0))
    first = [(row.op, row.stage, row.micro_batch) for row in rows][:3]
    assert first == [("F", 0, 0), ("F", 0, 1), ("F", 1, 0)]


@pytest.mark.parametrize("run", [None, [RUN], 3], ids=["nothing", "a list", "a number"])
def test_what_is_no_run_is_refused(run: object) -> None:
    with pytest.raises(
        InputError, match=r"list_instructions: run: got \w+, wanted what ff.profile\(client\) gives"
    ):
        ff.list_instructions(run)  # type: ignore[arg-type]
