"""Recorded events, decided upon again: the same instructions to the byte, or the first that differs."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_ferro.errors import ConfigError
from dask_ferro.policy.estimates import Estimate
from dask_ferro.policy.events import Assigned, Finished, Joined, MessagesSent, Tick
from dask_ferro.policy.facts import Replica, TaskFacts
from dask_ferro.policy.recording.recorder import Recorder
from dask_ferro.policy.recording.replay import replay
from dask_ferro.policy.recording.values import decode, encode, text
from dask_ferro.policy.stealing.policies import POLICIES
from tests.policy.recording.recordings import InMemory, changed, recorded, shuffled
from tests.policy.test_scheduling_core import Scene, piled

# Of real clusters, cut behind the decision that they are about.
FILES = sorted((Path(__file__).parent / "recorded").glob("*.events"))


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return recorded("informed")


def of_kind(lines: list[str], kind: str) -> int:
    """The place of the first line with an instruction of some kind."""
    return next(n for n, line in enumerate(lines) if n and kind in {i["is"] for i in json.loads(line)["out"]})


# -- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(("x", 0, -1.5, True, None), id="a key of several parts"),
        pytest.param((b"\x00\xff", ("x", ("y",))), id="bytes and tuples in tuples"),
        pytest.param((0.1 + 0.2, 5e-324, inf, -inf), id="floats to the last bit, and without end"),
        pytest.param(Assigned(("x", 1), "tcp://a:1", "x", (0, 1, 2), Estimate(0.5), {"GPU": 1.0}), id="an event"),
        pytest.param(Finished("x", True, 0.25), id="an event of few words"),
        pytest.param(TaskFacts("x", 0.5, False, (Replica(8, frozenset("ab"), "gpu", "y"),), frozenset("a"),
            others={"gpu": 0.1}), id="the facts of a task"),
        pytest.param({"is": "Finished", ("set",): {}}, id="a mapping with names of ours"),
    ],
)  # fmt: skip
def test_what_is_written_is_read_as_the_same_value(value: Any) -> None:
    read = decode(json.loads(text(encode(value))))
    assert (read, type(read)) == (value, type(value))
    assert text(encode(read)) == text(encode(value))


def test_numbers_of_other_classes_are_plain_ones() -> None:
    assert text(encode((np.float64(0.5), np.int64(3), np.str_("x")))) == '[0.5,3,"x"]'
    assert decode(encode(nan)) != decode(encode(nan))


def test_a_value_that_no_event_has_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got a object, which recordings do not support"):
        encode(("x", object()))


# -- replays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("from_event", [0, 1, 150, 400])
def test_a_replay_decides_the_same_wherever_the_recording_begins(policy: str, from_event: int) -> None:
    lines = recorded(policy, from_event=from_event)
    found = replay(lines)
    assert (found.policy, found.events, found.difference) == (policy, len(lines) - 1, None)
    assert found.instructions == sum(len(json.loads(line)["out"]) for line in lines[1:])
    assert ('{"is":"Ask"' in "".join(lines)) is (policy != "none")


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_mappings_and_sets_is_no_matter(lines: list[str], seed: int) -> None:
    other = shuffled(lines, seed)
    assert other != lines
    assert replay(other)[1:4] == replay(lines)[1:4]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_recorded_decision_is_made_again(path: Path, seed: int | None) -> None:
    lines = path.read_text().splitlines(keepends=True)
    found = replay(lines if seed is None else shuffled(lines, seed), path.name)
    assert (found.events, found.difference) == (len(lines) - 1, None)
    assert found.instructions > 0


def test_there_are_recorded_decisions() -> None:
    assert FILES


def test_a_part_of_a_recording_is_the_recording_of_a_part(lines: list[str]) -> None:
    for end in (1, 2, len(lines) // 2):
        found = replay(lines[:end])
        assert (found.events, found.difference, found.cut) == (end - 1, None, False)
    torn = [*lines[:50], lines[50][:-5]]
    assert (replay(torn).events, replay(torn).cut) == (49, True)


def test_a_reason_to_end_is_told(lines: list[str]) -> None:
    found = replay([*lines[:9], '{"end":"it is full"}\n'])
    assert (found.events, found.ended, found.cut) == (8, "it is full", False)


@pytest.mark.parametrize("kind", ["Ask", "HandOver", "Wake", "Hurry"])
def test_the_first_difference_is_told(lines: list[str], kind: str) -> None:
    at = of_kind(lines, kind)
    other = changed(lines[at], lambda read: read.update(out=[i for i in read["out"] if i["is"] != kind]))
    found = replay([*lines[:at], other, *lines[at + 1 :]])
    assert found.difference is not None
    assert (found.events, found.difference.number) == (at, at)
    assert found.difference.at == json.loads(lines[at])["at"]
    assert kind in found.difference.now
    assert kind not in found.difference.recorded
    assert found.difference.event == decode(json.loads(lines[at])["event"])


def test_a_question_that_was_not_asked_is_a_difference(lines: list[str]) -> None:
    at = of_kind(lines, "Ask")
    found = replay([*lines[:at], changed(lines[at], lambda read: read.pop("facts"))])
    assert found.difference is not None
    assert found.difference.now.startswith("the core asks a question that has no recorded answer: ")


def test_another_parameter_in_the_head_is_found(lines: list[str]) -> None:
    head = changed(lines[0], lambda read: read["parameters"].update(threshold=0.5))
    assert replay([head, *lines[1:]]).difference is not None


def test_an_error_of_the_core_is_recorded_and_made_again() -> None:
    scene, sink = Scene(), InMemory()
    recorder = Recorder(scene.core, "informed")
    recorder.add(sink)
    with pytest.raises(TypeError):
        recorder.handle(Joined("a", "two"), 0.0)  # type: ignore[arg-type]
    recorder.handle(MessagesSent(), 1.0)
    assert '"out":{"error":"TypeError"}' in sink.lines[1]
    assert replay(sink.lines)[1:4] == (2, 0, None)


# -- another policy beside it --------------------------------------------------------------------------------


def test_what_another_policy_would_move_is_told_and_not_done(lines: list[str]) -> None:
    found = replay(lines, policy="none")
    assert (found.events, found.difference) == (len(lines) - 1, None)
    assert found.decisions
    assert all(one.recorded and not one.other for one in found.decisions)
    asks = sum(line.count('{"is":"Ask"') for line in lines)
    assert 0 < sum(len(one.recorded) for one in found.decisions) <= asks + 32


def test_the_same_policy_would_move_the_same(lines: list[str]) -> None:
    for found in (replay(lines, policy="informed"), replay(lines, parameters={"tries": 8})):
        assert found.decisions
        assert all(one.recorded == one.other for one in found.decisions)


def test_another_parameter_would_move_other_tasks(lines: list[str]) -> None:
    found = replay(lines, parameters={"shortest": 0.5})
    assert found.difference is None
    assert any(one.recorded != one.other for one in found.decisions)


# -- the recorder --------------------------------------------------------------------------------------------


def test_without_a_sink_a_core_is_as_it_was() -> None:
    scene = piled()
    core, over = scene.core, []
    recorder = Recorder(core, "informed", lambda: over.append(True))
    assert core.facts is scene.facts
    few, all_ = InMemory(most=3), InMemory()
    recorder.add(few)
    recorder.handle(Tick(), 1.0)
    recorder.add(all_)
    recorder.handle(Tick(), 2.0)
    recorder.handle(Tick(), 3.0)  # the first one has had enough
    recorder.handle(Tick(), 4.0)
    assert (len(few.lines), len(all_.lines), over) == (4, 4, [])
    assert replay(few.lines)[1:4:2] == replay(all_.lines)[1:4:2] == (3, None)
    recorder.remove(all_)
    assert (over, recorder.sinks) == ([True], [])
    assert core.facts is scene.facts
    assert core.handle(Tick(), 5.0) is not None
    assert len(all_.lines) == 4


def test_an_answer_is_written_when_it_is_another_one() -> None:
    scene, sink = piled(3), InMemory()
    recorder = Recorder(scene.core, "informed")
    recorder.add(sink)
    scene.facts.bound.update(range(3))
    for now in (1.0, 1.1):
        recorder.handle(Tick(), now)
    asked = [json.loads(line).get("facts", []) for line in sink.lines[1:]]
    assert [fact[0] for fact in asked[0]].count("waiting") == 2
    assert not asked[1]
    scene.facts.bound.clear()
    recorder.handle(Tick(), 1.2)
    facts = json.loads(sink.lines[-1])["facts"]
    assert [fact[1] for fact in facts if fact[0] == "waiting"] == [2, 1]
    assert replay(sink.lines).difference is None


# -- what is no recording ------------------------------------------------------------------------------------

HEAD = {
    "ferro-events": 1, "policy": "informed", "seed": 0, "parameters": {}, "learning": {}, "coalesce": 0.001,
    "tick": 0.5, "core": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text_", "wanted"),
    [
        pytest.param("", "line 1: not the head", id="nothing"),
        pytest.param("PK\x03\x04\n", "line 1: not the head", id="another file"),
        pytest.param("[]\n", "line 1: not the head", id="JSON of another shape"),
        pytest.param(json.dumps(HEAD | {"ferro-events": 2}) + "\n", "got a head of form 2", id="a later form"),
        pytest.param(json.dumps(HEAD | {"policy": "best"}) + "\n", "got 'best', wanted one of", id="no policy"),
        pytest.param(json.dumps(HEAD | {"parameters": {"x": 1}}) + "\n", "'x'", id="no parameter"),
        pytest.param(json.dumps(HEAD | {"core": {"names": {}, "rows": [["Popen", []]]}}) + "\n", "got 'Popen'",
            id="a class of others"),
        pytest.param(json.dumps(HEAD | {"core": {"names": {}, "rows": [["dict", []]]}}) + "\n", "begins with no core",
            id="no core"),
        pytest.param(json.dumps(HEAD) + '\n{"at": 0}\n', "line 2: KeyError: 'event'", id="a line without an event"),
        pytest.param(json.dumps(HEAD) + "\n7\n", "line 2", id="a line that is no object"),
        pytest.param(json.dumps(HEAD) + '\n{"at": 0, "event": {"is": "system"}, "out": []}\n', "got 'system'",
            id="no event"),
        pytest.param(json.dumps(HEAD) + '\n{"at": 0, "event": {"is": "Left", "who": 1}, "out": []}\n', "'who'",
            id="no field"),
        pytest.param(json.dumps(HEAD) + "\n" + "[" * 100_000 + "\n", "line 2", id="a line of endless depth"),
    ],
)  # fmt: skip
def test_what_is_no_recording_is_refused_by_its_line(text_: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.events, line") as told:
        replay(text_.splitlines(keepends=True), "x.events")
    assert wanted in str(told.value)
