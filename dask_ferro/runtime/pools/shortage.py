"""Closed and paused pools in words, and whether missing workers can come: not if only those could provide them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import localtime, strftime

from dask_ferro.policy.scaling.facts import Pool


def is_shut(kind: Pool) -> bool:
    """Return whether no job of a pool is requested until a time or its user opens it."""
    return kind.is_paused or bool(kind.closed_until)


def told_closed(kinds: Iterable[Pool]) -> str:
    """Return a description of closed or paused pools: the reasons, the times, and the output of their last jobs.

    >>> told_closed([Pool("cpu", closed="no more"), Pool("gpu")])
    'cpu is closed: no more'
    """
    said = []
    for kind in kinds:
        if kind.closed:
            at = strftime(" until %H:%M:%S", localtime(kind.closed_until)) if kind.closed_until else ""
            state = "paused" if kind.is_paused else "closed"
            said.append(
                f"{kind.name} is {state}{at}: {kind.closed}" + (f"\n{kind.output}" if kind.output else "")
            )
    return "\n".join(said)


def shortage(missing: float, jobs: Mapping[str, int], kinds: Sequence[Pool]) -> str:
    """Return why this many more workers cannot come for now, given by the closed pools; empty: they may come.

    A pool's maximum that is too small is no reason by itself, as its user chose it.

    Parameters
    ----------
    jobs : mapping of str to int
        The number of jobs by pool.

    Examples
    --------
    >>> shortage(1, {}, [Pool("cpu", is_paused=True, closed="by its user")])
    'cpu is paused: by its user'
    >>> shortage(1, {}, [Pool("cpu", is_paused=True, closed="by its user"), Pool("gpu")])
    ''
    """
    room = sum(
        max(kind.maximum - jobs.get(kind.name, 0), 0) * kind.processes for kind in kinds if not is_shut(kind)
    )
    return told_closed(kind for kind in kinds if is_shut(kind)) if missing > room else ""
