"""What a worker is sent for a model or a bundle loads without dask_ferro: only Dask's own names are in the message."""

from __future__ import annotations

import pickle
import pickletools

import dask.array as da
import numpy as np
import pytest
from distributed.protocol.pickle import dumps

import dask_ferro as ff
from dask_ferro.lower.portable import PortableTask
from tests.clusters import on_cluster
from tests.graphs import mlp
from tests.waiting import until_async

X = np.zeros((40, 6), np.float32)
LAZY = da.from_array(X, chunks=(5, 6))
MODEL = ff.from_onnx(mlp())
CALLS = {
    "a model on an array": lambda client: client.compute(MODEL(X)),
    "a model on an array, cut": lambda client: client.compute(MODEL(X, batch_size=4)),
    "bundles of a model": lambda client: client.compute(ff.from_onnx(mlp(), granularity="op")(LAZY)),
    "a model on a dask array": lambda client: client.compute(MODEL(LAZY)),
    "what Dask makes of that": lambda client: client.compute((MODEL(LAZY) + 1).sum()),
    "a persisted one": lambda client: client.persist(MODEL(LAZY).mean(axis=0)),
    "predict": lambda client: client.map(MODEL.predict, [X, X + 1]),
    "predict of blocks": lambda client: client.compute(
        LAZY.map_blocks(MODEL.predict, dtype="f4", chunks=(5, 3))
    ),
}


def names(value: object) -> set[str]:
    """Return the names of dask_ferro in a pickle, apart from those in the bytes that a stand-in would not load."""
    texts = (text for _, text, _ in pickletools.genops(dumps(value)) if isinstance(text, str))
    return {text for text in texts if text.startswith("dask_ferro")}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@on_cluster(workers=0)
async def test_a_task_names_nothing_of_ours(client, scheduler, call):
    await ff.install(client, bundles=False)
    futures = call(client)
    await until_async(lambda: len(scheduler.tasks) > 0, "the graph on the scheduler")
    assert {str(ts.key): found for ts in scheduler.tasks.values() if (found := names(ts.run_spec))} == {}
    del futures


@pytest.mark.parametrize("protocol", [4, 5])
def test_arrays_of_a_task_are_outside_of_its_pickle_where_the_protocol_has_that(protocol):
    task, buffers = PortableTask("sum", np.sum, np.arange(10_000.0)), []
    callback = {"buffer_callback": buffers.append} if protocol == 5 else {}
    sent = pickle.dumps(task, protocol, **callback)
    assert (len(sent) < 10_000, [buffer.raw().nbytes for buffer in buffers]) == (
        protocol == 5,
        [80_000] * (protocol == 5),
    )
    assert pickle.loads(sent, buffers=buffers)({}) == 49_995_000
