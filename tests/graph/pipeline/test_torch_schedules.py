"""PyTorch's generators of schedules, run here: their lists are ours, and ours are accepted.

What they need of a process is the number of stages and ranks, so no process group is opened.
"""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from dask_ferro.errors import InputError
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.schedules import NAMES, usual_chunks
from dask_ferro.graph.pipeline.schedules import make_schedule as named_schedule
from tests.each import every

OF_SEVERAL = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "zb-h1": theirs.ScheduleInterleavedZeroBubble,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.ScheduleDualPipeV,
}
SIZES = [(1, 3), (2, 4), (3, 6), (4, 8), (4, 10), (8, 16)]


def generated(name, p, m, chunks):
    """Their schedule of any number of chunks a stage, as rank 0 makes it."""
    stage = SimpleNamespace(num_stages=p * chunks, group_size=p, group_rank=0, submod=None)
    return OF_SEVERAL[name]([stage] * chunks, m)


def of_one(make, p, m):
    """Their lists of one chunk a stage."""
    return make(
        SimpleNamespace(num_stages=p, group_size=p, group_rank=0, stage_index=0), m
    )._get_pipeline_order()


def lists(order):
    """The actions of each rank; an overlap is its two actions in their order."""
    rows = [
        chain.from_iterable(action.sub_actions or [action] for action in order[rank] if action)
        for rank in sorted(order)
    ]
    return [[str(action) for action in row if action.is_compute_op] for row in rows]


def read(order, name="theirs"):
    return Schedule.of(lists(order), name)


# ---- their lists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_our_lists_are_theirs(name):
    for p, m in SIZES:
        order = generated(name, p, m, usual_chunks(name)).pipeline_order
        assert read(order).stages == named_schedule(name, p, m).stages


@pytest.mark.parametrize("chunks", [3, 4])
def test_our_lists_of_more_chunks_are_theirs(chunks):
    for p, m in ((3, 6), (4, 6)):
        order = generated("interleaved", p, m, chunks).pipeline_order
        assert read(order).stages == named_schedule("interleaved", p, m, chunks).stages


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_our_gpipe_is_theirs(p, m):
    assert read(of_one(theirs.ScheduleGPipe, p, m)).stages == named_schedule("gpipe", p, m).stages


def test_their_1f1b_is_refused_as_its_last_stage_counts_from_one():
    order = of_one(theirs.Schedule1F1B, 4, 8)
    with pytest.raises(
        InputError, match=r"chunk 3, micro-batch 0: got B,(.|\n)*chunk 3, micro-batch 8: got F,"
    ):
        read(order)
    found, ours = lists(order), named_schedule("1f1b", 4, 8).stages
    assert found[:3] == [list(map(str, row)) for row in ours[:3]]
    # Once torch counts from 0 this test fails, and 1F1B is a case of `test_our_lists_are_theirs`.
    assert found[3][0] == "3F1"


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_their_merged_backwards_can_run(name, p):
    order = generated(name, p, 2 * p, usual_chunks(name)).pipeline_order
    found = read({rank: theirs._merge_bw(list(row)) for rank, row in order.items()})
    kinds = {action.kind for action in found.actions}
    assert {"F", "B"} <= kinds <= {"F", "B", "I", "W"}


# ---- our lists ---------------------------------------------------------------------------------------------


@every("name", NAMES)
def test_our_lists_run_by_theirs_too(name):
    """They read each action, find every one once and in order, and run the lists with their own transfers."""
    for p, m in ((1, 3), (3, 2), (3, 7), (4, 8)):
        _check_lists(name, p, m)


def _check_lists(name, p, m):
    one = named_schedule(name, p, m)
    order = {rank: [theirs._Action.from_str(str(a)) for a in row] for rank, row in enumerate(one.stages)}
    homes = theirs._validate_schedule(order, p, p * usual_chunks(name), m)
    assert homes == dict(one.stage_of)
    comms = theirs._add_send_recv(order, homes.__getitem__, len(homes))
    theirs._simulate_comms_compute(comms, homes.__getitem__, len(homes))
    assert read(comms).stages == one.stages
