"""`dask worker --preload plugins/ferro_worker.py`: the worker plugin, without a client."""

from dask_ferro.scheduler.worker_plugin import FerroWorker


async def dask_setup(worker):
    """Measure the worker, which takes tasks meanwhile."""
    await worker.plugin_add(FerroWorker())
