"""What is copied before a preemption, and to whom."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.policy.copies import Copying, Exposed, Receiver

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
        sizes = sorted(by_key[key].nbytes for key, to in found.items() if to == address)
        assert sum(sizes) <= one.room
        assert len(sizes) < 2 or sum(sizes) <= max(budget, sizes[-1])
    for key, to in found.items():
        assert receivers[to].job != by_key[key].job
        assert COPYING.is_worth(by_key[key].nbytes, by_key[key].seconds)
