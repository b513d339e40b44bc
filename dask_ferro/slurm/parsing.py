"""The parsing of SLURM's output: rows of a queue, times, array elements, and the kind of a refusal by `sbatch`.

It runs nothing and knows no cluster, so that each oddity of SLURM is one row of a table in a test.  Unknown words are
read cautiously: a job in an unknown state exists, an unknown refusal may pass. Durations are seconds, points in time
epoch seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import NamedTuple

PENDING, EXECUTING, HOLD, ENDING, TERMINAL = "pending", "started", "held", "ending", "over"

# Fixed widths, since `squeue` cuts longer values; separators are newer than some sites' SLURM.
_COLUMNS = {
    "JobArrayID": 40,
    "JobID": 14,
    "State": 20,
    "RestartCnt": 12,
    "SubmitTime": 24,
    "StartTime": 24,
    "EndTime": 24,
    "NumNodes": 10,
    "exit_code": 12,
    "NodeList": 80,
    "Reason": 80,
    # The identifier of a submission is at the end of it.
    "Comment": 200,
}
FORMAT = ",".join(f"{name}:{width}" for name, width in _COLUMNS.items())
# Numbers, since local time is ambiguous for an hour each year.
TIME_FORMAT = "%s"

_PHASES = {
    **dict.fromkeys(("PENDING", "REQUEUED"), PENDING),
    **dict.fromkeys(("CONFIGURING", "RUNNING", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED"), EXECUTING),
    **dict.fromkeys(("SPECIAL_EXIT", "REQUEUE_HOLD", "RESV_DEL_HOLD"), HOLD),
    # A job that is being requeued is in this state too, for an instant.
    "COMPLETING": ENDING,
    **dict.fromkeys(("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"), TERMINAL),
    **dict.fromkeys(("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "STAGE_OUT", "TIMEOUT"), TERMINAL),
}

# Ends that its tasks did not cause; a job that failed, or is out of memory, may be their fault.
_BLAMELESS = frozenset(
    ["BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "PREEMPTED", "REQUEUED", "REVOKED", "TIMEOUT"]
)
_TIME_LIMIT = "TimeLimit"

# Reasons for which a job waits until the site or the request is changed.  A partition that is down or inactive is in
# maintenance: it comes back, and the job keeps its place in the queue.
_STUCK_REASONS = re.compile(
    r"PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|BadConstraints"
    r"|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|NeverSatisfied"
    r"|(Assoc|QOS)M(ax|in)\w*(PerJob|WallDuration|NotSatisfied)",
    re.IGNORECASE,
)


# JobHeldUser, JobHeldAdmin, JobHoldMaxRequeue, "job requeued in held state", "launch_failed_requeued_held"; not
# QOSUsageThreshold, which is an ordinary reason to wait.
_HOLD_REASONS = re.compile(r"JobHeld|JobHold|(?<![A-Za-z])(held|hold)(?![A-Za-z])", re.IGNORECASE)

# Seconds in which a preempted job can move its data.
_LONG_GRACE = 30

_CELL = re.compile(r"(?:^|\s)([A-Za-z]+)=(\S*)")


class QueueRow(NamedTuple):
    """A job, or one element of an array, as `squeue` lists it.

    Attributes
    ----------
    job_id : str
        In the form for `scancel`: "12", or "12_3" for an element of an array.
    state, reason : str
        As SLURM names them.
    restarts : int
        Number of requeues.
    submitted, starts, ends : float or None
        Epoch; for a pending job, `starts` is SLURM's estimate.
    node : str
        The nodes of the job.
    comment : str
        The comment of its submission.
    number : str
        SLURM's own number of an array's element, which differs from that of the array.
    nodes : int
        Number of nodes; 0: not known.
    exit : str
        "exit code 3" or "signal 9"; empty for 0.
    """

    job_id: str
    state: str
    restarts: int = 0
    submitted: float | None = None
    starts: float | None = None
    ends: float | None = None
    node: str = ""
    reason: str = ""
    comment: str = ""
    number: str = ""
    nodes: int = 0
    exit: str = ""

    @property
    def phase(self) -> str:
        """The phase: "pending", "started", "held", "ending" or "over"."""
        phase = _PHASES.get(self.state, EXECUTING)
        return HOLD if phase == PENDING and _HOLD_REASONS.search(self.reason) else phase

    @property
    def description(self) -> str:
        """Its state in SLURM's words, with the reason and the exit status."""
        text = f"{self.state} ({self.reason})" if self.reason else self.state
        return f"{text}, {self.exit}" if self.exit else text

    @property
    def is_ended(self) -> bool:
        """Whether SLURM or a person ended it, and not its own processes."""
        return self.state in _BLAMELESS or (self.phase in (ENDING, TERMINAL) and self.reason == _TIME_LIMIT)

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for a change that time alone does not bring."""
        return self.phase == PENDING and bool(_STUCK_REASONS.search(self.reason))


def rows(text: str) -> dict[str, QueueRow]:
    """Return the jobs in the output of ``squeue -h -r -O FORMAT``, by id; other lines are skipped."""
    jobs = {}
    for line in text.splitlines():
        job_id, number, state, restarts, submitted, starts, ends, nodes, status, node, reason, comment = (
            _cells(line)
        )
        if re.fullmatch(r"\d+(_\d+)?", job_id) and state:
            jobs[job_id] = QueueRow(
                job_id,
                state.upper(),
                int(restarts) if restarts.isdecimal() else 0,
                parse_time(submitted),
                parse_time(starts),
                parse_time(ends),
                node,
                "" if reason == "None" else reason,
                "" if comment == "(null)" else comment,
                number,
                int(nodes) if nodes.isdecimal() else 0,
                exit_status(status),
            )
    return jobs


def scontrol_rows(text: str) -> dict[str, QueueRow]:
    """Return the jobs in the output of ``scontrol --oneliner show job``, by id, one for each array element."""
    jobs: dict[str, QueueRow] = {}
    for line in text.splitlines():
        # The first of a name wins: a user's comment may contain similar text.
        facts = dict(reversed(_CELL.findall(line)))
        if "JobId" not in facts or "JobState" not in facts:
            continue
        reason = facts.get("Reason", "")
        row = QueueRow(
            facts["JobId"],
            facts["JobState"].split(",")[0].upper(),
            int(facts.get("Restarts") or 0),
            parse_time(facts.get("SubmitTime", "")),
            parse_time(facts.get("StartTime", "")),
            parse_time(facts.get("EndTime", "")),
            facts.get("NodeList", "").replace("(null)", ""),
            "" if reason == "None" else reason,
            number=facts["JobId"],
            exit=exit_status(facts.get("ExitCode", "")),
        )
        array, elements = facts.get("ArrayJobId"), facts.get("ArrayTaskId")
        ids = [f"{array}_{one}" for one in expand_elements(elements)] if array and elements else [row.job_id]
        jobs.update((job_id, row._replace(job_id=job_id)) for job_id in ids)
    return jobs


def preemption(text: str) -> tuple[frozenset[str], dict[str, float]]:
    """Return the partitions whose jobs may be preempted at once, and the grace seconds of preempted jobs by partition.

    The text is that of ``scontrol --oneliner show partition``; the default partition is also listed under "".  A
    partition of the highest priority is not preempted, whatever its mode; and a grace of half a minute suffices to move
    a job's data.

    >>> preemption("PartitionName=a PriorityTier=2\\nPartitionName=b PriorityTier=1 PreemptMode=CANCEL GraceTime=5")
    (frozenset({'b'}), {'b': 5.0})
    """
    lines = [dict(_CELL.findall(line)) for line in text.splitlines()]
    partitions = [facts for facts in lines if "PartitionName" in facts]
    highest = max((int(facts.get("PriorityTier", "1")) for facts in partitions), default=1)
    at_once: set[str] = set()
    graces: dict[str, float] = {}
    for facts in partitions:
        names = [facts["PartitionName"], *([""] if facts.get("Default") == "YES" else [])]
        grace = float(value) if (value := facts.get("GraceTime", "")).isdecimal() else 0.0
        if grace:  # without any, SLURM sends no signal
            graces |= dict.fromkeys(names, grace)
        is_preempted = facts.get("PreemptMode", "OFF") not in ("OFF", "GANG")
        if is_preempted and grace < _LONG_GRACE and int(facts.get("PriorityTier", "1")) < highest:
            at_once.update(names)
    return frozenset(at_once), graces


def kill_wait(text: str) -> float | None:
    """Return the seconds from SIGTERM to SIGKILL, from ``scontrol show config``; None if they are missing.

    >>> kill_wait("KillOnBadExit           = 0\\nKillWait                = 30 sec")
    30.0
    """
    found = re.search(r"^\s*KillWait\s*=\s*(\d+)", text, re.MULTILINE)
    return float(found[1]) if found else None


def _cells(line: str) -> list[str]:
    cells, at = [], 0
    for width in _COLUMNS.values():
        cells.append(line[at : at + width].strip())
        at += width
    return cells


def parse_time(text: str) -> float | None:
    """Return a point in time; None for N/A, Unknown, INVALID and the like.

    >>> parse_time("1795293374"), parse_time("INVALID")
    (1795293374.0, None)
    """
    if text.isdecimal():
        return float(text) or None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def duration(text: str) -> float:
    """Return the seconds of a time limit as `sbatch --time` takes it; infinite for UNLIMITED, 0 and invalid text.

    Minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.

    >>> duration("30"), duration("01:00:00"), duration("1-12")
    (1800.0, 3600.0, 129600.0)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return inf
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds) or inf


def option(script: str, short: str, long: str) -> str:
    """Return the value of the last such option in a script's header, as SLURM does; "": none.

    >>> option("#SBATCH -p cpu -c8\\n#SBATCH --partition=gpu", "p", "partition")
    'gpu'
    """
    names = rf"--{long}(?:=|[ \t]+)" + (rf"|-{short}[ \t]*" if short else "")
    pattern = rf"^#SBATCH[ \t]+(?:.*[ \t])?(?:{names})(\"[^\"\n]*\"|'[^'\n]*'|\S+)"
    found = re.findall(pattern, script, re.MULTILINE)
    return str(found[-1]).strip("\"'") if found else ""


def element(job_id: str) -> tuple[str, int]:
    """Return the array and the index of a job; a single job counts as element 0 of an array.

    >>> element("12_3"), element("12")
    (('12', 3), ('12', 0))
    """
    array, _, index = job_id.partition("_")
    return array, int(index or 0)


def exit_status(text: str) -> str:
    """Return a job's exit code or signal from SLURM's notation, or from a status of wait(2); empty: 0 or not known.

    >>> exit_status("3:0"), exit_status("0:9"), exit_status("0:0"), exit_status("768"), exit_status("9")
    ('exit code 3', 'signal 9', '', 'exit code 3', 'signal 9')
    """
    if text.isdecimal():  # `squeue` before SLURM 23
        text = f"{int(text) >> 8}:{int(text) & 127}"
    found = re.fullmatch(r"(\d+):(\d+)", text)
    code, signal = map(int, found.groups()) if found else (0, 0)
    if signal:
        return f"signal {signal}"
    return f"exit code {code}" if code else ""


def expand_elements(elements: str) -> Iterator[int]:
    """Yield the elements of SLURM's short notation.

    >>> list(expand_elements("0-2,5,8-12:2%1"))
    [0, 1, 2, 5, 8, 10, 12]
    """
    for part in elements.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match:
            first, last, step = match.groups()
            yield from range(int(first), int(last or first) + 1, int(step or 1))


def indices(numbers: Sequence[int]) -> str:
    """Return ascending numbers in the notation of `sbatch --array`.

    >>> indices([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# -- refusals ------------------------------------------------------------------------------------------------

# Kinds of failures of `sbatch`: it may pass, too many jobs for now, permanent, or not known.
TRANSIENT, LIMIT, PERMANENT, UNKNOWN = "transient", "limit", "permanent", "unknown"

_REFUSALS: Mapping[str, tuple[str, ...]] = {
    LIMIT: (r"MaxSubmit", r"GrpSubmit", r"job array specification"),
    TRANSIENT: (
        r"temporarily", r"timed out", r"unable to contact", r"try again", r"zero bytes", r"standby mode",
        r"connect(ion)? (refused|failure|error)", r"message (send|receive) failure", r"not available (now|right now)",
        r"submissions disabled", r"generating job credential", r"error writing script", r"no route to host",
        r"connection reset", r"unexpected message", r"internal error", r"cannot allocate memory",
        r"failed to send", r"protocol authentication",
        # Maintenance: the site comes back.
        r"(partition|node) not available \(", r"partition in down state", r"nodes are busy", r"not usable now",
        r"reservation is in use",
    ),
    PERMANENT: (
        r"\binvalid\b", r"not permitted", r"permission denied", r"access denied", r"configuration is not available",
        r"not in this partition", r"than (permitted|available)", r"memory required by task", r"not supported",
        r"unrecognized option", r"no partition specified", r"unable to open file", r"missing or exceeds",
        r"must be specified", r"too long", r"configuration source", r"batch script", r"per_?job", r"not found on",
    ),
}  # fmt: skip


def refusal(text: str) -> str:
    """Return the kind of a failure of `sbatch` by its output: "transient", "limit", "permanent" or "unknown".

    The first kind with a matching pattern wins, as SLURM repeats itself in general terms.
    """
    for kind, patterns in _REFUSALS.items():
        if any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns):
            return kind
    return UNKNOWN


def words(text: str) -> str:
    """Return SLURM's message on one line, without the names of its commands.

    >>> words("sbatch: error: invalid partition specified: x\\nsbatch: error: Batch job submission failed: No")
    'invalid partition specified: x; Batch job submission failed: No'
    """
    lines = (re.sub(r"^\s*(\w+: )?(error: |fatal: )?", "", line).strip() for line in text.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))
