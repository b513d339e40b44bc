"""The parsing of PBS's output: rows of a queue, times, and the kind of a refusal by `qsub`.

It runs nothing and knows no cluster, so that each oddity of PBS is one row of a table in a test.  It reads the long
format of `qstat -f` as text: the output of ``-F json`` is invalid JSON if some user's environment has quotes or a
number such as 005 (OpenPBS issues 1255, 2541), and contains only the first of several jobs in some releases (issue
2672). Unknown words are read cautiously: a job in an unknown state exists, an unknown refusal may pass. Durations are
seconds, points in time epoch seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate
from functools import partial
from itertools import chain
from math import inf

from dask_ferro.runtime.slurm import parsing
from dask_ferro.runtime.slurm.parsing import HELD, LIMIT, PENDING, PERMANENT, STUCK, TRANSIENT, QueueRow

# The variable that identifies a submission: `qstat -f` shows a job's environment, and the job's name is the user's.
VARIABLE = "FERRO_SUBMISSION"
# PBS's default of a queue's kill_delay, for a running job that was told to end.
KILL_DELAY = 10.0

# States of PBS, mapped to those of SLURM with the same meaning for the controller.
_STATES = {
    **dict.fromkeys("QWTH", "PENDING"),
    "M": "PENDING",  # at another server, under the same id
    **dict.fromkeys("RB", "RUNNING"),
    **dict.fromkeys("SU", "SUSPENDED"),
    "E": "COMPLETING",
    **dict.fromkeys("FXC", "COMPLETED"),
}
_OVER = ("F", "X", "C")

# Exit statuses set by PBS itself.
_TIMEOUT = (-29,)  # JOB_EXEC_KILL_WALLTIME
# A shell ended by a signal: 256 plus its number, or 128 plus its number if the script's own shell reports it.
_SIGNALLED = {128 + 9, 128 + 15, 256 + 9, 256 + 15}

_JOB = re.compile(r"^Job Id:[ \t]*(\S+)", re.IGNORECASE)
_FACT = re.compile(r"^[ \t]+([A-Za-z_][\w.]*) = (.*)$")
_UNKNOWN_JOB = re.compile(r"unknown job ?id:?\s+(\S+)", re.IGNORECASE)
# The scheduler's message for a request that no node meets.  Lack of a server's resource (a licence, a file system)
# passes.
_NEVER = re.compile(r"can never run(?!: insufficient amount of server resource)", re.IGNORECASE)


def rows(text: str) -> dict[str, QueueRow]:
    """Return the jobs in the output of ``qstat -f``, by id; other text is skipped."""
    found = {}
    for job_id, facts in jobs(text):
        if facts.get("job_state"):
            found[job_id] = row(job_id, facts)
    return found


def jobs(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the jobs of the long format, with their attributes; of a repeated attribute the first value."""
    job_id, facts = "", dict[str, str]()
    for line in text.replace(
        "\n\t", ""
    ).splitlines():  # a long value is broken anywhere, and continues after a tab
        if begin := _JOB.match(line):
            if job_id:
                yield job_id, facts
            job_id, facts = begin[1], {}
        elif fact := _FACT.match(line):
            facts.setdefault(fact[1], fact[2])
    if job_id:
        yield job_id, facts


def row(job_id: str, facts: Mapping[str, str]) -> QueueRow:
    """Return the row for the attributes of a job."""
    letter = facts["job_state"].strip()
    starts = moment(facts.get("stime", facts.get("start_time", "")))
    limit = duration(facts.get("Resource_List.walltime", ""))
    state, reason = _STATES.get(letter, "RUNNING"), facts.get("comment", "").strip()
    if letter in _OVER:
        state, reason = _ended(facts.get("Exit_status", facts.get("exit_status", "")).strip(), starts)
    elif letter == "H":
        state, reason = "PENDING", f"held ({facts.get('Hold_Types', '').strip() or '?'}) {reason}".strip()
    elif letter not in ("Q", "W", "T", "M"):
        reason = ""  # "Job run at ..." is not the reason of a state
    known = HELD if letter == "H" else parsing.phase_of(state)
    return QueueRow(
        job_id,
        state,
        submitted=moment(facts.get("qtime", facts.get("ctime", ""))),
        starts=starts,
        ends=starts + limit if starts is not None and limit < inf else None,
        node=facts.get("exec_host", "").partition("/")[0],
        reason=reason,
        comment=known_by(facts.get("Variable_List", "")),
        known=STUCK if known == PENDING and _NEVER.search(reason) else known,
    )


def _ended(status: str, starts: float | None) -> tuple[str, str]:
    """Return the state and the reason of a job that is over."""
    if not re.fullmatch(r"-?\d{1,9}", status):
        return ("CANCELLED", "") if starts is None else ("COMPLETED", "")
    number = int(status)
    if number == 0:
        return "COMPLETED", ""
    if number in _TIMEOUT:
        return "TIMEOUT", f"exit status {number}"
    if number in _SIGNALLED:
        return "CANCELLED", f"exit status {number}"
    return "FAILED", f"exit status {number}"


def known_by(variables: str) -> str:
    """Return the identifier of a job's submission; empty: it has none.

    >>> known_by("PBS_O_HOME=/home/me,FERRO_SUBMISSION=ferro-12.ab,OTHER=1")
    'ferro-12.ab'
    """
    found = re.search(rf"(?:^|,)\s*{VARIABLE}=([\w.-]*)", variables)
    return found[1] if found else ""


def unknown(text: str) -> set[str]:
    """Return the ids that `qstat` reports as unknown.

    >>> unknown("qstat: Unknown Job Id 12.pbs01")
    {'12.pbs01'}
    """
    return set(_UNKNOWN_JOB.findall(text))


def number(job_id: str) -> str:
    """Return the number of a job, since commands write the server's name in several ways.

    >>> number("12.pbs01.site.org"), number("12[3].pbs01")
    ('12', '12[3]')
    """
    return job_id.partition(".")[0]


def submitted(text: str) -> str:
    """Return the id in the output of `qsub`, whatever a site's wrapper adds; empty: there is none.

    >>> submitted("Welcome!\\n12.pbs01\\n")
    '12.pbs01'
    """
    found = re.findall(r"^\s*(\d+(?:\[\])?(?:\.[\w.-]+)?)\s*$", text, re.MULTILINE)
    return str(found[-1]) if found else ""


def moment(text: str) -> float | None:
    """Return a point in time; PBS prints the local time of the caller.

    >>> moment("never"), moment("Sat Xyz 14 08:37:55 2024")
    (None, None)
    """
    told = parsedate(text)  # month names do not depend on the user's language
    try:
        return None if told is None else time.mktime((*told[:8], -1))
    except (OverflowError, ValueError):
        return None


def duration(text: str) -> float:
    """Return the seconds of a walltime: hours:minutes:seconds, minutes:seconds or seconds; infinite for none.

    >>> duration("01:00:00"), duration("90"), duration("unlimited")
    (3600.0, 90.0, inf)
    """
    if not re.fullmatch(r"\d{1,9}(:\d{1,2}){0,2}(\.\d+)?", text.strip()):
        return inf
    seconds = 0.0
    for part in text.strip().split(":"):
        seconds = seconds * 60 + float(part)
    return seconds or inf


def kill_delay(text: str) -> float | None:
    """Return the least seconds from SIGTERM to SIGKILL among the queues in ``qstat -Q -f``; None: no queue has any.

    >>> kill_delay("Queue: workq\\n    queue_type = Execution\\n    kill_delay = 30\\n")
    30.0
    """
    found = re.findall(r"^\s+kill_delay = (\d+)\s*$", text, re.MULTILINE)
    return float(min(map(int, found))) if found else None


def option(header: str, letter: str) -> list[str]:
    """Return the values of an option in a script's directives, without quotes.

    >>> option("#PBS -N a\\n#PBS -l ncpus=1 -l 'walltime=10'", "l")
    ['ncpus=1', 'walltime=10']
    """
    pattern = rf"(?:^|\s)-{letter}[ \t]*(\"[^\"\n]*\"|'[^'\n]*'|\S+)"
    lines = re.findall(r"^#PBS[ \t]+(.*)$", header, re.MULTILINE)
    values = chain.from_iterable(re.findall(pattern, line) for line in lines)
    return [value.strip("\"'") for value in values]


def walltime(header: str) -> float:
    """Return the seconds of the last walltime in a script's directives."""
    parts = ",".join(option(header, "l")).split(",")
    limits = [part.partition("=")[2] for part in parts if part.startswith("walltime=")]
    return duration(limits[-1]) if limits else inf


_REFUSALS: Mapping[str, tuple[str, ...]] = {
    LIMIT: (r"maximum number of jobs", r"would exceed .* limit"),
    TRANSIENT: (
        r"cannot connect", r"connection (refused|timed out|reset)", r"server shutting down", r"shutting down",
        r"no free connections", r"end of file", r"time[d]? ?out", r"try again", r"temporar", r"premature end",
        r"protocol error", r"communication failure", r"system error", r"internal server error", r"resource busy",
        r"object busy", r"queue is not enabled", r"no available server", r"could not contact", r"license",
    ),
    PERMANENT: (
        r"unknown (queue|resource|node)", r"violates", r"unauthorized", r"illegal", r"invalid", r"not permitted",
        r"access to queue is denied", r"permission denied", r"bad (uid|gid|user)", r"unknown option", r"usage:",
        r"exceeds? ", r"must be", r"no default queue", r"hook rejected", r"requires", r"cannot", r"not found on",
    ),
}  # fmt: skip


refusal = partial(parsing.refusal, known=_REFUSALS)
