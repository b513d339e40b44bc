"""The parser of a batch system's listing, as its user described it: a regular expression, columns, or JSON.

The description is checked when the cluster is made, with an error that names it; a command's output never causes an
error: a line without a job is skipped, and a job in an unknown state counts as existing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.slurm.parsing import ENDING, HELD, OVER, PENDING, STARTED, QueueRow

# Fields of a job.
FIELDS = ("job_id", "state", "tag", "reason", "node")
_NEEDED = ("job_id", "state")
# The state of a row for each phase, whatever the listing's words were.
_STATES = {PENDING: "PENDING", STARTED: "RUNNING", HELD: "PENDING", ENDING: "COMPLETING", OVER: "COMPLETED"}

# State words of Grid Engine, LSF, OAR, HTCondor, Torque and similar systems.  E means ending in PBS and Torque.
KNOWN: Mapping[str, Sequence[str]] = {
    PENDING: ["Q", "qw", "PEND", "PENDING", "PD", "W", "WAIT", "Waiting", "I", "IDLE", "toLaunch", "1"],
    STARTED: [
        "R",
        "r",
        "t",
        "Rr",
        "Rt",
        "RUN",
        "RUNNING",
        "Running",
        "Launching",
        "S",
        "s",
        "USUSP",
        "SSUSP",
        "2",
    ],
    HELD: ["H", "h", "hqw", "hRwq", "Eqw", "PSUSP", "HOLD", "HELD", "Hold", "5"],
    ENDING: ["E", "dr", "dt", "dRr", "Finishing", "EXITING"],
    OVER: ["F", "C", "X", "CD", "DONE", "EXIT", "ZOMBI", "COMPLETED", "Terminated", "Error", "3", "4"],
}


class Listing:
    r"""Parses the output of a listing.

    Parameters
    ----------
    described : str or mapping
        A regular expression with groups, searched in each line; or ``{"job_id": 0, "state": 4}``, columns from 0 on,
        with "separator" unless that is white space; or ``{"json": "Jobs", "state": "job_state"}``, names of fields in
        each record below a dotted path; if the records are not a list, their keys are the ids.
    states : mapping of str to sequence of str, optional
        The batch system's words for "pending", "started", "held", "ending" and "over", in addition to the known ones.

    Raises
    ------
    ConfigError
        For an invalid description.

    Examples
    --------
    >>> Listing(r"^(?P<job_id>\d+) +(?P<state>\w+)").rows("12 PEND\n13 RUN")["13"].phase
    'started'
    """

    def __init__(self, described: object, states: Mapping[str, Sequence[str]] | None = None) -> None:
        self._phases = _phases(states or {})
        self._facts: Callable[[str], Iterator[Mapping[str, object]]]
        if isinstance(described, str):
            self._facts = partial(_matches, pattern("listed", described, _NEEDED))
        elif isinstance(described, Mapping):
            self._facts = _reader(dict(described))
        else:
            raise _wrong(described)

    def rows(self, text: str) -> dict[str, QueueRow]:
        """Return the jobs of a listing, by id."""
        found: dict[str, QueueRow] = {}
        for facts in self._facts(text):
            told = {name: " ".join(str(value).split()) for name, value in facts.items() if _is_word(value)}
            if told.get("job_id") and told.get("state"):
                found[told["job_id"]] = self._row(told)
        return found

    def _row(self, told: Mapping[str, str]) -> QueueRow:
        phase = self._phases.get(told["state"], STARTED)
        reason = f"held: {told['state']}" if phase == HELD else told.get("reason", "")
        return QueueRow(
            told["job_id"],
            _STATES[phase],
            node=told.get("node", ""),
            reason=reason,
            comment=told.get("tag", ""),
            known=phase,
        )


def _reader(described: dict[str, object]) -> Callable[[str], Iterator[Mapping[str, object]]]:
    """Return a parser of columns, or of fields in JSON."""
    path, separator = described.pop("json", None), described.pop("separator", None)
    if not isinstance(separator, str | None) or separator == "":
        raise _wrong({"separator": separator})
    columns = {name: at for name, at in described.items() if type(at) is int and at >= 0}
    fields = {name: at for name, at in described.items() if isinstance(at, str) and at}
    is_known = described.keys() <= set(FIELDS) and "state" in described
    if path is None and is_known and columns == described and "job_id" in columns:
        return partial(_cells, columns, separator)
    if isinstance(path, str) and is_known and fields == described:
        return partial(_records, fields, path)
    raise _wrong(described)


def _matches(searched: re.Pattern[str], text: str) -> Iterator[Mapping[str, object]]:
    return (match.groupdict() for match in map(searched.search, text.splitlines()) if match)


def _cells(columns: Mapping[str, int], separator: str | None, text: str) -> Iterator[Mapping[str, object]]:
    for line in text.splitlines():
        cells = line.split(separator)
        if len(cells) > max(columns.values()):
            yield {name: cells[at] for name, at in columns.items()}


def _records(fields: Mapping[str, str], path: str, text: str) -> Iterator[Mapping[str, object]]:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return
    for key in filter(None, path.split(".")):
        found = found.get(key) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        yield from ({"job_id": key, **_named(record, fields)} for key, record in found.items())
    elif isinstance(found, list):
        yield from (_named(record, fields) for record in found)


def _named(record: object, fields: Mapping[str, str]) -> dict[str, object]:
    if not isinstance(record, Mapping):
        return {}
    return {name: record.get(field) for name, field in fields.items()}


def _is_word(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _phases(states: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the phases by the batch system's words; the user's words override the known ones."""
    is_right = isinstance(states, Mapping) and all(
        phase in KNOWN and not isinstance(words, str) and isinstance(words, Sequence)
        for phase, words in states.items()
    )
    if not is_right:
        raise ConfigError(
            f"ff.BatchCluster: states: got {states!r}, wanted lists of words by {', '.join(map(repr, KNOWN))}"
        )
    found: dict[str, str] = {}
    for phase, words in (*KNOWN.items(), *states.items()):
        found |= dict.fromkeys(map(str, words), phase)
    return found


def pattern(name: str, text: str, needed: Sequence[str] = ()) -> re.Pattern[str]:
    """Return a compiled regular expression with the required groups.

    Raises
    ------
    ConfigError
        For an invalid expression, or one with other groups.
    """
    try:
        compiled = re.compile(text, re.MULTILINE)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"ff.BatchCluster: {name}: got {text!r}, which is not a regular expression: {error}"
        ) from error
    if missing := [group for group in needed if group not in compiled.groupindex]:
        raise ConfigError(f"ff.BatchCluster: {name}: got {text!r}, without a group (?P<{missing[0]}>...)")
    if strange := [group for group in compiled.groupindex if group not in FIELDS]:
        raise ConfigError(
            f"ff.BatchCluster: {name}: unknown group {strange[0]!r}; wanted some of {', '.join(FIELDS)}"
        )
    return compiled


def _wrong(described: object) -> ConfigError:
    return ConfigError(
        f"ff.BatchCluster: listed: got {described!r}, wanted a regular expression with groups job_id and state; or "
        'columns from 0 on, as in {"job_id": 0, "state": 4}; or fields of JSON, as in {"json": "Jobs", "state": "S"};'
        f" of {', '.join(FIELDS)}"
    )
