"""Memory of the caller's: workers of its host write into it, others refuse, and nothing is left of it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from dask_ferro.lower.model.shared_buffer import Landing, SharedBuffer, opened, write
from tests.waiting import BOUND_S

pytestmark = pytest.mark.skipif(opened(1) is None, reason="this system has no memfd")

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def _names() -> list[str]:
    return [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


def _is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def _write_elsewhere(place: SharedBuffer, offset: int) -> None:
    raise SystemExit(0 if write(place, offset, ROWS) else 3)


def test_another_process_writes_where_it_was_told():
    with Landing(2 * ROWS.nbytes) as landing:
        other = multiprocessing.get_context("spawn").Process(
            target=_write_elsewhere, args=(landing.place, ROWS.nbytes)
        )
        other.start()
        other.join(BOUND_S)
        assert other.exitcode == 0, f"waited {BOUND_S:g} s for the process; last seen: {other!r}"
        whole = landing.array((2, 3, 4), ROWS.dtype)
    np.testing.assert_array_equal(whole, [np.zeros_like(ROWS), ROWS])


def test_rows_are_written_in_c_order_whatever_theirs_is():
    with Landing(ROWS.nbytes) as landing:
        assert write(landing.place, 0, np.asfortranarray(ROWS))
        np.testing.assert_array_equal(landing.array(ROWS.shape, ROWS.dtype), ROWS)


def test_what_the_caller_changes_is_its_own():
    with Landing(ROWS.nbytes) as landing:
        assert write(landing.place, 0, ROWS)
        first = landing.array(ROWS.shape, ROWS.dtype)
        first[:] = -1
        np.testing.assert_array_equal(landing.array(ROWS.shape, ROWS.dtype), ROWS)


def test_a_place_is_found_no_more_when_the_landing_has_ended_and_its_result_stays():
    with Landing(ROWS.nbytes) as landing:
        assert write(landing.place, 0, ROWS)
        whole = landing.array(ROWS.shape, ROWS.dtype)
    assert not write(landing.place, 0, -ROWS)
    np.testing.assert_array_equal(whole, ROWS)
    assert not any(landing.place.name in name for name in _names())


def test_a_result_s_memory_is_kept_by_any_view_of_it_and_then_given_back():
    size = 2**26
    with Landing(size) as landing:
        whole = landing.array((2, size // 2), np.dtype(np.uint8))
    address = whole.ctypes.data
    part = whole[1, 5:]
    del whole
    assert part.sum() == 0
    assert _is_mapped(address)
    del part
    assert not _is_mapped(address)


@pytest.mark.parametrize("changed", [{"name": "ferro-other"}, {"pid": 2**22 + 1}, {"descriptor": 99_999}])
def test_nothing_is_written_where_something_else_is_found(changed):
    with Landing(ROWS.nbytes) as landing:
        assert not write(landing.place._replace(**changed), 0, ROWS)
        np.testing.assert_array_equal(landing.array(ROWS.shape, ROWS.dtype), np.zeros_like(ROWS))


def test_a_pipe_under_the_same_number_is_not_opened():
    reader, writer = os.pipe()  # opening its writing end again would succeed; a named one's would wait
    try:
        assert not write(SharedBuffer(os.getpid(), writer, "ferro-other"), 0, ROWS)
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)
