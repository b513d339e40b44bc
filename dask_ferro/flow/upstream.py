"""Access to a private name of Dask's workers: whether a task has left the pool of threads.

Not in `lower.upstream`, since this imports distributed, which takes a third of a second.
"""

from __future__ import annotations

from distributed.threadpoolexecutor import rejoin, thread_state


def rejoin_after_secede() -> None:
    """Let this thread be one of its worker's again, if a task has called `secede`."""
    if not getattr(thread_state, "proceed", True):
        rejoin()
