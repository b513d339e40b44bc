"""`dask worker --preload-nanny plugins/ferro_job.py`: the worker leaves in order when its batch job ends."""

from dask_ferro.slurm.job_preload import dask_setup, dask_teardown

__all__ = ["dask_setup", "dask_teardown"]
