"""How rows are cut, as a table of claims."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.stream.chunks import CHUNK_BYTES, Chunks, batch_rows
from tests.each import every

MANY = 10**9


@every(
    ("wanted", "facts"),
    [
        pytest.param(CHUNK_BYTES // 1024, {"rows": MANY, "row_bytes": 1024}, id="as many as make 32 MiB"),
        pytest.param(1, {"rows": MANY, "row_bytes": 2 * CHUNK_BYTES}, id="a row that is larger is a chunk"),
        pytest.param(500, {"rows": MANY, "row_seconds": 0.01}, id="no more than five seconds of work"),
        pytest.param(1000, {"rows": 64_000, "row_seconds": 0.001, "slots": 2}, id="32 chunks a thread"),
        pytest.param(20, {"rows": 200, "row_seconds": 0.0028, "slots": 2}, id="equally many chunks for each thread"),
        pytest.param(2, {"rows": 7, "row_bytes": CHUNK_BYTES / 3, "slots": 2},
            id="equally many, where three rows fill a chunk"),
        pytest.param(50, {"rows": 1000, "row_seconds": 0.001, "slots": 99}, id="not less than is worth a task"),
        pytest.param(1000, {"rows": 1000, "row_seconds": 1e-6}, id="no more than there are"),
        pytest.param(1, {"rows": 0}, id="no rows, and still a number to divide by"),
        pytest.param(32_000, {"rows": MANY, "row_bytes": 1024, "grain": 1000},
            id="a multiple of the source's chunks"),
        pytest.param(50_000, {"rows": MANY, "row_bytes": 1024, "grain": 50_000},
            id="one of the source's chunks, if it is larger, and bearable"),
        pytest.param(32_768, {"rows": MANY, "row_bytes": 1024, "grain": MANY},
            id="not one that would not fit into memory"),
        pytest.param(5, {"rows": MANY, "row_seconds": 1.0, "grain": 1000}, id="not one that takes for ever"),
        pytest.param(52_632, {"rows": 10**6, "row_seconds": 1e-6, "grain": 10**6, "is_cut": True},
            id="equal parts of one that can be cut, of 50 ms at least"),
        pytest.param(1000, {"rows": 10**4, "row_bytes": 1000, "row_seconds": 5e-5, "grain": 10, "is_cut": True},
            id="many small ones together"),
    ],
)  # fmt: skip
def test_batch(wanted, facts):
    free = {"row_bytes": 1.0, "row_seconds": 0.0, "slots": 1, "grain": 1}
    assert batch_rows(**{**free, **facts}) == wanted


@given(rows=st.integers(0, 1000), batch=st.integers(1, 300))
def test_chunks_cover_the_rows_once_and_in_order(rows, batch):
    chunks = Chunks(rows, batch)
    spans = [chunks.span(n) for n in range(chunks.count)]
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(rows))
    assert all(stop > start for start, stop in spans)
    assert [chunks.length(n) for n in range(chunks.count)] == [stop - start for start, stop in spans]
