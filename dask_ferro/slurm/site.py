"""SLURM's commands for the jobs of one cluster: submit, list, cancel.

Each has a time limit, and failures carry SLURM's message.  One `squeue` runs at a time.  Jobs that it does not list
are asked for by `scontrol`.  The cluster's own jobs are recognised by a tag in their comment, and not by their name,
which is the user's and may be shared.  The first submission starts the watchdog, so that no job is ever in the queue
without one.  Retries are decided elsewhere.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from dask_ferro import portable
from dask_ferro.slurm import parsing
from dask_ferro.slurm.commands import RefusedError, environment, run
from dask_ferro.slurm.orphan_guard import Watchdog, is_orphan
from dask_ferro.slurm.parsing import EXECUTING, PENDING, TERMINAL, QueueRow

logger = logging.getLogger(__name__)

# The time limit of queries made once, at the start.
_QUERY_TIMEOUT = 5.0
# Seconds between two queries of the nodes, for one of which a look waits: an administrator is in no hurry, and sinfo
# costs 9 ms of a core.
_NODES, _NODES_LIMIT = 3.0, 1.0
# Of the 200 characters of a comment that squeue shows, the most for the user's; the rest is for our identifier.
_OWN_WORDS = 120
# The most elements of an array: SLURM's default allows 1001, and one refusal costs less if an array is not everything.
ELEMENTS = 500
# The most arrays asked for in one call, 7 ms of a core each.  The others follow with the next call.
_ARRAYS = 32
_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)
# Ids per cancellation: far below the limit of a command line, and one call costs as much as for one job.
_CANCEL_BATCH = 200


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
        # The preemptible partitions; the grace seconds of preempted jobs by partition; seconds from SIGTERM to SIGKILL.
        self.preemptible: frozenset[str] = frozenset()
        self.graces: dict[str, float] = {}
        self.kill_wait: float | None = None
        self._watchdog: Watchdog | None = None
        # For listings, so that hanging commands do not accumulate.
        self._turn = asyncio.Lock()
        # Until a listing shows that no dead cluster has left a job.
        self._may_have_orphans = True
        self._draining: frozenset[str] = frozenset()
        self._nodes_at = 0.0  # when they are asked for again
        # The arrays submitted here: if a site rewrites comments, this is the only way to recognise them.
        self._arrays: dict[str, None] = {}

    @property
    def was_used(self) -> bool:
        """Whether there may be jobs, of this cluster or of a dead one."""
        return self._watchdog is not None or self._may_have_orphans

    async def submit(self, script: str, offsets: Sequence[int], nonce: str) -> str:
        """Submit one job, or an array of these elements; return its id.

        Parameters
        ----------
        nonce : str
            The identifier in the submission's comment, after the tag.

        Raises
        ------
        Refused
            With SLURM's message; if no watchdog can be started, which would end the jobs after this process.
        """
        if self._watchdog is None:
            try:
                self._watchdog = Watchdog(self.job_name, self.tag, environment())
            except OSError as error:
                raise RefusedError(f"no watchdog could be started: {error}", parsing.TRANSIENT) from None
        array = [f"--array={parsing.indices(offsets)}"] if list(offsets) != [0] else []
        # The command line overrides SBATCH_JOB_NAME in the environment, and the script.
        out = await run(
            "sbatch",
            "--parsable",
            f"--job-name={self.job_name}",
            f"--comment={_comment(script, f'{self.tag}.{nonce}')}",
            *array,
            stdin=script,
            pass_fds=(self._watchdog.fd,),
        )
        # A site's wrapper may print text first; with several clusters, the cluster's name follows.
        ids = re.findall(r"^(\d+)(?:;.*)?$", out, re.MULTILINE)
        if not ids:
            raise RefusedError(f"sbatch printed no job id: {out.strip()!r}", parsing.UNKNOWN)
        self._arrays[ids[-1]] = None
        self._watchdog.note(ids[-1])
        return str(ids[-1])

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
        rows = {
            job_id: row
            for job_id, row in parsing.rows(out).items()
            if f"{self.tag}." in row.comment
            or parsing.element(job_id)[0] in self._arrays
            or is_orphan(row.comment)
        }
        self._may_have_orphans = any(row.phase != TERMINAL for row in rows.values())
        return rows

    async def unlisted(self, job_ids: Iterable[str]) -> dict[str, QueueRow | None]:
        """Return rows of `scontrol` for jobs that `squeue` does not list, with one query an array.

        None: there is no such job; a missing entry: no answer, or too many arrays for one call.
        """
        # An empty `squeue` with status 0, or a cached one half a minute old, is common.
        arrays: dict[str, list[str]] = {}
        for job_id in job_ids:
            arrays.setdefault(parsing.element(job_id)[0], []).append(job_id)
        answers: dict[str, QueueRow | None] = {}
        for array, ids in list(arrays.items())[:_ARRAYS]:
            try:
                rows = parsing.scontrol_rows(await run("scontrol", "--oneliner", "show", "job", array))
                if not rows:
                    continue  # SLURM says so where there is no such job: an empty answer is none
            except RefusedError as refused:
                if not _UNKNOWN_JOB.search(refused.words):
                    logger.warning("dask_ferro: scontrol failed: %s", refused.words)
                    break
                rows = {}
            answers.update((job_id, rows.get(job_id) or _omitted_row(job_id, rows)) for job_id in ids)
        return answers

    async def find(self, nonce: str) -> str | None:
        """Return the array that a submission created; None if none is pending or running.

        Raises
        ------
        Refused
            If SLURM does not answer.
        """
        text = await run("scontrol", "--oneliner", "show", "job")  # `squeue` may be older than the submission
        rows = parsing.scontrol_rows("\n".join(line for line in text.splitlines() if nonce in line))
        live = (job_id for job_id, row in rows.items() if row.phase in (PENDING, EXECUTING))
        return next((parsing.element(job_id)[0] for job_id in live), None)

    async def learn(self) -> None:
        """Ask SLURM for its configuration, as far as it answers."""
        partitions, settings = await asyncio.gather(
            self._configuration("--oneliner", "show", "partition"), self._configuration("show", "config")
        )
        self.preemptible, self.graces = parsing.preemption(partitions)
        self.kill_wait = parsing.kill_wait(settings)

    async def _configuration(self, *words: str) -> str:
        """Return a part of SLURM's configuration; empty if it does not answer."""
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT):
                return await run("scontrol", *words)
        except (RefusedError, TimeoutError) as error:
            logger.info("dask_ferro: scontrol %s: %r", " ".join(words), error)
            return ""

    async def draining(self) -> frozenset[str]:
        """Return the nodes that are being drained, asked for at intervals; the last answer holds in between."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._nodes_at:
            try:
                async with asyncio.timeout(_NODES_LIMIT):
                    out = await run("sinfo", "--noheader", "--Node", "--states=drain,fail", "--format=%N")
                self._draining = frozenset(out.split())
            except (RefusedError, TimeoutError) as error:
                logger.warning("dask_ferro: sinfo failed: %r", error)
            self._nodes_at = loop.time() + _NODES
        return self._draining

    async def cancel(self, job_ids: Sequence[str]) -> None:
        """Request the end of jobs; failures are logged, as the caller checks in any case."""
        for at in range(0, len(job_ids), _CANCEL_BATCH):
            try:
                await run("scancel", *job_ids[at : at + _CANCEL_BATCH])
            except RefusedError as refused:
                logger.warning("dask_ferro: scancel failed: %s", refused.words)

    def close(self, *, jobs_left: bool = False) -> None:
        """End the watchdog, or let it cancel the remaining jobs."""
        if self._watchdog is not None:
            self._watchdog.close(jobs_left=jobs_left)


def _omitted_row(job_id: str, rows: Mapping[str, QueueRow]) -> QueueRow | None:
    """Return the row of an element that its array is shown without: it was cancelled while pending."""
    if not rows or "_" not in job_id:
        return None
    return QueueRow(job_id, "CANCELLED", sys.maxsize, reason="its array is there without it")


def _comment(script: str, identifier: str) -> str:
    """Return a submission's comment: the user's own, and our identifier.

    The identifier is last, or first if the user's text leaves it no room in squeue's column.
    """
    own = parsing.option(script, "", "comment")
    parts = (identifier, own) if len(own) > _OWN_WORDS else (own, identifier)
    return " ".join(filter(None, parts))
