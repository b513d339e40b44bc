"""PyTorch's generators of schedules, run here: their lists are ours, their files are read, and ours are accepted.

What they need of a process is the number of stages and ranks, so no process group is opened.
"""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import pytest
from simulated.pipeline import simulate
from torch.distributed.pipelining import schedules as theirs

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.closed_forms import StageSeconds
from dask_ferro.graph.pipeline.named import NAMES, known, usual_chunks
from dask_ferro.graph.pipeline.schedule import Schedule
from tests.each import every

OF_SEVERAL = {
    "looped-bfs": theirs.ScheduleLoopedBFS,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "interleaved-zb": theirs.ScheduleInterleavedZeroBubble,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.ScheduleDualPipeV,
}
SIZES = [(1, 3), (2, 4), (3, 6), (4, 8), (4, 10), (8, 16)]


def generated(name, p, m, chunks=2):
    """Their schedule of several chunks a stage, as rank 0 makes it."""
    stage = SimpleNamespace(num_stages=p * chunks, group_size=p, group_rank=0, submod=None)
    return OF_SEVERAL[name]([stage] * chunks, m)


def of_one(make, p, m):
    """Their lists of one chunk a stage."""
    return make(
        SimpleNamespace(num_stages=p, group_size=p, group_rank=0, stage_index=0), m
    )._get_pipeline_order()


def as_csv(order):
    return "".join(
        ",".join("" if a is None else str(a) for a in order[rank]) + "\n" for rank in sorted(order)
    )


def span(one):
    return simulate(one, StageSeconds(1, 1, 1).of(one)).makespan


# ---- their lists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb", "zb-v", "dualpipe-v"])
def test_our_lists_are_theirs(name):
    for p, m in SIZES:
        assert Schedule.parse(as_csv(generated(name, p, m).pipeline_order)).stages == known(name, p, m).stages


@pytest.mark.parametrize("chunks", [3, 4])
@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_our_lists_of_more_chunks_are_theirs(name, chunks):
    for p, m in ((3, 6), (4, 6)):
        order = generated(name, p, m, chunks).pipeline_order
        assert Schedule.parse(as_csv(order)).stages == known(name, p, m, chunks).stages


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_our_backwards_of_looped_bfs_are_theirs_in_the_order_of_micro_batches(p, m):
    found = Schedule.parse(as_csv(generated("looped-bfs", p, m).pipeline_order))
    ours = known("looped-bfs", p, m)

    def turned(action):
        return action if action.kind == "F" else action._replace(micro_batch=m - 1 - action.micro_batch)

    assert [tuple(map(turned, row)) for row in found.stages] == list(ours.stages)
    assert (span(found), found.peaks) == (span(ours), ours.peaks)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_our_gpipe_is_theirs(p, m):
    assert Schedule.parse(as_csv(of_one(theirs.ScheduleGPipe, p, m))).stages == known("gpipe", p, m).stages


def test_their_1f1b_is_refused_as_its_last_stage_counts_from_one():
    order = of_one(theirs.Schedule1F1B, 4, 8)
    with pytest.raises(
        ConfigError, match=r"chunk 3, micro-batch 0: got B,(.|\n)*chunk 3, micro-batch 8: got F,"
    ):
        Schedule.parse(as_csv(order))
    ours = known("1f1b", 4, 8).stages
    lists = [
        [str(a) for a in order[rank] if a.computation_type is not theirs.REDUCE_GRAD] for rank in range(4)
    ]
    assert lists[:3] == [list(map(str, row)) for row in ours[:3]]
    # Once torch counts from 0 this test fails, and 1F1B is a case of `test_our_lists_are_theirs`.
    assert lists[3][0] == "3F1"


# ---- their files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12)])
@pytest.mark.parametrize("name", OF_SEVERAL)
def test_their_files_are_read_as_they_are(tmp_path, name, p, m, form):
    one = generated(name, p, m)
    one._dump_csv(str(tmp_path / "theirs.csv"), form)
    found = Schedule.load(tmp_path / "theirs.csv")
    # They write a backward that directly follows its input gradient as one; an overlap is their two actions.
    order = (
        one.pipeline_order
        if form == "compute_only"
        else {
            rank: [a for a in row if a.is_compute_op] for rank, row in one.pipeline_order_with_comms.items()
        }
    )
    wanted = [chain.from_iterable(a.sub_actions or [a] for a in order[rank] if a) for rank in range(p)]
    assert [list(map(str, row)) for row in found.stages] == [list(map(str, row)) for row in wanted]
    assert ("SEND" in (tmp_path / "theirs.csv").read_text()) == (form == "compute_comms")


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", ["interleaved-zb", "zb-v"])
def test_their_merged_backwards_are_read(name, p):
    order = generated(name, p, 2 * p).pipeline_order
    merged = {rank: theirs._merge_bw(list(row)) for rank, row in order.items()}
    found, ours = Schedule.parse(as_csv(merged)), known(name, p, 2 * p)
    kinds = {action.kind for action in found.actions}
    assert {"F", "B"} <= kinds <= {"F", "B", "I", "W"}
    split = [[*"IW"] if a.kind == "B" else [a.kind] for a in found.stages[0]]
    assert list(chain.from_iterable(split)) == [a.kind for a in ours.stages[0]]


# ---- our files ---------------------------------------------------------------------------------------------


@every("name", NAMES)
def test_our_files_are_theirs_too(name):
    """They read each cell, find every action once and in order, and run the lists with their own transfers."""
    for p, m in ((1, 3), (3, 2), (3, 7), (4, 8)):
        _check_file(name, p, m)


def _check_file(name, p, m):
    one = known(name, p, m)
    order = {
        rank: [theirs._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(one.to_csv().splitlines())
    }
    homes = theirs._validate_schedule(order, p, p * usual_chunks(name), m)
    assert homes == dict(one.stage_of)
    comms = theirs._add_send_recv(order, homes.__getitem__, len(homes))
    theirs._simulate_comms_compute(comms, homes.__getitem__, len(homes))
    assert Schedule.parse(as_csv(comms)).stages == one.stages
