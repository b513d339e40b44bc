"""Pools and their jobs in words, and whether missing workers can come: not if only closed pools could provide them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from time import localtime, strftime

from dask_ferro.elastic.site_jobs import SiteJob
from dask_ferro.policy.scaling.facts import Pool

# States in the order of a job's life.
_STATES = ("running", "booting", "pending", "submitting")
# The most reasons shown for one state; a site has a dozen of them.
_REASONS = 3
# The most characters shown of a reason, which quotes SLURM.
_WORDS = 120


def is_shut(kind: Pool) -> bool:
    """Return whether no job of a pool is requested until a time or its user opens it."""
    return kind.is_paused or bool(kind.closed_until)


def closed_text(kinds: Iterable[Pool]) -> str:
    """Return a description of closed or paused pools: the reasons, the times, and the output of their last jobs.

    >>> closed_text([Pool("cpu", closed="no more"), Pool("gpu")])
    'cpu is closed: no more'
    """
    return "\n".join(
        f"{kind.name} is {_closed_state(kind)}: {kind.closed}" + (f"\n{kind.output}" if kind.output else "")
        for kind in kinds
        if kind.closed
    )


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
    return closed_text(kind for kind in kinds if is_shut(kind)) if missing > room else ""


def in_rows(
    jobs: Sequence[SiteJob], kinds: Iterable[Pool], bounds: tuple[float, float] | None = None
) -> list[tuple[str, str]]:
    """Return names and texts: the bounds of a cluster's workers, and for each pool its jobs and why it is closed.

    >>> in_rows((), [Pool("gpu", maximum=4, closed="by its user", is_paused=True)], (0, inf))
    [('bounds', '0.. workers'), ('pool gpu 0..4', 'no jobs; paused: by its user')]
    """
    rows = [] if bounds is None else [("bounds", f"{_bounds(*bounds)} workers")]
    for kind in kinds:
        limits = f" {_bounds(kind.minimum, kind.maximum)}" if kind.minimum or kind.maximum < inf else ""
        text = _states(job for job in jobs if job.pool == kind.name)
        if kind.closed:
            text += f"; {_closed_state(kind)}: {_cut(kind.closed)}"
        rows.append((f"pool {kind.name}{limits}", text))
    return rows


def _states(jobs: Iterable[SiteJob]) -> str:
    """Return the number of jobs in each state, with the reasons that the site gives."""
    states: dict[str, Counter[str]] = {}
    for job in jobs:
        states.setdefault(job.state, Counter())[job.reason] += 1
    parts = []
    for state in sorted(states, key=_STATES.index):
        reasons = [_cut(reason) for reason, _ in states[state].most_common(_REASONS) if reason]
        parts.append(f"{states[state].total()} {state}" + (f" ({', '.join(reasons)})" if reasons else ""))
    return ", ".join(parts) or "no jobs"


def _closed_state(kind: Pool) -> str:
    at = strftime(" until %H:%M:%S", localtime(kind.closed_until)) if kind.closed_until else ""
    return ("paused" if kind.is_paused else "closed") + at


def _bounds(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g}.." + ("" if high == inf else f"{high:g}")


def _cut(text: str) -> str:
    return text[:_WORDS] + ("..." if len(text) > _WORDS else "")
