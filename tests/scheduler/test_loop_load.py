"""How busy a loop is."""

import time
from pathlib import Path

import pytest

from dask_ferro.scheduler import stealing
from dask_ferro.scheduler.stealing import LoopLoad


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
    least = 0.8 if stealing._SCHEDSTAT.exists() else 0.0
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
    monkeypatch.setattr(stealing, "_SCHEDSTAT", counters)
    load = LoopLoad()
    load.share()
    spin()
    busy = load.share()
    assert busy is not None
    assert 0.0 < busy <= 1.0
