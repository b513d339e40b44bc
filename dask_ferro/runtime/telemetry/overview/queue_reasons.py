"""The reasons that a batch system has for a pending job, in plain words."""

from __future__ import annotations

# How a reason begins (of two that begin alike the longer first): in plain words, and whether it does not end by itself,
# or not soon.
QUEUES = {
    "Priority": ("jobs with a higher priority are ahead", False),
    "Resources": ("it waits for nodes to become free", False),
    "BeginTime": ("the job asked for a later start", True),
    "DependencyNeverSatisfied": ("it waits for another job", True),
    "Dependency": ("it waits for another job", False),
    "ReqNodeNotAvail": ("the nodes it asked for are down or reserved", True),
    "Nodes required": ("the nodes it asked for are down or reserved", True),
    "PartitionDown": ("the partition is down", True),
    "PartitionInactive": ("the partition takes no jobs now", True),
    "PartitionTimeLimit": ("it asked for more time than the partition grants, and will not start", True),
    "PartitionNodeLimit": ("it asked for more nodes than the partition grants, and will not start", True),
    "QOSNotAllowed": ("a limit of the quality of service is reached", True),
    "QOS": ("a limit of the quality of service is reached", False),
    "AccountNotAllowed": ("the partition does not admit the account, and it will not start", True),
    "Invalid": ("the account or the quality of service is not valid, and it will not start", True),
    "BadConstraints": ("no node has what it asked for, and it will not start", True),
    "JobHeld": ("it is held until it is released", True),
    "AssocMaxJobs": ("a limit of the account is reached", True),
    "Assoc": ("a limit of the account is reached", False),
    "Licenses": ("it waits for a licence", False),
    "ReservationDeleted": ("it waits for its reservation", True),
    "Reservation": ("it waits for its reservation", False),
}
# What is in the reasons of a job that is larger than a limit for one job.
_TOO_LARGE = "PerJob"


def plain(reason: str) -> str:
    """Return a reason in plain words; "": there are none for it."""
    return _row(reason)[0]


def is_endless(reason: str) -> bool:
    """Return whether a pending job with this reason waits until something is done.

    >>> is_endless("PartitionTimeLimit"), is_endless("QOSMaxWallDurationPerJobLimit"), is_endless("Priority")
    (True, True, False)
    """
    return _row(reason)[1] or _TOO_LARGE in reason


def _row(reason: str) -> tuple[str, bool]:
    return next((row for start, row in QUEUES.items() if reason.startswith(start)), ("", False))
