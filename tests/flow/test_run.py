"""Runs of flows on several workers, random graphs in a random order: the values are those of tasks run one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.flow.hub import call_task
from dask_ferro.flow.run import FlowRun, InnerTask, Share, TaskFailure
from dask_ferro.flow.times import TaskTimes


@dataclass(frozen=True)
class Add:
    """A task that adds its inputs and one, or fails."""

    dependencies: frozenset[Any]
    fails: bool = False

    def __call__(self, values: dict[Any, int]) -> int:
        if self.fails:
            raise ValueError("as asked")
        return 1 + sum(values.values())


def shares(calls: dict[int, Add], owners: dict[int, int], members: int, wanted: set[int]) -> list[Share]:
    readers: dict[int, set[int]] = {key: set() for key in calls}
    for key, call in calls.items():
        for dep in call.dependencies:
            if dep in readers and owners[dep] != owners[key]:
                readers[dep].add(owners[key])
    return [
        Share(
            "f",
            m,
            members,
            tuple(
                InnerTask(key, calls[key], float(key), tuple(readers[key]))
                for key in calls
                if owners[key] == m
            ),
            tuple(key for key in calls if owners[key] == m and key in wanted),
        )
        for m in range(members)
    ]


def values_of(calls: dict[int, Add], inputs: dict[int, int]) -> dict[int, Any]:
    values: dict[int, Any] = dict(inputs)
    for key, call in calls.items():
        failed = call.fails or any(values[dep] == "failed" for dep in call.dependencies)
        values[key] = "failed" if failed else call(values={d: values[d] for d in call.dependencies})
    return values


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_all_tasks_run_once_and_give_what_they_give_alone(seed: int) -> None:
    rng = random.Random(seed)
    count, members = rng.randint(1, 30), rng.randint(1, 5)
    outside = {-1: 10, -2: 20}
    calls = {
        key: Add(
            frozenset(rng.sample([*range(key), *outside], min(key + 2, rng.randint(0, 4)))),
            rng.random() < 0.05,
        )
        for key in range(count)
    }
    owners = {key: rng.randrange(members) for key in calls}
    wanted = {key for key in calls if rng.random() < 0.4}
    workers = [rng.randrange(3) for _ in range(members)]
    made = shares(calls, owners, members, wanted)
    runs = {w: FlowRun([m for m in range(members) if workers[m] == w]) for w in set(workers)}
    begins = list(range(members))
    rng.shuffle(begins)
    # To which worker, and what: a value, tasks that are given away, the key of one that comes back.
    underway: list[tuple[int, str, Any]] = []
    ran: list[int] = []
    begun: set[int] = set()
    # A value may arrive before the members of its worker begin; a member that has no inputs begins with none.
    while begins or underway or any(run.is_ready for run in runs.values()):
        ready = [w for w, run in runs.items() if run.is_ready]
        doing = {"begin": begins, "send": underway, "run": ready, "steal": ready}
        step = rng.choice([name for name, what in doing.items() if what])
        if step == "begin":
            m = begins.pop()
            begun.add(workers[m])
            read = {dep for task in made[m].tasks for dep in task.call.dependencies}
            runs[workers[m]].add(made[m], {key: value for key, value in outside.items() if key in read})
        elif step == "send":
            to, kind, what = underway.pop(rng.randrange(len(underway)))
            if kind == "value":
                runs[to].receive(*what)
            elif kind == "back":
                runs[to].take_back(what)
            elif to in begun:
                for stolen in what:
                    runs[to].accept(stolen)
            else:
                underway.append((to, kind, what))
        elif step == "steal":
            w = rng.choice(ready)
            thieves = [other for other in runs if other != w]
            tasks = runs[w].spare(rng.randint(1, 3))
            if thieves and tasks:
                underway.append((rng.choice(thieves), "give", runs[w].give(tasks, workers.index(w))))
        else:
            w = rng.choice(ready)
            task = runs[w].take()
            owner = runs[w].owner_of(task)
            if owner is not None and rng.random() < 0.2:
                # Its result cannot be sent.
                runs[w].drop(task)
                underway.append((workers[owner], "back", task.key))
                continue
            value = call_task(task, runs[w].inputs_of(task), TaskTimes())
            ran.append(task.key)
            readers = {workers[m] for m in (*task.readers, *([] if owner is None else [owner]))}
            underway += [(to, "value", (task.key, value)) for to in readers - {w}]
            runs[w].finish(task, value)
    assert sorted(ran) == list(calls)
    assert all(run.is_done for run in runs.values())
    right = values_of(calls, outside)
    for m, share in enumerate(made):
        results = runs[workers[m]].results(share)
        got = ["failed" if isinstance(value, TaskFailure) else value for value in results]
        assert got == [right[key] for key in share.outputs]


def test_a_value_goes_with_its_last_reader() -> None:
    calls = {0: Add(frozenset()), 1: Add(frozenset([0])), 2: Add(frozenset([1]))}
    (share,) = shares(calls, dict.fromkeys(calls, 0), 1, {2})
    run = FlowRun([0])
    run.add(share, {})
    for _ in calls:
        task = run.take()
        run.finish(task, call_task(task, run.inputs_of(task), TaskTimes()))
    assert run.is_done
    assert list(run._values) == [2]


def test_an_error_names_the_task_that_raised_it() -> None:
    calls = {0: Add(frozenset(), fails=True), 1: Add(frozenset([0])), 2: Add(frozenset())}
    (share,) = shares(calls, dict.fromkeys(calls, 0), 1, set(calls))
    run = FlowRun([0])
    run.add(share, {})
    while not run.is_done:
        task = run.take()
        run.finish(task, call_task(task, run.inputs_of(task), TaskTimes()))
    first, second, third = run.results(share)
    assert first is second
    assert third == 1
    with pytest.raises(ValueError, match="as asked") as caught:
        raise first.error
    assert caught.value.__notes__ == ["in task 0, which ran with others as one task"]
