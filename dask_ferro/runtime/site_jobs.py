"""A job as its site sees it: the value that every kind of cluster gives to the controller, to records and to views.

It stands below all folders of the runtime: batch systems make it, and the controller reads it.
"""

from __future__ import annotations

from typing import NamedTuple

from dask_ferro.policy.scaling.facts import PAUSED, REMOVED

# The pool of a cluster whose user named none.
DEFAULT = "default"
# What is said of a pool that its user paused or removed.
MODES = {PAUSED: "paused", REMOVED: "being removed"}


class SiteJob(NamedTuple):
    """A job as its site sees it.

    Attributes
    ----------
    state : str
        "submitting", "pending", "booting" or "running".
    workers : tuple of str
        The names that its workers have, or will have, at the scheduler.
    since : float
        When that state began; epoch.
    order : int
        Its place by submission.
    ends_at : float or None
        When its walltime is over; epoch.
    reason : str
        The site's, where it says one.
    """

    name: str
    pool: str
    job_id: str
    state: str
    workers: tuple[str, ...]
    since: float
    order: int
    ends_at: float | None = None
    reason: str = ""
