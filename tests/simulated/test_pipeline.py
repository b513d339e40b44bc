"""What pipelines take on virtual stages: the closed forms to the bit, and what hops and the waits of tasks do."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated.pipeline import StageSeconds, bubbles, peaks, simulate

from dask_ferro.graph.pipeline.action import Action
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.schedules import NAMES
from dask_ferro.graph.pipeline.schedules import make_schedule as named_schedule
from dask_ferro.simulate.compare import of_trace
from dask_ferro.trace import Trace
from tests.graph.pipeline.schedules import feasible, known_ones, makespan

ONE = StageSeconds(1, 1, 1)
SIZES = [(4, 8), (4, 16), (8, 16), (8, 32)]
WHOLE = st.builds(StageSeconds, *[st.integers(1, 9)] * 3)
# Stages, and micro-batches: fewer than stages, and no multiple of them, among others.
MANY = (st.integers(1, 6), st.integers(1, 14))
QUARTERS = st.integers(0, 12).map(lambda quarters: quarters / 4)


def run(name: str, p: int, m: int, seconds: StageSeconds = ONE, **costs: float) -> Trace:
    one = named_schedule(name, p, m)
    return simulate(one, seconds.of(one), **costs)


def order(trace: Trace) -> list[list[str]]:
    """What each stage computed, in order."""
    return [[s.key for s in trace.of("compute") if s.worker == worker] for worker in sorted(trace.workers)]


def drawn(one: Schedule, seed: int) -> Callable[[Action], float]:
    """Seconds by action, in eighths: sums of them are exact."""
    chance = random.Random(seed)
    seconds = {action: chance.randint(0, 16) / 8 for action in one.dependencies}
    return seconds.__getitem__


# ---- the closed forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spans"),
    [
        pytest.param("gpipe", (33, 57, 69, 117), id="gpipe: (m + p - 1)(F + B)"),
        pytest.param("1f1b", (33, 57, 69, 117), id="1f1b: (m + p - 1)(F + B)"),
        pytest.param("interleaved", (28.5, 52.5, 58.5, 106.5), id="interleaved: m(F + B) + (p - 1)(F + B)/2"),
        pytest.param("zb-h1", (27, 51, 55, 103), id="zb-h1: m(F + B) + (p - 1)(F + B - 2W)"),
        pytest.param("zb-v", (25.5, 49.5, 51.5, 99.5), id="zb-v: m(F + B) and the ramp"),
        pytest.param("dualpipe-v", (25.5, 49.5, 51.5, 99.5), id="dualpipe-v: m(F + B) and the ramp"),
    ],
)
def test_makespans_at_equal_seconds(name, spans):
    assert tuple(run(name, p, m).makespan for p, m in SIZES) == spans
    assert tuple(makespan(name, p, m, ONE) for p, m in SIZES) == spans


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 9), WHOLE)
@settings(max_examples=60, deadline=None)
def test_whole_backwards_take_what_the_formula_says_at_any_seconds(name, p, m, seconds):
    assert run(name, p, m, seconds).makespan == makespan(name, p, m, seconds)


@given(*MANY, st.sampled_from([2, 4]), WHOLE)
@settings(max_examples=60, deadline=None)
def test_chunks_in_turn_take_what_the_formula_says_at_any_seconds_and_micro_batches(p, m, chunks, seconds):
    one = named_schedule("interleaved", p, m, chunks)
    assert simulate(one, seconds.of(one)).makespan == makespan("interleaved", p, m, seconds, chunks)


@given(st.integers(1, 6), st.integers(0, 8), WHOLE)
@settings(max_examples=60, deadline=None)
def test_zb_h1_takes_what_the_formula_says_where_weight_gradients_are_the_shortest(p, more, seconds):
    assume(seconds.weight_grad <= min(seconds.forward, seconds.input_grad))
    assert run("zb-h1", p, p + more, seconds).makespan == makespan("zb-h1", p, p + more, seconds)


@given(st.sampled_from(["zb-v", "dualpipe-v"]), st.integers(1, 5), st.integers(0, 6), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_v_takes_its_ramp_at_equal_seconds_and_zb_v_never_waits(name, p, more, each):
    m, seconds = 2 * p - (name == "zb-v") + more, StageSeconds(each, each, each)
    trace = run(name, p, m, seconds)
    assert trace.makespan == makespan(name, p, m, seconds)
    for worker in trace.workers:
        mine = [s for s in trace.of("compute") if s.worker == worker]
        # Whole backwards make the next stage wait a little, but nobody ends later.
        assert name == "dualpipe-v" or all(a.stop == b.start for a, b in pairwise(mine))


@given(st.sampled_from(NAMES), *MANY, WHOLE)
@settings(max_examples=80, deadline=None)
def test_no_schedule_takes_less_than_its_formula(name, p, m, seconds):
    assert run(name, p, m, seconds).makespan >= makespan(name, p, m, seconds)


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("gpipe", 9),
        ("1f1b", 9),
        ("interleaved", 4.5),
        ("zb-h1", 3),
        ("zb-v", 1.5),
        ("dualpipe-v", 1.5),
    ],
)
def test_every_stage_of_four_idles_for(name, bubble):
    trace = run(name, 4, 8)
    assert bubbles(trace) == {f"stage-{s}": bubble for s in range(4)}
    assert trace.utilization == 24 / (24 + bubble)


def test_inference_takes_its_forwards():
    one = named_schedule("1f1b", 4, 8).forward()
    trace = simulate(one, StageSeconds(2, 1, 1).of(one))
    assert trace.makespan == (8 + 4 - 1) * 2
    assert peaks(trace) == {f"stage-{s}": 0 for s in range(4)}


# ---- what takes which time --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "costs", "span"),
    [
        pytest.param([["0F0", "0B0"]], {}, 3, id="a stage alone takes its seconds"),
        pytest.param([["0F0", "0B0"], ["1F0", "1B0"]], {"transfer": 10}, 26, id="a transfer each way"),
        pytest.param([["0F0", "1F0", "1B0", "0B0"]], {"transfer": 10}, 6, id="none on the same stage"),
        pytest.param([["0F0", "1F0", "1B0", "0B0"]], {"hop": 10}, 36, id="a hop at each edge"),
        pytest.param([["0F0", "0B0"], ["1F0", "1B0"]], {"transfer": 10, "hop": 1}, 29, id="both add up"),
        pytest.param([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], {"transfer": 1}, 11,
            id="a transfer beside computation"),
    ],
)  # fmt: skip
def test_seconds(rows, costs, span):
    assert (
        simulate(Schedule.of(rows), lambda action: 2 if action.kind == "B" else 1, **costs).makespan == span
    )


def test_the_slowest_stage_is_the_pipelines_speed():
    one = named_schedule("1f1b", 4, 64)
    trace = simulate(one, lambda action: (3 if action.chunk == 2 else 1) * (2 if action.kind == "B" else 1))
    assert trace.busy["stage-2"] == 64 * 9
    assert trace.makespan == 64 * 9 + 2 * 1 + 2 * 2  # and once in through the two before it, and out again


def test_a_transfer_is_a_span_at_the_receiver():
    trace = simulate(Schedule.of([["0F0", "0B0"], ["1F0", "1B0"]]), lambda action: 1, transfer=0.5)
    sent = [(s.key, s.source, s.worker, s.start, s.stop) for s in trace.of("transfer")]
    assert sent == [("0F0", "stage-0", "stage-1", 1, 1.5), ("1B0", "stage-1", "stage-0", 3.5, 4)]


@pytest.mark.parametrize("costs", [{"transfer": -1}, {"hop": -1}, {"seconds": lambda action: -1}])
def test_negative_seconds_are_refused(costs):
    with pytest.raises(ValueError, match="negative seconds"):
        simulate(named_schedule("1f1b", 2, 2), **{"seconds": lambda action: 1, **costs})


@given(st.one_of(feasible(), known_ones()), st.integers(0, 99), QUARTERS, QUARTERS)
@settings(max_examples=60, deadline=None)
def test_a_schedule_runs_by_its_lists_and_after_what_it_needs(one, seed, transfer, hop):
    seconds = drawn(one, seed)
    trace = simulate(one, seconds, transfer=transfer, hop=hop)
    assert order(trace) == [[str(action) for action in row] for row in one.stages]
    spans = {Action.parse(s.key): s for s in trace.of("compute")}
    assert all(spans[action].seconds == seconds(action) for action in spans)
    for action, needs in one.dependencies.items():
        for need in needs:
            moves = transfer * (spans[need].worker != spans[action].worker)
            assert spans[action].start >= spans[need].stop + moves + hop


@given(st.one_of(feasible(), known_ones()), st.integers(0, 99), QUARTERS, QUARTERS)
@settings(max_examples=60, deadline=None)
def test_waits_keep_no_more_than_the_lists(one, seed, transfer, hop):
    trace = simulate(one, drawn(one, seed), waits=one.waits, transfer=transfer, hop=hop)
    assert len(trace.tasks) == len(one.dependencies)
    assert all(kept <= most for kept, most in zip(peaks(trace).values(), one.peaks, strict=True))


@given(known_ones(), st.integers(0, 99), QUARTERS)
@settings(max_examples=30, deadline=None)
def test_a_trace_is_a_graph_in_an_order_in_which_it_can_run(one, seed, transfer):
    trace = simulate(one, drawn(one, seed), transfer=transfer)
    graph = of_trace(trace)
    assert {t.key: set(t.dependencies) for t in graph.tasks} == {
        str(action): set(map(str, needs)) for action, needs in one.dependencies.items()
    }
    assert graph.lower_bound(len(one.stages)) <= trace.makespan


def test_a_trace_is_kept_in_a_file(tmp_path):
    trace = run("zb-v", 2, 4, transfer=0.25)
    trace.save(tmp_path / "run.ferrotrace")
    assert Trace.load(tmp_path / "run.ferrotrace") == trace


# ---- what the waits are for -------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_the_lists_keep_what_they_promise(name, p, m):
    one = named_schedule(name, p, m)
    assert tuple(peaks(simulate(one, ONE.of(one))).values()) == one.peaks


def test_priorities_alone_keep_no_memory():
    one = named_schedule("1f1b", 4, 8)
    assert one.peaks == (4, 3, 2, 1)
    assert list(peaks(simulate(one, ONE.of(one), waits={})).values()) == [8, 7, 4, 1]


@pytest.mark.parametrize("hop", [0.05, 0.5])
def test_gpipe_and_inference_wait_for_no_hop_between_actions_that_are_ready(hop):
    for one in (named_schedule("gpipe", 4, 16), named_schedule("1f1b", 4, 16).forward()):
        by_lists = simulate(one, ONE.of(one), hop=hop).makespan
        assert simulate(one, ONE.of(one), waits=one.waits, hop=hop).makespan < by_lists - 10 * hop
