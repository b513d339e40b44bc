"""All options of the `ferro` section of Dask's configuration: a class for each section, and `OPTIONS` by key.

A new option is a field of one of these classes, or of a class that one of them includes; no other list names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from dask_ferro.graph.model.checks.limits import Limits
from dask_ferro.options import (
    Option,
    choice,
    count,
    flag,
    given,
    number,
    options_of,
    seconds,
    section,
    size,
)
from dask_ferro.policy.estimates import Learning
from dask_ferro.policy.placement import PlacementParameters
from dask_ferro.policy.scaling.fleet import ScalingParameters as Scaling
from dask_ferro.policy.scheduling_core import COALESCE, TICK
from dask_ferro.policy.stealing.informed import StealingParameters as Stealing
from dask_ferro.policy.stealing.policies import POLICIES as NAMED

AUTO, OFF = "auto", "none"
POLICIES = (AUTO, *NAMED)
DEVICES = ("cpu", "gpu")


@dataclass(frozen=True)
class InputOptions:
    """`ferro.inputs`."""

    embed_bytes: int = size(
        "64KiB",
        "An input array up to this size is sent inside its task. A larger one is scattered to the workers once: sent"
        " through the scheduler, 600 MB of inputs ran at two thirds of the speed of files.",
    )


@dataclass(frozen=True)
class SessionOptions:
    """`ferro.onnxruntime`."""

    intra_op_threads: int | None = count(
        "auto",
        'Threads inside one session run; "auto" is the worker\'s cores over its threads, at least 1. More than that'
        " oversubscribes the machine: two worker threads with two each ran at 0.77 of the speed.",
        unit="threads",
        auto=True,
    )
    prepack: bool = flag(
        True,
        "Whether a session may repack weights for its kernels. That gains up to 15 % of speed, and each process then"
        " has its own copy of the weights; without it, processes of one host share the pages of the file.",
    )


@dataclass(frozen=True)
class CacheOptions:
    """`ferro.cache`."""

    bytes: int = size(
        "2GiB",
        "Sessions and weights that one worker process keeps; the least recently used are evicted first.",
    )


@dataclass(frozen=True)
class LimitOptions:
    """`ferro.limits`."""

    of_models: Limits = section(Limits)
    run: float = seconds(
        None,
        "How long one bundle may run on its chunk, since a Loop may never end. A task over the limit fails; null: no"
        " limit.",
        off=True,
    )


@dataclass(frozen=True)
class RankOptions:
    """`ferro.ranks`."""

    checkpoint_calls: int | None = count(
        50,
        "After this many successive calls of `ff.Ranks` or steps of `ff.parallel`, persisted results that are inputs of"
        " the next call lose their lineage: a dead worker costs at most this many steps, and the scheduler keeps the"
        " tasks of this many. The call waits for these results and copies each to another worker. null: lineage is"
        " never cut.",
        unit="calls",
        auto=True,
    )


@dataclass(frozen=True)
class BundleOptions:
    """`ferro.bundle`."""

    workers: int | None = count(
        "auto",
        'The number of worker threads that granularity "auto" plans for; "auto" asks the current cluster, or counts the'
        " cores of this machine if there is none.",
        unit="threads",
        auto=True,
    )
    # Beside `workers`, as both decide into how many tasks a graph is cut.
    costs: str | None = given(
        "file",
        "A file on the scheduler's machine that keeps what tasks cost, so that `ff.bundled` knows them in the next"
        " program too; null: they are forgotten with the scheduler.",
        default="~/.cache/dask_ferro/task-costs",
    )


@dataclass(frozen=True)
class PluginOptions:
    """`ferro.scheduler`: stealing, placement, ranking, timing and recording of the scheduler plugin."""

    stealing: str = choice(
        POLICIES,
        'The stealing policy: "informed" looks at the longest queues; "last-victim" asks the last victim, then any'
        ' worker; "none" (or off, false, null) moves nothing, so that nothing corrects a wrong placement.'
        ' "auto": informed, but none if Dask\'s own switch, `distributed.scheduler.work-stealing`, is off.',
        off=OFF,
    )
    placement: bool = flag(
        True,
        "Whether a ready task goes to the worker where it is projected to finish first; false: Dask's own choice, a"
        " worker that holds its data.",
    )
    rank: bool = flag(
        True,
        "Whether narrow graphs run their longest chains first; wide graphs keep Dask's order, which needs less memory.",
    )
    parameters: Stealing = section(Stealing)
    placing: PlacementParameters = section(PlacementParameters, name="place")
    learning: Learning = section(Learning, name="learn")
    coalesce: float = seconds(
        f"{1000 * COALESCE:g}ms", "How long events are collected before the plugin decides."
    )
    tick: float = seconds(
        f"{1000 * TICK:g}ms",
        "How often the plugin examines every worker, whichever events there were.",
        above=True,
    )
    scheduler_sends: float = seconds(
        "1ms",
        "How long the scheduler batches messages to a worker. With Dask's own 5 ms, no dependency between two workers"
        " takes less.",
    )
    worker_sends: float = seconds("1ms", "How long a worker batches messages to the scheduler; Dask: 2 ms.")
    client_sends: float = seconds(
        "2ms", "How long a client that installed the plugin batches messages to the scheduler; Dask: 10 ms."
    )
    events: float = seconds(
        "5s",
        'How often steals and placements, if there were any, are published on topic "ferro"; 0: never.',
        off=True,
    )
    answer: float = seconds(
        "15s",
        "How long `ff.install`, `ff.uninstall`, `ff.check` and `ff.trace(ops=True)` wait for each worker; a worker that"
        " hangs is reported, and set up when it reconnects. On a busy machine, a worker may need some seconds to import"
        " the package.",
    )
    recorded_tasks: int = count(
        0, "The number of finished tasks that are kept for traces; 0 keeps none.", unit="tasks", least=0
    )
    # Here beside stealing's parameters, since a recording is used to examine them.
    record: str | None = given(
        "file",
        "A file on the scheduler's machine that records all events and decisions of stealing, for"
        " `dask ferro replay --events`. An existing recording is replaced, any other file is not; if the file cannot be"
        " written, one warning says so and the scheduler goes on. Each task takes some 0.4 kB of the file, and 40 us of"
        " the scheduler's process, 10 us of them in its event loop.",
    )
    record_bytes: int = size(
        "256MiB",
        "The most that a recording of events may take, also that of `ff.trace(events=True)` (in the scheduler's"
        " memory, compressed). At the limit it stops with a warning; the part until then can be replayed.",
    )


@dataclass(frozen=True)
class WorkerOptions:
    """`ferro.worker`."""

    device: str = choice(
        (AUTO, *DEVICES), 'The device class of a worker\'s tasks; "auto": gpu where CuPy sees a device.'
    )


@dataclass(frozen=True)
class DeviceOptions:
    """`ferro.device`."""

    tf32: bool = flag(
        False,
        "Whether float32 matrix products use TF32, which rounds the factors to 10 bits of mantissa: several times as"
        " fast on a recent GPU, with errors of 1e-3 instead of 1e-6.",
    )
    weights_bytes: int | None = size(
        "auto",
        'GPU memory for cached weights, each held once however many bundles read it; "auto": half of the free memory.'
        " Together with results and inputs they take 0.75 of it at most, or the larger of these two settings.",
        auto=True,
    )
    results_bytes: int | None = size(
        "auto",
        'GPU memory for results and inputs; beyond it, the oldest move to the host. "auto": 0.6 of the free memory.',
        auto=True,
    )
    onnxruntime: str = choice(
        ("auto", "never", "anywhere"),
        'With `optimizations`: whether ONNX Runtime may compute on a device instead of the array table. "auto": where'
        ' its CUDA provider works and is projected to be faster; "never"; "anywhere": also on a device whose memory is'
        " the host's (an emulated one).",
        off="never",
    )
    optimizations: bool = flag(
        True,
        "Chains of elementwise operators become one generated kernel, small matrix products of equal shapes one call,"
        " and ONNX Runtime or the array table is chosen by projected seconds. False: the array table computes node by"
        " node.",
    )


@dataclass(frozen=True)
class ElasticOptions:
    """`ferro.elastic`."""

    interval: float = seconds("1s", "How often the controller takes a snapshot, decides and acts.")
    scaling: Scaling = section(Scaling)
    fail_unrunnable: bool = flag(
        False,
        "Whether tasks that no worker can run fail, with the reason, while every pool that could run them is closed"
        " because its jobs are refused or fail, and has no job pending or starting; false: they wait until a pool"
        " opens again and submits jobs once more.",
    )
    failures: float = count(
        3,
        "A pool of batch jobs closes for a while when this many of its jobs in a row end before their worker"
        " connects; null: never for that reason.",
        unit="jobs",
        auto=True,
        nothing=inf,
    )
    failures_in_window: float = count(
        20,
        "A pool also closes when this many jobs do so within `failures-window`, even if others succeed in between;"
        " null: never for that reason.",
        unit="jobs",
        auto=True,
        nothing=inf,
    )
    failures_window: float = seconds("10m", "The window of time for `failures-in-window`.")
    copy_share: float = number(
        0.5,
        "The share of memory up to which a worker receives copies of preemptible jobs' results. 0: none are made.",
        most=1.0,
    )


@dataclass(frozen=True)
class StreamOptions:
    """`ferro.stream`."""

    lease: float = seconds(
        "60s",
        "A lock of `ff.run` that another host holds counts as abandoned when it was not renewed for this long: for"
        " shared file systems that do not pass locks between hosts. A holder renews its lock 12 times in this time.",
    )
    no_workers: float = seconds(
        "5s",
        "How long `ff.run` waits without any worker before it logs a warning; the next one comes after twice the time,"
        " and so on.",
    )


@dataclass(frozen=True)
class TraceOptions:
    """`ferro.trace`."""

    tasks: int = count(
        100_000,
        "The most finished tasks that `ff.trace` keeps, the newest ones; each takes 0.5 kB of the scheduler's memory.",
        unit="tasks",
    )
    ops: bool = flag(
        False,
        "Whether `ff.trace` records the ops inside of bundles. That costs 1.4 us for each op of the array table; for"
        " ONNX Runtime, a second session and 16 us an op, for the first 20,000 ops of each session.",
    )
    events: bool = flag(
        False,
        "Whether `ff.trace` records all events and decisions of stealing, for `dask ferro replay --events`.",
    )


@dataclass(frozen=True)
class Ferro:
    """`ferro`: all sections."""

    inputs: InputOptions = section(InputOptions, "inputs")
    onnxruntime: SessionOptions = section(SessionOptions, "onnxruntime")
    cache: CacheOptions = section(CacheOptions, "cache")
    limits: LimitOptions = section(LimitOptions, "limits")
    ranks: RankOptions = section(RankOptions, "ranks")
    bundle: BundleOptions = section(BundleOptions, "bundle")
    store: str | None = given(
        "folder",
        "A folder that the client and every worker can read and write: models given as bytes are written there, and"
        " the workers map them. Without one, they are written to a temporary folder, and a copy is sent to workers"
        " that cannot read it.",
    )
    scheduler: PluginOptions = section(PluginOptions, "scheduler")
    worker: WorkerOptions = section(WorkerOptions, "worker")
    device: DeviceOptions = section(DeviceOptions, "device")
    elastic: ElasticOptions = section(ElasticOptions, "elastic")
    stream: StreamOptions = section(StreamOptions, "stream")
    trace: TraceOptions = section(TraceOptions, "trace")


# Keys of job configurations by section: arguments of `adapt`, not options; Dask reads these files too, so allow them.
OF_JOB_FILES = {"elastic": ("minimum", "maximum")}
# All options by key without "ferro.", such as "cache.bytes".
OPTIONS: dict[str, Option] = dict(options_of(Ferro))
