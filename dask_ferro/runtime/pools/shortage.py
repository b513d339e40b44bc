"""Whether workers that are waited for can come: not where only pools could have them that are closed or paused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.runtime.pools.providers import told_closed


def is_shut(kind: Pool) -> bool:
    """Whether no job of a pool is asked for until its time, or its user, opens it; trouble that passes is none."""
    return bool(kind.mode or kind.closed_until)


def shortage(missing: float, jobs: Mapping[str, int], kinds: Sequence[Pool]) -> str:
    """Return why so many more workers cannot come for now: the pools that are shut; empty: they may come.

    That a pool's maximum is too small is no reason by itself: its user said so.

    Parameters
    ----------
    jobs : mapping of str to int
        Those that there are, by pool.

    Examples
    --------
    >>> shortage(1, {}, [Pool("cpu", mode="paused", closed="by its user")])
    'cpu is paused: by its user'
    >>> shortage(1, {}, [Pool("cpu", mode="paused", closed="by its user"), Pool("gpu")])
    ''
    """
    room = sum(
        max(kind.maximum - jobs.get(kind.name, 0), 0) * kind.processes for kind in kinds if not is_shut(kind)
    )
    return told_closed(kind for kind in kinds if is_shut(kind)) if missing > room else ""
