"""Access to private or undocumented names of dask-jobqueue.

`JobCluster` has a method of ours for each step of a cluster's life, which subclasses extend.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import yaml

from dask_ferro.errors import missing_extra


class _Missing:
    """The classes of dask-jobqueue where it is not installed: a name can be imported, and a call names the extra."""

    def __new__(cls, *_: object, **__: object) -> Any:
        raise missing_extra("ff.SLURMCluster", "dask-jobqueue", "slurm")


# The import of dask_jobqueue makes SIGINT end any program with status 0, which is undone here.
_on_interrupt = signal.getsignal(signal.SIGINT)
try:
    from dask_jobqueue.core import Job, JobQueueCluster
    from dask_jobqueue.slurm import SLURMCluster, SLURMJob
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "dask_jobqueue":
        raise
    Job = JobQueueCluster = SLURMCluster = _Missing  # type: ignore[misc]
    SLURMJob = type("SLURMJob", (Job,), {})  # type: ignore[misc, assignment]

signal.signal(signal.SIGINT, _on_interrupt)

__all__ = ["Job", "JobCluster", "JobQueueCluster", "SLURMJob", "defaults_of"]


class JobCluster(SLURMCluster):  # type: ignore[misc]
    """dask-jobqueue's cluster of SLURM jobs."""

    async def _start(self) -> None:
        await self._open_cluster()

    async def _open_cluster(self) -> None:
        """Start the scheduler, and connect to it."""
        await super()._start()

    async def _close(self) -> None:
        await self._close_cluster()

    async def _close_cluster(self) -> None:
        """Close the scheduler."""
        await super()._close()

    def _worker_shape(self) -> tuple[int, int]:
        """Return the threads and the bytes of one worker."""
        raise NotImplementedError

    def _threads_per_worker(self) -> int:
        return self._worker_shape()[0]

    def _memory_per_worker(self) -> int:
        return self._worker_shape()[1]

    def _first_job(self) -> Job:
        """Return a job that is never submitted.  It is used before anything is started."""
        raise NotImplementedError

    @property
    def _dummy_job(self) -> Job:
        return self._first_job()


def defaults_of(kind: str) -> Mapping[str, object]:
    """Return dask-jobqueue's default options of a batch system."""
    text = files("dask_jobqueue").joinpath("jobqueue.yaml").read_text(encoding="utf-8")
    defaults: Mapping[str, object] = yaml.safe_load(text)["jobqueue"][kind]
    return defaults


def batch_job_of(cluster: Any) -> Job | None:
    """Return a job of a dask-jobqueue cluster that is never submitted; None: it has no class of jobs."""
    return cluster.job_cls and cluster._dummy_job


def job_keywords(cluster: JobQueueCluster) -> Mapping[str, object]:
    """Return the keywords of all jobs of a cluster."""
    return cluster._job_kwargs


def command_of(job: Job) -> str:
    """Return the command with which a job's script starts its worker."""
    return job._command_template


def add_to_command(job: Job, words: str) -> None:
    """Append arguments to the command."""
    job._command_template += f" {words}"


def prologue_of(job: Job) -> Sequence[str]:
    """Return the user's lines before the command."""
    return tuple(filter(None, job._job_script_prologue))
