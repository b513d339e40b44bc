"""How many chunks a task takes, of which graphs, and where their results go."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.lower.model.groups import BufferSlot, are_chains, grouped, sizes
from dask_ferro.lower.model.shared_buffer import SharedBuffer, opened

ROWS = np.ones((2, 3), np.float32)


@given(st.integers(1, 500), st.floats(0, 2), st.integers(1, 40))
def test_every_chunk_is_taken_once_and_tasks_get_shorter(chunks, seconds, threads):
    found = sizes(chunks, seconds, threads)
    assert sum(found) == chunks
    assert min(found) >= 1
    assert sorted(found, reverse=True) == list(found)
    assert all(count * seconds <= 0.5 + 1e-9 for count in found if count > 1)
    assert len(found) >= min(chunks, 2 * threads)


@pytest.mark.parametrize(
    ("chunks", "seconds", "threads", "wanted"),
    [
        pytest.param(8, 0.0, 2, (1,) * 8, id="nobody knows how long they are"),
        pytest.param(8, 0.3, 2, (1,) * 8, id="long ones stay alone"),
        pytest.param(16, 0.01, 2, (4, 3, 2, 1, 1, 1, 1, 1, 1, 1), id="half of each thread's share of what is left"),
        pytest.param(20, 0.25, 2, (2,) * 7 + (1,) * 6, id="no more than half a second"),
        pytest.param(4, 0.01, 8, (1,) * 4, id="fewer than threads"),
    ],
)  # fmt: skip
def test_sizes(chunks, seconds, threads, wanted):
    assert sizes(chunks, seconds, threads) == wanted


def _read(number: int) -> da.Array:
    return da.from_delayed(dask.delayed(lambda: ROWS)(), (2, 3), np.float32)


def _from_files() -> da.Array:
    return da.concatenate([_read(i) for i in range(3)])


CHAINS = [
    pytest.param(_from_files, True, id="a read each"),
    pytest.param(lambda: da.from_array(np.ones((6, 3)), chunks=(2, 3)), True, id="slices of one array"),
    pytest.param(lambda: da.ones((6, 3), chunks=(2, 3)) * 2, True, id="made where they are needed"),
    pytest.param(lambda: _from_files().map_blocks(np.negative), True, id="a function of each"),
    pytest.param(lambda: _from_files() + _from_files()[::-1], False, id="two chunks make one"),
    pytest.param(lambda: _from_files() - _from_files().mean(axis=0), False, id="all chunks make each"),
]


@pytest.mark.parametrize(("build", "wanted"), CHAINS)
def test_chunks_are_grouped_where_none_waits_for_another(build, wanted):
    assert are_chains(build().dask) is wanted


def test_a_group_reads_what_its_chunks_read():
    nodes = [Task("a", np.add, TaskRef("x"), 1), Task("b", np.add, TaskRef("y"), TaskRef("x"))]
    task = grouped("g", nodes, [None, None])
    assert task.dependencies == {"x", "y"}
    assert task({"x": 10, "y": 20}) == (11, 30)


def _landed(value: object, **announced: object) -> tuple[object, np.ndarray]:
    """What a group of one chunk gives, and what lies in its place then."""
    landing = opened(ROWS.nbytes)
    if landing is None:
        pytest.skip("this system has no memfd")
    with landing:
        target = BufferSlot(landing.place, 0, 0, ROWS.shape, ROWS.dtype)._replace(**announced)
        (found,) = grouped("g", [Task("a", lambda: value)], [target])()
        return found, landing.array(ROWS.shape, ROWS.dtype)


def test_a_result_that_is_put_in_its_place_does_not_travel():
    found, there = _landed(ROWS)
    assert found is None
    np.testing.assert_array_equal(there, ROWS)


@pytest.mark.parametrize(
    ("value", "announced"),
    [
        pytest.param(ROWS[:1], {}, id="fewer rows than announced"),
        pytest.param(ROWS.astype(np.float64), {}, id="another dtype"),
        pytest.param([1, 2], {}, id="no array"),
        pytest.param(ROWS, {"place": SharedBuffer(1, 0, "ferro-none")}, id="a place that is not there"),
    ],
)
def test_any_other_result_travels(value, announced):
    found, there = _landed(value, **announced)
    assert found is value
    np.testing.assert_array_equal(there, np.zeros_like(ROWS))
