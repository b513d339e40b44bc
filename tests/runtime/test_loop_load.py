"""How busy a loop is."""

import time
from pathlib import Path
from typing import NamedTuple

import pytest

from dask_ferro.runtime import loop_load
from dask_ferro.runtime.loop_load import LoopLoad


def spin() -> None:
    sum(range(5_000_000))


def test_nothing_is_known_the_first_time() -> None:
    assert LoopLoad().share() is None


def test_a_loop_that_spins_is_busy_whether_or_not_others_have_the_core() -> None:
    load = LoopLoad()
    load.share()
    spin()
    busy = load.share()
    # A kernel may not count what a thread waits for a core.
    least = 0.8 if loop_load._SCHEDSTAT.exists() else 0.0
    assert busy is not None
    assert least < busy <= 1.0


def test_a_loop_that_sleeps_is_not_busy() -> None:
    load = LoopLoad()
    load.share()
    time.sleep(0.3)
    idle = load.share()
    assert idle is not None
    assert idle < 0.8


@pytest.mark.parametrize("content", [None, b"", b"10\n", b"what now\n"])
def test_without_the_counters_it_is_busy_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    counters = tmp_path / "schedstat"
    if content is not None:
        counters.write_bytes(content)
    monkeypatch.setattr(loop_load, "_SCHEDSTAT", counters)
    load = LoopLoad()
    load.share()
    spin()
    busy = load.share()
    assert busy is not None
    assert 0.0 < busy <= 1.0


class CpuTimes(NamedTuple):
    """Seconds of all cores, as psutil gives them."""

    user: float
    idle: float
    iowait: float


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        pytest.param((10.0, 10.0, 0.0), (12.0, 10.0, 0.0), 1.0, id="no core was idle"),
        pytest.param((10.0, 10.0, 0.0), (11.0, 13.0, 0.0), 0.25, id="three quarters idle"),
        pytest.param((10.0, 10.0, 0.0), (11.0, 10.5, 0.5), 0.5, id="waiting for a disk is idle"),
        pytest.param((10.0, 10.0, 0.0), (10.0, 10.0, 0.0), 0.0, id="no time passed"),
    ],
)
def test_where_workers_share_its_cores_their_load_counts(
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[float, ...],
    after: tuple[float, ...],
    wanted: float,
) -> None:
    monkeypatch.setattr(LoopLoad, "_own_share", lambda self: 0.0, raising=True)
    samples = iter([CpuTimes(*before), CpuTimes(*after)] * 2)
    monkeypatch.setattr(loop_load.os, "sched_getaffinity", lambda _: {1}, raising=False)
    busy = CpuTimes(0.0, 0.0, 0.0)  # of a core that is another job's
    monkeypatch.setattr(loop_load.psutil, "cpu_times", lambda percpu: [busy, next(samples)])
    load = LoopLoad()
    load.share(shares_cores=True)
    assert load.share(shares_cores=True) == pytest.approx(wanted)
    alone = LoopLoad()
    alone.share()
    assert alone.share() == 0.0
