"""SLURM's commands, for the jobs of one cluster: submit, list, cancel.

Each has a time limit, and says in SLURM's words why it failed.  One `squeue` runs at a time.  What it does not list is
asked for elsewhere (`second_source`).  Which jobs are the cluster's own says a tag in their comment, and not their
name, which is the user's: others may have it too.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

from dask_ferro import portable
from dask_ferro.runtime.slurm import logs, parsing
from dask_ferro.runtime.slurm.commands import Refused, environment, run
from dask_ferro.runtime.slurm.orphan_guard import GuardedJobs, Watchdog
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, PENDING, STARTED, QueueRow
from dask_ferro.runtime.slurm.second_source import SecondSource
from dask_ferro.runtime.slurm.watched_site import WatchedSite

logger = logging.getLogger(__name__)

# What is only asked once, at the start, is not waited for longer than that.
_ASKED = 5.0
# Between two looks at the nodes: an administrator is in no hurry, and sinfo costs 9 ms of a core.
_NODES = 3.0
# Of a comment that squeue shows 200 characters of; the rest is for the word that a submission is known by.
_OWN_WORDS = 120
# A look at the queue waits so long for the nodes; what takes longer is told with the next one.
_NODES_WAIT = 1.0


class SlurmSite(WatchedSite):
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

    word, submits, lists, cancels = "SLURM", "sbatch", "squeue", "scancel"
    # Of an array at most: SLURM's default allows 1001, and one refusal costs less if an array is not everything.
    elements = 500

    def __init__(self, job_name: str, tag: str, keep: GuardedJobs | None = None) -> None:
        super().__init__(job_name, tag)
        self._keep = keep
        # Those of runs before, too, that did not end in order.
        self._names: tuple[str, ...] = (job_name,)
        # What was submitted here: of a site that rewrites comments, that is all that is known.
        self._arrays: dict[str, None] = {}
        self._draining: frozenset[str] = frozenset()
        self._nodes_at = 0.0
        self._nodes_look: asyncio.Task[None] | None = None
        self._others = SecondSource()

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
            self.guarded().inherit(tag)

    def take_over(self, array: str) -> None:
        """Take a job of a run before, or an array, for one of this run.

        Raises
        ------
        Refused
            When nobody would end it if this process died.
        """
        self._arrays[array] = None
        self.guarded().note(array)

    def _watch(self) -> Watchdog:
        return Watchdog(self.job_name, self.tag, environment(), self._keep)

    async def submit(self, script: str, offsets: Sequence[int], nonce: str = "") -> str:
        """Submit one job, or an array of these elements; return its id."""
        watchdog = self.guarded()
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
        """Return all jobs of the cluster that `squeue` lists, finished ones too."""
        async with self._turn:
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
        """Return what other commands say of jobs that `squeue` does not list."""
        return await self._others.rows(job_ids)

    async def ask(self, *command: str, stdin: str = "") -> str:
        """Return what a command prints that only tells something; it is given up after some seconds."""
        try:
            async with asyncio.timeout(_ASKED):
                return await run(*command, stdin=stdin)
        except TimeoutError:
            raise Refused(f"{command[0]} did not answer within {_ASKED:g} s", parsing.TRANSIENT) from None

    async def last_output(self, job_id: str, script: str) -> logs.Log:
        """Return the end of what a job printed."""
        return await logs.last_output(self.ask, job_id, script, self.job_name)

    async def find(self, nonce: str) -> str | None:
        """Return the array that a submission became; None where it waits or runs nowhere."""
        listed = None
        with suppress(Refused):
            listed = await self.queue()
        for row in (listed or {}).values():
            if row.phase in (PENDING, STARTED) and nonce in row.comment:
                return parsing.element(row.job_id)[0]
        try:  # `squeue` may be older than the submission
            return await self._others.named(nonce)
        except Refused as refused:
            if listed is None or refused.kind == parsing.TRANSIENT:
                raise
            return None  # a site without it

    async def graces(self) -> dict[str, float]:
        """Return the seconds that partitions grant to preempted jobs, and note which those are.

        Where SLURM does not say, there are none.
        """
        told = await self._told("--oneliner", "show", "partition")
        self.preemptible = parsing.preemptible(told)  # "" is the default partition
        return parsing.graces(told)

    async def kill_wait(self) -> float | None:
        """Return the seconds from SIGTERM to SIGKILL; None where SLURM does not say."""
        return parsing.kill_wait(await self._told("show", "config"))

    async def _told(self, *words: str) -> str:
        """Return what SLURM says of itself; empty where it does not."""
        try:
            return await self.ask("scontrol", *words)
        except Refused as refused:
            logger.info("dask_ferro: scontrol %s: %s", " ".join(words), refused.words)
            return ""

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

    async def _cancel(self, job_ids: Sequence[str]) -> None:
        await run("scancel", *job_ids)

    async def _cancel_known(self, job_ids: set[str]) -> None:
        # Of most of these nothing is left, and SLURM's complaints about them say nothing.
        await self.cancel(list(self._arrays), level=logging.DEBUG)

    async def _are_gone(self, job_ids: set[str]) -> bool:
        try:
            listed = await self.queue()
        except Refused as refused:
            logger.debug("dask_ferro: squeue failed: %s", refused.words)
            return False
        left = [row for row in listed.values() if row.phase != OVER]
        if not left:
            unlisted = job_ids - listed.keys()
            said = await self._others.rows(unlisted, most=None)
            if unlisted <= {job_id for job_id, row in said.items() if row is None or row.phase == OVER}:
                return True
            await self._cancel_known(job_ids)  # an empty squeue may be a lie
        await self.cancel([row.job_id for row in left if row.phase != ENDING])
        return False

    def close(self, *, jobs_left: bool = False) -> None:
        """End the watchdog, or leave the jobs that are left to it."""
        if self._nodes_look is not None:
            self._nodes_look.cancel()
        super().close(jobs_left=jobs_left)


def _comment(script: str, known_by: str) -> str:
    """Return a submission's comment: the user's own, and the word that it is known by.

    That word is last, or first where the user's words leave it no room in squeue's column.
    """
    own = parsing.option(script, "", "comment")
    parts = (known_by, own) if len(own) > _OWN_WORDS else (own, known_by)
    return " ".join(filter(None, parts))
