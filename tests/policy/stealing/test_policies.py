"""Who takes which task from whom, as tables of claims; one suite over all policies first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dask_ferro.policy.facts import Key, Outcome, TaskFacts, Worker
from dask_ferro.policy.stealing.informed import (
    InformedPolicy,
    Policy,
    StealingParameters,
    StealingState,
    adapt,
    is_starving,
    threshold_of,
)
from dask_ferro.policy.stealing.last_victim import LastVictim
from dask_ferro.policy.stealing.policies import NoStealing, make_policy
from tests.policy.facts import MB, Stand, decided, needs, stand, task, ways

P = StealingParameters(
    threshold=0.01, reach=0.1, margin=0.002, shortest=0.002, tries=8,
)  # fmt: skip
INFORMED = InformedPolicy(P)
LAST_VICTIM = LastVictim(P)
POLICIES = [
    pytest.param(INFORMED, id="informed"),
    pytest.param(LAST_VICTIM, id="last-victim"),
    pytest.param(NoStealing(P), id="none"),
]
Ways = list[tuple[Key, str, str]]


def many(count: int, seconds: float = 0.05, **facts: object) -> list:
    """Tasks t0, t1, ... of which t0 would start last."""
    return [task(f"t{n}", seconds, **facts) for n in range(count)]


def moves(
    policy: Policy, *stands: Stand, state: StealingState | None = None, hungry: Sequence[str] | None = None
) -> Ways:
    """What a policy moves."""
    return ways(decided(policy, stands, state, hungry))


# -- of every policy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "stands",
    [
        pytest.param([], id="an empty cluster"),
        pytest.param([stand("a", *many(9), running=1.0)], id="a lone worker"),
        pytest.param([stand("a"), stand("b")], id="idle workers only"),
        pytest.param([stand(a, *many(3), running=0.05) for a in "abc"], id="balanced queues"),
        pytest.param([stand(a, running=0.05) for a in "abc"], id="one task each and no queue"),
        pytest.param([stand("a", running=9.0), stand("b")], id="what runs"),
        pytest.param([stand("a", *many(9), running=1.0), stand("b", accepts=False)], id="for a thief that is paused"),
        pytest.param([stand("a", *many(9), running=1.0), stand("b", task("own"), running=0.0)],
            id="for a worker that has a queue of its own"),
        pytest.param([stand("a", *many(9), running=1.0), stand("b", running=5.0)],
            id="for a worker that is busy for long"),
        pytest.param([stand("a", *many(9, allowed=frozenset({"a"})), running=1.0), stand("b")],
            id="what may run only where it is"),
        pytest.param([stand("a", *many(9, allowed=frozenset()), running=1.0), stand("b")], id="what may run nowhere"),
        pytest.param([stand("a", *many(9, origins=("b", "c")), running=1.0), stand("b"), stand("c")],
            id="a task back to where it came from"),
    ],
)  # fmt: skip
def test_does_not_move(policy: Policy, stands: Sequence[Stand]) -> None:
    assert moves(policy, *stands) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_moves_nothing_for_those_that_are_not_hungry(policy: Policy) -> None:
    assert moves(policy, stand("a", *many(9), running=1.0), stand("b"), hungry=[]) == []


@pytest.mark.parametrize("policy", [INFORMED, LAST_VICTIM])
def test_a_restriction_is_a_must_and_the_rest_moves(policy: Policy) -> None:
    mixed = [task("no", allowed=frozenset({"a", "c"})), task("yes", allowed=frozenset({"b"})), *many(6)]
    found = moves(policy, stand("a", *mixed, running=1.0), stand("b"))
    assert found[0] == ("yes", "a", "b")
    assert "no" not in [key for key, _, _ in found]


@pytest.mark.parametrize("policy", [INFORMED, LAST_VICTIM])
def test_two_thieves_never_take_the_same_task(policy: Policy) -> None:
    found = moves(policy, stand("a", *many(20), running=1.0), stand("b"), stand("c"))
    assert {thief for _, _, thief in found} == {"b", "c"}
    assert len({key for key, _, _ in found}) == len(found)


@pytest.mark.parametrize(
    ("name", "kind"), [("informed", InformedPolicy), ("last-victim", LastVictim), ("none", NoStealing)]
)
def test_a_policy_is_found_by_its_name(name: str, kind: type) -> None:
    policy = make_policy(name, P, 7)
    assert (type(policy), policy.parameters, getattr(policy, "seed", 7)) == (kind, P, 7)


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="got 'greedy', wanted one of informed, last-victim, none"):
        make_policy("greedy", P)


# -- InformedPolicy: which tasks, and how many -------------------------------------------------------------------

UNKNOWN = {"known": False}


@pytest.mark.parametrize(
    ("stands", "wanted"),
    [
        pytest.param([stand("a", *many(8), running=0.05), stand("b")], ["t0", "t1"],
            id="takes the last to start first, up to its reach"),
        pytest.param([stand("a", *many(8, 0.5), running=0.5), stand("b")], ["t0"], id="takes one task, however long"),
        pytest.param([stand("a", *many(60, 0.004), running=0.0), stand("b")], [f"t{n}" for n in range(25)],
            id="takes many short ones at once"),
        pytest.param([stand("a", task("last"), running=0.0), stand("b")], [],
            id="leaves the only waiting task to a victim that would run dry"),
        pytest.param([stand("a", task("last"), running=0.06), stand("b")], ["last"],
            id="takes the only waiting task of a victim that is busy for longer"),
        pytest.param([stand("a", *many(9, 0.001), running=0.009), stand("b")], [],
            id="a task of 1 ms stays where it starts within a few times what its move costs"),
        pytest.param([stand("a", *many(9, 0.001), running=0.1), stand("b")], [f"t{n}" for n in range(9)],
            id="tasks of 1 ms move from behind one that runs for long"),
        pytest.param([stand("a", *many(30, 0.001), running=0.0), stand("b")], [f"t{n}" for n in range(10)],
            id="of a long queue of short tasks those move that would wait for long"),
        pytest.param([stand("a", task("short", 0.001), task("long", 0.006), running=0.012), stand("b")], ["long"],
            id="goes past a short one"),
        pytest.param([stand("a", task("t"), running=0.0105), stand("b", running=0.009)], [],
            id="a gain under the margin is none"),
        pytest.param([stand("a", task("t"), running=0.0115), stand("b", running=0.009)], ["t"],
            id="a gain over the margin is one"),
        pytest.param([stand("a", task("t"), running=0.051), stand("b", slowness=3.0)], [],
            id="a slow thief finishes later"),
        pytest.param([stand("a", task("t"), running=0.051, slowness=3.0), stand("b")], ["t"],
            id="a slow victim is worth leaving"),
        pytest.param([stand("a", *many(4, origins=("c",)), running=1.0), stand("b"), stand("c", running=1.0)],
            ["t0", "t1"], id="a moved task moves on, if not back"),
    ],
)  # fmt: skip
def test_one_thief_takes(stands: Sequence[Stand], wanted: list[str]) -> None:
    assert [key for key, _, _ in moves(INFORMED, *stands)] == wanted


@pytest.mark.parametrize(
    ("tasks", "wanted"),
    [
        pytest.param([task("far", inputs=(needs(MB, "a"),)), task("near", inputs=(needs(MB, "b"),))], "near",
            id="the one whose inputs it holds"),
        pytest.param([task("large", inputs=(needs(2 * MB, "a"),)), task("small", inputs=(needs(MB, "a"),))], "small",
            id="the cheaper of two"),
        pytest.param([task("last"), task("first")], "last", id="of equally cheap ones the last to start"),
        pytest.param([task("costly", inputs=(needs(100 * MB, "a"),)), task("free")], "free",
            id="not the one whose transfer takes longer than it gains"),
        pytest.param([task("likes a", preferred=frozenset({"a"})), task("likes b", preferred=frozenset({"b"}))],
            "likes b", id="the one that does not prefer to stay"),
    ],
)  # fmt: skip
def test_of_two_tasks_a_thief_takes(tasks: list, wanted: str) -> None:
    assert moves(INFORMED, stand("a", *tasks, running=0.0), stand("b"))[0] == (wanted, "a", "b")


def test_a_transfer_that_costs_more_than_it_gains_keeps_a_task() -> None:
    wait = task("t", 0.05, inputs=(needs(10 * MB, "a"),))  # 0.1 s to move
    costs = 0.1 * (1 + P.burden) + P.margin
    assert moves(INFORMED, stand("a", wait, running=0.99 * costs), stand("b")) == []
    assert moves(INFORMED, stand("a", wait, running=1.01 * costs), stand("b")) == [("t", "a", "b")]


def test_a_task_whose_victim_fetches_inputs_leaves_only_for_a_worker_that_has_them() -> None:
    """What takes so long already would take as long to another worker."""
    for waited, holders, expected in ((0.001, "c", True), (0.2, "c", False), (0.2, "b", True)):
        wait = task("t", 0.05, inputs=(needs(MB, holders),), waited=waited)
        found = moves(INFORMED, stand("a", wait, running=0.15), stand("b"), stand("c", running=1.0))
        assert (found == [("t", "a", "b")]) is expected


@pytest.mark.parametrize(
    ("stands", "wanted"),
    [
        pytest.param([stand("a", *many(1, known=False, waited=0.01), running=0.6), stand("b")], 0,
            id="stays until it has waited"),
        pytest.param([stand("a", *many(1, **UNKNOWN), running=1.0), stand("b")], 1, id="leaves what runs for long"),
        pytest.param([stand("a", *many(4, **UNKNOWN), running=1.0), stand("b")], 1, id="leaves a real queue"),
        pytest.param([stand("a", *many(4, known=False, origins=("c",)), running=0.5), stand("b")], 0,
            id="moves but once"),
        pytest.param([stand("a", *many(12, 0.05, **UNKNOWN)[:1], *many(1, 0.05), running=0.5), stand("b")], 1,
            id="hides no known one"),
    ],
)  # fmt: skip
def test_a_task_of_unknown_duration(stands: Sequence[Stand], wanted: int) -> None:
    guessed = [s._replace(queue=tuple(t._replace(seconds=0.5 if not t.known else 0.05) for t in s.queue))
               for s in stands]  # fmt: skip
    assert len(moves(INFORMED, *guessed)) == wanted


def test_unknown_ones_at_the_end_of_a_queue_hide_no_known_one() -> None:
    queue = [task(("guess", n), 0.5, known=False, origins=("c",)) for n in range(20)]
    found = moves(INFORMED, stand("a", *queue, task("known"), running=1.0), stand("b"))
    assert found == [("known", "a", "b")]


def test_at_most_so_many_tasks_are_weighed_for_a_move() -> None:
    costly = [task(("costly", n), inputs=(needs(100 * MB, "a"),)) for n in range(P.tries)]
    assert moves(INFORMED, stand("a", *costly, task("free"), running=0.2), stand("b")) == []
    assert moves(INFORMED, stand("a", *costly[1:], task("free"), running=0.2), stand("b")) != []


# -- InformedPolicy: whose, and for whom -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stands", "first", "count"),
    [
        pytest.param([stand("a", *many(3), running=0.1), stand("b", task("x"), *many(9), running=0.1), stand("c")],
            ("x", "b", "c"), 2, id="from the fullest victim first"),
        pytest.param([stand("a", *many(9, allowed=frozenset({"a"})), running=0.1),
            stand("b", task("x"), task("y"), running=0.1), stand("c")], ("x", "b", "c"), 2,
            id="from the next victim when the first may not give"),
        pytest.param([stand("a", *many(4), running=0.05), stand("b", running=0.009), stand("c")], ("t0", "a", "c"), 3,
            id="for the first to run dry first"),
        pytest.param([stand("a", *many(4), running=0.0), *(stand(t) for t in "bcdefg")], ("t0", "a", "b"), 3,
            id="and leave a victim its threshold, for many thieves together"),
        pytest.param([stand("a", *many(30, 0.5), running=0.5), stand("b", nthreads=4)], ("t0", "a", "b"), 4,
            id="one for each thread of a thief"),
        pytest.param([stand("a", task("t", 0.001), accepts=False), stand("b")], ("t", "a", "b"), 1,
            id="from a paused victim, even its last short one"),
    ],
)  # fmt: skip
def test_tasks_move(stands: Sequence[Stand], first: tuple[Key, str, str], count: int) -> None:
    found = moves(INFORMED, *stands)
    assert (found[0], len(found)) == (first, count)


def test_work_is_spread_over_all_thieves() -> None:
    found = moves(INFORMED, stand("a", *many(30, 0.2), running=0.2), *(stand(t) for t in "bcdef"))
    assert sorted(thief for _, _, thief in found) == ["b", "c", "d", "e", "f"]


def test_a_thief_with_a_lower_threshold_waits_for_longer() -> None:
    stands = [stand("a", *many(9), running=0.1), stand("b", running=0.02)]
    assert moves(INFORMED, *stands) == []
    assert moves(INFORMED, *stands, state=StealingState(thresholds={"b": 0.05})) != []


def test_a_victim_with_a_higher_threshold_keeps_more() -> None:
    stands = [stand("a", *many(3), running=0.05), stand("b")]
    assert moves(INFORMED, *stands) != []
    assert moves(INFORMED, *stands, state=StealingState(thresholds={"a": 0.19})) == []


# -- the threshold -----------------------------------------------------------------------------------------


def outcome(kind: str, seconds: float = 0.0) -> Outcome:
    return Outcome(kind, "v", "t", seconds)


def after(*outcomes: Outcome, state: StealingState = StealingState()) -> float:  # noqa: B008
    """The thief's threshold after what became of its moves."""
    return threshold_of(adapt(state, outcomes, P), "t", P)


@pytest.mark.parametrize("first", [0.001, 0.01, 0.25])
def test_a_threshold_follows_the_time_from_request_to_start(first: float) -> None:
    settled = after(*[outcome("started", 0.02)] * 40, state=StealingState(thresholds={"t": first}))
    assert settled == pytest.approx(0.02, rel=0.01)


def test_a_threshold_is_bounded() -> None:
    assert after(*[outcome("started", 9.0)] * 50) == pytest.approx(0.25)


def test_a_threshold_is_of_one_worker() -> None:
    state = adapt(StealingState(), (outcome("started", 0.02),), P)
    assert (threshold_of(state, "v", P), list(state.thresholds)) == (P.threshold, ["t"])


def test_a_success_is_remembered_until_a_failure() -> None:
    started = adapt(StealingState(), (outcome("started", 0.01),), P)
    assert started.victims == {"t": "v"}
    assert adapt(started, (outcome("refused"),), P).victims == {}


def test_nothing_heard_is_nothing_learned() -> None:
    state = StealingState(thresholds={"t": 0.1})
    assert adapt(state, (), P) is state


# -- LastVictim --------------------------------------------------------------------------------------------


FULL = [stand(a, *many(8), running=1.0) for a in "abcdefgh"] + [stand("t")]
# Chance alone would hardly find b.
HIDDEN = [stand("a", running=1.0), stand("b", *many(8), running=1.0), stand("t"),
          *(stand(f"x{n}", running=1.0) for n in range(50))]  # fmt: skip
# Each worker's last victim is the next one, and only the last of them has anything.
CHAIN = [stand(a, running=1.0) for a in "abcd"] + [stand("e", *many(8), running=1.0), stand("t")]
VICTIMS = {"t": "a", "a": "b", "b": "c", "c": "d", "d": "e"}


@pytest.mark.parametrize(
    ("stands", "hops", "victims", "asked"),
    [
        *(pytest.param(FULL, 3, {"t": victim}, {victim}, id=f"the last victim, {victim}") for victim in "abcdefgh"),
        pytest.param(HIDDEN, 3, {"t": "a", "a": "b"}, {"b"}, id="the last victim's own"),
        pytest.param(CHAIN, 3, VICTIMS, set(), id="nobody after so many hops"),
        pytest.param(CHAIN, 4, VICTIMS, {"e"}, id="one hop further"),
        pytest.param([FULL[0], FULL[-1]], 40, {"t": "gone"}, {"a"}, id="no victim that left"),
    ],
)  # fmt: skip
def test_a_request_asks(stands: list[Stand], hops: int, victims: dict[str, str], asked: set[str]) -> None:
    found = moves(LastVictim(P, hops=hops), *stands, state=StealingState(victims=victims), hungry=["t"])
    assert {victim for _, victim, _ in found} == asked


@pytest.mark.parametrize(
    ("stands", "taken"),
    [
        pytest.param([stand("a", *many(9), running=1.0), stand("t")], [(f"t{n}", "t") for n in range(4)],
            id="half of what waits, the last to start first"),
        pytest.param([stand("a", *many(9), running=1.0), stand("t"), stand("u")],
            [*((f"t{n}", "t") for n in range(4)), ("t4", "u"), ("t5", "u")], id="the next thief half of what is left"),
        pytest.param([stand("a", task("x"), running=1.0), stand("t")], [], id="not a lone one"),
    ],
)  # fmt: skip
def test_of_a_last_victim_thieves_take(stands: list[Stand], taken: list[tuple[Key, str]]) -> None:
    found = moves(LAST_VICTIM, *stands, state=StealingState(victims={"t": "a", "u": "a"}))
    assert [(key, thief) for key, _, thief in found] == taken


def test_chance_asks_everyone_in_turn() -> None:
    turns = (moves(LAST_VICTIM, *FULL, state=StealingState(turns=turn), hungry=["t"]) for turn in range(200))
    assert {victim for found in turns for _, victim, _ in found} == set("abcdefgh")


def test_another_seed_asks_others() -> None:
    found = {str(moves(LastVictim(P, seed=seed), *FULL, hungry=["t"])) for seed in range(20)}
    assert len(found) > 4


@pytest.mark.parametrize(
    ("row", "is_thief"),
    [
        pytest.param({"starts_in": 0.0}, True, id="one with nothing to do"),
        pytest.param({"starts_in": 0.004}, True, id="one that will soon have nothing to do"),
        pytest.param({"starts_in": 0.006}, False, id="not one with more than its threshold"),
        pytest.param({"starts_in": 0.004, "unlocks": True}, False, id="not one about to make work for itself"),
        pytest.param({"starts_in": 0.0, "unlocks": True}, True, id="one with a free thread, whatever it makes"),
        pytest.param({"starts_in": 0.0, "accepts": False}, False, id="not a paused one"),
        pytest.param({"starts_in": 0.001, "waiting": 1, "busy": 1}, False, id="not one with a queue"),
        pytest.param({"starts_in": 0.0, "waiting": 1, "busy": 0}, True, id="one whose queue waits for resources"),
    ],
)  # fmt: skip
def test_who_is_a_thief(row: dict[str, Any], is_thief: bool) -> None:
    assert is_starving(stand("w").worker._replace(**row), 0.005) is is_thief


# -- nothing waits for more than a small multiple of its move ----------------------------------------------

COST = P.shortest + 246_000 / (100 * MB)  # of what reads 246 kB that lie elsewhere


def _behind(waiting: TaskFacts, seconds: float) -> Ways:
    """What moves to an idle worker, of one task that is projected to wait, or seen to have waited, for so long."""
    if waiting.origins or waiting.device != "cpu" or not waiting.known:
        waiting = waiting._replace(overdue=seconds, waited=seconds)
    return moves(INFORMED, stand("v", waiting, running=seconds), stand("w"))


@pytest.mark.parametrize(
    ("waiting", "bears"),
    [
        pytest.param(task("t", 0.0), P.bears * P.shortest, id="a short one"),
        pytest.param(task("t", 0.00058, inputs=(needs(246_000, "v"),)), P.bears * COST, id="and its input lies there"),
        pytest.param(task("t", 0.5, known=False), P.bears * P.shortest, id="one of unknown duration"),
        pytest.param(task("t", 0.5, known=False, inputs=(needs(20 * MB, "v"),)), 0.2 * (1 + P.burden) + P.margin,
            id="with a large input"),
        pytest.param(task("t", 0.5, known=False, origins=("x",)), 2 * P.bears * P.shortest, id="that was moved"),
        pytest.param(task("t", 0.0, origins=("w",)), 2 * P.bears * P.shortest, id="one that came from there"),
        pytest.param(task("t", 0.0, origins=("w", "x", "w")), 8 * P.bears * P.shortest, id="and went to and fro"),
        pytest.param(task("t", 0.5, device="gpu"), P.bears * P.shortest, id="unknown on such a device"),
    ],
)  # fmt: skip
def test_a_task_moves_when_it_waits_for_a_few_times_its_move(waiting: TaskFacts, bears: float) -> None:
    assert _behind(waiting, 0.99 * bears) == []
    assert _behind(waiting, 1.01 * bears) == [("t", "v", "w")]


@pytest.mark.parametrize("policy", [INFORMED, LAST_VICTIM])
@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({}, id="alone in its queue"),
        pytest.param({"known": False}, id="of unknown duration"),
        pytest.param({"origins": ("w",)}, id="that came from the thief"),
        pytest.param({"inputs": (needs(MB, "v"),)}, id="whose input lies there"),
    ],
)
def test_an_overdue_task_moves_whatever_was_projected(policy: Policy, facts: dict[str, Any]) -> None:
    victim = stand("v", task("t", 0.001, overdue=1.0, **facts), running=0.001)
    assert moves(policy, victim, stand("w")) == [("t", "v", "w")]


def test_a_task_that_waits_for_resources_moves_to_where_they_are_free() -> None:
    """A thread of its worker has nothing to do: it would start at once, were the resource there."""
    held = task("t", 0.1, allowed=frozenset({"w"}), blocked=1.0)
    row = Worker("v", "h", "cpu", 2, starts_in=0.0, busy=1, waiting=1)
    assert moves(INFORMED, Stand(row, (held,)), stand("w")) == [("t", "v", "w")]
    assert moves(INFORMED, Stand(row, (held._replace(blocked=0.001),)), stand("w")) == []
