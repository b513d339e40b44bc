"""The commands of PBS (OpenPBS, PBS Professional) for the jobs of one cluster: `qsub`, `qstat`, `qselect` and `qdel`.

Jobs are queried by id, which lists no other user's jobs, and for which `qstat` always prints an answer: a row (with
``-x`` also for jobs that are over) or "Unknown Job Id".  So an empty output is no answer.  A submission is identified
by a variable in the job's environment; `qselect` finds the jobs with the cluster's name when an answer was lost.
Durations are seconds.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping, Sequence

from dask_ferro.runtime.sites import qstat
from dask_ferro.runtime.sites.batchsite import Answer, BatchSite
from dask_ferro.runtime.slurm import logs, parsing
from dask_ferro.runtime.slurm.commands import Refused, called, check
from dask_ferro.runtime.slurm.parsing import QueueRow

# Jobs per command.
_AT_ONCE = 200
# The time limits of a submission, which may pass a site's hooks, and of queries made once, at the start.
_SUBMITS, _ASKED = 30.0, 5.0
# Messages of qdel about jobs that are gone or ending, which are no failures.
_GONE = re.compile(
    r"unknown job|has finished|invalid for (the )?state|being deleted|state of job", re.IGNORECASE
)


class PBSSite(BatchSite):
    """The commands of PBS for the jobs of one cluster."""

    word, submits, lists = "PBS", "qsub", "qstat"

    def described(self) -> dict[str, object]:
        """Return the options from which `guard` makes the same site."""
        return {"kind": "pbs"}

    async def _submit(self, script: str, known_by: str, pass_fds: Sequence[int]) -> str:
        # The command line overrides the script, so that the script's own variables have to be repeated.
        variables = ",".join([*qstat.option(script, "v"), f"{qstat.VARIABLE}={known_by}"])
        command = ("qsub", "-N", self.job_name, "-v", variables)
        printed = await called(*command, stdin=script, pass_fds=pass_fds, limit=_SUBMITS)
        check(command[0], printed, qstat.refusal)
        if not (job_id := qstat.submitted(printed.out)):
            raise Refused(f"qsub printed no job id: {printed.out.strip()[:200]!r}", parsing.UNKNOWN)
        return job_id

    async def _shown(self, job_ids: Sequence[str]) -> Answer:
        wanted = {qstat.number(job_id): job_id for job_id in job_ids}
        rows: dict[str, QueueRow] = {}
        unknown: set[str] = set()
        for at in range(0, len(job_ids), _AT_ONCE):
            printed = await called("qstat", "-x", "-f", *job_ids[at : at + _AT_ONCE])
            found, missing = qstat.rows(printed.out), qstat.unknown(printed.err)
            if printed.status and not found and not missing:
                check("qstat", printed, qstat.refusal)
            for job_id, row in found.items():
                if own := wanted.get(qstat.number(job_id)):
                    rows[own] = row._replace(job_id=own)
            unknown |= {wanted[number] for number in map(qstat.number, missing) if number in wanted}
        return Answer(rows, frozenset(unknown - rows.keys()))

    async def _own(self) -> Mapping[str, QueueRow]:
        printed = await called("qselect", "-u", getpass.getuser(), "-N", self.job_name)
        check("qselect", printed, qstat.refusal)
        # A known job keeps the id under which it was first known.
        known = {qstat.number(job_id): job_id for job_id in self._ids}
        ids = [known.get(qstat.number(word), word) for word in printed.out.split() if word[:1].isdecimal()]
        said = (await self._shown(ids)).rows if ids else {}
        return self._ours(said)

    async def _all_own(self) -> Mapping[str, QueueRow]:
        printed = await called("qstat", "-f")  # all jobs of the server; only needed when an answer was lost
        check("qstat", printed, qstat.refusal)
        return self._ours(qstat.rows(printed.out))

    def _ours(self, rows: Mapping[str, QueueRow]) -> dict[str, QueueRow]:
        return {job_id: row for job_id, row in rows.items() if row.comment.startswith(f"{self.tag}.")}

    async def _cancel(self, job_ids: Sequence[str]) -> None:
        printed = await called("qdel", *job_ids)
        rest = [line for line in printed.err.splitlines() if line.strip() and not _GONE.search(line)]
        if rest or not printed.err.strip():
            check("qdel", printed._replace(err="\n".join(rest)), qstat.refusal)

    async def kill_wait(self) -> float | None:
        """Return the seconds from SIGTERM to SIGKILL: the least value of the queues, or PBS's default."""
        try:
            printed = await called("qstat", "-Q", "-f", limit=_ASKED)
        except Refused:
            return qstat.KILL_DELAY
        told = qstat.kill_delay(printed.out)
        return qstat.KILL_DELAY if told is None else told

    async def last_output(self, job_id: str, script: str) -> logs.Log:
        """Return the end of a job's error output, or of its other output."""

        try:
            told = (await called("qstat", "-x", "-f", job_id, limit=_ASKED)).out
        except Refused:
            told = ""  # then only the script is used
        return await logs.end_of(outputs(told, job_id, script, self.job_name))


def outputs(told: str, job_id: str, script: str, job_name: str) -> tuple[str, ...]:
    """Return the paths of a job's output, errors first.

    Parameters
    ----------
    told : str
        The output of `qstat -f` for the job; empty: none.
    """
    facts = dict(next((found for found in qstat.jobs(told)), ("", {}))[1])
    paths = []
    for name, letter, ending in (("Error_Path", "e", "ER"), ("Output_Path", "o", "OU")):
        given = facts.get(name, "").partition(":")[2] or (qstat.option(script, letter) or [""])[-1]
        path = os.path.expanduser(given) or f"{job_name}.{letter}{qstat.number(job_id)}"
        if path.endswith("/") or os.path.isdir(path):
            path = os.path.join(path, f"{job_id}.{ending}")
        paths.append(os.path.abspath(path))
    return tuple(dict.fromkeys(paths))
