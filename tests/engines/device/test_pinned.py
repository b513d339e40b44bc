"""Buffers of page-locked memory: used again when their arrays are gone, and never more than the limit."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dask_ferro.engines.device.pinned import PinnedBuffers

MIB = 1 << 20


class Allocator:
    """Counts the buffers that it has made."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> memoryview:
        self.sizes.append(nbytes)
        return memoryview(bytearray(nbytes))


def make(limit: int = 64 * MIB) -> tuple[PinnedBuffers, Allocator]:
    allocator = Allocator()
    return PinnedBuffers(allocator, limit), allocator


def of(nbytes: int) -> tuple[tuple[int, ...], type]:
    return (nbytes // 4,), np.float32


def test_an_array_has_its_shape_and_dtype_and_can_be_written() -> None:
    buffers, _ = make()
    array = buffers.empty((3, 5, 70_000), np.int16)
    assert array is not None
    assert (array.shape, array.dtype) == ((3, 5, 70_000), np.int16)
    array[...] = 7
    assert (array == 7).all()


def test_a_buffer_is_used_again_when_all_views_of_its_array_are_gone() -> None:
    buffers, allocator = make()
    array = buffers.empty(*of(MIB))
    assert array is not None
    view = array[5:].reshape(-1)
    view[:] = 3.0
    del array
    gc.collect()
    other = buffers.empty(*of(MIB))  # the first buffer is still read
    assert other is not None
    other[:] = 4.0
    assert (view == 3.0).all()
    assert allocator.sizes == [MIB, MIB]
    del view, other
    gc.collect()
    kept = [buffers.empty(*of(MIB - 4096)), buffers.empty(*of(MIB // 2 + 4))]  # both are rounded up to 1 MiB
    assert all(a is not None for a in kept)
    assert allocator.sizes == [MIB, MIB]


def test_all_buffers_together_stay_below_the_limit() -> None:
    buffers, allocator = make(limit=4 * MIB)
    held = [buffers.empty(*of(MIB)) for _ in range(4)]
    assert all(a is not None for a in held)
    assert buffers.empty(*of(MIB)) is None
    assert buffers.nbytes == 4 * MIB
    del held
    gc.collect()
    # Buffers of another size are dropped for what fits otherwise.
    large = buffers.empty(*of(4 * MIB))
    assert large is not None
    assert (buffers.nbytes, allocator.sizes[-1]) == (4 * MIB, 4 * MIB)


def test_threads_never_share_a_buffer() -> None:
    buffers, _ = make()

    def work(number: int) -> bool:
        for step in range(50):
            array = buffers.empty(*of(MIB // 2))
            if array is None:
                return False
            array[:] = 100 * number + step
            if not (array == 100 * number + step).all():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
