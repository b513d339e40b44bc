"""SLURM's commands, for the jobs of one cluster: submit, list, cancel.

Each has a time limit, and says in SLURM's words why it failed.  One `squeue` runs at a time.  What it does not list is
asked for elsewhere (`second_source`).  The first submission starts the watchdog, so that nothing is ever in the queue
without one.  What is tried again is decided elsewhere, but for the end of all jobs.  Which jobs are the cluster's own
says a tag in their comment, and not their name, which is the user's: others may have it too.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterable, Sequence

from dask_ferro import portable
from dask_ferro.runtime.slurm import logs, parsing
from dask_ferro.runtime.slurm.commands import Refused, environment, run
from dask_ferro.runtime.slurm.orphan_guard import GuardedJobs, Watchdog
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, PENDING, STARTED, QueueRow
from dask_ferro.runtime.slurm.second_source import SecondSource

logger = logging.getLogger(__name__)

# Arguments of one scancel.
_CANCELLED = 200
# What is only asked once, at the start, is not waited for longer than that.
_ASKED = 5.0
# Between two looks at the nodes: an administrator is in no hurry, and sinfo costs 9 ms of a core.
_NODES = 3.0
# Of a comment that squeue shows 200 characters of; the rest is for the word that a submission is known by.
_OWN_WORDS = 120
# A look at the queue waits so long for the nodes; what takes longer is told with the next one.
_NODES_WAIT = 1.0
# While all jobs are ended: the first pause between two looks, and the longest.
_LOOK, _LOOK_MOST = 0.1, 2.0


class SlurmSite:
    """SLURM, as far as the jobs of one cluster are concerned.

    Parameters
    ----------
    job_name : str
        Which all jobs of this cluster have, and others may have as well.
    tag : str
        A word that the comments of all jobs of this cluster have, and no others.
    keep : GuardedJobs, optional
        What the watchdog does when this process dies.
    """

    # What a log or an error calls it, and its commands.
    word, submits, lists = "SLURM", "sbatch", "squeue"
    # Of an array at most: SLURM's default allows 1001, and one refusal costs less if an array is not everything.
    elements = 500

    def __init__(self, job_name: str, tag: str, keep: GuardedJobs | None = None) -> None:
        self.job_name, self.tag, self._keep = job_name, tag, keep
        # Of runs before that did not end in order: the tags and names of their jobs.
        self.former_tags: tuple[str, ...] = ()
        self._names: tuple[str, ...] = (job_name,)
        # What was submitted here: of a site that rewrites comments, that is all that is known.
        self._arrays: dict[str, None] = {}
        self._watchdog: Watchdog | None = None
        # Partitions, as `graces` found them; "" is the default one.
        self.preemptible: frozenset[str] = frozenset()
        self._draining: frozenset[str] = frozenset()
        self._nodes_at = 0.0
        self._nodes_look: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._others = SecondSource()

    @property
    def was_used(self) -> bool:
        """Whether there may be jobs."""
        return self._watchdog is not None or bool(self.former_tags)

    def inherit(self, tags: Iterable[str], names: Iterable[str]) -> None:
        """Look after the jobs of runs before as well.

        Raises
        ------
        Refused
            When nobody would end them if this process died.
        """
        self.former_tags = tuple(tags)
        self._names = tuple(dict.fromkeys((self.job_name, *filter(parsing.is_job_name, names))))
        for tag in self.former_tags:
            self._guarded().inherit(tag)

    def take_over(self, array: str) -> None:
        """Take a job of a run before, or an array, for one of this run.

        Raises
        ------
        Refused
            When nobody would end it if this process died.
        """
        self._arrays[array] = None
        self._guarded().note(array)

    def _guarded(self) -> Watchdog:
        if self._watchdog is None:
            self._watchdog = _watchdog(self.job_name, self.tag, self._keep)
        return self._watchdog

    async def submit(self, script: str, offsets: Sequence[int], nonce: str = "") -> str:
        """Submit one job, or an array of these elements; return its id.

        Parameters
        ----------
        nonce : str
            What the queue will show the submission by: the end of its comment, after the tag.

        Raises
        ------
        Refused
            With SLURM's words.
        """
        watchdog = self._guarded()
        array = [f"--array={parsing.indices(offsets)}"] if list(offsets) != [0] else []
        # The command line wins over SBATCH_JOB_NAME in the environment, and over the script.
        out = await run(
            "sbatch",
            "--parsable",
            f"--job-name={self.job_name}",
            f"--comment={_comment(script, f'{self.tag}.{nonce}')}",
            *array,
            stdin=script,
            pass_fds=(watchdog.fd,),
        )
        # A site's wrapper may talk before; with several clusters, the cluster's name follows.
        found = re.findall(r"^(\d+)(?:;.*)?$", out, re.MULTILINE)
        if not found:
            raise Refused(f"sbatch printed no job id: {out.strip()!r}", parsing.UNKNOWN)
        self._arrays[found[-1]] = None
        watchdog.note(found[-1])
        return str(found[-1])

    async def queue(self) -> dict[str, QueueRow]:
        """Return all jobs of the cluster that `squeue` lists, by id, finished ones too: all that there are, as a rule.

        Raises
        ------
        Refused
            When SLURM does not answer.
        """
        async with self._turn:  # commands that hang do not pile up
            out = await run(
                "squeue", "--noheader", "--array", "--states=all", f"--user={portable.user_id()}",
                f"--name={','.join(self._names)}", f"--Format={parsing.FORMAT}",
            )  # fmt: skip
        return {job_id: row for job_id, row in parsing.rows(out).items() if self._is_own(row)}

    def _is_own(self, row: QueueRow) -> bool:
        if any(f"{tag}." in row.comment for tag in (self.tag, *self.former_tags)):
            return True
        return parsing.element(row.job_id)[0] in self._arrays

    async def unlisted(self, job_ids: Iterable[str]) -> dict[str, QueueRow | None]:
        """Return what other commands say of jobs that `squeue` does not list.

        None: they know no such job; of a job that is left out, they did not answer.
        """
        return await self._others.rows(job_ids)

    async def ask(self, *command: str, stdin: str = "") -> str:
        """Return what a command prints that only tells something; it is given up after some seconds.

        Raises
        ------
        Refused
            With SLURM's words.
        """
        try:
            async with asyncio.timeout(_ASKED):
                return await run(*command, stdin=stdin)
        except TimeoutError:
            raise Refused(f"{command[0]} did not answer within {_ASKED:g} s", parsing.TRANSIENT) from None

    async def last_output(self, job_id: str, script: str) -> logs.Log:
        """Return the end of what a job printed."""
        return await logs.last_output(self.ask, job_id, script, self.job_name)

    async def find(self, nonce: str) -> str | None:
        """Return the array that a submission became; None where it waits or runs nowhere.

        Raises
        ------
        Refused
            When SLURM does not answer.
        """
        try:
            listed = await self.queue()
        except Refused:
            return await self._others.named(nonce)
        there = (row for row in listed.values() if row.phase in (PENDING, STARTED))
        for row in there:
            if nonce in row.comment:
                return parsing.element(row.job_id)[0]
        try:  # `squeue` may be older than the submission
            return await self._others.named(nonce)
        except Refused as refused:
            if refused.kind == parsing.TRANSIENT:
                raise
            return None  # a site without it

    async def graces(self) -> dict[str, float]:
        """Return the seconds that partitions grant to preempted jobs, and note which those are.

        Where SLURM does not say, there are none.
        """
        try:
            async with asyncio.timeout(_ASKED):
                told = await run("scontrol", "--oneliner", "show", "partition")
            self.preemptible = parsing.preemptible(told)
            return parsing.graces(told)
        except (Refused, TimeoutError) as error:
            logger.info("dask_ferro: scontrol did not tell of the partitions: %s", error)
            return {}

    async def kill_wait(self) -> float | None:
        """Return the seconds from SIGTERM to SIGKILL; None where SLURM does not say."""
        try:
            async with asyncio.timeout(_ASKED):
                return parsing.kill_wait(await run("scontrol", "show", "config"))
        except (Refused, TimeoutError) as error:
            logger.info("dask_ferro: scontrol did not tell of its configuration: %s", error)
            return None

    async def draining(self) -> frozenset[str]:
        """Return the nodes that their administrator wants to have free: a look now and then, and what it said since."""
        now = asyncio.get_running_loop().time()
        if now >= self._nodes_at and (self._nodes_look is None or self._nodes_look.done()):
            self._nodes_at = now + _NODES
            self._nodes_look = asyncio.create_task(self._look_at_nodes())
        if self._nodes_look is not None:
            await asyncio.wait({self._nodes_look}, timeout=_NODES_WAIT)
        return self._draining

    async def _look_at_nodes(self) -> None:
        try:
            out = await run("sinfo", "--noheader", "--Node", "--states=drain,fail", "--format=%N")
            self._draining = frozenset(out.split())
        except Refused as refused:
            logger.warning("dask_ferro: sinfo failed: %s", refused.words)

    async def cancel(self, job_ids: Sequence[str], level: int = logging.WARNING) -> None:
        """Ask SLURM to end jobs; failures are logged, for the caller looks in any case."""
        for at in range(0, len(job_ids), _CANCELLED):
            try:
                await run("scancel", *job_ids[at : at + _CANCELLED])
            except Refused as refused:
                logger.log(level, "dask_ferro: scancel failed: %s", refused.words)

    async def cancel_all(self, patience: float, job_ids: Iterable[str] = ()) -> bool:
        """End every job of the cluster; return whether none is left within so many seconds.

        Parameters
        ----------
        job_ids : iterable of str
            Those that were there: an empty `squeue` alone does not say that they are gone.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                return await self._cancel_all(set(job_ids))
        return False

    async def _cancel_all(self, job_ids: set[str]) -> bool:
        pause = _LOOK
        # Whatever the queue says; of most of these nothing is left, and SLURM's complaints about them say nothing.
        await self.cancel(list(self._arrays), level=logging.DEBUG)
        while True:
            try:
                listed = await self.queue()
            except Refused as refused:
                logger.debug("dask_ferro: squeue failed: %s", refused.words)
            else:
                left = [row for row in listed.values() if row.phase != OVER]
                if not left and not await self._are_left(job_ids - listed.keys()):
                    return True
                if not left:  # or it is a lie
                    await self.cancel(list(self._arrays), level=logging.DEBUG)
                await self.cancel([row.job_id for row in left if row.phase != ENDING])
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LOOK_MOST)

    async def _are_left(self, job_ids: set[str]) -> bool:
        """Whether jobs that `squeue` does not list may be there all the same."""
        said = await self._others.rows(job_ids, most=None)
        gone = {job_id for job_id, row in said.items() if row is None or row.phase == OVER}
        return bool(job_ids - gone)

    def close(self, *, jobs_left: bool = False) -> None:
        """End the watchdog, or leave the jobs that are left to it."""
        if self._nodes_look is not None:
            self._nodes_look.cancel()
        if self._watchdog is not None:
            self._watchdog.close(jobs_left=jobs_left)


def _comment(script: str, known_by: str) -> str:
    """Return a submission's comment: the user's own, and the word that it is known by.

    That word is last, or first where the user's words leave it no room in squeue's column.
    """
    own = parsing.option(script, "", "comment")
    parts = (known_by, own) if len(own) > _OWN_WORDS else (own, known_by)
    return " ".join(filter(None, parts))


def _watchdog(job_name: str, tag: str, keep: GuardedJobs | None) -> Watchdog:
    try:
        return Watchdog(job_name, tag, environment(), keep)
    except OSError as error:
        raise Refused(f"no watchdog could be started: {error}", parsing.TRANSIENT) from None
