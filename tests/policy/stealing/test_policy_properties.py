"""What holds of the ledger after any sequence of events, and of every policy on any snapshot."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dask_ferro.policy import idle_order
from dask_ferro.policy import ledger as ledger_module
from dask_ferro.policy.estimates import is_duration
from dask_ferro.policy.facts import Outcome, Worker
from dask_ferro.policy.placement import NoWorker, PlacementParameters, Wait
from dask_ferro.policy.stealing import policies as registry
from dask_ferro.policy.stealing.informed import (
    Policy,
    StealingParameters,
    StealingState,
    adapt,
    is_starving,
    threshold_of,
)
from tests.policy.facts import Stand, decided, free_links, ledger, needs, snapshot, stand, task, where

ADDRESSES = [f"w{i}" for i in range(6)]
KEYS = ["x", "y", ("x", 0), ("x", 1), *range(14)]
addresses = st.sampled_from(ADDRESSES)


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of events; `at` says on which worker each key stands, `way` to which thief it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.book = ledger({})
        self.at: dict[object, str] = {}
        self.way: dict[object, str] = {}

    @initialize(threads=st.lists(st.integers(0, 3), min_size=3, max_size=5))
    def begin(self, threads: list[int]) -> None:
        for address, nthreads in zip(ADDRESSES, threads, strict=False):
            self.book.add_worker(address, nthreads, "h")

    # -- events

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        address=addresses, nthreads=st.integers(1, 3), device=st.sampled_from(["cpu", "gpu"]), accepts=st.booleans()
    )  # fmt: skip
    def join(self, address: str, nthreads: int, device: str, accepts: bool) -> None:
        self.book.add_worker(address, nthreads, "h", device, accepts)

    @rule(address=addresses)
    def leave(self, address: str) -> None:
        self.book.remove_worker(address)
        for key in [key for key, at in self.at.items() if at == address]:
            self.forget(key)

    @precondition(lambda self: self.book.rows)
    @rule(data=st.data(), accepts=st.booleans())
    def pause(self, data: st.DataObject, accepts: bool) -> None:
        self.book.set_accepts(data.draw(st.sampled_from(sorted(self.book.rows))), accepts)

    @rule(address=addresses, seconds=st.sampled_from([None, 0.0, 0.4, 5.0]))
    def end(self, address: str, seconds: float | None) -> None:
        self.book.set_end(address, None if seconds is None else self.now + seconds)

    @precondition(lambda self: self.book.rows)
    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True),
        prefix=st.sampled_from(["a", "b"]),
        priority=st.tuples(st.integers(0, 1), st.integers(0, 3)),
        annotated=st.sampled_from([None, None, None, 0.0, -0.0, 0.25, 1e-6, float("nan")]),
    )
    def assign(self, data, keys, prefix, priority, annotated) -> None:
        address = data.draw(st.sampled_from(sorted(self.book.rows)))
        for key in keys:
            self.forget(key)
            size = {"a": 0, "b": 1000}[prefix]
            self.book.assign(self.now, key, address, prefix, priority, annotated=annotated, nbytes=size)
            self.at[key] = address

    @precondition(lambda self: self.at)
    @rule(data=st.data(), seconds=st.sampled_from([None, 0.0, 1e-4, 0.2, 1.5]))
    def finish(self, data: st.DataObject, seconds: float | None) -> None:
        key = data.draw(st.sampled_from(list(self.at)))
        assert self.book.finish(self.now, key, seconds).key == key
        self.forget(key)

    @precondition(lambda self: len(self.book.rows) > 1 and len(self.way) < len(self.at))
    @rule(data=st.data(), last=st.booleans())
    def request(self, data: st.DataObject, last: bool) -> None:
        """Of what waits, as policies do, or of anything."""
        ends = [shown.key for address in self.book.rows for shown in self.book.queue(address, 2, self.now)]
        ends = [key for key in ends if key not in self.book.requests]
        anything = [key for key in self.at if key not in self.book.requests]
        if not anything:
            return
        key = data.draw(st.sampled_from(ends if last and ends else anything))
        thief = data.draw(st.sampled_from([a for a in sorted(self.book.rows) if a != self.at[key]]))
        self.book.request(self.now, key, thief, moving=7)
        self.way[key] = thief

    @precondition(lambda self: self.way)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.way)))
        self.book.withdraw(self.now, key)
        del self.way[key]

    @precondition(lambda self: self.book.requests)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.book.requests)))
        victim, entry, thief = self.at[key], self.book.entries[key], self.book.requests[key].thief
        here = self.book.rows.get(thief.address) is thief
        self.book.confirm(self.now, key)
        self.forget(key)
        if here:
            self.at[key] = thief.address
            assert entry.origins[-1] == victim

    @precondition(lambda self: self.book.requests)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.book.requests)))
        self.book.refuse(self.now, key)
        self.way.pop(key, None)
        assert key in self.book.rows[self.at[key]].running

    def forget(self, key: object) -> None:
        self.at.pop(key, None)
        self.way.pop(key, None)

    # -- what holds

    @invariant()
    def every_entry_stands_in_one_place(self) -> None:
        rows = self.book.rows
        assert {key: entry.worker.address for key, entry in self.book.entries.items()} == self.at
        requests = {key: request for key, request in self.book.requests.items() if not request.withdrawn}
        assert {key: request.thief.address for key, request in requests.items()} == self.way
        assert {key for key, entry in self.book.entries.items() if entry.state == "requested"} == set(
            self.way
        )
        assert all(self.book.entries[key] is request.entry for key, request in self.book.requests.items())
        places = [key for row in rows.values() for key in row.running]
        places += [entry.key for row in rows.values() for _, _, entry in row.queue]
        assert Counter([*places, *self.way]) == Counter(dict.fromkeys(self.at, 1))
        for entry in self.book.entries.values():
            assert rows[entry.worker.address] is entry.worker
            assert (
                (entry.started is not None)
                == (entry.key in entry.worker.running)
                == (entry.state == "running")
            )

    @invariant()
    def sums_equal_their_recomputation(self) -> None:
        assert self.book.waiting == sum(len(row.queue) for row in self.book.rows.values())
        for row in self.book.rows.values():
            waiting = [entry for _, _, entry in row.queue]
            requests = [r for r in self.book.requests.values() if r.thief is row and not r.withdrawn]
            incoming = [request.entry for request in requests]
            here = [*waiting, *row.running.values()]
            promised = sum(e.nbytes for e in here) + sum(r.entry.nbytes + r.moving for r in requests)
            assert row.promised == promised
            assert row.waiting_seconds == pytest.approx(sum(e.seconds for e in waiting), abs=1e-9)
            assert row.incoming == len(incoming)
            assert row.incoming_seconds == pytest.approx(sum(e.seconds for e in incoming), abs=1e-9)

    @invariant()
    def a_guess_stands_only_where_nothing_was_measured(self) -> None:
        for entry in self.book.entries.values():
            measured = (entry.prefix, entry.device) in self.book.durations.measured
            estimated = entry.annotated is not None and is_duration(entry.annotated)
            assert entry.known == (measured or estimated)

    @invariant()
    def queues_are_in_order_and_shown_last_first(self) -> None:
        for address, row in self.book.rows.items():
            order = [(priority, sequence) for priority, sequence, _ in row.queue]
            assert order == sorted(order)
            assert not row.queue or not row.accepts or len(row.running) >= row.nthreads
            assert [t.key for t in self.book.queue(address, 64, self.now)] == [
                e.key for _, _, e in reversed(row.queue)
            ]

    @invariant()
    def loads_are_sorted_and_those_of_the_workers_with_a_queue(self) -> None:
        loads = self.book._loads
        assert loads == sorted(loads)
        assert {address: load for load, address in loads} == {
            row.address: pytest.approx(row.waiting_seconds * row.slowness / row.nthreads)
            for row in self.book.rows.values()
            if row.queue
        }
        assert self.book.snapshot(self.now, []).busiest == tuple(a for _, a in reversed(loads))

    @invariant()
    def the_soonest_are_those_of_a_search_of_all(self) -> None:
        open_ = [self.book.worker(a, self.now) for a, row in self.book.rows.items() if row.accepts]
        for count in (1, 2, 4):
            found = self.book.soonest(self.now, count)
            assert [w.starts_in for w in found] == pytest.approx(_first(open_, count), abs=1e-9)
            assert len({w.address for w in found}) == len(found)
            assert all(w.accepts for w in found)

    @invariant()
    def the_soonest_that_last_are_those_of_a_search_of_all(self) -> None:
        for lasting in (0.1, 1.0):
            open_ = [self.book.worker(a, self.now) for a, row in self.book.rows.items() if row.accepts]
            having = [w for w in open_ if w.starts_in + lasting <= w.ends_in]
            found = self.book.soonest(self.now, 2, lasting=lasting)
            assert [w.starts_in for w in found] == pytest.approx(_first(having, 2), abs=1e-9)
            assert all(w.address in {h.address for h in having} for w in found)

    @invariant()
    def ends_are_those_that_were_told(self) -> None:
        for address in self.book.rows:
            at = self.book.ends.get(address, math.inf)
            assert self.book.worker(address, self.now).ends_in == pytest.approx(at - self.now)

    @invariant()
    def the_facts_of_a_worker_are_sane(self) -> None:
        for address, row in self.book.rows.items():
            worker = self.book.worker(address, self.now)
            assert worker.starts_in >= -1e-9
            assert 0 <= worker.busy <= worker.nthreads
            assert 1 / 32 <= row.slowness <= 32


def _first(workers: list[Worker], count: int) -> list[float]:
    """When so many workers of each device class start a task, the first to start first."""
    found: list[float] = []
    for device in {w.device for w in workers}:
        found += sorted(w.starts_in for w in workers if w.device == device)[:count]
    return sorted(found)


@pytest.mark.parametrize("few", [2, idle_order.SCAN_LIMIT], ids=["kept in order", "looked through"])
def test_the_ledger(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (idle_order, ledger_module):
        monkeypatch.setattr(module, "SCAN_LIMIT", few)
    skipped = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    steps = settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=skipped)
    run_state_machine_as_test(LedgerMachine, settings=steps)


# -- policies on any snapshot ------------------------------------------------------------------------------

SECONDS = st.sampled_from([0.0005, 0.003, 0.02, 0.05, 0.3])
PARAMETERS = StealingParameters(threshold=0.01, reach=0.1, margin=0.002, shortest=0.002)
# Every policy that has a name.
POLICIES: list[Policy] = [registry.make_policy(name, PARAMETERS) for name in registry.POLICIES]
policies = pytest.mark.parametrize("policy", POLICIES, ids=list(registry.POLICIES))
some = st.frozensets(addresses, max_size=4)


def _kinds(count: int) -> list[dict[str, Any]]:
    """Facts of tasks, to be drawn as a whole: drawn one by one they made the suite four times slower."""
    chance = random.Random(0)

    def some_addresses() -> frozenset[str]:
        return frozenset(chance.sample(ADDRESSES, chance.randint(0, 4)))

    return [
        {
            "seconds": chance.choice([0.0005, 0.003, 0.02, 0.05, 0.3]),
            "known": chance.random() < 0.7,
            "inputs": tuple(needs(chance.randint(0, 10**7), *some_addresses()) for _ in range(number % 3)),
            "allowed": some_addresses() if chance.random() < 0.3 else None,
            "preferred": some_addresses() if chance.random() < 0.3 else None,
            "origins": tuple(sorted(some_addresses())) if chance.random() < 0.3 else (),
        }
        for number in range(count)
    ]


queues = st.lists(st.sampled_from(_kinds(100)), max_size=7)
# Threads, seconds of what runs (None: idle, if nothing waits), slowness, and whether it is paused.
seats = st.sampled_from(
    list(itertools.product([1, 2, 3], [None, 0.0005, 0.02, 0.3], [0.5, 1.0, 3.0], [False, False, True]))
)
# Seconds that a worker has left; none of the queues above takes longer than 7 s.
ends = st.sampled_from([math.inf, math.inf, math.inf, 60.0, 2.3, 0.1])


@st.composite
def stands(draw: st.DrawFn) -> list[Stand]:
    """Up to six workers with queues of any tasks."""
    made = []
    for address, (seat, kinds, ends_in) in zip(
        ADDRESSES, draw(st.lists(st.tuples(seats, queues, ends), max_size=6)), strict=False
    ):
        nthreads, running, slowness, paused = seat
        queue = [task((address, number), **kind) for number, kind in enumerate(kinds)]
        facts = {"nthreads": nthreads, "slowness": slowness, "accepts": not paused, "ends_in": ends_in}
        made.append(stand(address, *queue, running=(running or 0.0) if queue else running, **facts))
    return made


@st.composite
def states(draw: st.DrawFn) -> StealingState:
    """What a policy may remember, also of workers that are gone."""
    return StealingState(
        thresholds=draw(st.dictionaries(addresses, st.sampled_from([0.001, 0.01, 0.25]))),
        victims=draw(st.dictionaries(addresses, addresses)),
        turns=draw(st.integers(0, 99)),
    )


kinds = st.sampled_from(["started", "refused", "stale"])
outcomes = st.lists(st.builds(Outcome, kinds, addresses, addresses, st.floats(0, 2)), max_size=3)
properties = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@policies
@properties
@given(stands=stands(), state=states(), heard=outcomes)
def test_every_move_is_legal(
    policy: Policy, stands: list[Stand], state: StealingState, heard: list[Outcome]
) -> None:
    shown, state = snapshot(stands), adapt(state, heard, PARAMETERS)
    found = decided(policy, stands, state)
    waiting = {t.key: (address, t) for address, queue in shown.queues.items() for t in queue}
    assert len({move.key for move in found}) == len(found)
    for move in found:
        victim, moved = waiting[move.key]
        thief = shown.workers[move.thief]
        assert move.victim == victim != move.thief
        assert move.thief in shown.hungry
        assert is_starving(thief, threshold_of(state, move.thief, policy.parameters))
        assert moved.allowed is None or move.thief in moved.allowed
        assert move.thief not in moved.origins
        seconds = moved.seconds * thief.slowness
        assert not moved.known or thief.has_time(thief.starts_in, seconds + policy.parameters.spare)


@properties
@given(stands=stands(), state=states())
def test_a_thief_gets_what_its_reach_admits_and_one_task_more(
    stands: list[Stand], state: StealingState
) -> None:
    shown = snapshot(stands)
    found = POLICIES[0].step(shown, state)
    seconds = {t.key: t.seconds for queue in shown.queues.values() for t in queue}
    for address in {move.thief for move in found}:
        thief = shown.workers[address]
        taken = [seconds[move.key] for move in found if move.thief == address]
        free = thief.nthreads - thief.busy
        work = sum(taken[free:-1]) * thief.slowness / thief.nthreads
        assert work <= PARAMETERS.reach or len(taken) <= free + 1


@properties
@given(stands=stands(), state=states())
def test_every_informed_move_gains(stands: list[Stand], state: StealingState) -> None:
    for move in POLICIES[0].step(snapshot(stands), state):
        assert move.gain > 0.0
        assert move.cost >= 0.0


@properties
@given(stands=stands(), state=states())
def test_no_victim_is_left_under_its_threshold(stands: list[Stand], state: StealingState) -> None:
    shown = snapshot(stands)
    moved = POLICIES[0].step(shown, state)
    for address in {move.victim for move in moved}:
        victim = shown.workers[address]
        seconds = {t.key: t.seconds for t in shown.queues[address]}
        given_away = sum(seconds[move.key] for move in moved if move.victim == address)
        left = victim.starts_in - given_away * victim.slowness / victim.nthreads
        assert not victim.accepts or left >= threshold_of(state, address, PARAMETERS) - 1e-9


@st.composite
def alike(draw: st.DrawFn) -> list[Stand]:
    """Up to six workers of equal queues."""
    seconds, running = draw(st.lists(SECONDS, max_size=5)), draw(st.none() | SECONDS)
    facts = {"nthreads": draw(st.integers(1, 4)), "running": (running or 0.0) if seconds else running}
    queues = {
        a: [task((a, n), s) for n, s in enumerate(seconds)] for a in ADDRESSES[: draw(st.integers(1, 6))]
    }
    return [stand(address, *queue, **facts) for address, queue in queues.items()]


@policies
@properties
@given(stands=alike(), state=states())
def test_nothing_moves_when_balanced(policy: Policy, stands: list[Stand], state: StealingState) -> None:
    assert decided(policy, stands, state) == ()


@policies
@properties
@given(stands=stands(), state=states(), chance=st.randoms(use_true_random=False))
def test_equal_input_gives_equal_output_and_stays_as_it_was(
    policy: Policy, stands: list[Stand], state: StealingState, chance: random.Random
) -> None:
    everyone = [s.worker.address for s in stands]
    shown = snapshot(stands, asked=policy.asks(everyone, sorted(everyone), state))
    before = copy.deepcopy((shown, state))
    found = policy.step(shown, state)
    assert (shown, state) == before
    other = shown._replace(workers=shuffled(shown.workers, chance), queues=shuffled(shown.queues, chance))
    assert policy.step(other, state) == found


@properties
@given(stands=stands(), state=states(), chance=st.randoms(use_true_random=False))
def test_the_order_in_which_workers_got_hungry_changes_no_informed_move(
    stands: list[Stand], state: StealingState, chance: random.Random
) -> None:
    shown = snapshot(stands)
    hungry, busiest = (tuple(chance.sample(a, len(a))) for a in (shown.hungry, shown.busiest))
    other = shown._replace(hungry=hungry, busiest=busiest)
    assert POLICIES[0].step(other, state) == POLICIES[0].step(shown, state)


@properties
@given(heard=outcomes, state=states())
def test_thresholds_stay_in_their_bounds(heard: list[Outcome], state: StealingState) -> None:
    for value in adapt(state, tuple(heard), PARAMETERS).thresholds.values():
        assert 0.0 <= value <= 0.25


@properties
@given(stands=stands(), chance=st.randoms(use_true_random=False), some=st.none() | some)
def test_a_placement_is_legal_and_does_not_depend_on_order(
    stands: list[Stand], chance: random.Random, some: frozenset[str] | None
) -> None:
    workers = [s.worker for s in stands]
    ready = task("t", 0.05, allowed=some, inputs=(needs(10**6, "w0"),))
    mixed = (workers, chance.sample(workers, len(workers)))
    chosen, again = (where(PlacementParameters().choose(ready, each, free_links(), {})) for each in mixed)
    open_ = {w.address for w in workers if w.accepts and (some is None or w.address in some)}
    assert chosen in open_ if open_ else chosen == NoWorker()
    assert again == chosen


@properties
@given(stands=stands(), known=st.booleans(), fresh=st.sampled_from([0.0, 1.0, 60.0]))
def test_a_known_task_is_placed_in_time_or_waits_or_has_no_choice(
    stands: list[Stand], known: bool, fresh: float
) -> None:
    workers = [s.worker for s in stands]
    ready = task("t", 0.05, known=known)
    spare = PlacementParameters().spare
    chosen = where(PlacementParameters().choose(ready, workers, free_links(), {}, fresh))
    open_ = {w.address: w for w in workers if w.accepts}
    in_time = {a for a, w in open_.items() if w.has_time(w.starts_in, 0.05 * w.slowness + spare)}
    if in_time or (open_ and not known):
        assert chosen in (in_time if known else open_)
    elif known and 0.05 + spare <= fresh:
        assert chosen == Wait("reserved_for_new_worker")
    elif not open_:
        assert chosen == NoWorker()
    else:
        left = {address: w.ends_in - w.starts_in for address, w in open_.items()}
        assert left[str(chosen)] == max(left.values())


def shuffled(rows: Mapping, chance: random.Random) -> dict:
    """The same mapping in another order."""
    return dict(chance.sample(list(rows.items()), len(rows)))
