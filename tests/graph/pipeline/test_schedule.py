"""Pipeline schedules: lists that can run and lists that cannot, the known ones, and the waits that keep them."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.errors import InputError
from dask_ferro.graph.pipeline.action import Action, dependencies
from dask_ferro.graph.pipeline.schedule import Schedule, problems
from dask_ferro.graph.pipeline.schedules import make_schedule as by_name
from tests.each import every
from tests.graph.pipeline.schedules import SIZES as ANY_SIZES
from tests.graph.pipeline.schedules import activations, feasible, known_ones, sized

SIZES = [(4, 8), (4, 16), (8, 16), (8, 32)]


def lists(schedule: Schedule) -> list[str]:
    """Each stage's list as text."""
    return [" ".join(map(str, row)) for row in schedule.stages]


def schedule(*rows: str) -> Schedule:
    return Schedule.of([row.split() for row in rows])


# ---- actions ----------------------------------------------------------------------------------------------


def test_an_action_is_written_chunk_kind_micro_batch():
    assert str(Action(2, "F", 10)) == "2F10"
    assert Action.parse(" 12W0 ") == Action(12, "W", 0)


@every("text", ["", "F0", "0F", "0X0", "-1F0", "0f0", "0F0 1F0", "0F²", "0F9999999", "1RECV_F0"])
def test_any_other_text_is_refused(text):
    with pytest.raises(ValueError, match="wanted chunk, one of F, I, W, B, micro-batch"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        pytest.param("0F3", "", id="the first chunk's forward needs nothing"),
        pytest.param("1F3", "0F3", id="a forward needs the one before"),
        pytest.param("2B3", "2F3", id="the last backward needs its own forward"),
        pytest.param("1I3", "1F3 2B3", id="an input gradient needs its forward and the next gradient"),
        pytest.param("1W3", "1I3", id="a weight gradient needs its input gradient"),
        pytest.param("0B3", "0F3 1I3", id="a backward waits for I where the next one is split, not for W"),
    ],
)
def test_an_action_needs(action, needs):
    there = set(map(Action.parse, ["0F3", "1F3", "2F3", "2B3", "1I3", "1W3", "0B3"]))
    assert dependencies(there)[Action.parse(action)] == tuple(map(Action.parse, needs.split()))


# ---- what can run -----------------------------------------------------------------------------------------


@every(
    ("rows", "problem"),
    [
        pytest.param([], "has no stages", id="nothing"),
        pytest.param(["0F0 0B0", ""], "stage 1 has no actions", id="a stage that does nothing"),
        pytest.param(["0F0 0F0 0B0"], "stage 0: got 0F0 2 times, wanted it once", id="an action twice"),
        pytest.param(["0F0 0F1 0B1", "0B0"], r"chunk 0: got stages \[0, 1\], wanted one", id="a chunk on two stages"),
        pytest.param(["0F0 0F1 0B0"], r"chunk 0, micro-batch 1: got F, wanted F and B", id="a backward is missing"),
        pytest.param(["0F0 0I0 0F1 0B1"], "chunk 0, micro-batch 0: got F, I, wanted",
            id="a weight gradient is missing"),
        pytest.param(["0F0 0B0 0W0"], "chunk 0, micro-batch 0: got F, W, B, wanted", id="a weight gradient too many"),
        pytest.param(["0F0 0B0", "2F0 2B0"], "chunk 1, micro-batch 0: got nothing", id="a chunk is missing"),
        pytest.param(["0F0 0F2"], "chunk 0, micro-batch 1: got nothing, wanted F", id="a forward is missing"),
        pytest.param(["0F0 0F1 0B0 0F2 0B1 0B2", "1F1 1B0 1F2 1B1 1F3 1B2"],
            "chunk 1, micro-batch 0: got B,(.|\n)*chunk 1, micro-batch 3: got F,",
            id="forwards counted from 1 on the last stage"),
        pytest.param(["0B0 0F0"], "deadlock: stage 0 waits at 0B0 for 0F0", id="backward before forward"),
        pytest.param(["0F0 0W0 0I0"], "deadlock: stage 0 waits at 0W0 for 0I0", id="W before I"),
        pytest.param(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
            "deadlock: stage 0 waits at 0B0 for 1B0; stage 1 waits at 1F1 for 0F1",
            id="two stages that wait for each other"),
        pytest.param(["0F999999"], "and more", id="a micro-batch far beyond the others"),
    ],
)  # fmt: skip
def test_lists_that_cannot_run_are_refused(rows, problem):
    with pytest.raises(InputError, match=problem):
        schedule(*rows)


@pytest.mark.parametrize(
    ("rows", "peaks"),
    [
        pytest.param(["0F0 0B0 0F1 0B1"], (1,), id="a backward makes room"),
        pytest.param(["0F0 0I0 0F1 0I1 0W0 0W1"], (2,), id="an input gradient makes none"),
        pytest.param(["0F0 1F0 1B0 0B0"], (2,), id="both chunks of a stage count"),
        pytest.param(["0F0 0I0 0W0", "1F0 1B0"], (1, 1), id="split and whole backwards mix"),
        pytest.param(["0F0 0F1", "1F0 1F1"], (0, 0), id="inference keeps nothing"),
    ],
)
def test_peaks(rows, peaks):
    assert schedule(*rows).peaks == peaks


@given(feasible(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_lists_deadlock_exactly_where_edges_and_lists_make_a_cycle(one, random):
    rows = [random.sample(row, len(row)) for row in one.stages]
    before = {action: set(needs) for action, needs in one.dependencies.items()}
    for row in rows:
        for action, after in pairwise(row):
            before[after].add(action)
    try:
        TopologicalSorter(before).prepare()
        assert problems(rows) == []
    except CycleError:
        (problem,) = problems(rows)
        assert problem.startswith("deadlock: stage ")


@given(feasible())
@settings(max_examples=60, deadline=None)
def test_steps_rise_along_lists_and_edges(one):
    steps = one.steps
    assert len(steps) == sum(map(len, one.stages))
    assert all(steps[a] < steps[b] for row in one.stages for a, b in pairwise(row))
    assert all(steps[need] < steps[action] for action, needs in one.dependencies.items() for need in needs)


# ---- text -------------------------------------------------------------------------------------------------


def test_a_schedule_is_printed_by_steps():
    assert str(by_name("zb-h1", 2, 2)).splitlines() == [
        "stage 0  0F0 0F1   . 0I0 0W0 0I1 0W1",
        "stage 1    . 1F0 1I0 1F1 1I1 1W0 1W1",
    ]


@given(st.one_of(feasible(), known_ones()))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(one):
    assert Schedule.of(([str(a) for a in row] for row in one.stages), one.name) == one


def test_wrong_texts_are_told_by_stage_and_action():
    with pytest.raises(
        InputError, match=r"stage 0, action 1: got '0G0', wanted(.|\n)*stage 1, action 0: got ''"
    ):
        Schedule.of([["0F0", "0G0"], [""]])


# ---- the known ones ---------------------------------------------------------------------------------------


@every(
    ("one", "rows"),
    [
        pytest.param(by_name("gpipe", 2, 3), ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
            id="gpipe: all forwards, then all backwards"),
        pytest.param(by_name("1f1b", 3, 4),
            ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3", "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"],
            id="1f1b: p - s forwards, then in turn, from micro-batch 0 on every stage"),
        pytest.param(by_name("zb-h1", 3, 4), ["0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3", "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"],
            id="zb-h1: W(i) directly after I(i + s)"),
        pytest.param(by_name("interleaved", 2, 4), ["0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"],
            id="interleaved: p micro-batches through a chunk, then the next chunk"),
        pytest.param(by_name("zb-v", 2, 3), ["0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"], id="zb-v: down and up again"),
        pytest.param(by_name("dualpipe-v", 2, 4), [
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
            "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3"],
            id="dualpipe-v: a forward of one chunk, a backward of the other"),
        pytest.param(by_name("interleaved", 2, 3), ["0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
            "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2"], id="interleaved: one round of three on two stages"),
        pytest.param(by_name("interleaved", 2, 5), [
            "0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4",
            "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4"],
            id="interleaved: rounds of three and two"),
        pytest.param(by_name("1f1b", 3, 1), ["0F0 0B0", "1F0 1B0", "2F0 2B0"], id="fewer micro-batches than stages"),
        pytest.param(by_name("gpipe", 2, 3).forward(), ["0F0 0F1 0F2", "1F0 1F1 1F2"], id="inference"),
    ],
)  # fmt: skip
def test_the_list_is(one, rows):
    assert lists(one) == rows


@every(("p", "m"), SIZES)
@every(
    ("name", "chunks", "kept"),
    [
        pytest.param("gpipe", 1, lambda p, m, s: m, id="gpipe keeps m"),
        pytest.param("1f1b", 1, lambda p, m, s: p - s, id="1f1b keeps p - s"),
        pytest.param("zb-h1", 1, lambda p, m, s: p, id="zb-h1 keeps p"),
        pytest.param("zb-v", 2, lambda p, m, s: 2 * p, id="zb-v keeps p of whole stages"),
        pytest.param("interleaved", 2, lambda p, m, s: 3 * p - 1 - 2 * s,
            id="interleaved keeps p + (p - 1) / chunks of whole stages on the first"),
        pytest.param("interleaved", 3, lambda p, m, s: 4 * p - 1 - 2 * s,
            id="interleaved keeps the same share of three"),
        pytest.param("dualpipe-v", 2, lambda p, m, s: 2 * p + 1, id="dualpipe-v keeps p + 1/2 of whole stages"),
    ],
)  # fmt: skip
def test_peak_live_activations(name, chunks, kept, p, m):
    one = by_name(name, p, m, chunks)
    assert one.peaks == tuple(kept(p, m, s) for s in range(p))
    assert one.peaks == activations(name, p, m, chunks)
    assert one.chunks == chunks * p


@given(ANY_SIZES)
@settings(max_examples=150, deadline=None)
def test_every_known_schedule_is_complete_and_in_order_and_keeps_its_bound(size):
    """No problems: each action is there once, after what it needs, and no two stages wait for each other."""
    name, p, m, _ = size
    one = sized(*size)
    assert problems(one.stages) == []
    assert (len(one.stages), one.micro_batches) == (p, m)
    assert all(home in (chunk % p, 2 * p - 1 - chunk) for chunk, home in one.stage_of.items())
    bound = activations(name, p, m, size[3])
    assert all(kept <= most for kept, most in zip(one.peaks, bound, strict=True))
    assert one.peaks == bound or (name in ("zb-v", "dualpipe-v") and m < 2 * p)
    for row in one.stages:
        for chunk in {action.chunk for action in row}:
            for kinds in ("F", "BI", "BW"):
                taken = [a.micro_batch for a in row if a.chunk == chunk and a.kind in kinds]
                assert taken == list(range(m))


@every(
    ("arguments", "problem"),
    [
        pytest.param(("1F1B", 2, 2), "got '1F1B', wanted one of gpipe.*did you mean 1f1b", id="no such name"),
        pytest.param(("knots", 2, 2), "or a list of your own$", id="a name like none"),
        pytest.param((("1f1b",), 2, 2), "got .'1f1b',., wanted", id="no name at all"),
        pytest.param(("gpipe", 0, 2), "stages: got 0, wanted a whole number above 0", id="no stages"),
        pytest.param(("gpipe", 2, 2.0), "micro_batches: got 2.0", id="micro-batches that are no whole number"),
        pytest.param(("1f1b", 2, 2, 2), "chunks: got 2 a stage, wanted 1", id="two chunks for 1f1b"),
        pytest.param(("dualpipe-v", 2, 2, 4), "chunks: got 4 a stage, wanted 2", id="two Vs"),
        pytest.param(("interleaved", 2, 2, 1), "wanted 2 or more; 1 is called 1f1b", id="one chunk interleaved"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_exist_are_refused(arguments, problem):
    with pytest.raises(InputError, match=problem):
        by_name(*arguments)


# ---- the waits that keep them -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "wanted"),
    [
        pytest.param(by_name("gpipe", 2, 4), [], id="gpipe has no order to keep"),
        pytest.param(by_name("1f1b", 2, 4).forward(), [], id="nor has inference"),
        # On the last stage every backward waits for the forward before it, which is its own.
        pytest.param(by_name("1f1b", 2, 2), ["0F0 0F1", "0F1 0B0", "0B0 0B1", "1B0 1F1"],
            id="an action waits for the one before it, unless it needs that anyway"),
        pytest.param(schedule("0F0 0F1 1F0 1B0 1F1 1I1 1W1 0B0 0F2 0B1 1F2 1B2 0B2"),
            ["1B0 1F1", "1W1 0F2", "0B0 1F2"], id="of several chunks and split backwards, a forward waits for room"),
    ],
)  # fmt: skip
def test_waits(one, wanted):
    assert [f"{before} {after}" for after, before in one.waits.items()] == wanted


@given(st.one_of(feasible(), known_ones()))
@settings(max_examples=60, deadline=None)
def test_steps_rise_along_all_waits(one):
    assert all(one.steps[before] < one.steps[after] for after, before in one.waits.items())
    assert all(before not in one.dependencies[after] for after, before in one.waits.items())
