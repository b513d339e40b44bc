"""The private or undocumented names of Dask without which a part of dask_ferro is not used, by part and owner.

Only modules called `upstream*.py` use such names.  Each part checks its names on its first use (`missing`), so
that stock Dask goes on where one is missing.  Owners are imported only when they are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version
from inspect import unwrap
from itertools import chain

logger = logging.getLogger(__name__)

# The parts, each a key of `_NAMES`.
SCHEDULER, WORKER, CLUSTER, JOBQUEUE = "scheduler", "worker", "cluster", "jobqueue"

_NAMES: Mapping[str, Mapping[str, str]] = {
    SCHEDULER: {
        "distributed.scheduler.Scheduler": """
            _reschedule acquire_resources bandwidth check_idle_saturated decide_worker_non_rootish
            decide_worker_rootish_queuing_enabled handle_worker_status_change is_rootish no_workers_timeout
            release_resources request_acquire_replicas send_task_to_worker stimulus_queue_slots_maybe_opened
            stream_comms task_prefixes transition transitions valid_workers worker_plugins worker_send
        """,
        "distributed.scheduler.WorkerState": "add_to_processing metrics remove_from_processing",
        "distributed.scheduler.TaskState": "get_nbytes",
        "distributed.stealing.WorkStealing": """
            balance count in_flight log metrics move_task_confirm move_task_request put_key_in_stealable
            remove_key_from_stealable
        """,
        "distributed.stealing": "_WORKER_STATE_CONFIRM _WORKER_STATE_REJECT",
        "distributed.batched.BatchedSend": "interval",
    },
    WORKER: {
        "distributed.worker.Worker": """
            _instances batched_stream contact_address metrics startup_information state transfer_incoming_log
        """,
        "distributed.nanny.Nanny": "worker_address",
    },
    CLUSTER: {
        "distributed.deploy.spec.SpecCluster": """
            _adaptive _correct_state _futures _i new_spec new_worker_spec scheduler_comm scheduler_info worker_spec
            workers
        """,
        "distributed.deploy.adaptive.Adaptive": "_start",
    },
    JOBQUEUE: {
        "distributed.deploy.spec.SpecCluster": """
            _close _get_logs _memory_per_worker _start _threads_per_worker _update_worker_status
        """,
        "dask_jobqueue.core.JobQueueCluster": "_dummy_job _job_kwargs",
        "dask_jobqueue.core.Job": "_command_template _job_script_prologue",
    },
}


# Some hundred look-ups, the same for each cluster of a process.
@cache
def missing(*parts: str) -> tuple[str, ...]:
    """Return the dotted names that some parts need and the installed versions lack."""
    lacks: list[str] = []
    for path, owned in chain.from_iterable(_NAMES[part].items() for part in parts):
        there = _names_of(path)
        lacks += [f"{path}.{name}" for name in owned.split() if name not in there]
    return tuple(lacks)


def _names_of(path: str) -> set[str]:
    """Return the names of a module or a class and, of its instances, those that its constructors mention."""
    module, _, name = path.rpartition(".")
    try:
        owner = getattr(import_module(module), name, None) or import_module(path)
    except ImportError:
        return set()
    names = set(dir(owner))
    for kind in owner.__mro__ if isinstance(owner, type) else ():
        code = getattr(unwrap(vars(kind).get("__init__", object)), "__code__", None)
        names.update(getattr(kind, "__annotations__", ()), code.co_names if code else ())
    return names


def remedy(lacks: Iterable[str], stays: str) -> str:
    """Return a sentence for users about missing names.

    Parameters
    ----------
    lacks : iterable of str
        The names returned by `missing`.
    stays : str
        The consequence.
    """
    return (
        f"dask_ferro: {stays}: the installed Dask (distributed {version('distributed')}) has no"
        f" {'; no '.join(lacks)}. Install the versions that dask-ferro asks for, or a newer dask-ferro"
    )


@cache
def warn_once(sentence: str) -> None:
    """Log a warning, once per process."""
    logger.warning(sentence)
