"""What a worker gives away to another worker of its flow, and whom a worker without tasks asks."""

from __future__ import annotations

import pytest

from dask_ferro.policy.stealing.peers import FIRST_S, LOST_S, MOST_S, Thief, gift

KB, MB = 1e3, 1e6


@pytest.mark.parametrize(
    ("nbytes", "ready", "seconds", "running", "threads", "count"),
    [
        pytest.param([KB] * 8, 8, 0.01, 0.0, 1, 4, id="half of what waits"),
        pytest.param([KB], 1, 0.01, 0.0, 1, 1, id="the only ready task, behind one that has just begun"),
        pytest.param([KB], 1, 5e-4, 2e-4, 1, 0, id="not a task that begins soon"),
        pytest.param([KB], 1, 5e-4, 1.0, 1, 1, id="a task behind one that takes longer than others"),
        pytest.param([KB] * 8, 8, 5e-5, 0.0, 1, 0, id="not a task that takes less time than its move"),
        pytest.param([KB] * 8, 8, 2e-4, 0.0, 1, 4, id="short tasks, if enough of them wait"),
        pytest.param([KB] * 2, 2, 2e-4, 0.0, 1, 0, id="not short tasks that begin before they would arrive"),
        pytest.param([100 * MB] * 8, 8, 0.01, 0.0, 1, 0, id="not what takes longer to send than it waits"),
        pytest.param([20 * MB] * 8, 8, 0.01, 0.0, 1, 2, id="as many as arrive in time"),
        pytest.param([KB] * 8, 8, 1e-3, 0.0, 16, 0, id="not where many threads begin all of them soon"),
        pytest.param([], 0, 0.01, 1.0, 1, 0, id="nothing of nothing"),
    ],
)
def test_gift(
    nbytes: list[float], ready: int, seconds: float, running: float, threads: int, count: int
) -> None:
    assert gift(nbytes, ready, seconds, running, threads) == count


def asked(thief: Thief, now: float) -> int:
    """Let a thief ask as soon as it does, and return whom."""
    thief.idle(now)
    victim = thief.victim(now + thief.seconds(now))
    assert victim is not None
    return victim


def test_a_thief_asks_one_at_a_time_and_again_if_there_is_no_answer() -> None:
    thief = Thief([1, 2], 0)
    thief.idle(0.0)
    assert thief.victim(FIRST_S / 2) is None
    assert thief.victim(FIRST_S) in (1, 2)
    assert thief.victim(FIRST_S + LOST_S / 2) is None
    assert thief.victim(FIRST_S + LOST_S) in (1, 2)


def test_a_thief_asks_its_last_victim_first() -> None:
    thief = Thief(range(100), 0)
    victim = asked(thief, 0.0)
    thief.answered(victim, 3, 1.0)
    assert asked(thief, 2.0) == victim
    thief.answered(victim, 0, 2.5)
    assert asked(thief, 3.0) != victim


def test_a_thief_waits_longer_after_each_answer_without_tasks() -> None:
    thief, pauses = Thief([1], 0), []
    for now in range(10):
        asked(thief, now)
        thief.answered(1, 0, now)
        pauses.append(thief.seconds(now))
    assert pauses == pytest.approx([min(FIRST_S * 2**n, MOST_S) for n in range(1, 11)])
    asked(thief, 10)
    thief.answered(1, 1, 10)
    thief.idle(10)
    assert thief.seconds(10) == pytest.approx(FIRST_S)


def test_a_thief_asks_nobody_whose_tasks_have_ended() -> None:
    thief = Thief([1, 2], 0)
    thief.answered(asked(thief, 0.0), 1, 0.0)
    thief.ended(1)
    assert {asked(thief, float(now)) for now in range(1, 5)} == {2}
    thief.ended(2)
    assert thief.seconds(9.0) == float("inf")
    assert thief.victim(9.0) is None
