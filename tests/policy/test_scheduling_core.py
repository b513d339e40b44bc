"""What the core decides about each event, as tables and stories without a cluster; and that all of it are values."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import pytest

from dask_ferro.policy import scheduling_core as module
from dask_ferro.policy.events import (
    AcceptsTasks,
    Ask,
    Event,
    HandOver,
    Hurry,
    Instruction,
    LoopMeasured,
    MessagesSent,
    MoveOrdered,
    PlaceAgain,
    RequestSettled,
    RequestUnsent,
    RequestWithdrawn,
    SchedulerRestarted,
    StealAnswered,
    StealCompleted,
    StealingSwitched,
    TaskAssigned,
    TaskFinished,
    Tick,
    Wake,
    WakeDue,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from dask_ferro.policy.facts import Key, Move, Outcome
from dask_ferro.policy.scheduling_core import SchedulingCore
from dask_ferro.policy.stealing.informed import Policy, StealingParameters
from dask_ferro.policy.stealing.policies import POLICIES, make_policy
from tests.policy.facts import FakeFacts

P = StealingParameters(threshold=0.01)


class Scene:
    """A core, and what it wanted done by now."""

    def __init__(self, policy: Policy | None = None, **prefixes: float) -> None:
        self.facts = FakeFacts()
        self.core = SchedulingCore(self.facts, policy or make_policy("informed", P))
        for prefix, seconds in prefixes.items():
            self.core.ledger.durations.add(prefix, "cpu", seconds)
        self.history: list[tuple[Event, float, list[Instruction]]] = []

    def hear(self, *events: Event, now: float = 0.0) -> list[Instruction]:
        """Tell of events; return what they led to but for how messages are gathered."""
        told: list[Instruction] = []
        for event in events:
            decided = self.core.handle(event, now)
            self.history.append((event, now, decided))
            told += decided
        return [instruction for instruction in told if not isinstance(instruction, Hurry)]

    def workers(self, *addresses: str, nthreads: int = 1) -> None:
        self.hear(*(WorkerJoined(address, nthreads, "h") for address in addresses))

    def queue(self, address: str, keys: Iterable[Key], prefix: str = "p", now: float = 0.0) -> None:
        self.hear(*(TaskAssigned(key, address, prefix, (n,)) for n, key in enumerate(keys)), now=now)
        self.hear(MessagesSent(), now=now)

    def asked(self, *events: Event, now: float = 0.0) -> list[tuple[Key, str, str]]:
        found = self.hear(*events, now=now)
        return [(i.key, i.victim, i.thief) for i in found if isinstance(i, Ask)]


def piled(count: int = 10, seconds: float = 0.5, **options: Any) -> Scene:
    """A worker with tasks 0, 1, ... of which the first runs, and one with nothing to do."""
    scene = Scene(p=seconds, **options)
    scene.workers("a", "b")
    scene.queue("a", range(count))
    return scene


# -- when steps are taken ----------------------------------------------------------------------------------


def test_work_beside_a_thief_is_looked_at_when_events_have_gathered() -> None:
    scene = Scene(p=0.5)
    scene.workers("a", "b")
    assert scene.hear(TaskAssigned(0, "a", "p", 0), now=1.0) == []
    # The one that was asked for as "b" came is due before.
    assert scene.hear(TaskAssigned(1, "a", "p", 1), now=1.0) == []
    (due,) = {i.at for _, _, told in scene.history for i in told if isinstance(i, Wake)}
    assert due == module.COALESCE
    assert scene.asked(WakeDue(due), now=1.001) == [(1, "a", "b")]


def test_a_due_time_that_was_replaced_by_an_earlier_one_is_no_matter() -> None:
    scene = piled()
    scene.hear(WakeDue(module.COALESCE), now=0.001)
    assert scene.hear(WakeDue(module.COALESCE), now=0.002) == []


def test_a_worker_is_looked_at_just_before_it_runs_dry() -> None:
    scene = Scene(p=1.0)
    scene.workers("a", "b")
    scene.queue("b", ["own"])
    scene.queue("a", range(10))
    scene.hear(TaskFinished("own", True, 1.0), TaskAssigned("next", "b", "p", 0), MessagesSent(), now=1.0)
    (wake,) = scene.hear(Tick(), now=1.0)
    assert wake == Wake(pytest.approx(2.0 - P.threshold))
    assert scene.asked(WakeDue(wake.at), now=wake.at + 0.001) == [(9, "a", "b")]


@pytest.mark.parametrize(
    ("seconds", "tasks", "steps"),
    [
        pytest.param(0.0001, 5, 0, id="short tasks in a short queue are not looked at"),
        pytest.param(0.0001, 500, 1, id="nor is a long queue of them left alone"),
        pytest.param(0.003, 2, 1, id="one task that is worth its move is looked at"),
        pytest.param(0.5, 1, 0, id="what runs is not looked at"),
    ],
)
def test_the_gate(seconds: float, tasks: int, steps: int) -> None:
    scene = piled(tasks, seconds)
    scene.hear(Tick())
    assert scene.core.steps == steps


def test_short_tasks_behind_one_that_takes_long_are_looked_at_again_and_move() -> None:
    """The gate asks for another look by itself: no event has to come, and no tick."""
    scene = Scene(long=9.0, short=0.0001)
    scene.workers("a", "b")
    scene.queue("a", ["long"], "long")
    scene.queue("a", range(3), "short")
    now, asked = 0.0, []
    while not asked and now < 0.2:
        wakes = [i.at for _, _, told in scene.history for i in told if isinstance(i, Wake)]
        now = wakes[-1]
        asked = scene.asked(WakeDue(now), now=now)
    assert {key for key, _, _ in asked} <= {0, 1, 2}
    assert asked
    assert now < 0.2


def test_while_it_is_off_nothing_is_asked_for_but_at_a_tick() -> None:
    scene = piled()
    told = (AcceptsTasks("b", True), TaskFinished(0, True, 0.5), WakeDue(module.COALESCE))
    assert scene.hear(StealingSwitched(False), *told) == []
    assert scene.asked(Tick()) == [(9, "a", "b")]
    assert scene.hear(TaskFinished(1, True, 0.5)) == []
    assert scene.hear(StealingSwitched(True), now=5.0) == [Wake(5.0 + module.COALESCE)]


# -- what a step looks at ----------------------------------------------------------------------------------


def test_a_paused_worker_is_no_thief_until_it_runs_again() -> None:
    scene = piled()
    scene.hear(AcceptsTasks("b", False))
    assert scene.asked(Tick()) == []
    scene.hear(AcceptsTasks("b", True))
    assert scene.asked(Tick()) == [(9, "a", "b")]


def test_thieves_take_turns_where_they_are_many() -> None:
    scene = Scene(p=0.5)
    thieves = [f"t{n:03d}" for n in range(module.THIEVES + 8)]
    scene.workers("a", *thieves)
    scene.queue("a", range(3))
    scene.facts.bound.update(range(3))
    for _ in range(2):
        scene.hear(Tick())
    first, second = scene.facts.looks[1], scene.facts.looks[-1]
    assert len(first) == len(second) == module.THIEVES
    assert set(first) | set(second) == set(thieves)


def test_victims_take_turns_where_nothing_of_the_longest_queues_may_move() -> None:
    scene = Scene(p=0.5)
    victims = [f"v{n:02d}" for n in range(25)]
    scene.workers(*victims, "thief")
    for n, address in enumerate(victims):
        keys = [(address, k) for k in range(2 + n)]
        scene.queue(address, keys)
        scene.facts.bound.update(keys if n else ())  # only what waits in the shortest queue may move
    asked = [scene.asked(Tick()) for _ in range(3)]
    assert asked == [[], [], [(("v00", 1), "v00", "thief")]]


def test_a_step_describes_few_tasks_and_more_only_where_none_of_them_moves() -> None:
    scene = Scene(p=0.5)
    victims = [f"v{n:02d}" for n in range(10)]
    scene.workers(*victims, "thief")
    for address in victims:
        scene.queue(address, [(address, k) for k in range(100)])
    assert scene.asked(Tick()) != []
    few, scene.facts.described = scene.facts.described, 0
    scene.facts.bound.update(key for key in scene.core.ledger.entries)
    scene.hear(TaskFinished(("v00", 99)), WorkerLeft("thief"), WorkerJoined("other", 1, "h"))
    scene.hear(Tick())
    assert few <= 2 * P.quick
    assert scene.facts.described == 2 * P.quick + module.TASKS


def test_a_policy_that_moves_nothing_is_described_nothing() -> None:
    scene = piled(100, policy=make_policy("none", P))
    assert scene.asked(Tick()) == []
    assert scene.facts.described == 0


def test_thieves_are_served_by_the_victims_that_they_ask() -> None:
    """In one step: a quick look would show the first of those queues alone."""
    scene = Scene(make_policy("last-victim", P), p=0.001)
    thieves, victims = [f"t{n}" for n in range(4)], [f"v{n}" for n in range(4)]
    scene.workers(*victims)
    for address in victims:
        scene.queue(address, [(address, k) for k in range(200)])
    scene.workers(*thieves)
    served = {thief: victim for _, victim, thief in scene.asked(Tick())}
    # The fourth asks those that two others asked before it.
    assert len(served) == len(set(served.values())) == 3


# -- requests and what becomes of them ---------------------------------------------------------------------


def requested() -> Scene:
    """A scene in which the last task was asked for."""
    scene = piled()
    assert scene.asked(Tick()) == [(9, "a", "b")]
    return scene


@pytest.mark.parametrize(
    ("event", "kind", "instructions", "where"),
    [
        pytest.param(StealAnswered(9, "given"), "confirmed", [HandOver(9, "a", "b")], "b", id="given up"),
        pytest.param(StealAnswered(9, "kept"), "refused", [], "a", id="kept: it had started"),
        pytest.param(StealAnswered(9, "seceded"), "refused", [], "", id="seceded: it has no thread"),
        pytest.param(StealAnswered(9, "gone"), "stale", [PlaceAgain(9, "a", "b")], "", id="gone"),
        pytest.param(TaskFinished(9, True, 0.5), "stale", [], "", id="done before it was asked"),
        pytest.param(TaskFinished(9), "stale", [], "", id="taken back before it was asked"),
    ],
)
def test_what_comes_of_a_request(
    event: Event, kind: str, instructions: list[Instruction], where: str
) -> None:
    scene = requested()
    settled, *found = [i for i in scene.hear(event, now=0.1) if not isinstance(i, Wake)]
    (ask,) = [i for *_, decided in scene.history for i in decided if isinstance(i, Ask)]
    assert settled == RequestSettled(9, "a", "b", kind, 0.1, ask.gain, ask.cost)
    assert found == instructions
    counts = dict.fromkeys(("confirmed", "refused", "stale"), 0) | {kind: 1}
    assert {name: scene.core.counts[name] for name in counts} == counts
    entry = scene.core.ledger.entries.get(9)
    assert (entry.worker.address if entry is not None else "") == where


def test_a_task_is_not_given_to_a_thief_that_left_or_paused() -> None:
    for event in (WorkerLeft("b"), AcceptsTasks("b", False)):
        scene = requested()
        scene.hear(event)
        assert HandOver not in map(type, scene.hear(StealAnswered(9, "given")))
        assert scene.core.counts["stale"] == 1


def test_a_task_that_was_given_up_for_nobody_is_placed_again() -> None:
    scene = piled()
    assert scene.hear(StealAnswered(9, "given")) == [PlaceAgain(9, "", "")]
    assert scene.hear(StealAnswered(9, "kept")) == []


def test_the_end_of_a_stolen_task_tells_how_long_the_move_took() -> None:
    scene = requested()
    scene.hear(StealAnswered(9, "given"), MessagesSent(), now=0.1)
    (arrived, *_) = scene.hear(TaskFinished(9, True, 0.5), now=0.8)
    assert arrived == StealCompleted(9, "a", "b", 0.0, pytest.approx(0.3))
    assert scene.core.counts["seconds_worked"] == 0.5
    scene.hear(Tick(), now=0.9)
    assert scene.core.threshold("b") == pytest.approx(P.threshold + 0.25 * (0.25 - P.threshold))


def test_a_stolen_task_whose_second_thief_was_refused_ended_on_the_first() -> None:
    scene = requested()
    scene.hear(StealAnswered(9, "given"), MessagesSent(), now=0.1)
    scene.core.ledger.request(0.2, 9, "a")
    scene.hear(StealAnswered(9, "kept"), now=0.3)
    (arrived, *_) = scene.hear(TaskFinished(9, True, 0.5), now=0.8)
    assert arrived == StealCompleted(9, "a", "b", 0.0, pytest.approx(0.3))


def test_a_request_that_could_not_be_sent_was_none() -> None:
    scene = requested()
    scene.hear(RequestUnsent(9))
    assert (scene.core.counts["requests"], scene.core.ledger.requests) == (0, {})
    assert scene.hear(StealAnswered(9, "gone")) == [PlaceAgain(9, "", "")]


def test_a_request_of_which_nothing_is_heard_frees_its_thief_and_may_be_answered_late() -> None:
    scene = requested()
    scene.hear(RequestWithdrawn(9), now=9.0)
    assert scene.core.ledger.worker("b", 9.0).starts_in == 0.0
    assert HandOver(9, "a", "b") in scene.hear(StealAnswered(9, "given"), now=10.0)
    assert scene.core.ledger.entries[9].worker.address == "b"


def test_a_task_that_seceded_after_its_request_was_withdrawn_has_no_thread() -> None:
    scene = requested()
    scene.hear(RequestWithdrawn(9), StealAnswered(9, "seceded"), now=5.0)
    assert 9 not in scene.core.ledger.entries


def test_what_cannot_be_reserved_is_not_asked_for() -> None:
    scene = piled()
    scene.facts.refused.update(range(10))
    assert scene.asked(Tick()) == []
    assert scene.core.counts["requests"] == 0


def test_a_move_that_somebody_orders_is_asked_for_whatever_it_gains() -> None:
    scene = piled(2, 0.0001)
    assert scene.asked(MoveOrdered(Move(1, "a", "b", -1.0, 0.0))) == [(1, "a", "b")]
    assert scene.asked(MoveOrdered(Move(1, "a", "b", -1.0, 0.0))) == []  # it is on its way


def test_outcomes_that_no_step_reads_do_not_pile_up() -> None:
    scene = requested()
    request = scene.core.ledger.requests[9]
    for _ in range(3 * module.HISTORY):
        scene.core._settle("refused", request, 0.0)
    assert list(scene.core._outcomes) == [Outcome("refused", "a", "b")] * module.HISTORY
    scene.hear(Tick())
    assert len(scene.core._outcomes) == 0


def test_a_worker_that_left_is_remembered_nowhere() -> None:
    scene = requested()
    scene.hear(StealAnswered(9, "given"), TaskFinished(9, True, 0.5), Tick())
    assert "b" in scene.core.state.thresholds
    scene.hear(StealAnswered(8, "given"), TaskFinished(8, True, 0.5), WorkerLeft("b"), Tick())
    assert "b" not in scene.core.state.thresholds


def test_a_restart_forgets_tasks_and_keeps_what_they_cost() -> None:
    scene = requested()
    scene.hear(SchedulerRestarted())
    assert scene.core.ledger.entries == {}
    assert scene.core.ledger.durations.of("p", "cpu") == (0.5, True)


# -- overdue tasks ------------------------------------------------------------------------------------------------


def test_a_tick_finds_what_no_other_step_may_see() -> None:
    """One task that may move among many that may not, behind one that takes long."""
    scene = Scene(long=60.0, p=0.01)
    scene.workers("a", "b")
    scene.queue("a", ["long"], "long")
    scene.queue("a", range(40))
    scene.facts.bound.update(set(range(40)) - {3})
    found = [scene.asked(Tick(), now=5.0)]
    assert [worker.address for worker in scene.core.overdue.idle] == ["b"]
    found += [scene.asked(Tick(), now=5.0 + turn) for turn in range(5)]
    assert [(3, "a", "b")] in found


def test_a_tick_looks_at_some_of_very_many_idle_workers_at_a_time() -> None:
    scene = Scene(p=0.5)
    scene.workers(*(f"t{n:04d}" for n in range(module.MAX_IDLE + 100)))
    seen = set()
    for _ in range(2):
        scene.hear(Tick(elsewhere=True))
        assert len(scene.core.overdue.idle) == module.MAX_IDLE
        seen |= {worker.address for worker in scene.core.overdue.idle}
    assert len(seen) == module.MAX_IDLE + 100


# -- messages ----------------------------------------------------------------------------------------------


def test_messages_to_a_worker_hurry_while_it_has_little_to_do() -> None:
    scene = Scene(p=0.004)
    told = [scene.core.handle(WorkerJoined("a", 1, "h"), 0.0)]
    told += [scene.core.handle(TaskAssigned(n, "a", "p", n), 0.0) for n in range(6)]
    told += [scene.core.handle(TaskFinished(n, True, 0.004), 0.004 * n) for n in range(6)]
    hurried = [(n, i.soon) for n, found in enumerate(told) for i in found if isinstance(i, Hurry)]
    # Three that wait take 12 ms: with the fourth of them; two take 8 ms.
    assert hurried == [(0, True), (4, False), (9, True)]


def test_messages_are_gathered_while_the_loop_has_no_time_left() -> None:
    scene = Scene(p=0.004)
    scene.workers("a", "b")
    shares = [0.89, 0.95, 0.85, 0.5]  # it is over well below the bound: each change is a message a worker
    told = [scene.core.handle(LoopMeasured(share), 0.5 * n) for n, share in enumerate(shares)]
    assert told == [[], [Hurry("a", False), Hurry("b", False)], [], [Hurry("a", True), Hurry("b", True)]]
    scene.core.handle(LoopMeasured(1.0), 3.0)
    assert scene.core.handle(StealingSwitched(False), 3.0) == [Hurry("a", True), Hurry("b", True)]


# -- values ------------------------------------------------------------------------------------------------


def story(policy: Policy) -> Scene:
    """Workers that come and go, tasks that are given, moved, kept and done, and ticks."""
    scene = Scene(policy, p=0.05)
    scene.workers("a", "b", "c", nthreads=2)
    scene.queue("a", range(30))
    now = 0.0
    for turn in range(12):
        now += 0.05
        asked = scene.asked(Tick(elsewhere=turn % 2 == 0), now=now)
        for n, (key, _, _) in enumerate(asked):
            scene.hear(StealAnswered(key, ("given", "kept", "gone")[n % 3]), now=now + 0.001)
        scene.hear(
            WorkerReported("a", now, frozenset(scene.core.ledger.rows["a"].running)), MessagesSent(), now=now
        )
        running = [key for row in scene.core.ledger.rows.values() for key in row.running]
        scene.hear(*(TaskFinished(key, True, 0.05) for key in running), now=now + 0.04)
        if turn == 5:
            scene.hear(WorkerLeft("c"), WorkerJoined("d", 1, "far"), AcceptsTasks("b", False), now=now)
        if turn == 8:
            new = TaskAssigned("new", "b", "q", (0,), 0.3, {"GPU": 1.0}, 7)
            scene.hear(AcceptsTasks("b", True), new, now=now)
    return scene


@pytest.mark.parametrize("name", POLICIES)
def test_events_that_were_pickled_give_another_core_the_same_instructions(name: str) -> None:
    first = story(make_policy(name, P, 3))
    recorded = pickle.loads(pickle.dumps([(event, now) for event, now, _ in first.history]))
    other = SchedulingCore(FakeFacts(), make_policy(name, P, 3))
    other.ledger.durations.add("p", "cpu", 0.05)
    again = [other.handle(event, now) for event, now in recorded]
    assert pickle.dumps(again) == pickle.dumps([decided for _, _, decided in first.history])
    assert any(isinstance(i, Ask) for decided in again for i in decided) is (name != "none")


# -- what is set ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plenty", "soon"), [(0.01, False), (0.3, True)])
def test_messages_are_gathered_for_who_has_plenty(plenty: float, soon: bool) -> None:
    scene = Scene(make_policy("informed", StealingParameters(plenty=plenty)), p=0.1)
    scene.workers("a")
    scene.queue("a", range(3))
    hurries = [i.soon for _, _, told in scene.history for i in told if isinstance(i, Hurry)]
    assert hurries[-1] is soon


@pytest.mark.parametrize("quick", [2, 8])
def test_the_first_look_shows_a_few_tasks_for_each_thread(quick: int) -> None:
    scene = piled(60, policy=make_policy("informed", StealingParameters(threshold=0.01, quick=quick)))
    assert scene.asked(Tick(), now=0.3)
    assert scene.facts.described == 2 * quick


@pytest.mark.parametrize(("heard", "runs"), [(1.0, ["x"]), (0.05, ["first", "x"])])
def test_what_a_worker_says_it_runs_is_believed_of_what_is_older_than_the_news(
    heard: float, runs: list[str]
) -> None:
    core = SchedulingCore(FakeFacts(), make_policy("informed", P))
    given = (TaskAssigned(key, "a", "p", n) for n, key in enumerate(("first", "x")))
    for event in (WorkerJoined("a", 1, "h"), *given, MessagesSent()):
        core.handle(event, 0.0)
    core.handle(WorkerReported("a", heard, frozenset({"x"})), 1.1)
    assert sorted(core.ledger.rows["a"].running) == runs
