"""Arrays in memory that the workers of this host map: results, lost workers, and when their memory is freed."""

from __future__ import annotations

import gc
import os
import pickle
import signal

import distributed
import numpy as np
import pytest

import dask_ferro as ff
from dask_ferro.lower import shared_memory
from tests.clusters import running
from tests.graphs import close, mlp, mlp_reference
from tests.waiting import finished, until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not shared_memory.HAS_MEMORY, reason="this system has no memory without a name"),
]
X = np.random.default_rng(1).standard_normal((20_000, 6), dtype=np.float32)


def none_is_left():
    gc.collect()
    shared_memory.forget_messages(distributed.default_client().cluster.scheduler)
    return not shared_memory._memories and not shared_memory._unread


@pytest.mark.parametrize("batch", [None, 3_000])
def test_tasks_have_the_places_of_their_rows(client, batch):
    scores = ff.from_onnx(mlp())(X, batch_size=batch)
    assert len(shared_memory._memories) == 1
    assert len(pickle.dumps(scores.dask)) < 100_000 < X.nbytes
    close(scores.compute(), mlp_reference(X))
    close((scores + 1).compute(scheduler="sync"), mlp_reference(X) + 1)
    del scores
    until(none_is_left, "the memory is freed")


def test_rows_of_a_lost_worker_are_read_again():
    with running(2) as client:
        scores = ff.from_onnx(mlp())(X, batch_size=1_000).persist()
        finished(scores)
        gc.collect()
        os.kill(min(client.run(os.getpid).values()), signal.SIGKILL)
        close(scores.compute(), mlp_reference(X))
        del scores
        until(none_is_left, "the memory is freed")


def test_a_copy_is_read_only_and_what_is_made_of_it_is_an_array(client):
    array = shared_memory.share_array(X, client)
    assert not array.flags.writeable
    assert len(pickle.dumps(array[5:9])) < 1_000
    copy = pickle.loads(pickle.dumps(array[5:9]))
    np.testing.assert_array_equal(copy, X[5:9])
    twice = pickle.loads(pickle.dumps(array * 2))
    assert type(twice) is np.ndarray
    np.testing.assert_array_equal(twice, X * 2)
    np.testing.assert_array_equal(shared_memory.share_array(X[::2, ::-1], client), X[::2, ::-1])


def test_workers_that_may_be_elsewhere_are_sent_the_rows(client):
    with distributed.Client(client.scheduler.address, set_as_default=False) as other:
        assert shared_memory.share_array(X, other) is None
    with running(processes=False) as threads:
        assert shared_memory.share_array(X, threads) is None
    assert shared_memory.share_array(np.full(9, "a", object), client) is None
    assert shared_memory.share_array(X, None) is None
