"""SLURM's commands, for the jobs of one cluster: submit, list, cancel.

Each runs in an environment without what a batch job hands on, in a session of its own, and says in SLURM's words why
it failed.  The first submission starts the watchdog, so that nothing is ever in the queue without one.  What is tried
again is decided elsewhere, but for the end of all jobs.  Which jobs are the cluster's own says a tag in their comment,
and not their name, which is the user's: others may have it too.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Sequence

from dask_ferro.runtime import squeue
from dask_ferro.runtime.squeue import ENDING, OVER, Row
from dask_ferro.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

# A command answers within milliseconds; sbatch itself gives up on a dead controller after 9 s.
_PATIENCE = 60.0
# Arguments of one scancel.
_CANCELLED = 200
# What is only asked once, at the start, is not waited for longer than that.
_ASKED = 5.0
# Between two looks at the nodes: an administrator is in no hurry, and sinfo costs 9 ms of a core.
_NODES = 3.0
# Of a comment that squeue shows 200 characters of; the rest is for the word that a submission is known by.
_OWN_WORDS = 120
# While all jobs are ended: the first pause between two looks, and the longest.
_LOOK, _LOOK_MOST = 0.1, 2.0

# A controller that runs in a job itself would hand that job's shape on to its workers (SLURM_CPUS_PER_TASK, ...); a
# user's SQUEUE_STATES or SCANCEL_INTERACTIVE would hide jobs.
_OWN = re.compile(r"SLURM_(?!CONF$|CONF_|CLUSTERS$|JWT$)|SQUEUE_|SCANCEL_|SBATCH_ARRAY_INX$")


class Refused(Exception):
    """A command failed: its own words, and whether that may pass ("transient", "limit", "permanent", "unknown")."""

    def __init__(self, words: str, kind: str) -> None:
        super().__init__(words)
        self.words, self.kind = words, kind


class Site:
    """SLURM, as far as the jobs of one cluster are concerned.

    Parameters
    ----------
    job_name : str
        Which all jobs of this cluster have, and others may have as well.
    tag : str
        A word that the comments of all jobs of this cluster have, and no others.
    """

    def __init__(self, job_name: str, tag: str) -> None:
        self.job_name, self.tag = job_name, tag
        # What was submitted here: of a site that rewrites comments, that is all that is known.
        self._arrays: dict[str, None] = {}
        self._watchdog: Watchdog | None = None
        self.preemptible: frozenset[str] = (
            frozenset()
        )  # partitions, as `graces` found them; "" is the default one
        self._draining: frozenset[str] = frozenset()
        self._nodes_at = 0.0

    @property
    def was_used(self) -> bool:
        """Whether there may be jobs."""
        return self._watchdog is not None

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
        if self._watchdog is None:
            self._watchdog = _watchdog(self.job_name, self.tag)
        array = [f"--array={squeue.indices(offsets)}"] if list(offsets) != [0] else []
        # The command line wins over SBATCH_JOB_NAME in the environment, and over the script.
        out = await _run(
            "sbatch",
            "--parsable",
            f"--job-name={self.job_name}",
            f"--comment={_comment(script, f'{self.tag}.{nonce}')}",
            *array,
            stdin=script,
            pass_fds=(self._watchdog.fd,),
        )
        # A site's wrapper may talk before; with several clusters, the cluster's name follows.
        found = re.findall(r"^(\d+)(?:;.*)?$", out, re.MULTILINE)
        if not found:
            raise Refused(f"sbatch printed no job id: {out.strip()!r}", squeue.UNKNOWN)
        self._arrays[found[-1]] = None
        self._watchdog.note(found[-1])
        return str(found[-1])

    async def queue(self) -> dict[str, Row]:
        """Return all jobs of the cluster that SLURM still knows of, finished ones too, by id.

        Raises
        ------
        Refused
            When SLURM does not answer.
        """
        out = await _run(
            "squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", f"--name={self.job_name}",
            f"--Format={squeue.FORMAT}",
        )  # fmt: skip
        return {job_id: row for job_id, row in squeue.rows(out).items() if self._is_own(row)}

    def _is_own(self, row: Row) -> bool:
        return f"{self.tag}." in row.comment or squeue.element(row.job_id)[0] in self._arrays

    async def ask(self, *command: str, stdin: str = "") -> str:
        """Return what a command prints that only tells something; it is given up after some seconds.

        Raises
        ------
        Refused
            With SLURM's words.
        """
        try:
            async with asyncio.timeout(_ASKED):
                return await _run(*command, stdin=stdin)
        except TimeoutError:
            raise Refused(f"{command[0]} did not answer within {_ASKED:g} s", squeue.TRANSIENT) from None

    async def graces(self) -> dict[str, float]:
        """Return the seconds that partitions grant to preempted jobs, and note which those are.

        Where SLURM does not say, there are none.
        """
        try:
            async with asyncio.timeout(_ASKED):
                told = await _run("scontrol", "--oneliner", "show", "partition")
            self.preemptible = squeue.preemptible(told)
            return squeue.graces(told)
        except (Refused, TimeoutError) as error:
            logger.info("dask_ferro: scontrol did not tell of the partitions: %s", error)
            return {}

    async def kill_wait(self) -> float | None:
        """Return the seconds from SIGTERM to SIGKILL; None where SLURM does not say."""
        try:
            async with asyncio.timeout(_ASKED):
                return squeue.kill_wait(await _run("scontrol", "show", "config"))
        except (Refused, TimeoutError) as error:
            logger.info("dask_ferro: scontrol did not tell of its configuration: %s", error)
            return None

    async def draining(self) -> frozenset[str]:
        """Return the nodes that their administrator wants to have free: a look now and then, and what it said since."""
        now = asyncio.get_running_loop().time()
        if now >= self._nodes_at:
            self._nodes_at = now + _NODES
            try:
                out = await _run("sinfo", "--noheader", "--Node", "--states=drain,fail", "--format=%N")
                self._draining = frozenset(out.split())
            except Refused as refused:
                logger.warning("dask_ferro: sinfo failed: %s", refused.words)
        return self._draining

    async def cancel(self, job_ids: Sequence[str], level: int = logging.WARNING) -> None:
        """Ask SLURM to end jobs; failures are logged, for the caller looks in any case."""
        for at in range(0, len(job_ids), _CANCELLED):
            try:
                await _run("scancel", *job_ids[at : at + _CANCELLED])
            except Refused as refused:
                logger.log(level, "dask_ferro: scancel failed: %s", refused.words)

    async def cancel_all(self, patience: float) -> bool:
        """End every job of the cluster; return whether none is left within so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                return await self._cancel_all()
        return False

    async def _cancel_all(self) -> bool:
        pause = _LOOK
        # Whatever the queue says; of most of these nothing is left, and SLURM's complaints about them say nothing.
        await self.cancel(list(self._arrays), level=logging.DEBUG)
        while True:
            try:
                left = [row for row in (await self.queue()).values() if row.phase != OVER]
            except Refused as refused:
                logger.debug("dask_ferro: squeue failed: %s", refused.words)
            else:
                if not left:
                    return True
                await self.cancel([row.job_id for row in left if row.phase != ENDING])
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LOOK_MOST)

    def close(self, *, jobs_left: bool = False) -> None:
        """End the watchdog, or leave the jobs that are left to it."""
        if self._watchdog is not None:
            self._watchdog.close(jobs_left=jobs_left)


def _comment(script: str, known_by: str) -> str:
    """Return a submission's comment: the user's own, and the word that it is known by.

    That word is last, or first where the user's words leave it no room in squeue's column.
    """
    found = re.findall(r"^#SBATCH\s.*--comment[=\s]\s*(\"[^\"]*\"|'[^']*'|\S+)", script, re.MULTILINE)
    own = [words.strip("\"'") for words in found[-1:]]
    parts = [known_by, *own] if sum(map(len, own)) > _OWN_WORDS else [*own, known_by]
    return " ".join(parts)


def _watchdog(job_name: str, tag: str) -> Watchdog:
    try:
        return Watchdog(job_name, tag, _environment())
    except OSError as error:
        raise Refused(f"no watchdog could be started: {error}", squeue.TRANSIENT) from None


async def _run(*command: str, stdin: str = "", pass_fds: Sequence[int] = ()) -> str:
    """Return what a command printed.

    It has a session of its own, so that a terminal's Ctrl-C does not end a submission halfway.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise Refused(f"{command[0]} is not on the PATH of this machine", squeue.PERMANENT) from None
    except OSError as error:  # no process or memory left, for now
        raise Refused(f"{command[0]}: {error}", squeue.TRANSIENT) from None
    try:
        async with asyncio.timeout(_PATIENCE):
            out, err = await process.communicate(stdin.encode())
    except TimeoutError:
        raise Refused(f"{command[0]} did not answer within {_PATIENCE:g} s", squeue.TRANSIENT) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        text = err.decode(errors="replace") or out.decode(errors="replace")
        said = squeue.words(text) or f"{command[0]} ended with status {process.returncode}"
        raise Refused(said, squeue.refusal(text))
    return out.decode(errors="replace")


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not _OWN.match(name)}
    return own | {"SLURM_TIME_FORMAT": squeue.TIME_FORMAT}
