"""The check whether missing workers can come: they cannot if only closed or paused pools could provide them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.runtime.pools.providers import told_closed


def is_shut(kind: Pool) -> bool:
    """Return whether no job of a pool is requested until a time or its user opens it."""
    return bool(kind.mode or kind.closed_until)


def shortage(missing: float, jobs: Mapping[str, int], kinds: Sequence[Pool]) -> str:
    """Return why this many more workers cannot come for now, given by the closed pools; empty: they may come.

    A pool's maximum that is too small is no reason by itself, as its user chose it.

    Parameters
    ----------
    jobs : mapping of str to int
        The number of jobs by pool.

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
