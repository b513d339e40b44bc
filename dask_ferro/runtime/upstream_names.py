"""Every private or undocumented name of Dask that dask_ferro uses, with its purpose and a public hook to replace it.

`SEAMS` are used only in modules called `upstream*.py`; `FACTS` are documented attributes, which any module may read.
A test searches the source for others; `missing` reports at start-up the names that the installed version lacks, or
whose arguments differ.  Owners are imported only when they are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from inspect import Parameter, signature, unwrap
from itertools import chain
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

# The parts of dask_ferro that need these names; each part is checked on its first use.
SCHEDULER, WORKER, CLUSTER, JOBQUEUE = "scheduler", "worker", "cluster", "jobqueue"
# Not checked: most functions work without these, and task specifications are imported with `lower`.
OPTIONAL = "optional"

# Public hooks that would replace seams in Dask; `docs/upstream.md` has a paragraph, and a patch, for some.
HOOKS = {
    "decide_worker": "a hook of `SchedulerPlugin` that chooses a ready task's worker, or lets it wait",
    "steal": "methods of the scheduler that ask a worker for tasks, move one, and tell a plugin of the answer",
    "extension": "a documented interface of the stealing extension, as `SchedulerPlugin` has one",
    "status": "a hook of `SchedulerPlugin` for a worker's status, and a method that sets it",
    "sends": "options of the configuration, and methods, for the intervals at which messages are sent",
    "retire": "a `retire_workers` that hands results back, verifies where they are, and can be called off",
    "reschedule": "a documented method that places a task anew, or fails it",
    "state": "documentation for attributes that plugins and dashboards read already",
    "worker": "documentation for attributes of `Worker` and `Nanny` that plugins read already",
    "cluster": "documented steps of a cluster's life for subclasses: start, close, a worker came or went",
    "job": "documented parts of dask-jobqueue's script: the prologue and the worker's command",
    "submit": "a hook of a client, or of `SchedulerPlugin`, that rewrites a graph before the scheduler makes its tasks",
    "graph": "public names for task specifications, and for the kind of an array's chunks",
}


class Seam(NamedTuple):
    """A name of Dask that is not public.

    Attributes
    ----------
    owner : str
        The class or module that defines it.
    part : str
        The part of dask_ferro that needs it.
    why : str
        Its purpose.
    hook : str
        The key in `HOOKS` of its possible replacement.
    takes : tuple of str, optional
        The arguments passed to it; for an overridden method, all its arguments.
    overrides : bool
        Whether a method of ours overrides it.
    """

    owner: str
    name: str
    part: str
    why: str
    hook: str
    takes: tuple[str, ...] | None = None
    overrides: bool = False


_GRAPH = (
    "Alias", "DataNode", "GraphNode", "List", "Task", "TaskRef", "resolve_aliases", "_execute_subgraph",
    "convert_legacy_graph",
)  # fmt: skip

# By owner and part: (name, hook, purpose), and the arguments of calls; "=" before them marks a method that ours
# overrides, so that the arguments have to be the same.
_ROWS: dict[tuple[str, str], list[tuple[str, ...]]] = {
    ("distributed.scheduler.Scheduler", SCHEDULER): [
        ("_reschedule", "reschedule", "places a task that a worker has anew", "key worker stimulus_id"),
        ("acquire_resources", "steal", "a moved task takes resources at its thief", "ts ws"),
        ("bandwidth", "state", "what Dask has measured of transfers between workers"),
        ("check_idle_saturated", "steal", "both ends of a move are looked at again", "ws"),
        ("decide_worker_non_rootish", "decide_worker", "our choice for a ready task", "=ts"),
        ("decide_worker_rootish_queuing_enabled", "decide_worker", "our choice for one that looks like a root", "="),
        ("handle_worker_status_change", "status", "a leaving worker is given nothing more",
            "status worker stimulus_id"),
        ("is_rootish", "decide_worker", "says of which task a worker is asked for next", "=ts"),
        ("no_workers_timeout", "decide_worker", "tasks that we hold back do not count towards it"),
        ("release_resources", "steal", "a moved task frees its victim's resources", "ts ws"),
        ("request_acquire_replicas", "retire", "copies results before their worker goes", "addr keys stimulus_id"),
        ("send_task_to_worker", "steal", "sends a moved task to its thief", "worker ts"),
        ("stimulus_queue_slots_maybe_opened", "decide_worker", "sends several short tasks of the queue at a time",
            "=stimulus_id"),
        ("stream_comms", "sends", "the connection to each worker, whose interval is set"),
        ("task_groups", "state", "the nodes of the graph's page"),
        ("task_prefixes", "state", "what Dask has counted and measured by prefix"),
        ("transition", "reschedule", "fails tasks that no pool can run", "key finish stimulus_id"),
        ("transitions", "reschedule", "places tasks without a worker again", "recommendations stimulus_id"),
        ("valid_workers", "state", "the workers that a restricted task may run on", "ts"),
        ("worker_plugins", "worker", "the plugins that later workers are given"),
        ("worker_send", "steal", "a request to a worker: for a task, or to change its status", "worker msg"),
    ],
    ("distributed.scheduler.WorkerState", SCHEDULER): [
        ("add_to_processing", "steal", "a moved task is its thief's", "ts"),
        ("metrics", "state", "what its newest heartbeat told"),
        ("remove_from_processing", "steal", "a moved task is not its victim's", "ts"),
    ],
    ("distributed.scheduler.TaskState", SCHEDULER): [
        ("get_nbytes", "state", "the bytes of a result, or Dask's guess", ""),
    ],
    ("distributed.stealing.WorkStealing", SCHEDULER): [
        ("_add_to_in_flight", "extension", "notes a request", "ts info"),
        ("_in_flight_event", "extension", "set when no request is on its way"),
        ("_remove_from_in_flight", "extension", "forgets a request", "ts"),
        ("_request_counter", "extension", "numbers requests"),
        ("balance", "extension", "Dask's tick, called by hand", "="),
        ("count", "extension", "steps that asked for something, as Dask counts them"),
        ("in_flight", "extension", "the requests that are on their way"),
        ("in_flight_tasks", "extension", "requests by worker"),
        ("key_stealable", "extension", "what may be stolen, as Dask's dashboard reads it"),
        ("log", "extension", "Dask's log of stealing", "msg"),
        ("metrics", "extension", "requests by level, as Dask counts them for Prometheus"),
        ("move_task_confirm", "steal", "takes a worker's answer", "=key state stimulus_id worker"),
        ("move_task_request", "steal", "asks for a task by hand", "=ts victim thief"),
        ("put_key_in_stealable", "extension", "a task may be stolen", "=ts"),
        ("recalculate_cost", "extension", "a duration was learned", "=ts"),
        ("remove_key_from_stealable", "extension", "a task left its thread", "=ts"),
        ("steal_time_ratio", "extension", "Dask's level of a task", "ts"),
        ("stealable", "extension", "what may be stolen, by worker and level"),
    ],
    ("distributed.stealing", SCHEDULER): [
        ("_WORKER_STATE_CONFIRM", "steal", "answers by which a worker gives a task up"),
        ("_WORKER_STATE_REJECT", "steal", "answers by which it keeps one"),
    ],
    ("distributed.batched.BatchedSend", SCHEDULER): [
        ("interval", "sends", "how long messages are gathered before they are sent"),
    ],
    ("distributed.http.scheduler.prometheus.core.PrometheusHandler", OPTIONAL): [
        ("_collectors", "state", "the scheduler whose metrics are asked for"),
    ],
    ("distributed.client.Client", OPTIONAL): [
        ("_graph_to_futures", "submit", "a client's graphs are bundled on the scheduler", "expr keys"),
        ("scheduler_comm", "sends", "the connection to the scheduler, whose interval is set"),
    ],
    ("distributed.worker.Worker", WORKER): [
        ("_instances", "worker", "the workers of this process"),
        ("batched_stream", "sends", "the connection to the scheduler, whose interval is set"),
        ("contact_address", "worker", "the address by which the scheduler knows the worker"),
        ("metrics", "worker", "what heartbeats tell"),
        ("startup_information", "worker", "what registration tells"),
        ("state", "worker", "the types of the results that the worker holds"),
        ("transfer_incoming_log", "worker", "what transfers between workers took"),
    ],
    ("distributed.nanny.Nanny", WORKER): [
        ("worker_address", "worker", "the address of the worker that a nanny looks after"),
    ],
    ("distributed.deploy.spec.SpecCluster", CLUSTER): [
        ("_adaptive", "cluster", "the controller that looks after a cluster"),
        ("_futures", "cluster", "what a cluster waits for before it is closed"),
        ("_correct_state", "cluster", "starts and closes what the specification says", ""),
        ("_i", "cluster", "the number of the next job"),
        ("new_spec", "cluster", "what a job of the specification is"),
        ("new_worker_spec", "cluster", "the specification of one more job", ""),
        ("scheduler_comm", "cluster", "the connection to the scheduler"),
        ("scheduler_info", "cluster", "the connected workers"),
        ("worker_spec", "cluster", "the jobs that are wanted"),
        ("workers", "cluster", "the jobs that were started"),
    ],
    # Overridden by clusters of jobs.
    ("distributed.deploy.spec.SpecCluster", JOBQUEUE): [
        ("_close", "cluster", "ends the jobs before the scheduler", "="),
        ("_get_logs", "cluster", "the jobs' output beside the workers' logs", "=cluster scheduler workers"),
        ("_memory_per_worker", "cluster", "`adapt` and `scale` by memory", "="),
        ("_start", "cluster", "the batch system is asked before the scheduler starts", "="),
        ("_threads_per_worker", "cluster", "`adapt` and `scale` by cores", "="),
        ("_update_worker_status", "cluster", "a worker came or went", "=op msg"),
    ],
    ("distributed.deploy.cluster.Cluster", OPTIONAL): [
        ("_adaptive_options", "cluster", "options that a refused `adapt` would leave to the next one"),
    ],
    ("distributed.deploy.adaptive.Adaptive", CLUSTER): [
        ("_start", "cluster", "the first look at once, not after an interval", "="),
    ],
    ("dask_jobqueue.core.JobQueueCluster", JOBQUEUE): [
        ("_dummy_job", "job", "the shape of a job; ours is the first pool's"),
        ("_job_kwargs", "job", "the options that all jobs have"),
    ],
    ("dask_jobqueue.core.Job", JOBQUEUE): [
        ("_command_template", "job", "the command that starts a worker"),
        ("_job_script_prologue", "job", "the user's lines before it"),
    ],
    ("dask.array.core.Array", OPTIONAL): [
        ("_meta", "graph", "an empty array of the kind of a dask array's chunks"),
    ],
    ("distributed.threadpoolexecutor", OPTIONAL): [
        ("thread_state", "worker", "whether a task has left its worker's pool of threads"),
    ],
    ("dask._expr", OPTIONAL): [
        (name, "graph", "a graph that is bundled where it is written out")
        for name in ("Expr", "FinalizeCompute", "LLGExpr")
    ],
    ("dask._task_spec", OPTIONAL): [(name, "graph", "tasks of our graphs") for name in _GRAPH],
}  # fmt: skip


def _seams() -> Iterator[Seam]:
    for (owner, part), rows in _ROWS.items():
        for name, hook, why, *arguments in rows:
            given = tuple(arguments[0].removeprefix("=").split()) if arguments else None
            is_ours = bool(arguments) and arguments[0].startswith("=")
            yield Seam(owner, name, part, why, hook, given, is_ours)


SEAMS = tuple(_seams())

# Attributes described in Dask's own reference ("Scheduling state", "Plugins").
FACTS: dict[str, tuple[str, ...]] = {
    "distributed.scheduler.Scheduler": (
        "idle_task_count", "queued", "running", "tasks", "transition_counter", "unrunnable", "workers",
    ),
    "distributed.scheduler.WorkerState": (
        "actors", "executing", "has_what", "long_running", "memory", "memory_limit", "nbytes", "needs_what",
        "processing", "used_resources",
    ),
    "distributed.scheduler.TaskState": (
        "actor", "annotations", "dependencies", "dependents", "host_restrictions", "loose_restrictions", "prefix",
        "priority", "processing_on", "resource_restrictions", "run_id", "run_spec", "state", "suspicious", "type",
        "waiters", "waiting_on", "who_has", "who_wants", "worker_restrictions",
    ),
    "distributed.scheduler.TaskGroup": ("dependencies", "nbytes_total", "states"),
    "distributed.scheduler.TaskPrefix": ("all_durations", "duration_average", "max_exec_time", "states"),
    "distributed.diagnostics.plugin.SchedulerPlugin": (
        "add_worker", "log_event", "remove_worker", "restart", "transition",
    ),
}  # fmt: skip


def missing(*parts: str) -> tuple[str, ...]:
    """Return descriptions of names that some parts need and the installed versions lack; empty: none is missing."""
    return tuple(chain.from_iterable(map(_missing, parts)))


# Some hundred look-ups, the same for each cluster of a process.
@cache
def _missing(part: str) -> tuple[str, ...]:
    found = [words for seam in SEAMS if seam.part == part and (words := trouble(seam))]
    if part == SCHEDULER:
        for owner, names in FACTS.items():
            facts = (Seam(owner, name, part, "", "state") for name in names)
            found += filter(None, map(trouble, facts))
    return tuple(found)


def remedy(lacks: Iterable[str], stays: str) -> str:
    """Return a sentence for users about missing names.

    Parameters
    ----------
    lacks : iterable of str
        The descriptions returned by `missing`.
    stays : str
        The consequence.
    """
    packages = ("distributed", "dask-jobqueue", "dask-ferro")
    versions = ", ".join(f"{name} {there}" for name in packages if (there := _version(name)))
    try:
        wanted = [
            one.partition(";")[0] for one in requires("dask-ferro") or () if one.startswith("distributed")
        ]
    # The package is run from its source, without metadata.
    except PackageNotFoundError:
        wanted = []
    return (
        f"dask_ferro: {stays}: the installed Dask has no {'; no '.join(lacks)} ({versions}). "
        f"Install {' or '.join(wanted) or 'the versions that dask_ferro asks for'}, or a newer dask-ferro"
    )


@cache
def warn_once(sentence: str) -> None:
    """Log a warning, once per process."""
    logger.warning(sentence)


def trouble(seam: Seam) -> str:
    """Return a description of a name's problem in the installed version; empty: it is usable."""
    owner = _owner(seam.owner)
    where = f"{seam.owner}.{seam.name}"
    if owner is None or not has(owner, seam.name):
        return where
    if seam.takes is None:
        return ""
    try:
        there = dict(signature(getattr(owner, seam.name)).parameters)
    # It is a property, or not callable.
    except (TypeError, ValueError):
        return f"{where} as a method"
    there.pop("self", None)
    if seam.overrides:
        fits = tuple(there) == seam.takes
    else:
        any_name = any(one.kind is Parameter.VAR_KEYWORD for one in there.values())
        fits = any_name or there.keys() >= set(seam.takes)
    return "" if fits else f"{where}({', '.join(seam.takes)}), but one with ({', '.join(there)})"


def has(owner: object, name: str) -> bool:
    """Return whether a class, its instances or a module have a name, as far as can be seen without an instance."""
    if hasattr(owner, name):
        return True
    kinds = owner.__mro__ if isinstance(owner, type) else ()
    return any(name in getattr(kind, "__annotations__", ()) or name in _used_in_init(kind) for kind in kinds)


def _used_in_init(kind: type) -> tuple[str, ...]:
    """Return the names used in a class's constructor, including the attributes that it sets."""
    code = getattr(unwrap(vars(kind).get("__init__", object)), "__code__", None)
    return code.co_names if code is not None else ()


def _owner(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name, None)
        return import_module(path) if found is None else found
    except ImportError:
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
