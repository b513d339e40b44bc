"""What the plugin publishes on topic "ferro": sums that add up, of bounded size, and nothing once it is off."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import pytest
from distributed import Event

import dask_ferro as ff
from dask_ferro.elastic.controller import action_event, action_text
from dask_ferro.observe.top import take_snapshot
from dask_ferro.policy.events import RequestSettled
from dask_ferro.policy.scaling.facts import Submit
from dask_ferro.scheduler.events import TOPIC, Events
from dask_ferro.scheduler.log import ACTIONS, PLACES, TRANSFER_FIELDS, Log
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.scheduler.scheduling import Scheduling
from tests.clusters import on_cluster
from tests.waiting import opened, until_async


def events_of(scheduler) -> Events:
    return part_of(scheduler, Scheduling).events


def published(scheduler, action):
    return [message for _, message in scheduler.get_events(TOPIC) if message["action"] == action]


async def steal_some(client, scheduler):
    """Pile tasks up behind one blocked worker, so that the other one steals."""
    first = next(iter(scheduler.workers))

    def block(name):
        opened(name)

    blocker = client.submit(block, "pile", workers=[first], key="blocker")
    where = {"workers": [first], "allow_other_workers": True, "pure": False}
    tasks = [client.submit(lambda i: i, i, key=f"one-{i}", **where) for i in range(30)]
    counts = scheduler.extensions["stealing"].counts
    await until_async(lambda: counts["confirmed"], "a confirmed move", seen=lambda: dict(counts))
    await Event("pile").set()
    assert await client.gather(tasks) == list(range(30))
    await blocker


@on_cluster(installed=True, parameters={"shortest": 0.0})
async def test_the_events_add_up_to_what_was_counted(client, scheduler):
    heard = []
    client.subscribe_topic(TOPIC, lambda event: heard.append(event[1]))
    log = scheduler.extensions["stealing"].records
    log.record_for("the test", 1000)
    await steal_some(client, scheduler)
    events, counts = events_of(scheduler), scheduler.extensions["stealing"].counts
    events.tick()
    steals, places = published(scheduler, "steal"), published(scheduler, "place")
    for name in ("requests", "confirmed", "refused", "stale"):
        assert sum(event[name] for event in steals) == counts[name]
    worked = sum(event["seconds_worked"] for event in steals)
    assert worked == pytest.approx(counts["seconds_worked"])
    moves = log.moves.since()[0]
    confirmed = [move for move in moves if move.outcome == "confirmed"]  # they alone cost
    assert {one.key for one in log.stolen.since()[0]} == {move.key for move in confirmed}
    assert counts["seconds_moving"] == pytest.approx(sum(move.cost for move in confirmed))
    assert len(moves) == sum(counts[name] for name in ("confirmed", "refused", "stale"))
    told = [message[1] for _, message in scheduler.get_events("stealing") if message[0] == "confirm"]
    assert told == [move.key for move in confirmed]  # Dask's own log
    assert sum(tasks for event in steals for _, _, tasks in event["flows"]) == counts["confirmed"]
    assert {name: sum(event[name] for event in places) for name in PLACES} == log.counts["place"]
    assert sum(log.counts["place"].values()) >= 31
    assert [(row["in"], row["out"]) for row in take_snapshot(scheduler)["workers"]] == [
        (sum(move.thief == at for move in confirmed), sum(move.victim == at for move in confirmed))
        for at in scheduler.workers
    ]
    await until_async(
        lambda: len(heard) >= len(scheduler.get_events(TOPIC)),
        "all events to reach the client",
        seen=lambda: heard,
    )
    assert {message["action"] for message in heard} == {"steal", "place"}


@on_cluster(installed=True)
async def test_an_event_is_small_whatever_was_moved_and_one_tick_publishes_one(client, scheduler):
    events = events_of(scheduler)
    stealing = scheduler.extensions["stealing"]
    for i in range(5000):
        stealing.counts["confirmed"] += 1
        pair = f"tcp://victim:{i}", "tcp://thief:1"
        stealing.records.moves.append(RequestSettled(("x", i), *pair, "confirmed", 1.0, 0.0, 0.0))
    events.tick()
    events.tick()
    (event,) = published(scheduler, "steal")
    assert (event["confirmed"], len(event["flows"]), len(event["sample"])) == (5000, 16, 4)
    assert len(msgpack.packb(event)) < 3000
    assert event["sample"][0] == {"key": "('x', 0)", "victim": "tcp://victim:0", "thief": "tcp://thief:1"}


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        pytest.param([[*ACTIONS.values()]], dict.fromkeys(ACTIONS.values(), 1), id="every kind of a policy"),
        pytest.param([["submit"], ["submit", "of a later version"]], {"submit": 2}, id="over decisions"),
    ],
)
@on_cluster(installed=True)
async def test_actions_of_the_elastic_controller_are_counted(client, scheduler, messages, wanted):
    for kinds in messages:
        done = [{"kind": kind, "why": "drain this, they said", "count": 1} for kind in kinds]
        await client.log_event(TOPIC, {"action": "scale", "done": done, "wanted": {"a": 3}})
    log = events_of(scheduler).log
    assert {kind: count for kind, count in log.counts["scale"].items() if count} == wanted
    assert log.decisions.newest["wanted"] == {"a": 3}


@on_cluster(installed=True)
async def test_a_decision_that_was_there_first_is_seen_and_not_counted(client, scheduler):
    await ff.uninstall(client)
    await client.log_event(
        TOPIC, {"action": "scale", "done": [{"kind": "submit", "count": 1}], "wanted": {"a": 1}}
    )
    await ff.install(client)
    log = events_of(scheduler).log
    assert log.decisions.newest["wanted"] == {"a": 1}
    assert not any(log.counts["scale"].values())


@on_cluster(installed=True)
async def test_what_workers_received_is_counted_by_class_of_link_and_survives_them(client, scheduler):
    one, other = scheduler.workers
    value = client.submit(lambda: bytes(100_000), workers=[one], key="made")
    await client.submit(len, value, workers=[other], key="fetched")
    counts = scheduler.extensions["stealing"].records.counts
    transfers, nbytes, seconds = (counts[f"received_{what}"] for what in TRANSFER_FIELDS)
    await until_async(lambda: transfers["host"], "a heartbeat that tells of the transfer")
    assert (transfers["host"], nbytes["host"] >= 100_000, seconds["host"] > 0) == (1, True, True)
    assert (transfers["hosts"], nbytes["hosts"], seconds["hosts"]) == (0, 0, 0.0)
    await client.retire_workers([other])
    assert transfers["host"] == 1


def test_a_workers_counts_that_restart_are_counted_on() -> None:
    def beat(number: int, transfers: int) -> Any:
        return {"beat": number, "received": {"host": (transfers, 100 * transfers, 1.0), "hosts": (0, 0, 0.0)}}

    log = Log({})
    log.received(beat(1, 2), None)
    log.received(beat(2, 5), beat(1, 2))
    log.received(beat(1, 1), beat(2, 5))
    log.received(beat(1, 1), beat(1, 1))  # of an earlier installation
    assert [log.counts[f"received_{what}"]["host"] for what in TRANSFER_FIELDS] == [6, 600, 2.0]


@on_cluster(installed=True)
async def test_uninstall_ends_it(client, scheduler):
    events = events_of(scheduler)
    await client.submit(lambda: 1)
    await ff.uninstall(client)
    assert not events._ticks.is_running()


@on_cluster(installed=True, parameters={"shortest": 0.0})
async def test_stolen_work_is_at_most_the_time_that_passed_on_every_thread(client, scheduler):
    """A hundred tasks that wait for a minute at once gain no 100 minutes."""

    began = time.monotonic()
    await steal_some(client, scheduler)
    elapsed = time.monotonic() - began
    events_of(scheduler).tick()
    worked = sum(event["seconds_worked"] for event in published(scheduler, "steal"))
    assert 0 < worked <= elapsed * scheduler.total_nthreads


@pytest.mark.parametrize("kind", list(ACTIONS), ids=list(ACTIONS.values()))
def test_every_action_is_published_with_its_kind_and_told_in_words(kind):
    action = kind("a", 2, "wide, they said") if kind is Submit else kind(("j1", "j2"), "wide, they said")
    event = action_event(action)
    assert (event["kind"], event["why"], event["count"]) == (kind.__name__.lower(), "wide, they said", 2)
    assert event.get("pool", event.get("jobs")) == ("a" if kind is Submit else ["j1", "j2"])
    assert action_text(action).startswith(event["kind"] + " ")
    msgpack.packb(event)
