"""Results of one task that travel together."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from distributed import futures_of
from distributed.protocol import serialize
from distributed.protocol.serialize import deserialize_bytes, serialize_bytes
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import dask_ferro as ff
from dask_ferro.lower.worker.outputs import MAX_COPY, NamedOutputs, Outputs, pack_results, together_by_name
from tests.each import every
from tests.waiting import result

SMALL = [np.full(256, i, np.float32) for i in range(1000)]


def sent(value):
    """What arrives of a value."""
    return deserialize_bytes(serialize_bytes(value))


def same(got, wanted):
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, wanted)


def test_many_small_arrays_are_one_frame_and_their_positions():
    _, frames = serialize(pack_results(SMALL))
    description, stack = (memoryview(frame).nbytes for frame in frames)
    assert stack == 1000 * 1024
    assert description < 4000


def test_large_arrays_keep_their_frames_and_are_not_copied():
    large = np.zeros(MAX_COPY, np.float32)
    _, frames = serialize(pack_results([SMALL[0], large, SMALL[1]]))
    assert len(frames) == 3
    assert any(
        f.nbytes == large.nbytes and np.shares_memory(np.frombuffer(f, np.float32), large) for f in frames[1:]
    )


@every(
    "arrays",
    [
        pytest.param([np.array(1.5), np.array(2.5), np.array(3)], id="without axes"),
        pytest.param([np.empty((0, 3), np.int8), np.empty(0), np.arange(3)], id="empty ones"),
        pytest.param([np.empty(0), np.empty(0)], id="nothing but empty ones"),
        pytest.param([np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(12)[::3]], id="any layout"),
        pytest.param([np.array([True, False]), np.arange(3, dtype="i1"), np.arange(2.0)], id="odd lengths"),
        pytest.param([np.arange(3, dtype=">f4"), np.arange(3, dtype="<f4")], id="the other byte order"),
        pytest.param([np.arange(3).astype(ml_dtypes.bfloat16), np.arange(3.0)], id="bfloat16"),
        pytest.param([np.array(["a", "bc"], object), np.arange(3)], id="texts"),
        pytest.param(
            [np.zeros(MAX_COPY), np.arange(3), np.ones((MAX_COPY, 1), np.int8)], id="large and small"
        ),
        pytest.param([np.broadcast_to(np.float32(1), (4, 4)), np.arange(3)], id="broadcast"),
    ],
)
def test_what_is_sent_arrives(arrays):
    got = sent(pack_results(arrays))
    assert type(got) is Outputs
    assert all(one.flags.writeable for one in got)
    for one, wanted in zip(got, arrays, strict=True):
        same(one, wanted)
    named = {f"y{i}": a for i, a in enumerate(arrays)}
    by_name = sent(together_by_name(named))
    assert type(by_name) is dict
    assert list(by_name) == list(named)
    for name, wanted in named.items():
        same(by_name[name], wanted)


DTYPES = st.sampled_from(["?", "i1", "<u2", "<i8", "<f2", "<f4", "<c16"])
SHAPES = nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@given(st.lists(nps.arrays(DTYPES, SHAPES), max_size=12))
def test_any_arrays_arrive_bit_by_bit(arrays):
    for one, wanted in zip(sent(pack_results(arrays)), arrays, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@pytest.mark.cluster
def test_outputs_travel_together_between_workers_and_to_the_client(client):
    model = ff.from_onnx(ff.testing.build("wide", branches=6, length=1), granularity=0.003)
    x = np.arange(256, dtype=np.float32)
    y = model(x)
    assert 1 < len(model.planned(x).bundles) < 6  # several outputs each
    for got in (y.compute(), result(client.compute(y))):
        assert list(got) == list(model.outputs)
        for value in got.values():
            same(value, x)
    kept = client.persist(y)
    futures = futures_of(kept)
    assert Outputs in {type(v) for v in client.gather(futures)}
    client.replicate(futures)
    for name in model.outputs:
        same(result(client.compute(kept[name])), x)
    whole = ff.from_onnx(ff.testing.build("wide", branches=3, length=1), granularity="model")(x)
    assert type(result(client.compute(whole))) is dict
    assert type(whole.compute()) is dict
    assert isinstance(whole.compute(scheduler="sync"), NamedOutputs)
