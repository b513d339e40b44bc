"""SLURM's reports of jobs that `squeue` does not list, from `sacct` and `scontrol`.

An empty `squeue` with status 0, or a cached one half a minute old, is common: before a job counts as gone, another
command is asked.  These are `sacct` where accounting is on (one call for all), and `scontrol show job`, one call per
array, for jobs that `sacct` does not know.  There are three answers: a row, "no such job", and none at all.  An
element that was cancelled while pending leaves no record: the array is shown without it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Iterator

from dask_ferro.runtime.slurm import parsing
from dask_ferro.runtime.slurm.commands import NotInstalled, Refused, run
from dask_ferro.runtime.slurm.parsing import QueueRow

logger = logging.getLogger(__name__)

# Arrays queried at a time, and at most per call: 7 ms of a core each.  The others follow with the next call.
_AT_ONCE, _MOST = 4, 32
# Jobs per call of sacct.
_ACCOUNTED = 500

_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)
_NO_ACCOUNTING = re.compile(r"disabled|not (enabled|supported)", re.IGNORECASE)
# The mark of a long array that SLURM has cut.
_CUT = re.compile(r"\bArrayTaskId=\S*\.\.\.")
_CELL = re.compile(r"(?:^|\s)([A-Za-z]+)=(\S*)")


class SecondSource:
    """Rows of jobs by id, from `sacct` and `scontrol`."""

    def __init__(self) -> None:
        self._accounting = True

    async def rows(self, job_ids: Iterable[str], most: int | None = _MOST) -> dict[str, QueueRow | None]:
        """Return rows of jobs by id; None: SLURM knows no such job; missing: no answer.

        Parameters
        ----------
        most : int or None
            The most arrays to ask for.
        """
        wanted = list(dict.fromkeys(job_ids))
        found: dict[str, QueueRow | None] = {**await self._accounted(wanted)} if wanted else {}
        arrays: dict[str, list[str]] = {}
        for job_id in wanted:
            if job_id not in found:
                arrays.setdefault(parsing.element(job_id)[0], []).append(job_id)
        turn = asyncio.Semaphore(_AT_ONCE)

        async def ask(array: str, ids: list[str]) -> None:
            async with turn:
                said = await self._shown(array)
            if said is not None:
                rows, is_whole = said
                listed = [job_id for job_id in ids if is_whole or job_id in rows]
                found.update((job_id, rows.get(job_id) or _left_out(job_id, rows)) for job_id in listed)

        await asyncio.gather(*(ask(array, ids) for array, ids in list(arrays.items())[:most]))
        return found

    async def named(self, nonce: str) -> str | None:
        """Return the pending or running array with a word in its comment.

        Raises
        ------
        Refused
            If SLURM does not answer.
        """
        text = await run("scontrol", "--oneliner", "show", "job")
        lines = "\n".join(line for line in text.splitlines() if nonce in line)
        live = (
            row.job_id for row in shown(lines).values() if row.phase in (parsing.PENDING, parsing.STARTED)
        )
        return next((parsing.element(job_id)[0] for job_id in live), None)

    async def _accounted(self, job_ids: list[str]) -> dict[str, QueueRow]:
        if not self._accounting:
            return {}
        found: dict[str, QueueRow] = {}
        for at in range(0, len(job_ids), _ACCOUNTED):
            ids = ",".join(job_ids[at : at + _ACCOUNTED])
            try:
                text = await run("sacct", "-X", "-n", "-P", "-j", ids, "--format=JobID,State")
            except Refused as refused:
                if isinstance(refused, NotInstalled) or _NO_ACCOUNTING.search(refused.words):
                    self._accounting = False
                logger.info("dask_ferro: sacct: %s", refused.words)
                return found
            found |= accounted(text)
        return {job_id: found[job_id] for job_id in job_ids if job_id in found}

    async def _shown(self, array: str) -> tuple[dict[str, QueueRow], bool] | None:
        """Return the rows of an array or of a single job, and whether they are complete; None: no answer."""
        try:
            text = await run("scontrol", "--oneliner", "show", "job", array)
            return shown(text), _CUT.search(text) is None
        except Refused as refused:
            if _UNKNOWN_JOB.search(refused.words):
                return {}, True
            logger.warning("dask_ferro: scontrol failed: %s", refused.words)
            return None


def shown(text: str) -> dict[str, QueueRow]:
    """Return the jobs in the output of ``scontrol --oneliner show job``, by id, one for each array element."""
    found = {}
    for line in text.splitlines():
        facts = dict(
            reversed(_CELL.findall(line))
        )  # the first wins: a user's comment may contain similar text
        if "JobId" not in facts or "JobState" not in facts:
            continue
        row = QueueRow(
            facts["JobId"],
            facts["JobState"].split(",")[0].upper(),
            int(facts.get("Restarts") or 0),
            parsing.moment(facts.get("SubmitTime", "")),
            parsing.moment(facts.get("StartTime", "")),
            parsing.moment(facts.get("EndTime", "")),
            facts.get("NodeList", "").replace("(null)", ""),
            "" if facts.get("Reason") == "None" else facts.get("Reason", ""),
        )
        for job_id in _ids(facts):
            found[job_id] = row._replace(job_id=job_id)
    return found


def accounted(text: str) -> dict[str, QueueRow]:
    """Return the jobs in the output of ``sacct -X -n -P --format=JobID,State``, by id.

    >>> accounted("12_[0-1]|PENDING\\n13|CANCELLED by 1000")["13"].state
    'CANCELLED'
    """
    found = {}
    for line in text.splitlines():
        job_id, _, state = line.strip().partition("|")
        array, _, elements = job_id.partition("_")
        if not array.isdecimal() or not state.strip():
            continue
        for element in parsing.expanded(elements.strip("[]")) if elements else [""]:
            name = f"{array}_{element}" if elements else array
            found[name] = QueueRow(name, state.split()[0].upper(), restarts=parsing.UNTOLD)
    return found


def _left_out(job_id: str, rows: dict[str, QueueRow]) -> QueueRow | None:
    """Return a row for an element missing from its array's output; None if the array is missing, too."""
    array = parsing.element(job_id)[0]
    if job_id == array or not any(parsing.element(other)[0] == array for other in rows):
        return None
    return QueueRow(job_id, "CANCELLED", restarts=parsing.UNTOLD, reason="its array is there without it")


def _ids(facts: dict[str, str]) -> Iterator[str]:
    array, elements = facts.get("ArrayJobId"), facts.get("ArrayTaskId")
    if array and elements:
        yield from (f"{array}_{element}" for element in parsing.expanded(elements))
    else:
        yield facts["JobId"]
