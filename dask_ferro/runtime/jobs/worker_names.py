"""The names of a cluster's workers: the pool's name, or dask-jobqueue's ``name``, then the job's number.

    default-3   gpu-4.1-0            without a name: of pool "gpu", job 4, requeued once, its first process
    run-3       run-gpu-4.1-0        with name="run"
    run-99-3                         with name="run-$SLURM_JOB_ID": the job's shell replaces variables

Numbers are never reused.  The result of a shell's replacement is known only once the worker has joined; until then,
and in displays of the job, the name is shown as written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.site_jobs import DEFAULT

# Text that a shell replaces within double quotes: $NAME, ${NAME...}, $(command).
_REPLACED = re.compile(r"\$(?:\w+|\{[^}]*\}|\([^)]*\))")
# Characters that would end the quotes around a name in the script, or start a new line.
_UNQUOTED = re.compile(r"[\"`\\\x00-\x1f\x7f]")


class WorkerNames:
    """The names of one cluster's workers.

    Parameters
    ----------
    name : object
        The cluster's name as its user gave it; None: not given.

    Attributes
    ----------
    actual : dict of str to str
        The names of joined workers that differ from those in their jobs' scripts, by the latter.

    Raises
    ------
    ConfigError
        For a name that cannot stand in a script.
    """

    def __init__(self, name: object = None) -> None:
        self._name = None if name is None else checked_cluster_name(name)
        self.actual: dict[str, str] = {}

    def prefix(self, pool: str) -> str:
        """Return the prefix of the names of a pool's workers."""
        if self._name is None:
            return pool
        return self._name if pool == DEFAULT else f"{self._name}-{pool}"

    def learn(self, worker: str, pools: Mapping[str, int], is_job: Callable[[str], bool]) -> None:
        """Record the actual name of a worker that joined.

        Parameters
        ----------
        pools : mapping of str to int
            The number of processes of a job, by pool.
        is_job : callable
            Whether a job of a name exists: a name that fits one pool may belong to another.
        """
        if self._name is None or "$" not in self._name:
            return
        for pool, processes in pools.items():
            prefix = self.prefix(pool)
            found = _pattern(prefix, processes).fullmatch(worker)
            if found and is_job(f"{prefix}-{found['number']}"):
                self.actual[f"{prefix}-{found['number']}{found['rest']}"] = worker


def checked_cluster_name(name: object) -> str:
    """Return a cluster's name that is valid as the beginning of its workers' names.

    Raises
    ------
    ConfigError
        For an empty one, or one with quotes, backslashes or line ends.
    """
    if not isinstance(name, str | int) or isinstance(name, bool) or not str(name).strip():
        raise ConfigError(f"ff.SLURMCluster: name: got {name!r}, wanted text that workers' names begin with")
    if _UNQUOTED.search(str(name)):
        raise ConfigError(
            f"ff.SLURMCluster: name: got {name!r}, wanted text without quotes, backslashes and line ends: "
            "workers' names begin with it, in the job script; shell variables such as $SLURM_JOB_ID may stand in it"
        )
    return str(name)


def _pattern(prefix: str, processes: int) -> re.Pattern[str]:
    parts = [re.escape(part) for part in _REPLACED.split(prefix)]
    process = r"-\d+" if processes > 1 else ""
    return re.compile(".*".join(parts) + rf"-(?P<number>\d+)(?P<rest>(\.\d+)?{process})")
