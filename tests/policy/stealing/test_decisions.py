"""Recorded decisions: read as what was written, decided again to the same moves or the first that differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_ferro.errors import InputError
from dask_ferro.policy.facts import Replica, TaskFacts
from dask_ferro.policy.stealing.decision import BEGINS, StealingDecision, replay
from dask_ferro.policy.stealing.informed import StealingParameters, StealingState
from dask_ferro.policy.stealing.policies import POLICIES, make_policy
from dask_ferro.simulate.core_adapter import CoreAdapter
from dask_ferro.simulate.engine import VirtualSite, simulate
from tests.policy.facts import snapshot, stand, task
from tests.simulate.test_engine import LATE, hoard

# Of real clusters: the decision that each file is named after.
FILES = sorted((Path(__file__).parent / "recorded").glob("*.decisions"))


def recorded(policy: str) -> list[StealingDecision]:
    """Return the decisions of a simulated run in which most tasks lie with one worker."""
    decisions: list[StealingDecision] = []

    def attach(site: VirtualSite) -> None:
        decider = site.scheduler.decider
        assert isinstance(decider, CoreAdapter)
        decider.core.on_decision = decisions.append

    simulate(hoard(120), LATE, policy=policy, attach=attach)
    return decisions


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [decision.line() + "\n" for decision in recorded("informed")]


def changed(line: str, change: Callable[[dict[str, Any]], object]) -> str:
    read = json.loads(line)
    change(read)
    return json.dumps(read) + "\n"


def of_one_task(one: TaskFacts, **thresholds: float) -> StealingDecision:
    state = StealingState(thresholds, {"a": "b"}, turns=3)
    policy = make_policy("last-victim", StealingParameters(threshold=0.5), 7)
    return StealingDecision(policy, state, snapshot([stand("a"), stand("b", one, running=0.1 + 0.2)]), ())


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(task(("x", 0, -1.5, ("y",))), id="a key of several parts"),
        pytest.param(task("x", 5e-324, waited=inf, blocked=0.1 + 0.2), id="floats to the last bit, and without end"),
        pytest.param(task("x", inputs=(Replica(8, frozenset("ab")),)), id="inputs"),
        pytest.param(task("x", allowed=frozenset("ab"), preferred=frozenset(), origins=("b",)), id="restrictions"),
        pytest.param(task("x", others={"gpu": 0.1}, must="gpu", known=False), id="durations by device class"),
    ],
)  # fmt: skip
def test_what_is_written_is_read_as_the_same_decision(one: TaskFacts) -> None:
    decision = of_one_task(one, a=0.1, b=inf)
    assert decision.line().startswith(BEGINS)
    read = StealingDecision.of_line(decision.line())
    assert (read, type(read.policy)) == (decision, type(decision.policy))
    assert read.line() == decision.line()


def test_numbers_of_numpy_are_plain_ones() -> None:
    plain, other = (
        of_one_task(task("x", 0.5, nbytes=3)),
        of_one_task(task("x", np.float64(0.5), nbytes=np.int64(3))),
    )
    assert other.line() == plain.line()


def test_a_value_that_json_cannot_have_is_refused() -> None:
    with pytest.raises(TypeError, match="got a object, which a recorded decision cannot have"):
        of_one_task(task(object())).line()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulators_decisions_are_those_of_their_replay(policy: str) -> None:
    """The same policy in the simulator and in a replay; `scheduler/test_decision_log.py` has the plugin's."""
    decisions = recorded(policy)
    moves = sum(len(decision.moves) for decision in decisions)
    assert bool(decisions) is (moves > 0) is (policy != "none")
    same = replay((decision.line() + "\n" for decision in decisions), "run")
    assert same == (len(decisions), moves, None)


def test_the_order_of_mappings_is_no_matter(lines: list[str]) -> None:
    def turned(read: Any) -> Any:
        if isinstance(read, dict):
            return {name: turned(one) for name, one in reversed(read.items())}
        return [turned(one) for one in read] if isinstance(read, list) else read

    assert replay((json.dumps(turned(json.loads(line))) + "\n" for line in lines), "run") == replay(
        lines, "run"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_decision_is_made_again(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    same = replay(lines, path.name)
    assert (same.decisions, same.difference) == (len(lines), None)
    assert same.moves > 0


def test_there_are_recorded_decisions() -> None:
    assert FILES


def test_the_first_difference_ends_a_replay(lines: list[str]) -> None:
    at = next(n for n, line in enumerate(lines, 1) if json.loads(line)["moves"])
    other = changed(lines[at - 1], lambda read: read["moves"].clear())
    same = replay([*lines[: at - 1], other, *lines[at:]], "run")
    assert same.difference is not None
    assert (same.decisions, same.difference.line, same.difference.recorded) == (at - 1, at, ())
    assert (same.difference.now, same.difference.at) == (
        StealingDecision.of_line(lines[at - 1]).moves, json.loads(other)["snapshot"]["now"],
    )  # fmt: skip


def test_parameters_are_those_of_the_recording(lines: list[str]) -> None:
    other = [changed(line, lambda read: read["parameters"].update(shortest=9.0)) for line in lines]
    assert replay(other, "run").difference is not None


def test_any_lines_of_a_recording_are_a_recording_and_a_torn_last_one_is_ignored(lines: list[str]) -> None:
    assert replay(lines[5:9], "run")[::2] == (4, None)
    assert replay([*lines[:3], lines[3][:-9]], "run")[::2] == (3, None)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda read: read.pop("state"), id="a part is missing"),
        pytest.param(lambda read: read.update(policy="greedy"), id="an unknown policy"),
        pytest.param(
            lambda read: read["parameters"].update(courage=1.0), id="a parameter of another version"
        ),
        pytest.param(lambda read: read["snapshot"].update(hungry=3), id="a value of another type"),
    ],
)
def test_a_line_that_is_no_decision_is_refused_by_its_number(lines: list[str], change: Any) -> None:
    with pytest.raises(InputError, match="run, line 2: no recorded decision: "):
        replay([lines[0], changed(lines[1], change)], "run")
