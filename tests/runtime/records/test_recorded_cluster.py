"""A cluster that is started on the journal of one that was killed, with a made-up batch system and scheduler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dask_ferro as ff
from dask_ferro.runtime.records.journal import JobJournal, read
from dask_ferro.runtime.records.record import JobRecord
from dask_ferro.runtime.records.recorded_cluster import RecordedCluster, recording_of
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.parsing import QueueRow


class MadeUpSite:
    """SLURM's commands: what they list, and what was asked of them."""

    job_name = "mine"

    def __init__(self, rows: Iterable[QueueRow] = ()) -> None:
        self.rows = {row.job_id: row for row in rows}
        self.former_tags: tuple[str, ...] = ()
        self.refuses_watchdogs = self.hangs = False
        self.address_file = ""
        self.announced_first: bool | None = None

    def inherit(self, tags: Iterable[str], names: Iterable[str]) -> None:
        self.announced_first = os.path.exists(self.address_file)
        if self.refuses_watchdogs:
            raise Refused("no watchdog could be started", "transient")
        self.former_tags = tuple(tags)

    def take_over(self, array: str) -> None: ...

    async def queue(self) -> Mapping[str, QueueRow]:
        if self.hangs:
            raise Refused("squeue did not answer", "transient")
        return self.rows

    async def unlisted(self, job_ids: Iterable[str]) -> dict[str, QueueRow | None]:
        return dict.fromkeys(job_ids)


class Base:
    """What dask-jobqueue's class does."""

    async def _open_cluster(self) -> None: ...


class MadeUpCluster(RecordedCluster, Base):
    """A cluster without workers."""

    def __init__(self, journal: Path, site: MadeUpSite, connected: Iterable[str] = ()) -> None:
        self._recording, _ = recording_of("ferro-new", journal, 0.0)
        self._site = site
        site.address_file = f"{journal}.scheduler"
        self._connected = set(connected)
        self._former: dict[str, Any] = {}
        self._book: dict[str, Any] = {}
        self._adopted: set[str] = set()
        self._names = SimpleNamespace(actual={})
        self.ended: dict[str, Any] = {}
        self._cancellation = SimpleNamespace(add=self.ended.update)
        self.scheduler = SimpleNamespace(address="tcp://new:1")
        self.scheduler_comm = None  # takes no plugins

    def _kind_digest(self, pool: str) -> str | None:
        return "k"

    def _connected_names(self) -> set[str]:
        return self._connected

    def _followed(self) -> list[Any]:
        return [*self._book.values(), *self._former.values()]


def killed(path: Path, *records: JobRecord) -> Path:
    """The journal of a cluster that was killed."""
    kept = JobJournal(path / "jobs", "ferro-old")
    kept.begin("mine", 1.0)
    kept.add(records)
    kept.release()
    return path / "jobs"


def test_its_watchdog_has_the_jobs_before_the_one_of_before_leaves_them(tmp_path: Path) -> None:
    """Killed between the two, it once left jobs that no watchdog knew of."""
    site = MadeUpSite()
    asyncio.run(MadeUpCluster(killed(tmp_path), site)._open_cluster())
    assert site.former_tags == ("ferro-old",)
    assert site.announced_first is False
    assert (tmp_path / "jobs.scheduler").read_text() == "tcp://new:1 ferro-new\n"


def test_without_a_watchdog_for_them_it_leaves_the_jobs_to_the_one_of_before(tmp_path: Path) -> None:
    site = MadeUpSite()
    site.refuses_watchdogs = True
    with pytest.raises(
        ff.ConfigError, match="no watchdog would end the jobs of the previous run: no watchdog could"
    ):
        asyncio.run(MadeUpCluster(killed(tmp_path), site)._open_cluster())
    assert not (tmp_path / "jobs.scheduler").exists()


async def test_a_job_that_started_while_slurm_was_slow_is_adopted_if_it_found_this_scheduler(
    tmp_path: Path,
) -> None:
    """Its workers were connected and worked, and it was ended."""
    facts: dict[str, Any] = {"state": "pending", "run": "ferro-old", "kind": "k"}
    records = [JobRecord(f"a-{n}", "a", f"{n}", order=n, **facts) for n in (1, 2, 3)]
    rows = [
        QueueRow("1", "RUNNING", comment="ferro-old.x", starts=50.0),
        QueueRow("2", "RUNNING", comment="ferro-old.x", starts=50.0, restarts=1),
        QueueRow("3", "RUNNING", comment="ferro-old.x", starts=50.0),
    ]
    site = MadeUpSite(rows)
    site.hangs = True

    cluster = MadeUpCluster(killed(tmp_path, *records), site, connected=["a-1", "a-2.1"])
    await cluster._open_cluster()
    assert len(cluster._former) == 3
    site.hangs = False
    await cluster._settle_former(await site.queue())
    assert {job.name: job.state for job in cluster._book.values()} == {"a-1": "booting", "a-2": "booting"}
    assert list(cluster.ended) == ["3"]


async def test_jobs_whose_numbers_nobody_heard_count_until_slurm_has_told_of_them(tmp_path: Path) -> None:
    """Where the first look took too long, they ran until a later one took them for strays, and did not count."""
    unheard = JobRecord("a-1", "a", state="submitting", run="ferro-old", kind="k", order=1)
    site = MadeUpSite(
        [QueueRow("7", "PENDING", comment="ferro-old.x"), QueueRow("8", "PENDING", comment="ferro-new.x")]
    )
    site.hangs = True

    cluster = MadeUpCluster(killed(tmp_path, unheard), site)
    await cluster._open_cluster()
    assert list(cluster._former) == ["a-1"]
    site.hangs = False
    await cluster._settle_former(await site.queue())
    await cluster._settle_former(site.rows | {"9": QueueRow("9", "PENDING", comment="ferro-old.y")})
    assert cluster._former == {}
    assert list(cluster.ended) == ["7"]
    assert cluster._recording.book.records[0].is_over


@pytest.mark.parametrize(
    ("rows", "is_open"),
    [
        pytest.param([], False, id="no job of its"),
        pytest.param([QueueRow("1", "COMPLETED", comment="ferro-old.x")], False, id="only one that is over"),
        pytest.param(
            [QueueRow("1", "PENDING", comment="ferro-old.x")], True, id="one that waits, and is adopted"
        ),
        pytest.param([QueueRow("9", "COMPLETING", comment="ferro-old.x")], True, id="one that ends"),
    ],
)
async def test_after_a_look_runs_without_jobs_are_not_looked_for_again(
    tmp_path: Path, rows: list[QueueRow], is_open: bool
) -> None:
    """Killed again and again, a cluster asked for the jobs of ever more runs."""
    record = JobRecord("a-1", "a", "1", state="pending", run="ferro-old", kind="k")

    cluster = MadeUpCluster(killed(tmp_path, record), MadeUpSite(rows))
    await cluster._open_cluster()
    await cluster._recording.end(jobs_left=True)
    tags = [run.tag for run in read(tmp_path / "jobs").open_runs]
    assert tags == (["ferro-old", "ferro-new"] if is_open else ["ferro-new"])


def test_a_run_that_did_not_start_is_not_looked_for(tmp_path: Path) -> None:
    async def fails(*args: object) -> None:
        raise OSError("no port")

    cluster = MadeUpCluster(killed(tmp_path), MadeUpSite())
    cluster._recording.connect = fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no port"):
        asyncio.run(cluster._open_cluster())
    assert [run.tag for run in read(tmp_path / "jobs").open_runs] == ["ferro-old"]
