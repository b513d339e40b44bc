"""Words of the overview's sentences: names, numbers, durations, and reasons with what to do about them."""

from __future__ import annotations

from collections.abc import Sequence

# The most names in a sentence.
_FEW = 3

# Why a task waits beside idle workers and what to do, by the policy's reason (`policy.waits.REASONS`).
WAITS = {
    "restricted": (
        "it may not run on those (workers=)",
        "submit it without workers=, or with allow_other_workers=True",
    ),
    "class": (
        "it requires a device that those do not have (ff.Require)",
        "start a worker with that device, or use ff.Prefer in place of ff.Require",
    ),
    "resources": (
        "those do not have the resources free that it asks for (resources=)",
        "start workers with more of the resource, or ask for less",
    ),
    "room": (
        "their devices have no memory free for it",
        "release results on the devices, or start workers with more device memory",
    ),
    "ends": (
        "their jobs end before it would",
        "ask for jobs with a longer walltime, or make tasks shorter",
    ),
    "actor": ("an actor stays where it is", "use tasks, or several actors"),
    "asked": (
        "its worker was asked to give it up, and has not answered yet",
        "if it stays, look at its worker, which is slow to answer",
    ),
    "silent": (
        "its worker does not answer, and has the only copy of its input",
        "end its worker if it does not come back: Dask computes its results again",
    ),
    "costs": (
        "its input is so large that moving it takes longer than waiting",
        "nothing; smaller inputs would move",
    ),
    "soon": ("it is about to be moved", "nothing, unless it stays"),
    "fresh": (
        "it is held for a new worker, which would have the time for it",
        "nothing if a job is on its way; otherwise ask for jobs with a longer walltime",
    ),
    "nobody": ("no worker of the cluster may run it", "start a worker that may run it"),
}
OFF = "stealing is off, which would move it", "ff.install(client, stealing='informed')"
# A batch system's reasons for a pending job, in plain words, by how they begin; those that begin alike, longest first.
QUEUES = {
    "Priority": "jobs with a higher priority are ahead",
    "Resources": "it waits for nodes to become free",
    "BeginTime": "the job asked for a later start",
    "DependencyNeverSatisfied": "the job that it waits for failed, and it will not start",
    "Dependency": "it waits for another job",
    "ReqNodeNotAvail": "the nodes it asked for are down or reserved",
    "Nodes required": "the nodes it asked for are down or reserved",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs now",
    "PartitionTimeLimit": "it asked for more time than the partition grants, and will not start",
    "PartitionNodeLimit": "it asked for more nodes than the partition grants, and will not start",
    "QOS": "a limit of the quality of service is reached",
    "AccountNotAllowed": "the partition does not admit the account, and it will not start",
    "Invalid": "the account or the quality of service is not valid, and it will not start",
    "BadConstraints": "no node has what it asked for, and it will not start",
    "JobHeld": "it is held until it is released",
    "Assoc": "a limit of the account is reached",
    "Licenses": "it waits for a licence",
    "Reservation": "it waits for its reservation",
}
# Of those reasons, the ones that do not end by themselves, or not soon; and what is in the reasons of a job that is
# larger than a limit for one job.
ENDLESS = (
    "AccountNotAllowed", "AssocMaxJobs", "BadConstraints", "BeginTime", "DependencyNeverSatisfied", "Invalid",
    "JobHeld", "Nodes required", "PartitionDown", "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit",
    "QOSNotAllowed", "ReqNodeNotAvail", "ReservationDeleted",
)  # fmt: skip
TOO_LARGE = "PerJob"


def is_endless(reason: str) -> bool:
    """Return whether a pending job with this reason of the batch system waits until something is done.

    >>> is_endless("PartitionTimeLimit"), is_endless("QOSMaxWallDurationPerJobLimit"), is_endless("Priority")
    (True, True, False)
    """
    return reason.startswith(ENDLESS) or TOO_LARGE in reason


def few(names: Sequence[str], count: int | None = None) -> str:
    """Return some names, and how many others there are of `count`.

    >>> few(["a", "b"]), few(["a", "b", "c", "d", "e"]), few(["a"], 3)
    ('a and b', 'a, b, c and 2 more', 'a and 2 more')
    """
    shown = list(names[:_FEW])
    more = (len(names) if count is None else count) - len(shown)
    parts = [*shown, f"{more:,} more"] if more else shown
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def workers(names: Sequence[str], count: int | None = None) -> str:
    """Return workers by their names, as `few` does.

    >>> workers(["0"]), workers(["0", "1"]), workers(["0"], 4)
    ('worker 0', 'workers 0 and 1', 'workers 0 and 3 more')
    """
    return f"worker{'s' if (count or len(names)) > 1 else ''} {few(names, count)}"


def counted(number: int, what: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "task"), counted(1200, "task")
    ('1 task', '1,200 tasks')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def lasting(seconds: float) -> str:
    """Return seconds in a unit that a reader has a feeling for.

    >>> lasting(0.004), lasting(0.44), lasting(83.0), lasting(4000.0), lasting(200000.0)
    ('4 ms', '0.4 s', '83 s', '67 min', '56 h')
    """
    if seconds < 0.095:
        return f"{1000 * seconds:.0f} ms" if seconds else "0 s"
    if seconds < 10.0:
        return f"{seconds:.1f} s"
    if seconds < 600.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600.0 else f"{seconds / 3600:.0f} h"


def and_more(number: int, what: str, verb: str) -> str:
    """Return a clause about `number` others; empty for none."""
    if not number:
        return ""
    return (
        f"; 1 more {what} {verb}s likewise" if number == 1 else f"; {number:,} more {what}s {verb} likewise"
    )
