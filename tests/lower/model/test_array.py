"""A model over the chunks of a dask array: its fused tasks know their order, and let go of what was read."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Alias, GraphNode, Task, TaskRef
from dask.core import flatten

import dask_ferro as ff
from dask_ferro.lower.model.array import FusedLayer, _in_order, run_steps
from dask_ferro.lower.model.groups import run_group
from tests.graphs import mlp, mlp_reference

X = np.random.default_rng(1).standard_normal((9, 6), dtype=np.float32)


def _tasks(y: da.Array, *counts: int) -> list[GraphNode]:
    keys = iter(list(flatten(y.__dask_keys__())))
    groups = [(("renamed", i), list(islice(keys, count))) for i, count in enumerate(counts)]
    return list(dict(FusedLayer(y.dask, groups)).values())


def _pieces() -> Iterator[da.Array]:
    read = dask.delayed(lambda rows: X[rows : rows + 3])
    for rows in (0, 3, 6):
        yield da.from_delayed(read(rows), (3, 6), np.float32)


def test_a_chunk_is_read_and_computed_by_one_task_in_an_order_found_once():
    y = ff.from_onnx(mlp())(da.concatenate(list(_pieces())))
    tasks = _tasks(y, 1, 2)
    assert [task.func for task in tasks] == [run_group] * 2
    assert [[node.func for node in task.args[0]] for task in tasks] == [[run_steps], [run_steps] * 2]
    assert all(not task.dependencies for task in tasks)
    np.testing.assert_allclose(
        np.concatenate([c for task in tasks for c in task()]), y.compute(scheduler="sync")
    )
    np.testing.assert_allclose(y.compute(scheduler="sync"), mlp_reference(X), rtol=1e-5, atol=1e-6)


class Block:
    """Something that one can see go."""


def _step(key: str, function: object, *reads: str) -> Task:
    return Task(key, function, *(TaskRef(name) for name in reads))


def _watched() -> tuple[dict[str, Task], list[bool]]:
    """A chain make -> read -> last, and whether what `make` gave was there still when `last` ran."""
    made: list[weakref.ref[Block]] = []
    there: list[bool] = []

    def make() -> Block:
        block = Block()
        made.append(weakref.ref(block))
        return block

    def last(value: int) -> int:
        there.append(made[0]() is not None)
        return value + 1

    steps = (_step("make", make), _step("read", lambda block: 1, "make"), _step("last", last, "read"))
    return {task.key: task for task in steps}, there


def test_what_nothing_reads_any_more_is_let_go_before_the_next_step():
    inner, there = _watched()
    fused = _in_order(Task.fuse(*inner.values()))
    assert fused() == 2
    assert there == [False]


@pytest.mark.parametrize("shuffled", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_the_order_is_that_of_what_reads_what(shuffled):
    steps = (
        _step("a", lambda x: x + 1, "given"),
        Alias("b", "a"),
        _step("c", lambda a, b, given: a * b + given, "a", "b", "given"),
        _step("d", lambda c: -c, "c"),
    )
    fused = Task.fuse(*(steps[i] for i in shuffled))
    ordered = _in_order(fused)
    assert ordered.dependencies == fused.dependencies == {"given"}
    assert ordered.key == fused.key
    assert ordered({"given": 4}) == fused({"given": 4}) == -29


def test_a_task_that_holds_no_others_stays_as_it_is():
    task = _step("a", abs, "x")
    assert _in_order(task) is task
