"""Access to a private name of Dask's workers: whether a task has left the pool of threads.

Not in `lower.upstream`, since this imports distributed, which takes a third of a second.
"""

from __future__ import annotations

from distributed import secede as leave
from distributed.threadpoolexecutor import rejoin, thread_state


def has_seceded() -> bool:
    """Return whether this thread has left its worker's pool."""
    return not getattr(thread_state, "proceed", True)


def leave_pool() -> None:
    """Let another thread have this one's place in its worker's pool."""
    leave()  # type: ignore[no-untyped-call]


def rejoin_pool() -> None:
    """Let this thread be one of its worker's again."""
    rejoin()  # type: ignore[no-untyped-call]
