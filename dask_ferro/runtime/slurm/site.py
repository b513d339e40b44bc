"""SLURM's commands for the jobs of one cluster: submit, list, cancel.

Each has a time limit, and failures carry SLURM's message.  One `squeue` runs at a time.  Jobs that it does not list
are asked for elsewhere (`second_source`).  The cluster's own jobs are recognised by a tag in their comment, and not
by their name, which is the user's and may be shared.  The first submission starts the watchdog, so that no job is
ever in the queue without one.  Retries are decided elsewhere, except at the end of all jobs.  Durations are seconds.
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
from dask_ferro.runtime.slurm.orphan_guard import Watchdog, is_orphan
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, PENDING, STARTED, QueueRow
from dask_ferro.runtime.slurm.second_source import SecondSource

logger = logging.getLogger(__name__)

# The time limit of queries made once, at the start.
_ASKED = 5.0
# Seconds between two queries of the nodes: an administrator is in no hurry, and sinfo costs 9 ms of a core.
_NODES = 3.0
# Of the 200 characters of a comment that squeue shows, the most for the user's; the rest is for our identifier.
_OWN_WORDS = 120
# Seconds that a listing waits for the nodes; a later answer is used by the next one.
_NODES_WAIT = 1.0
# The most elements of an array: SLURM's default allows 1001, and one refusal costs less if an array is not everything.
ELEMENTS = 500
# Ids per cancellation: far below the limit of a command line, and one call costs as much as for one job.
_CANCELLED = 200
# Seconds between two checks while all jobs are ended, at first and at most.
_LOOK, _LOOK_MOST = 0.1, 2.0


class SlurmSite:
    """SLURM's commands for the jobs of one cluster.

    Parameters
    ----------
    job_name : str
        The name of all jobs of this cluster, which others may have as well.
    tag : str
        A word in the comments of all jobs of this cluster, and no others.
    """

    def __init__(self, job_name: str, tag: str) -> None:
        self.job_name, self.tag = job_name, tag
        self.preemptible: frozenset[str] = frozenset()
        self._watchdog: Watchdog | None = None
        # For listings, so that hanging commands do not accumulate.
        self._turn = asyncio.Lock()
        # Until a listing shows that no dead cluster has left a job.
        self._may_have_orphans = True
        # The arrays submitted here: if a site rewrites comments, this is the only way to recognise them.
        self._arrays: dict[str, None] = {}
        self._draining: frozenset[str] = frozenset()
        self._nodes_at = 0.0
        self._nodes_look: asyncio.Task[None] | None = None
        self._others = SecondSource()

    @property
    def was_used(self) -> bool:
        """Whether there may be jobs, of this cluster or of a dead one."""
        return self._watchdog is not None or self._may_have_orphans

    def guarded(self) -> Watchdog:
        """Return the watchdog, started on the first call.

        Raises
        ------
        Refused
            If it could not be started: nothing would end the jobs after the death of this process.
        """
        if self._watchdog is None:
            try:
                self._watchdog = Watchdog(self.job_name, self.tag, environment())
            except OSError as error:
                raise Refused(f"no watchdog could be started: {error}", parsing.TRANSIENT) from None
        return self._watchdog

    async def submit(self, script: str, offsets: Sequence[int], nonce: str = "") -> str:
        """Submit one job, or an array of these elements; return its id.

        Parameters
        ----------
        nonce : str
            The identifier in the submission's comment, after the tag.

        Raises
        ------
        Refused
            With SLURM's message.
        """
        watchdog = self.guarded()
        array = [f"--array={parsing.indices(offsets)}"] if list(offsets) != [0] else []
        # The command line overrides SBATCH_JOB_NAME in the environment, and the script.
        out = await run(
            "sbatch",
            "--parsable",
            f"--job-name={self.job_name}",
            f"--comment={_comment(script, f'{self.tag}.{nonce}')}",
            *array,
            stdin=script,
            pass_fds=(watchdog.fd,),
        )
        # A site's wrapper may print text first; with several clusters, the cluster's name follows.
        found = re.findall(r"^(\d+)(?:;.*)?$", out, re.MULTILINE)
        if not found:
            raise Refused(f"sbatch printed no job id: {out.strip()!r}", parsing.UNKNOWN)
        self._arrays[found[-1]] = None
        watchdog.note(found[-1])
        return str(found[-1])

    async def queue(self) -> dict[str, QueueRow]:
        """Return all jobs that `squeue` lists of this cluster, and of dead ones of its job name; also finished ones.

        Raises
        ------
        Refused
        """
        self._may_have_orphans = False  # asked for once, where SLURM does not answer
        async with self._turn:
            out = await run(
                "squeue", "--noheader", "--array", "--states=all", f"--user={portable.user_id()}",
                f"--name={self.job_name}", f"--Format={parsing.FORMAT}",
            )  # fmt: skip
        rows = {job_id: row for job_id, row in parsing.rows(out).items() if self._is_own(row)}
        self._may_have_orphans = any(row.phase != OVER for row in rows.values())
        return rows

    def _is_own(self, row: QueueRow) -> bool:
        if f"{self.tag}." in row.comment or parsing.element(row.job_id)[0] in self._arrays:
            return True
        return is_orphan(row.comment)

    async def unlisted(self, job_ids: Iterable[str]) -> dict[str, QueueRow | None]:
        """Return the rows of other commands for jobs that `squeue` does not list.

        None: there is no such job; a missing entry: no answer.
        """
        return await self._others.rows(job_ids)

    async def ask(self, *command: str, stdin: str = "") -> str:
        """Return the output of a query, within a time limit of some seconds."""
        try:
            async with asyncio.timeout(_ASKED):
                return await run(*command, stdin=stdin)
        except TimeoutError:
            raise Refused(f"{command[0]} did not answer within {_ASKED:g} s", parsing.TRANSIENT) from None

    async def last_output(self, job_id: str, script: str) -> logs.Log:
        """Return the end of a job's output."""
        return await logs.last_output(self.ask, job_id, script, self.job_name)

    async def find(self, nonce: str) -> str | None:
        """Return the array that a submission created; None if none is pending or running.  Raises `Refused`."""
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
            return None  # a site without `scontrol`

    async def graces(self) -> dict[str, float]:
        """Return the grace seconds of preempted jobs by partition, and note the preemptible partitions.

        Empty if SLURM does not answer.
        """
        told = await self._told("--oneliner", "show", "partition")
        self.preemptible = parsing.preemptible(told)  # "" is the default partition
        return parsing.graces(told)

    async def kill_wait(self) -> float | None:
        """Return the seconds from SIGTERM to SIGKILL; None if SLURM does not report them."""
        return parsing.kill_wait(await self._told("show", "config"))

    async def _told(self, *words: str) -> str:
        """Return a part of SLURM's configuration; empty if it does not answer."""
        try:
            return await self.ask("scontrol", *words)
        except Refused as refused:
            logger.info("dask_ferro: scontrol %s: %s", " ".join(words), refused.words)
            return ""

    async def draining(self) -> frozenset[str]:
        """Return the nodes being drained, queried at intervals; the last answer holds in between."""
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
        """Request the end of jobs; failures are logged, as the caller checks in any case."""
        for at in range(0, len(job_ids), _CANCELLED):
            try:
                await run("scancel", *job_ids[at : at + _CANCELLED])
            except Refused as refused:
                logger.log(level, "dask_ferro: scancel failed: %s", refused.words)

    async def cancel_all(self, patience: float, job_ids: Iterable[str] = ()) -> bool:
        """End every job of the cluster; return whether none is left within `patience` seconds.

        Parameters
        ----------
        job_ids : iterable of str
            Jobs that existed; their absence from a listing does not show that they are gone.
        """
        existed, pause = set(job_ids), _LOOK
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._cancel_known()
                while not await self._are_gone(existed):
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LOOK_MOST)
                return True
        return False

    async def _cancel_known(self) -> None:
        # Most of these are gone, and SLURM's complaints about them are expected.
        await self.cancel(list(self._arrays), level=logging.DEBUG)

    async def _are_gone(self, job_ids: set[str]) -> bool:
        """Return whether no job of the cluster is left, nor any of these; else request their end again."""
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
            await self._cancel_known()  # an empty squeue may be wrong
        await self.cancel([row.job_id for row in left if row.phase != ENDING])
        return False

    def close(self, *, jobs_left: bool = False) -> None:
        """End the watchdog, or let it cancel the remaining jobs."""
        if self._nodes_look is not None:
            self._nodes_look.cancel()
        if self._watchdog is not None:
            self._watchdog.close(jobs_left=jobs_left)


def _comment(script: str, known_by: str) -> str:
    """Return a submission's comment: the user's own, and our identifier.

    The identifier is last, or first if the user's text leaves it no room in squeue's column.
    """
    own = parsing.option(script, "", "comment")
    parts = (known_by, own) if len(own) > _OWN_WORDS else (own, known_by)
    return " ".join(filter(None, parts))
