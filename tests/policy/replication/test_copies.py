"""What is copied before a preemption, and to whom."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.policy.replication.copies import Copying, CopyTraffic, Exposed, Receiver, ReplicaHolder, spare

MB = 10**6
COPYING = Copying(bandwidth=100e6, worth=2.0)
SAFE = Receiver(1000 * MB)
PLENTY = 100 * MB


@pytest.mark.parametrize(
    ("results", "receivers", "budget", "wanted"),
    [
        pytest.param([Exposed("a", MB, 1.0, "j1")], {"s": SAFE}, {}, {"a": "s"}, id="a dear one to a safe worker"),
        pytest.param([Exposed("a", MB, 0.02, "j1")], {"s": SAFE}, {}, {}, id="no cheap one"),
        pytest.param([Exposed("a", 100 * MB, 1.0, "j1")], {"s": SAFE}, {}, {}, id="no large one that is soon computed"),
        pytest.param([Exposed("a", MB, inf, "j1")], {"s": SAFE}, {}, {"a": "s"}, id="what nobody can compute"),
        pytest.param(
            [Exposed("a", MB, 9.0, "j1")], {"w": Receiver(PLENTY, "j1")}, {}, {}, id="not within the job"
        ),
        pytest.param(
            [Exposed("a", MB, 9.0, "j1")], {"w": Receiver(PLENTY, "j2")}, {}, {"a": "w"}, id="to another job"
        ),
        pytest.param(
            [Exposed("a", MB, 9.0, "j1")], {"w": Receiver(2 * PLENTY, "j2"), "s": Receiver(MB)}, {}, {"a": "s"},
            id="to a safe one before another job",
        ),
        pytest.param([Exposed("a", MB, 9.0, "j1")], {"s": Receiver(MB - 1)}, {}, {}, id="nowhere without room"),
        pytest.param(
            [Exposed("cheap", MB, 1.0, "j1"), Exposed("dear", MB, 9.0, "j1"), Exposed("only", MB, inf, "j1")],
            {"s": SAFE}, {"s": 2 * MB}, {"only": "s", "dear": "s"}, id="the dearest first",
        ),
        pytest.param(
            [Exposed("large", 50 * MB, 100.0, "j1")], {"s": SAFE}, {"s": MB}, {"large": "s"}, id="a large one by itself"
        ),
        pytest.param(
            [Exposed("large", 50 * MB, 100.0, "j1")], {"s": SAFE}, {"s": 0}, {}, id="nothing beside what is under way"
        ),
        pytest.param(
            [Exposed("large", 50 * MB, 100.0, "j1"), Exposed("small", 1000, 100.0, "j1")], {"s": SAFE}, {"s": MB},
            {"small": "s", "large": "s"}, id="a large one though small ones never end",
        ),
        pytest.param(
            [Exposed("tiny", 28, 0.02, "j1"), Exposed("dear", 2 * MB, 100.0, "j1")], {"s": SAFE}, {"s": MB / 3},
            {"dear": "s"}, id="what saves most for the time of its copy, messages included",
        ),
        pytest.param(
            [Exposed(i, 28, 1.0, "j1") for i in range(9)], {"s": SAFE}, {"s": MB}, {0: "s", 1: "s"},
            id="a few of thousands of small ones",
        ),
        pytest.param(
            [Exposed("a", MB, 9.0, "j1", "w"), Exposed("b", MB, 8.0, "j2", "v")], {"s": SAFE}, {"w": 0.0, "v": 1.0},
            {"b": "s"}, id="nothing from a worker that has sent enough",
        ),
        pytest.param(
            [Exposed("a", MB, 9.0, "j1", host="h1")],
            {"near": Receiver(2 * PLENTY, "j2", "h1"), "far": Receiver(PLENTY, "j3", "h2")}, {}, {"a": "far"},
            id="to another node before another job of the same",
        ),
        pytest.param(
            [Exposed("a", MB, 9.0, "j1", host="h1")], {"near": Receiver(PLENTY, "j2", "h1")}, {}, {"a": "near"},
            id="to another job of the same node before nowhere",
        ),
        pytest.param(
            [Exposed("two", MB, 9.0, ""), Exposed("one", MB, 1.0, "j1")], {"s": SAFE}, {"s": 2 * MB},
            {"one": "s", "two": "s"}, id="what several jobs hold to a safe one",
        ),
        pytest.param(
            [Exposed("two", MB, 9.0, ""), Exposed("one", MB, 1.0, "j1")], {"s": SAFE}, {"s": MB},
            {"one": "s"}, id="what several jobs hold after what one holds",
        ),
        pytest.param(
            [Exposed("two", MB, 9.0, "")], {"w": Receiver(PLENTY, "j3")}, {}, {}, id="what two jobs hold to no third"
        ),
    ],
)  # fmt: skip
def test_what_is_copied(results, receivers, budget, wanted):
    assert COPYING.choose(results, receivers, dict.fromkeys(receivers, PLENTY) | budget) == wanted


exposed = st.builds(
    Exposed,
    st.integers(0, 10**6),
    st.integers(0, 50 * MB),
    st.floats(0, 100) | st.just(inf),
    st.sampled_from("abc"),
)
receiver = st.builds(Receiver, st.integers(0, 200 * MB), st.sampled_from(["", "a", "b"]))


@given(
    st.lists(exposed, unique_by=lambda r: r.key, max_size=30),
    st.dictionaries(st.text(max_size=2), receiver),
    st.integers(0, PLENTY),
)
def test_bounds_hold_and_nothing_goes_to_its_own_job(results, receivers, budget):
    found = COPYING.choose(results, receivers, dict.fromkeys(receivers, budget))
    by_key = {result.key: result for result in results}
    for address, one in receivers.items():
        sizes = [by_key[key].nbytes for key, to in found.items() if to == address]
        assert sum(sizes) <= one.room
        assert sum(map(COPYING.charge, sizes[:-1])) < max(budget, 1)  # the last one may overdraw it
    for key, to in found.items():
        assert receivers[to].job != by_key[key].job
        assert COPYING.is_worth(by_key[key].nbytes, by_key[key].seconds)


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.integers(0, 50 * MB)), min_size=1, max_size=50))
def test_traffic_keeps_its_rate_but_for_the_first_second_and_the_last_result(steps):
    traffic, now, sent, last, rate = CopyTraffic(), 0.0, 0, 0, 32.0 * MB
    for passed, nbytes in steps:
        now += passed
        if traffic.allowed(now, {"w": rate})["w"] > 0:
            traffic.spend("w", nbytes)
            sent, last = sent + nbytes, nbytes
    assert sent - last <= rate * (now + 1.0) * 1.0001


SAFE_ONE, ANOTHER_SAFE, SPOT, SIBLING, OTHER = (ReplicaHolder(job) for job in ("", "", "j1", "j1", "j2"))
SHORT_SAFE, SHORT_SPOT = ReplicaHolder("", short=True), ReplicaHolder("j1", short=True)


@pytest.mark.parametrize(
    ("holders", "is_copied", "is_worth", "wanted"),
    [
        pytest.param((SAFE_ONE, ANOTHER_SAFE), False, True, None, id="safe ones by Dask's rule"),
        pytest.param((SPOT, SIBLING), False, True, None, id="those of one job by Dask's rule"),
        pytest.param((SAFE_ONE, SPOT), False, True, {1}, id="not the safe one of a reader's replica"),
        pytest.param((SAFE_ONE, SPOT), False, False, {1}, id="not the safe one of a cheap result"),
        pytest.param((SAFE_ONE, SPOT), True, True, set(), id="neither a copy nor what it was made of"),
        pytest.param((SAFE_ONE, SHORT_SPOT), True, True, {1}, id="what was copied where memory is short"),
        pytest.param((SHORT_SAFE, SPOT), True, True, {0}, id="a copy where memory is short"),
        pytest.param((SHORT_SAFE, SHORT_SPOT), True, True, {1}, id="the exposed one where both are short"),
        pytest.param((SAFE_ONE, ANOTHER_SAFE, SPOT), True, True, {0, 1}, id="one of two safe copies"),
        pytest.param(
            (SAFE_ONE, SPOT, OTHER), True, True, {1, 2}, id="an exposed copy once a safe one is there"
        ),
        pytest.param(
            (SPOT, OTHER), False, True, set(), id="neither of two jobs where it would be copied again"
        ),
        pytest.param((SPOT, OTHER), False, False, None, id="cheap ones by Dask's rule"),
        pytest.param((SPOT, SIBLING, OTHER), True, True, {0, 1}, id="one of the same job"),
    ],
)
def test_which_replicas_are_dropped(holders, is_copied, is_worth, wanted):
    assert spare(dict(enumerate(holders)), is_copied, lambda: is_worth) == wanted
