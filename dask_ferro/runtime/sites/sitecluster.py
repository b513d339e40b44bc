"""The common base of clusters on batch systems other than SLURM, with their own names in messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.jobs.cluster_repr import newest
from dask_ferro.runtime.sites.batchsite import BatchSite
from dask_ferro.runtime.slurm.cluster import SLURMCluster
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob, Ending

_SLURMS = "ff.SLURMCluster"


class SiteCluster(SLURMCluster):
    """A cluster on another batch system, whose name replaces SLURM's in messages."""

    _site: BatchSite

    def __init__(self, *args: Any, **options: Any) -> None:
        options["config_name"] = options.get("config_name") or self.job_cls.config_name
        with told_of(f"ff.{type(self).__name__}"):
            super().__init__(*args, **options)

    def _kind(self, pool: str) -> Any:
        with told_of(f"ff.{type(self).__name__}"):
            return super()._kind(pool)

    def _end(self, job: BatchJob, ending: Ending, is_lost: bool) -> None:
        super()._end(job, ending._replace(why=ending.why.replace("SLURM", self._site.word)), is_lost)

    def _written(self) -> list[Path]:
        folders = {kind.job.log_directory for kind in self._pool_records.values()}
        return newest(chain.from_iterable(map(self._outputs, folders)), self._began)

    def _outputs(self, folder: str | None) -> Iterator[Path]:
        """Yield possible output files of jobs: all in a folder for logs, else those that bear the jobs' name."""
        if Path(folder or ".").is_dir():
            of_jobs = (f"{self._site.job_name}.o", f"{self._site.job_name}.e")
            yield from (p for p in Path(folder or ".").iterdir() if folder or p.name.startswith(of_jobs))


@contextmanager
def told_of(who: str) -> Iterator[None]:
    """Replace the class in errors by the one that the user wrote."""
    try:
        yield
    except ConfigError as error:
        if _SLURMS not in str(error):
            raise
        raise ConfigError(str(error).replace(_SLURMS, who)) from error.__cause__
