"""Jobs that can never do any work, on a real SLURM: the reason is shown, in SLURM's words and the job's.

Stock dask-jobqueue asks for them once, or again and again, without a message: tasks wait for ever.
"""

from __future__ import annotations

import logging
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dask_ferro as ff
from dask_ferro.observe.top import take_snapshot
from dask_ferro.slurm import pool
from tests.on_slurm.tools import Site
from tests.on_slurm.tools import closing as closing_sites
from tests.waiting import BOUND_S, until

# A client warns in its own thread, where an error would be a log.
pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default:dask_ferro. pool:UserWarning")]

# Seconds within which a broken script is reported: three jobs one after the other, and their start.
SOON = 15.0


@pytest.fixture
def broken(slurm: Path, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Makes clusters whose jobs end at once, until the file `mended` is there."""
    script = f"[ -e {tmp_path}/mended ] || {{ echo 'module: no such thing <4>' >&2; exit 1; }}"
    yield from closing_sites(partial(Site, tmp_path, job_script_prologue=[script]))


def events(site: Site) -> list[dict[str, Any]]:
    """What was published of pools that closed."""
    found = site.client.get_events("ferro")
    return [message for _, message in found if message["action"] == "pool-closed"]


def test_who_waits_is_told_the_jobs_last_lines_everybody_once_and_tasks_fail_where_that_is_wanted(
    broken, caplog, tmp_path
):
    site = broken()
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        site.cluster.scale(2)
        with pytest.raises(ff.InputError) as raised:
            site.cluster.wait_for_workers(2)
        until(lambda: [w for w in warned if "is closed" in str(w.message)], "the client's warning")
    (event,) = events(site)
    assert event["log"].startswith(str(tmp_path / "logs"))
    assert list(event["lines"]) == ["module: no such thing <4>"]
    logged = [record.message for record in caplog.records if "is closed" in record.message]
    said = [str(warning.message) for warning in warned if "is closed" in str(warning.message)]
    assert (len(logged), len(said)) == (1, 1)
    with pytest.raises(ff.InputError) as again:  # a client waits where its cluster does
        site.client.wait_for_workers(1)
    clock = time.strftime("until %H:%M:%S", time.localtime(event["until"]))
    for text in (str(raised.value), str(again.value), logged[0], said[0]):
        assert "jobs ended before a worker came; the last, job" in text
        assert "FAILED (NonZeroExitCode)" in text
        assert event["log"] in text
        assert "\n    module: no such thing <4>" in text
        assert clock in text


# By what is wrong: options of the cluster, the address of its scheduler, and the error.
UNREACHABLE = {
    "no interface": ({"interface": "ib9"}, "", "has the error \"ValueError: 'ib9' is not a valid"),
    "it refuses": ({}, "tcp://127.0.0.1:9", "finds no scheduler at {}: it refuses connections"),
    "it says nothing": ({}, "silent", "finds no scheduler at {}: it does not answer within 9 s"),
}


def test_who_never_reaches_the_scheduler_is_told_with_node_address_network_and_line(site):
    """It was "Nanny failed to start", or that it timed out, after two minutes."""

    def text_of(options: dict[str, str], address: str) -> str:
        scheduler = {
            "dashboard_address": "127.0.0.1:0",
            "interface": "lo",
            "contact_address": address or None,
        }
        s = site(**options, death_timeout=10, scheduler_options=scheduler)
        with pytest.raises(ff.InputError) as raised:
            staff(s)
        return str(raised.value)

    def staff(s: Site) -> None:
        s.cluster.scale(3)
        s.cluster.wait_for_workers(3, timeout=BOUND_S)

    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as threads:
        there = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        rows = [
            (options, address.replace("silent", there), error)
            for options, address, error in UNREACHABLE.values()
        ]
        texts = list(threads.map(text_of, *zip(*[row[:2] for row in rows], strict=True)))
    for (options, address, error), text in zip(rows, texts, strict=True):
        network = options.get("interface", "lo")
        where = rf" on c\d, whose workers connect to {address or 'tcp:'}\S* by interface {network}; its log "
        assert re.search(where, text)
        assert error.format(address) in text


def test_a_pool_that_opens_again_goes_on_with_the_work_that_waited(broken, monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "_CLOSED_SECONDS", 2.0)
    site = broken()
    site.cluster.adapt(minimum=0, maximum=2, interval=0.3)
    future = site.client.submit(abs, -7)
    until(lambda: events(site), "the pool to close", seconds=SOON)

    def shown() -> str:
        found = site.client.run_on_scheduler(take_snapshot)["overview"]["findings"]
        return "".join(f"{one['sentence']}\n{one['output']}" for one in found if one["what"] == "pool")

    told = until(lambda: "closed until" in shown() and shown(), "the overview to name it", seen=shown)
    assert "pool default is closed until" in told
    assert "module: no such thing <4>" in told
    assert not future.done()
    (tmp_path / "mended").touch()
    assert future.result(timeout=60) == 7
    assert not site.cluster.pools[0].closed
    until(lambda: not shown(), "the overview to name it no more")
