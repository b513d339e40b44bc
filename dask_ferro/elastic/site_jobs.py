"""A job as reported by its site: the value that clusters pass to the controller, and to what reports on pools.

Batch systems make the value, and the controller reads it.
"""

from __future__ import annotations

from typing import NamedTuple

# The pool of a cluster without named pools.
DEFAULT = "default"


class SiteJob(NamedTuple):
    """A job as reported by its site.

    Attributes
    ----------
    state : str
        "submitting", "pending", "booting" or "running".
    workers : tuple of str
        The present or future names of its workers at the scheduler.
    since : float
        When that state began; epoch.
    order : int
        Its position by submission.
    ends_at : float or None
        When its walltime is over; epoch.
    reason : str
        The site's reason for the state, if any.
    """

    name: str
    pool: str
    state: str
    workers: tuple[str, ...]
    since: float
    order: int
    ends_at: float | None = None
    reason: str = ""
