"""Any batch system described by three commands: one to submit, one to list, one to cancel.

Commands are split into words without a shell, and placeholders in braces are replaced within a word.  A listing
contains nothing about a job that is gone: a job missing three times from listings with other jobs counts as gone; an
empty listing proves nothing, unless it matches the text that the user named for it.  Durations are seconds.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.sites import qstat
from dask_ferro.runtime.sites.batchsite import Answer, BatchSite
from dask_ferro.runtime.sites.listing import Listing, pattern
from dask_ferro.runtime.slurm import parsing
from dask_ferro.runtime.slurm.commands import Printed, Refused, called, check
from dask_ferro.runtime.slurm.parsing import QueueRow

_SUBMITS = 30.0
# Listings with other jobs from which a job must be missing to count as gone; one may be older than the job.
_MISSES = 3
_PLACE = re.compile(r"\{(\w+)\}")


class Template:
    """A command with placeholders.

    >>> Template("cancel", "bkill {ids}", ("ids",)).filled(ids=["12", "13"])
    ['bkill', '12', '13']

    Raises
    ------
    ConfigError
        For an empty command, or an unknown placeholder.
    """

    def __init__(self, name: str, text: object, places: Sequence[str], needed: Sequence[str] = ()) -> None:
        try:
            self.words = shlex.split(text) if isinstance(text, str) else []
        except ValueError as error:
            raise ConfigError(f"ff.BatchCluster: {name}: got {text!r}: {error}") from error
        self.places = set(chain.from_iterable(map(_PLACE.findall, self.words)))
        said = f"ff.BatchCluster: {name}: got {text!r}"
        if not self.words:
            raise ConfigError(f"{said}, wanted a command, such as 'qsub -N {{name}}'")
        if strange := sorted(self.places - set(places)):
            raise ConfigError(f"{said}, and {{{strange[0]}}} has no value; there are {', '.join(places)}")
        if needed and self.places.isdisjoint(needed):
            raise ConfigError(f"{said}, wanted {' or '.join(f'{{{place}}}' for place in needed)} in it")

    def filled(self, **values: str | Sequence[str]) -> list[str]:
        """Return the words of the command; a list that is a word of its own becomes several."""
        found: list[str] = []
        for word in self.words:
            alone = _PLACE.fullmatch(word)
            if alone and not isinstance(values[alone[1]], str):
                found.extend(values[alone[1]])
            else:
                found.append(_PLACE.sub(lambda place: _said(values[place[1]]), word))
        return found


def _said(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else ",".join(value)


class CommandSite(BatchSite):
    """A batch system described by its commands.

    Parameters
    ----------
    submit, list, cancel : str
    submitted : str
        A regular expression that finds the job's id in the output of `submit`.
    listed : str or mapping
        The output format of `list`, as for `Listing`.
    nothing : str
        A regular expression for the output of `list` without any job; empty: unknown.
    states : mapping, optional

    Raises
    ------
    ConfigError
        For commands that cannot be run as described.
    """

    def __init__(
        self,
        job_name: str,
        tag: str,
        *,
        submit: str,
        list: str,
        cancel: str,
        submitted: str = r"(?P<job_id>\d+)",
        listed: object = None,
        nothing: str = "",
        states: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(job_name, tag)
        self._given = {
            "submit": submit, "list": list, "cancel": cancel, "submitted": submitted, "listed": listed,
            "nothing": nothing, "states": dict(states or {}),
        }  # fmt: skip
        self._submit_command = Template("submit", submit, ("name", "tag", "script"))
        self._list_command = Template("list", list, ("name", "user"))
        self._cancel_command = Template("cancel", cancel, ("id", "ids"), ("id", "ids"))
        self._submitted = pattern("submitted", submitted, ("job_id",))
        self._listing = Listing(listed, states)
        self._nothing = pattern("nothing", nothing) if nothing else None
        self.submits, self.lists = self._submit_command.words[0], self._list_command.words[0]
        self.is_silent = self._nothing is None
        self._absent: dict[str, int] = {}

    def described(self) -> dict[str, object]:
        """Return the options from which `guard` makes the same site."""
        return {"kind": "commands", **self._given}

    async def _submit(self, script: str, known_by: str, pass_fds: Sequence[int]) -> str:
        values = {"name": self.job_name, "tag": known_by, "script": ""}
        if "script" not in self._submit_command.places:
            return self._id(await self._called(self._submit_command.filled(**values), script, pass_fds))
        with tempfile.NamedTemporaryFile("w", prefix=f"{self.job_name}-", suffix=".sh") as file:
            file.write(script)
            file.flush()
            os.chmod(file.name, 0o755)
            return self._id(
                await self._called(
                    self._submit_command.filled(**values | {"script": file.name}), "", pass_fds
                )
            )

    def _id(self, printed: Printed) -> str:
        check(self.submits, printed, qstat.refusal)
        found = self._submitted.search(printed.out) or self._submitted.search(printed.err)
        if found is None or not (job_id := (found["job_id"] or "").strip()):
            raise Refused(f"{self.submits} printed no job id: {printed.out.strip()[:200]!r}", parsing.UNKNOWN)
        return job_id

    async def _called(self, command: Sequence[str], stdin: str, pass_fds: Sequence[int]) -> Printed:
        return await called(*command, stdin=stdin, pass_fds=pass_fds, limit=_SUBMITS)

    async def _listed(self) -> tuple[dict[str, QueueRow], bool]:
        """Return the jobs, and whether the listing is known to be complete."""
        printed = await called(*self._list_command.filled(name=self.job_name, user=getpass.getuser()))
        rows = self._listing.rows(printed.out)
        is_said = self._nothing is not None and bool(self._nothing.search(printed.out + "\n" + printed.err))
        if not rows and not is_said:
            check(self.lists, printed, qstat.refusal)
        return rows, is_said or bool(rows)

    async def _shown(self, job_ids: Sequence[str]) -> Answer:
        rows, says_all = await self._listed()
        missing = [job_id for job_id in job_ids if job_id not in rows]
        for job_id in job_ids:
            if job_id in rows:
                self._absent.pop(job_id, None)
            elif says_all:
                self._absent[job_id] = self._absent.get(job_id, 0) + 1
        unknown = frozenset(job_id for job_id in missing if self._absent.get(job_id, 0) >= _MISSES)
        return Answer({job_id: rows[job_id] for job_id in job_ids if job_id in rows}, unknown)

    async def _own(self) -> Mapping[str, QueueRow]:
        rows, says_all = await self._listed()
        if not says_all and not self.is_silent:
            raise Refused(f"{self.lists} printed no jobs", parsing.TRANSIENT)
        own = f"{self.tag}."
        return {
            job_id: row for job_id, row in rows.items() if row.comment.startswith(own) or job_id in self._ids
        }

    async def _cancel(self, job_ids: Sequence[str]) -> None:
        each = [[job_id] for job_id in job_ids] if "id" in self._cancel_command.places else [job_ids]
        for ids in each:
            printed = await called(*self._cancel_command.filled(id=ids[0], ids=ids))
            check("the cancellation", printed, qstat.refusal)
