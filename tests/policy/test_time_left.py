"""Workers whose end is known: the tasks that they get, and the data that leave them first.  Tables of claims."""

from __future__ import annotations

from math import inf

import pytest

from dask_ferro.policy.facts import TaskFacts
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.placement import PlacementParameters, Wait
from dask_ferro.policy.stealing.informed import InformedPolicy, Policy, StealingParameters
from dask_ferro.policy.stealing.last_victim import LastVictim
from tests.policy.facts import MB, Stand, decided, free_links, ledger, needs, stand, task, ways, where

SPARE = 1.0
PLACEMENT = PlacementParameters(margin=0.002, light=MB, spare=SPARE)
PARAMETERS = StealingParameters(threshold=0.01, reach=0.1, margin=0.002, shortest=0.002, spare=SPARE)
INFORMED = InformedPolicy(PARAMETERS)
# Of 8 s, whose input takes 1 s to move; and one of unknown duration.
LONG = task("t", 8.0)
HELD = task("t", 8.0, inputs=(needs(100 * MB, "a"),))
GUESS = task("t", 8.0, known=False)


# -- placement ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready", "stands", "fresh", "wanted"),
    [
        pytest.param(LONG, [stand("a", ends_in=8.9), stand("b", running=5.0, ends_in=60.0)], 0.0, "b",
            id="goes past a worker that ends before it"),
        pytest.param(LONG, [stand("a", ends_in=9.0), stand("b", running=5.0, ends_in=60.0)], 0.0, "a",
            id="goes where the time just suffices"),
        pytest.param(LONG, [stand("a", running=2.0, ends_in=10.0), stand("b", running=5.0)], 0.0, "b",
            id="counts what runs before it"),
        pytest.param(LONG, [stand("a", slowness=2.0, ends_in=12.0), stand("b", running=5.0)], 0.0, "b",
            id="counts how slow the worker is"),
        pytest.param(HELD, [stand("a", ends_in=5.0), stand("b", ends_in=9.5), stand("c", ends_in=60.0)], 0.0, "c",
            id="counts its inputs' way, and leaves their holder"),
        pytest.param(task("t", 8.0, preferred=frozenset("a")), [stand("a", ends_in=5.0), stand("b")], 0.0, "b",
            id="gives up what it likes for it"),
        pytest.param(LONG, [stand("a", ends_in=5.0)], 9.0, Wait("reserved_for_new_worker"),
            id="waits for a fresh worker"),
        pytest.param(LONG, [stand("a", ends_in=5.0)], 8.9, "a", id="waits for none that ends before it too"),
        pytest.param(LONG, [stand("a", ends_in=7.0, running=4.0), stand("b", ends_in=5.0)], 0.0, "b",
            id="goes where it ends first, when no worker would join"),
        pytest.param(GUESS, [stand("a", ends_in=1.0)], 60.0, "a", id="of unknown length goes anywhere"),
    ],
)  # fmt: skip
def test_a_task(ready: TaskFacts, stands: list[Stand], fresh: float, wanted: str | Wait) -> None:
    assert where(PLACEMENT.choose(ready, [s.worker for s in stands], free_links(), {}, fresh)) == wanted


# -- stealing ----------------------------------------------------------------------------------------------


def many(count: int, seconds: float, **facts: object) -> list[TaskFacts]:
    return [task(f"t{n}", seconds, **facts) for n in range(count)]


@pytest.mark.parametrize("policy", [INFORMED, LastVictim(PARAMETERS)], ids=["informed", "last-victim"])
@pytest.mark.parametrize(
    ("ends_in", "taken"), [pytest.param(3.9, False, id="stays"), pytest.param(4.1, True, id="moves")]
)
def test_by_the_thief_s_time_a_task_of_3_s(policy: Policy, ends_in: float, taken: bool) -> None:
    stands = [stand("a", *many(4, 3.0), running=1.0), stand("b", ends_in=ends_in)]
    assert bool(decided(policy, stands)) is taken


def test_a_worker_that_ends_gives_what_it_cannot_do_and_keeps_the_rest() -> None:
    stands = [stand("a", *many(6, 1.0), running=0.0, ends_in=4.5), *(stand(t) for t in "bcdef")]
    found = ways(decided(INFORMED, stands, hungry="bcdef"))
    assert {key for key, _, _ in found} >= {"t0", "t1", "t2"}


# -- the ledger --------------------------------------------------------------------------------------------


def filled(workers: int) -> Ledger:
    """Workers of one thread that each run a task of a second: w0 starts one first, and ends first."""
    book = ledger({f"w{n}": 1 for n in range(workers)}, p=1.0)
    for n in range(workers):
        book.assign(0.0, n, f"w{n}", "p", 0, annotated=1.0 + n / 100)
        book.set_end(f"w{n}", 10.0 + n)
    return book


def test_an_end_is_as_far_away_as_the_clock_says() -> None:
    book = ledger({"a": 1, "b": 1})
    book.set_end("a", 100.0)
    assert [book.worker(w, 40.0).ends_in for w in "ab"] == [60.0, inf]
    book.set_end("a", None)
    assert (book.worker("a", 40.0).ends_in, book.ends) == (inf, {})


def test_an_end_may_be_told_before_the_worker_comes_and_goes_with_it() -> None:
    book = ledger({})
    book.set_end("a", 5.0)
    book.add_worker("a", 1)
    assert book.worker("a", 1.0).ends_in == 4.0
    book.remove_worker("a")
    book.add_worker("a", 1)
    assert book.worker("a", 1.0).ends_in == inf


@pytest.mark.parametrize("workers", [5, 40], ids=["a few workers", "many workers"])
@pytest.mark.parametrize(
    ("lasting", "wanted"),
    [
        pytest.param(0.0, ["w0", "w1"], id="all, when no matter how long"),
        pytest.param(11.5, ["w3", "w4"], id="those that last"),
        pytest.param(100.0, [], id="none, when none lasts"),
    ],
)
def test_the_soonest_are(workers: int, lasting: float, wanted: list[str]) -> None:
    assert [w.address for w in filled(workers).soonest(0.0, 2, lasting=lasting)] == wanted
