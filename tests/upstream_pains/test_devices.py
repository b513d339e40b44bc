"""Threads about GPUs, played with declared ones: a twentieth of a CPU's seconds, and memory for four blocks."""

from __future__ import annotations

from dask_ferro.testing.declared_device import DeclaredDevice, MemoryBlock, compute
from tests.upstream_pains.jobs import open_gate
from tests.upstream_pains.scene import Scene, on_a_scene

BLOCK = 1_000_000


@on_a_scene(workers=1, reports=True)
async def test_a_thief_is_a_device_without_room_for_what_it_steals(s: Scene) -> None:
    """https://github.com/rapidsai/dask-cuda/issues/44: stealing fills a GPU's memory; its users turn stealing off.

    40 blocks lie on a host; each task reads one, and the thief has room for four.  Stock Dask sends more.
    """
    (a,) = s.workers
    await s.learn(0.05, "job", "gate")
    blocks = await s.client.scatter([MemoryBlock(BLOCK) for _ in range(40)], workers=[a.address], hash=False)
    await s.occupy(a)
    futures = s.map(40, compute, 0.05, 8, on=[a], each=blocks)
    await s.until(lambda: len(s.state(a).processing) == 41, "40 tasks that wait")
    await s.join(plugins=(DeclaredDevice("gpu", 20.0, total=4 * BLOCK),))
    await s.told()
    await s.until(lambda: max(s.given.values()) > 1, "a move")
    await s.looks()
    open_gate()
    await s.done(futures, errors="skip")
    failed = [future for future in futures if future.status == "error"]
    if s.way == "stock":
        assert failed
        assert "do not fit" in str(await failed[0].exception())
    else:
        assert not failed
        assert s.ran()[1] >= 1


@on_a_scene(workers=0, reports=True)
async def test_a_cpu_is_not_given_as_much_as_a_gpu(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/9128: mixed workers share the tasks by number, and the fast one idles.

    40 tasks of 50 ms, or 2.5 ms, are placed while both are busy: until the GPU is done, the CPU could run two of them.
    """
    for device, faster in (("cpu", 1.0), ("gpu", 20.0)):
        await s.join(plugins=(DeclaredDevice(device, faster),))
    cpu, gpu = s.workers
    await s.told()
    await s.learn(0.05, "job", "gate")
    roots = s.map(6, compute, 0.0, 8, name="root", on=[cpu], strictly=True)  # or some are stolen
    await s.done(roots)
    async with s.still():
        await s.occupy(cpu)
        await s.occupy(gpu, gate="other")
        s.map(40, compute, 0.05, 8, each=[roots[n % 6] for n in range(40)])
        given = [s.state(worker).processing for worker in (cpu, gpu)]
        # The GPU memory of a task of this prefix is not known: some wait until the first one is done.
        await s.until(
            lambda: sum(map(len, given)) + len(s.scheduler.unrunnable) == 42, "40 tasks placed, or held back"
        )
        waiting = len(given[0]) - 1
    if s.way == "stock":
        assert waiting == 40  # it holds what they read
    else:
        assert waiting <= 4
