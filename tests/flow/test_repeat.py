"""Tasks that repeat: members that write them out give what a loop over the template gives."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.flow.hub import call_task
from dask_ferro.flow.repeat import unroll
from dask_ferro.flow.run import FlowRun, InnerTask, Repeat, Share, TaskFailure
from dask_ferro.flow.times import TaskTimes

START, END = ("add-before", 0), ("ends-it", 0)


@dataclass(frozen=True)
class Add:
    """A task that adds its inputs and one; it fails beyond a bound."""

    dependencies: frozenset[Any]
    bound: int

    def __call__(self, values: dict[Any, int]) -> int:
        assert values.keys() == self.dependencies
        total = 1 + sum(values.values())
        if total > self.bound:
            raise ValueError("as asked")
        return total


@dataclass(frozen=True)
class Ends:
    """The task that has a result of each repeat."""

    dependencies: frozenset[Any]

    def __call__(self, values: dict[Any, int]) -> tuple[int, ...]:
        return tuple(values[key] for key in sorted(values))


def key(i: int) -> Any:
    return ("add-it-1", i)


def looped(
    calls: dict[Any, Add], carry: dict[Any, Any], inputs: list[dict[Any, int]], start: dict[Any, int]
) -> Any:
    """Return the items of the task that ends all repeats; None if any task fails."""
    before, items = dict(start), []
    for own in inputs:
        values = {**before, **own}
        for name, call in calls.items():
            try:
                values[name] = call({dep: values[dep] for dep in call.dependencies})
            except ValueError:
                return None
        items += [values[name] for name in sorted(calls)]
        before = {dep: values[made] for dep, made in carry.items()}
    return tuple(items)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_members_give_what_a_loop_over_the_template_gives(seed: int) -> None:
    rng = random.Random(seed)
    count, members, times = rng.randint(1, 8), rng.randint(1, 3), rng.randint(1, 5)
    names = [key(i) for i in range(count)]
    # Two results of the step before, and two inputs of each repeat.
    carry = {("add-before", i): rng.choice(names) for i in range(2)}
    slots = [("input-it-1", i) for i in range(2)]
    inputs = [{slot: rng.randrange(3) for slot in slots} for _ in range(times)]
    bound = rng.choice([10**9, 200])
    calls = {}
    for i, name in enumerate(names):
        able = [*names[:i], *carry, *slots]
        calls[name] = Add(frozenset(rng.sample(able, rng.randint(1, min(3, len(able))))), bound)
    owners = {name: rng.randrange(members) for name in names}
    owners[END] = 0
    start = {dep: rng.randrange(5) for dep in carry}

    def readers(made: Any, reads: dict[Any, set[Any]]) -> tuple[int, ...]:
        of = {owners[name] for name, deps in reads.items() if made in deps}
        return tuple(of - {owners[made]})

    reads = {name: set(call.dependencies) for name, call in calls.items()}
    nexts = {name: {carry[dep] for dep in call.dependencies if dep in carry} for name, call in calls.items()}
    tasks = [
        InnerTask(name, call, rng.random(), readers(name, {**reads, END: set(names)}))
        for name, call in calls.items()
    ]
    tasks.append(InnerTask(END, Ends(frozenset(names)), 0.0))
    shares = []
    for m in range(members):
        own = tuple(task for task in tasks if owners[task.key] == m)
        repeats = Repeat("it", own, carry, inputs, {name: readers(name, nexts) for name in names})
        shares.append(Share("f", m, members, (), (END,) if not m else (), (repeats,) if own else ()))
        assert shares[-1].total == sum(len(task.call.dependencies) > 0 for task in own) * times
    runs = [FlowRun([m]) for m in range(members)]
    for run, share in zip(runs, shares, strict=True):
        run.add(unroll(share), start)
    seen = []
    while ready := [m for m, run in enumerate(runs) if run.is_ready]:
        m = rng.choice(ready)
        task = runs[m].take()
        seen.append(task.key)
        value = call_task(task, runs[m].inputs_of(task), TaskTimes())
        for other in task.readers:
            runs[other].receive(task.key, value)
        runs[m].finish(task, value)
    assert all(run.is_done for run in runs)
    assert sorted(seen) == sorted(
        [*((f"add-it-{n + 1}", i) for n in range(times) for i in range(count)), END]
    )
    (result,) = runs[0].results(unroll(shares[0]))
    expected = looped(calls, carry, inputs, start)
    assert isinstance(result, TaskFailure) if expected is None else result == expected
