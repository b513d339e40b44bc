"""The facts of a cluster of batch jobs in words, and the jobs' output in its logs.

Only known facts are shown; no command is waited for.  Of output only the ends of the newest files are read, which
bounds it however much the jobs print.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from math import inf
from pathlib import Path
from time import localtime, strftime
from typing import NamedTuple

from distributed.utils import Log

from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.runtime.site_jobs import SiteJob
from dask_ferro.runtime.slurm.logs import end_of_file
from dask_ferro.runtime.slurm.parsing import option

# States in the order of a job's life.
_STATES = ("running", "booting", "pending", "submitting")
# The most reasons shown for one state; a site has a dozen of them.
_REASONS = 3
# The most characters shown of a pool's reason for closing, which quotes SLURM.
_WORDS = 120
# The most output files read (a job writes one or two), and bytes read from the end of each.
_FILES, _TAIL = 50, 20_000
# The patterns that sbatch replaces in a file name.
_PATTERN = re.compile(r"%(\d*)([A-Za-z%])")


class Known(NamedTuple):
    """The known facts of a cluster: its jobs, its pools, and the bounds of its workers, if any."""

    jobs: Sequence[SiteJob]
    pools: Sequence[Pool]
    bounds: tuple[float, float] | None = None


def in_words(known: Known) -> str:
    """Return a one-line description.

    >>> in_words(Known((), (Pool("default"), Pool("gpu", maximum=4)), (0, 64)))
    'jobs: none, bounds: 0..64 workers, pools: default, gpu 0..4'
    """
    parts = [f"jobs: {', '.join(_states(known.jobs)) or 'none'}"]
    if known.bounds is not None:
        parts.append(f"bounds: {_bounds(*known.bounds)} workers")
    parts.append(f"pools: {', '.join(_pool(pool) for pool in known.pools)}")
    return ", ".join(parts)


def in_rows(known: Known) -> list[tuple[str, str]]:
    """Return names and texts: the bounds, and for each pool its jobs and why it is closed.

    >>> in_rows(Known((), (Pool("gpu", maximum=4, closed="by its user", is_paused=True),)))
    [('pool gpu 0..4', 'no jobs; paused: by its user')]
    """
    rows = [] if known.bounds is None else [("bounds", f"{_bounds(*known.bounds)} workers")]
    for pool in known.pools:
        states = _states(job for job in known.jobs if job.pool == pool.name)
        told = ", ".join(states) or "no jobs"
        rows.append((f"pool {pool.name}{_limits(pool)}", f"{told}; {_closed(pool)}" if pool.closed else told))
    return rows


def _states(jobs: Iterable[SiteJob]) -> list[str]:
    """Return the number of jobs in each state, with the reasons that the site gives."""
    states: dict[str, Counter[str]] = {}
    for job in jobs:
        states.setdefault(job.state, Counter())[job.reason] += 1
    found = []
    for state in sorted(states, key=lambda one: _STATES.index(one) if one in _STATES else len(_STATES)):
        reasons = [reason[:_WORDS] for reason, _ in states[state].most_common() if reason]
        more = ["..."] if len(reasons) > _REASONS else []
        told = f" ({', '.join(reasons[:_REASONS] + more)})" if reasons else ""
        found.append(f"{states[state].total()} {state}{told}")
    return found


def _pool(pool: Pool) -> str:
    return f"{pool.name}{_limits(pool)}" + (f" {_closed(pool)}" if pool.closed else "")


def _limits(pool: Pool) -> str:
    return f" {_bounds(pool.minimum, pool.maximum)}" if pool.minimum or pool.maximum < inf else ""


def _bounds(low: float, high: float) -> str:
    if low == high:
        return f"{low:g}"
    return f"{low:g}.." + ("" if high == inf else f"{high:g}")


def _closed(pool: Pool) -> str:
    until = f" until {strftime('%H:%M:%S', localtime(pool.closed_until))}" if pool.closed_until else ""
    more = "..." if len(pool.closed) > _WORDS else ""
    return f"{'paused' if pool.is_paused else 'closed'}{until}: {pool.closed[:_WORDS]}{more}"


# -- output --------------------------------------------------------------------------------------------------


def ends_of(paths: Iterable[Path]) -> dict[str, Log]:
    """Return the ends of output files by path."""
    return {str(path): Log(_tail(path)) for path in paths}


def outputs(header: str, job_name: str, since: float) -> list[Path]:
    """Return the newest output files written since a time by jobs with this script header, the newest last."""
    patterns = [pattern for pattern in _files(header, job_name) if pattern.parent.is_dir()]
    found: dict[Path, float] = {}
    for path in chain.from_iterable(pattern.parent.glob(pattern.name) for pattern in patterns):
        with suppress(OSError):  # removed meanwhile
            if path.is_file() and path.stat().st_mtime >= since:
                found[path] = path.stat().st_mtime
    return sorted(found, key=lambda path: found[path])[-_FILES:]


def _files(header: str, job_name: str) -> set[Path]:
    """Return the output paths of jobs with this script header as patterns; the last option of each stream counts."""
    streams = {option(header, "o", "output"), option(header, "e", "error")}
    known = {"x": job_name, "u": os.environ.get("USER", "*"), "%": "%"}
    patterns = set()
    for path in streams - {"", "/dev/null"}:
        parent, _, name = path.rpartition("/")
        plain = re.sub(r"([*?[])", r"[\1]", name)
        if "%" not in parent:
            glob = _PATTERN.sub(lambda match: known.get(match[2], "*"), plain)
            patterns.add(Path(parent or ".") / glob)
    return patterns


def _tail(path: Path) -> str:
    """Return the end of a file, starting at a line."""
    try:
        size, read = end_of_file(path, _TAIL)
    except OSError as error:
        return f"cannot be read: {error}"
    text = read.decode(errors="replace")
    if size <= _TAIL:
        return text
    return f"... the last {_TAIL} of {size} bytes\n" + text.partition("\n")[2]
