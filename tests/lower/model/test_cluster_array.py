"""A model over a dask array on two worker processes: tasks of several chunks, results in the caller's memory."""

from __future__ import annotations

import os
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

import dask_ferro as ff
from dask_ferro.lower.model.groups import sizes
from dask_ferro.lower.model.shared_buffer import Landing, SharedBuffer, opened
from tests.clusters import tasks_of
from tests.graphs import close, mlp, mlp_reference

pytestmark = pytest.mark.cluster


def _over_files(files, rows):
    """Rows of noise as from as many files, and what the model makes of them."""
    read = dask.delayed(_noise)
    x = da.concatenate([da.from_delayed(read(seed, rows), (rows, 6), np.float32) for seed in range(files)])
    return x, mlp_reference(np.concatenate([_noise(seed, rows) for seed in range(files)]))


def test_a_task_takes_several_short_chunks(client):
    x, wanted = _over_files(32, 20)
    y = ff.from_onnx(mlp())(x)
    close(y.compute(), wanted)
    threads = sum(client.nthreads().values())
    assert tasks_of(client, y.compute) == len(sizes(32, y.seconds, threads)) < 32
    close(y.compute(scheduler="sync"), wanted)


def test_chunks_that_lie_on_workers_keep_a_task_each(client):
    x, wanted = _over_files(12, 20)
    y = ff.from_onnx(mlp())(client.persist(x))
    close(y.compute(), wanted)
    assert tasks_of(client, y.compute) == 12


def test_a_large_result_is_written_where_it_is_wanted(client):
    x, wanted = _over_files(4, 100_000)
    y = ff.from_onnx(mlp())(x)
    assert y.nbytes > 2**20
    got = y.compute()
    close(got, wanted)
    assert got.flags.owndata == (opened(1) is None)
    got[:] = 0  # the caller's own
    close(y.compute(), wanted)


def test_a_large_result_travels_from_workers_that_do_not_reach_the_caller(client, monkeypatch):
    nowhere = property(lambda self: SharedBuffer(1, 0, "ferro-none"), lambda self, place: None)
    monkeypatch.setattr(Landing, "place", nowhere, raising=False)
    x, wanted = _over_files(4, 100_000)
    close(ff.from_onnx(mlp())(x).compute(), wanted)


def test_nothing_of_a_result_stays_open_when_a_task_fails(client):
    x, _ = _over_files(4, 100_000)
    with pytest.raises(ZeroDivisionError):
        ff.from_onnx(mlp())(x.map_blocks(lambda rows: rows / (1 // 0), meta=x._meta)).compute()
    assert not [link for link in _open_files() if link.startswith("/memfd:ferro-")]


def _open_files():
    """What this process has open, by name; of a system without /proc nothing."""
    folder = Path("/proc/self/fd")
    return [os.readlink(entry) for entry in folder.iterdir() if entry.is_symlink()] if folder.is_dir() else []


def _noise(seed, rows):
    return np.random.default_rng(seed).standard_normal((rows, 6), dtype=np.float32)
