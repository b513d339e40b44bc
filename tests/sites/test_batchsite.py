"""Batch systems without a cluster: what is known of a job that is not listed, is gone, or whose answer was lost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest

from dask_ferro.runtime.sites.batchsite import BatchSite
from dask_ferro.runtime.sites.commands import CommandSite
from dask_ferro.runtime.sites.pbs import PBSSite
from dask_ferro.runtime.slurm.commands import Refused
from tests.programs import ran
from tests.sites.batch import Batch
from tests.sites.conftest import COMMANDS
from tests.waiting import until_async

SCRIPT = "#!/bin/sh\nsleep 600\n"
GIVEN = {name: value for name, value in COMMANDS.items() if name not in ("directives", "grace")}


def pbs(name: str = "job", tag: str = "ferro-1") -> PBSSite:
    return PBSSite(name, tag)


def commands(name: str = "job", tag: str = "ferro-1", **given: Any) -> CommandSite:
    return CommandSite(name, tag, **(GIVEN | given))


KINDS = pytest.mark.parametrize(
    ("made", "submits", "lists"),
    [(pbs, "qsub", "qstat"), (commands, "submit", "jobs")],
    ids=["PBS", "commands"],
)


@asynccontextmanager
async def played(*sites: BatchSite) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(60.0):
            yield
    finally:
        for site in sites:
            site.close()


@KINDS
async def test_a_job_whose_answer_was_lost_is_found_by_its_word_and_no_other(
    made: Any, submits: str, lists: str, batch: Batch
) -> None:
    site, other = made(), made(tag="ferro-2")

    async with played(site, other):
        await other.submit(SCRIPT, [0], "aaaa")
        batch.does[submits] = "loses answer"
        with pytest.raises(Refused):
            await site.submit(SCRIPT, [0], "aaaa")
        seen = await site.queue()  # others use such names too; this one is ours
        assert len(seen) == 1
        assert await site.find("aaab") is None
        found = await site.find("aaaa")
        assert {found} == seen.keys()
        assert {found} == (await site.queue()).keys()
        assert await site.cancel_all(10.0)
        assert batch.alive() == [1]
        assert await other.cancel_all(10.0)

    assert batch.alive() == []


@pytest.mark.parametrize("lies", ["qselect", "qstat"])
async def test_a_lost_job_is_not_taken_for_none_where_one_command_of_two_says_nothing(
    lies: str, batch: Batch
) -> None:
    """Once it was submitted again, beyond the maximum."""
    site = pbs()

    async with played(site):
        for number in ("first", "second"):  # without and with a job that is known to be there
            batch.does["qsub"] = "loses answer"
            with pytest.raises(Refused):
                await site.submit(SCRIPT, [0], number)
            batch.does[lies] = "empty"
            if number == "first" and lies == "qstat":
                assert await site.find(number) is None  # nothing is known that could be missing
            else:
                with pytest.raises(Refused) if lies == "qstat" else nullcontext():
                    assert await site.find(number)
            batch.does.clear()
            assert await site.find(number)
        assert await site.find("third") is None


async def test_a_listing_that_leaves_out_what_is_there_says_nothing_of_others(batch: Batch) -> None:
    site = commands(nothing="No unfinished job found")

    async with played(site):
        assert await site.find("none") is None  # it says in words that there is nothing
        job_id = await site.submit(SCRIPT, [0], "a")
        batch.does["jobs"] = "empty"
        with pytest.raises(Refused):
            await site.find("none")
        batch.does.clear()
        await site.cancel([job_id])
        await until_async(lambda: not batch.alive(), "the end of the job")
        for _ in range(2):
            with pytest.raises(Refused):  # a listing may be older than the job
                await site.find("none")
        assert await site.find("none") is None


@KINDS
async def test_silence_about_a_job_says_nothing_and_words_do(
    made: Any, submits: str, lists: str, batch: Batch
) -> None:
    site = made()

    async with played(site):
        ids = [await site.submit(SCRIPT, [0], str(number)) for number in range(2)]
        batch.does[lists] = "empty"
        for _ in range(5):
            assert await site.unlisted(ids) == {}
        batch.does[lists] = "fail"
        assert await site.unlisted(ids) == {}
        with pytest.raises(Refused):
            await site.queue()
        batch.does.clear()
        gone = ids[0].replace("1", "7", 1)
        for _ in range(3):
            said = await site.unlisted([*ids, gone])
        assert (said[ids[0]].phase, said[ids[1]].phase, said[gone]) == ("started", "started", None)


async def test_an_empty_qstat_does_not_end_the_end_of_all_jobs(batch: Batch) -> None:
    site = pbs()

    async with played(site):
        await site.submit(SCRIPT, [0], "a")
        batch.does |= {"qstat": "empty", "qdel": "fail"}
        assert not await site.cancel_all(1.5)
        assert batch.alive() == [1]
        batch.does.clear()
        assert await site.cancel_all(10.0)


async def test_a_job_that_is_over_is_told_and_never_asked_for_again(batch: Batch) -> None:
    site = pbs()

    async with played(site):
        ends, stays = [await site.submit(text, [0], "a") for text in ("#!/bin/sh\nexit 4\n", SCRIPT)]

        async def is_over() -> bool:
            return (await site.queue())[ends].phase == "over"

        await until_async(is_over, "the end of a job")
        batch.calls.clear()
        row = (await site.queue())[ends]
        assert (row.state, row.reason) == ("FAILED", "exit status 4")
        assert batch.calls == [("qstat", ["-x", "-f", stays])]
        assert (await site.queue())[stays].comment == "ferro-1.a"


async def test_the_end_of_all_jobs_is_believed_where_a_silent_listing_goes_on_without_them(
    batch: Batch,
) -> None:
    site = commands(submit="submit -J {name} -D {tag} -n {script}")

    async with played(site):
        job_id = await site.submit(SCRIPT, [0], "a")
        batch.does["stop"] = "fail"
        assert not await site.cancel_all(1.0)
        assert batch.alive() == [1]
        batch.does.clear()
        assert await site.cancel_all(10.0, [job_id])
        assert batch.alive() == []
    assert batch.jobs[1].script == SCRIPT


async def test_the_scripts_own_variables_reach_the_job(batch: Batch) -> None:
    site = pbs()

    async with played(site):
        await site.submit("#!/bin/sh\n#PBS -v A=1,B=2\n#PBS -N x\nexit 0\n", [0], "n")
    assert batch.jobs[1].variables == "A=1,B=2,FERRO_SUBMISSION=ferro-1.n"


def test_the_watchdog_loads_neither_dask_nor_numpy() -> None:
    code = "import dask_ferro.runtime.sites.guard, sys; print({'dask', 'numpy', 'distributed'} & set(sys.modules))"
    done = ran([sys.executable, "-c", code], check=True)
    assert done.stdout == "set()\n"
