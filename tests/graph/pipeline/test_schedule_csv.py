"""Schedules as CSV text: entries of PyTorch's files, what they mean, and what is wrong with them."""

from __future__ import annotations

import pytest

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.schedule import Schedule
from tests.each import every

# Two stages, one micro-batch, with everything that a file may have.
FULL = [
    "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0RESHARD",
    "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1RESHARD",
]


def text(rows):
    return "\n".join(row.replace(" ", ",") for row in rows)


def lists(rows):
    return [" ".join(map(str, row)) for row in Schedule.parse(text(rows)).stages]


@every(
    ("rows", "read"),
    [
        pytest.param(FULL, ["0F0 0B0", "1F0 1B0"], id="transfers and weights are left out"),
        pytest.param(["0F0 0F1 (0F2;0B0)OVERLAP_F_B (0B1)OVERLAP_F_B 0B2"], ["0F0 0F1 0F2 0B0 0B1 0B2"],
            id="an overlap is its actions, in its order"),
        pytest.param(["0F0 (0B0;0F1)OVERLAP_F_B 0B1"], ["0F0 0B0 0F1 0B1"], id="a backward first"),
        pytest.param(["0F0 ()OVERLAP_F_B 0B0"], ["0F0 0B0"], id="an overlap of nothing"),
        pytest.param(["0F0 0I0 0F1 0W0 0B1"], ["0F0 0I0 0F1 0W0 0B1"], id="B is whole beside I and W"),
        pytest.param(["0F0 0B0 0F1 0W0 0B1 0W1"], ["0F0 0I0 0F1 0W0 0I1 0W1"], id="B is I where W has no other"),
        pytest.param(["0F0 0B0 0F1 0W0 0BW1"], ["0F0 0I0 0F1 0W0 0B1"], id="BW is whole beside such a B"),
        pytest.param(["0F0 0BW0"], ["0F0 0B0"], id="BW is whole by itself"),
        pytest.param(["0F0 0SEND_F0 0RECV_B0 0B0 0W0", "1RECV_F0 1F0 1B0 1SEND_B0 1W0"],
            ["0F0 0I0 0W0", "1F0 1I0 1W0"], id="an older B sends the gradient of its input"),
        pytest.param(["0FORWARD0 0BACKWARD_INPUT0 0BACKWARD_WEIGHT0 0FORWARD1 0FULL_BACKWARD1"],
            ["0F0 0I0 0W0 0F1 0B1"], id="kinds by their names"),
        pytest.param(["0UNSHARD0 0F0 0B0"], ["0F0 0B0"], id="a micro-batch where none is needed"),
        pytest.param(["0F0 0B0", "", "1F0  1B0"], ["0F0 0B0", "1F0 1B0"], id="a stage that waits"),
        pytest.param(["0F0 0SEND_F0", "1RECV_F0 1F0"], ["0F0", "1F0"], id="forwards alone"),
    ],
)  # fmt: skip
def test_entries_of_other_files(rows, read):
    assert lists(rows) == read


def without(entry):
    return [" ".join(cell for cell in row.split() if cell != entry) for row in FULL]


def moved(entry, before):
    """FULL, with an entry directly before another one."""
    return [row.replace(before, f"{entry} {before}") for row in without(entry)]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        pytest.param(without("0SEND_F0"),
            "line 2, cell 2: 1RECV_F0 receives what no line sends; add 0SEND_F0 after the action of chunk 0 .*remove",
            id="a RECV without its SEND"),
        pytest.param(without("1RECV_F0"), "line 1, cell 3: 0SEND_F0 sends what no line receives; add 1RECV_F0 before",
            id="a SEND without its RECV"),
        pytest.param([FULL[0] + " 0SEND_F0", FULL[1]], "line 1, cell 8: 0SEND_F0 is there already, at line 1, cell 3",
            id="a SEND twice"),
        pytest.param(moved("0SEND_F0", "0F0"), "line 1, cell 2: 0SEND_F0 is before 0F0, which makes what it sends",
            id="a SEND before its forward"),
        pytest.param(moved("1RECV_F0", "1B0"), "line 2, cell 3: 1RECV_F0 is after 1F0, which reads what it receives",
            id="a RECV after its reader"),
        pytest.param(moved("0REDUCE_GRAD", "0B0"), "line 1, cell 5: 0REDUCE_GRAD is before 0B0, whose gradient",
            id="a sum before its last gradient"),
        pytest.param(moved("0SEND_F0", "1RESHARD"),
            "line 2, cell 7: got 0SEND_F0, but the line has no action of chunk 0", id="a SEND on another line"),
        pytest.param(["0RECV_F0 0F0 0B0"], "0RECV_F0 has no other end, since no chunk is before 0; remove it",
            id="activations for the first chunk"),
        pytest.param([*FULL, "7UNSHARD"], "line 3, cell 1: got 7UNSHARD, but the line has no action of chunk 7",
            id="weights of no chunk"),
        pytest.param(["0F0 0SEND_F1 0B0", "1RECV_F1 1F0 1B0"], "0SEND_F1 has no action: the line has no 0F1; add it",
            id="transfers of a micro-batch that is not there"),
        pytest.param(["0F0 0B0 0F1 0B1 0W1"],
            "line 1, cell 2: 0B0 is an input gradient, as the file has W and no I, and 0W0 is missing; .*write 0BW0",
            id="an older B without its W"),
        pytest.param(["0F0 0I0 0W0 0F1 0B1 0W1"], "chunk 0, micro-batch 1: got F, W, B, wanted",
            id="a B and a W in a file with I"),
        pytest.param(["0F0 (0F1;0SEND_F1)OVERLAP_F_B 0B0"], "line 1, cell 2: got '0SEND_F1', .*inside",
            id="a transfer in an overlap"),
        pytest.param(["0F 0B0"], "line 1, cell 1: got '0F', wanted chunk", id="an action of no micro-batch"),
        pytest.param(["0F0 0SEND_G0"], "got '0SEND_G0', wanted .*or torch's SEND_F, RECV_F", id="no such transfer"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told_by_line_and_cell(tmp_path, rows, problem):
    (tmp_path / "theirs.csv").write_text(text(rows))
    with pytest.raises(ConfigError, match=rf"theirs\.csv' cannot (be read|run):(.|\n)*{problem}"):
        Schedule.load(tmp_path / "theirs.csv")
