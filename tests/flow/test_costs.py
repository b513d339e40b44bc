"""What the newest flows tell of the costs of their tasks."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from dask_ferro.flow.costs import BELIEVED_S, BelievedCosts, MemberFigures, learnt
from dask_ferro.graph.bundling.partition import FlowCosts
from tests.each import every

DEFAULTS = FlowCosts()
# What a hop by an answer may have waited for Python's lock.
LOCK_S = 5e-4
SLOW = FlowCosts(task_s=3e-4, message_s=4e-4, hop_s=2e-2)


def figures(costs: FlowCosts, tasks: int = 100, messages: int = 20, nbytes: int = 100) -> MemberFigures:
    """Return the figures of a flow of 2 ms tasks that cost so much besides."""
    computing, sending = 2e-3 * tasks, costs.message_s * messages
    return MemberFigures(
        messages, nbytes * messages, 0, 0.1, tasks, messages, computing + sending + costs.task_s * tasks,
        computing, sending, 2 * (costs.hop_s + LOCK_S),
    )  # fmt: skip


TYPICAL, TEN_TIMES = figures(DEFAULTS), figures(SLOW)
IDLE = MemberFigures()


@every(
    ("flows", "before", "after"),
    [
        pytest.param([], DEFAULTS, DEFAULTS, id="no flow yet"),
        pytest.param([TEN_TIMES] * 2, DEFAULTS, DEFAULTS, id="too few flows"),
        pytest.param([TYPICAL] * 5, DEFAULTS, DEFAULTS, id="what was believed"),
        pytest.param([TEN_TIMES] * 3, DEFAULTS, SLOW, id="ten times what was believed"),
        pytest.param([TYPICAL] * 5, SLOW, DEFAULTS, id="what was believed long ago"),
        pytest.param(
            [replace(TYPICAL, trip_s=1e-3)] * 5,
            DEFAULTS,
            DEFAULTS,
            id="answers that may have waited for Python's lock",
        ),
        pytest.param([IDLE] * 5, SLOW, SLOW, id="flows that did nothing"),
        pytest.param(
            [figures(FlowCosts(5e-5, 7e-5, 1e-4))] * 5, DEFAULTS, DEFAULTS, id="little more than was believed"
        ),
        pytest.param([TEN_TIMES] * 2 + [TYPICAL] * 3, DEFAULTS, DEFAULTS, id="a busy machine for a while"),
        pytest.param(
            [figures(FlowCosts(5.0, 5.0, 5.0))] * 4 + [TYPICAL], DEFAULTS, DEFAULTS, id="what cannot be"
        ),
        pytest.param(
            [figures(SLOW, nbytes=1 << 20)] * 5,
            DEFAULTS,
            replace(SLOW, message_s=DEFAULTS.message_s),
            id="large values tell nothing of messages",
        ),
        pytest.param(
            [replace(TEN_TIMES, trip_s=inf)] * 5,
            DEFAULTS,
            replace(SLOW, hop_s=DEFAULTS.hop_s),
            id="no worker asked another one",
        ),
    ],
)
def test_costs_are_what_the_newest_flows_tell_if_that_is_another_order(
    flows: list[MemberFigures], before: FlowCosts, after: FlowCosts
) -> None:
    costs = learnt(before, flows)
    assert [costs.task_s, costs.message_s, costs.hop_s] == pytest.approx(
        [after.task_s, after.message_s, after.hop_s]
    )


RANKS = replace(TYPICAL, trip_s=inf)


@every(
    ("told", "later", "hop_s"),
    [
        pytest.param([], 0.0, DEFAULTS.hop_s, id="no flow yet"),
        pytest.param([(0.0, TEN_TIMES)] * 3, BELIEVED_S / 2, SLOW.hop_s, id="three slow flows"),
        pytest.param([(0.0, TEN_TIMES)] * 3, BELIEVED_S, DEFAULTS.hop_s, id="and nothing for long"),
        pytest.param(
            [(0.0, TEN_TIMES)] * 3 + [(BELIEVED_S, TEN_TIMES)], 0.0, DEFAULTS.hop_s, id="flows long ago do not count"
        ),
        pytest.param(
            [(0.0, TEN_TIMES)] * 3 + [(BELIEVED_S / 2, RANKS)] * 9, BELIEVED_S / 2, DEFAULTS.hop_s,
            id="a training renews nothing",
        ),
        pytest.param([(0.0, TEN_TIMES), (1.0, RANKS), (2.0, RANKS)] * 3, 0.0, SLOW.hop_s, id="nor hides what is told"),
    ],
)  # fmt: skip
def test_costs_are_believed_for_a_while(
    told: list[tuple[float, MemberFigures]], later: float, hop_s: float
) -> None:
    believed, now = BelievedCosts(0.0), 0.0
    for now, one in told:
        believed.learn(one, now)
    assert believed.at(now + later).hop_s == pytest.approx(hop_s)


def test_what_members_did_is_added_up() -> None:
    one = MemberFigures(1, 2, 3, 4.0, 5, 6, 7.0, 8.0, 9.0, trip_s=0.5)
    both = MemberFigures.summed([one, replace(one, trip_s=0.25)])
    assert both == MemberFigures(2, 4, 6, 8.0, 10, 12, 14.0, 16.0, 18.0, trip_s=0.25)
