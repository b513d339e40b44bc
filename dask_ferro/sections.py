"""What the `ferro` section of Dask's configuration may hold: a class for each section, and `OPTIONS`, all by key.

A new option is a field here, or of a class that is a section's part; nothing else has to be told of it.
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
    options_of,
    seconds,
    section,
    size,
)
from dask_ferro.policy.estimates import Learning
from dask_ferro.policy.placement import PlacementParameters
from dask_ferro.policy.replication.copies import Copying
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
        "An input array up to this size travels inside its task. A larger one goes to the workers once, by itself:"
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
        "Whether a session may rearrange weights for its kernels. It gains up to 15 %, and costs each process its own"
        " copy of the weights; without it, processes of one host share the pages of the file.",
    )


@dataclass(frozen=True)
class CacheOptions:
    """`ferro.cache`."""

    bytes: int = size(
        "2GiB",
        "Sessions and weights that one worker process keeps; the least recently used leave first.",
    )


@dataclass(frozen=True)
class LimitOptions:
    """`ferro.limits`."""

    of_models: Limits = section(Limits)
    run: float = seconds(
        None,
        "How long one bundle may run on its chunk: a Loop may go round for ever, and only ONNX Runtime knows"
        " whether it does. Over the limit its task fails; null: it may take as long as it takes.",
        off=True,
    )


@dataclass(frozen=True)
class RankOptions:
    """`ferro.ranks`."""

    checkpoint_calls: int | None = count(
        20,
        "Calls of `ff.Ranks`, one behind the other, after which persisted results that are inputs again have their"
        " lineage cut: a worker's death runs so many steps again at most, and the scheduler remembers so many. A cut"
        " waits for them and copies each to another worker; null: never, every step is remembered.",
        unit="calls",
        auto=True,
    )


@dataclass(frozen=True)
class BundleOptions:
    """`ferro.bundle`."""

    workers: int | None = count(
        "auto",
        'The worker threads that "auto" granularity cuts a model for; "auto" asks the cluster at hand, and counts the'
        " cores of this machine when there is none.",
        unit="threads",
        auto=True,
    )


@dataclass(frozen=True)
class PluginOptions:
    """`ferro.scheduler`: what the scheduler plugin does, and when."""

    stealing: str = choice(
        POLICIES,
        'Which waiting tasks move: "informed" looks at the longest queues, "last-victim" asks the last victim,'
        ' then any worker, "none" (or off, false, null) moves nothing, so that nothing corrects a wrong placement.'
        ' "auto": informed, but none where Dask\'s own switch, `distributed.scheduler.work-stealing`, is off.',
        off=OFF,
    )
    placement: bool = flag(
        True,
        "Whether a ready task goes where it is projected to finish first; false: Dask's own choice, a holder of its"
        " data.",
    )
    rank: bool = flag(
        True,
        "Whether narrow graphs run their longest chains first; wide ones keep Dask's order, which keeps memory"
        " small.",
    )
    parameters: Stealing = section(Stealing)
    placing: PlacementParameters = section(PlacementParameters, name="place")
    learning: Learning = section(Learning, name="learn")
    coalesce: float = seconds(f"{1000 * COALESCE:g}ms", "How long events are gathered before a step.")
    tick: float = seconds(
        f"{1000 * TICK:g}ms",
        "How often a step is taken that looks at every worker, whatever the events said.",
        above=True,
    )
    scheduler_sends: float = seconds(
        "1ms",
        "How long the scheduler gathers messages to a worker. Dask's own 5 ms are the floor of every dependency's"
        " hop.",
    )
    worker_sends: float = seconds("1ms", "How long a worker gathers messages to the scheduler; Dask: 2 ms.")
    client_sends: float = seconds(
        "2ms", "How long a client that installed the plugin gathers messages to the scheduler; Dask: 10 ms."
    )
    events: float = seconds(
        "5s",
        'How often what was stolen and placed is published on topic "ferro", where there was anything; 0: never.',
        off=True,
    )
    answer: float = seconds(
        "15s",
        "How long `ff.install`, `ff.uninstall` and `ff.trace(ops=True)` wait for each worker; one that hangs is"
        " told of, and set up when it comes back. A worker of a busy machine may need some seconds to import the"
        " package.",
    )
    recorded_tasks: int = count(
        0, "Finished tasks that are kept for traces; 0 keeps none.", unit="tasks", least=0
    )
    # Beside stealing's own parameters, as it is what those are looked into with.
    record: str | None = given(
        "file",
        "A file on the scheduler's machine for all that stealing is told and decides, for `dask ferro replay --events`."
        " A recording that is there is replaced, any other file is not; one that cannot be written is told once, and"
        " the scheduler goes on. A task is some 0.4 kB, and takes the scheduler's process 40 us, its event loop 10 us.",
    )
    record_bytes: int = size(
        "256MiB",
        "How large a recording of events may become, that of `ff.trace(events=True)` too (in the scheduler's memory,"
        " compressed). Then it ends, with a warning; what there is can be replayed.",
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
        "Products of float32 matrices with factors rounded to 10 bits of mantissa: several times as fast on a recent"
        " GPU, with errors of 1e-3 instead of 1e-6.",
    )
    weights_bytes: int | None = size(
        "auto",
        'Weights that stay on a GPU, once each however many bundles read them; "auto": half of the free memory. With'
        " results and inputs they take 0.75 of it at most, or the larger of these two settings.",
        auto=True,
    )
    results_bytes: int | None = size(
        "auto",
        'Results and inputs that stay on a GPU; the oldest move to the host beyond that. "auto": 0.6 of the free'
        " memory.",
        auto=True,
    )
    onnxruntime: str = choice(
        ("auto", "never", "anywhere"),
        'Whether ONNX Runtime computes on a device beside the array table, with `optimizations`: "auto", where its CUDA'
        " provider works"
        ' and is projected to be faster; "never"; "anywhere", also on a device whose memory is the host\'s (a'
        " stand-in).",
        off="never",
    )
    optimizations: bool = flag(
        False,
        "Optimizations that no measurement on a GPU has justified yet: chains of elementwise operators as one generated"
        " kernel, small products of equal shapes as one call, and the choice between ONNX Runtime and the array table"
        " by projected seconds. False: the array table computes, node by node.",
    )


@dataclass(frozen=True)
class ElasticOptions:
    """`ferro.elastic`."""

    interval: float = seconds("1s", "How often the controller looks, decides and acts.")
    scaling: Scaling = section(Scaling)
    fail_unrunnable: bool = flag(
        False,
        "Whether tasks fail, with the reason, that no worker can run while every pool that could is closed, since"
        " its jobs are refused or fail, and has no job that waits or starts; false: they wait until a pool opens"
        " again, and its jobs are tried once more.",
    )
    failures: float = count(
        3,
        "A pool of batch jobs closes for a while when so many of its jobs end one after the other before a worker"
        " came; null: never for that.",
        unit="jobs",
        auto=True,
        nothing=inf,
    )
    failures_in_window: float = count(
        20,
        "Or when so many do within a window of time, whatever jobs worked in between; null: never for that.",
        unit="jobs",
        auto=True,
        nothing=inf,
    )
    failures_window: float = seconds("10m", "How long that window is.")
    copying: Copying = section(Copying, prefix="copy-")


@dataclass(frozen=True)
class StreamOptions:
    """`ferro.stream`."""

    lease: float = seconds(
        "60s",
        "A lock of `ff.run` whose holder was on another host counts as left behind after so long without a sign of"
        " life: for shared file systems that do not tell a lock of one host to another. A holder gives 12 signs in"
        " this time.",
    )
    no_workers: float = seconds(
        "5s",
        "How long `ff.run` waits without any worker before a log says so; it says it again after twice the time,"
        " and so on.",
    )


@dataclass(frozen=True)
class TraceOptions:
    """`ferro.trace`."""

    tasks: int = count(
        100_000,
        "Finished tasks that `ff.trace` keeps at most, the newest: 0.5 kB of the scheduler's memory each.",
        unit="tasks",
    )
    ops: bool = flag(
        False,
        "Whether it records the ops inside of bundles: 1.4 us for each op of the array table; for ONNX Runtime's, a"
        " second session and 16 us an op, for the first 20,000 ops of each session.",
    )
    events: bool = flag(
        False,
        "Whether it records all that stealing is told and decides, for `dask ferro replay --events`.",
    )


@dataclass(frozen=True)
class Ferro:
    """`ferro`: all there is."""

    inputs: InputOptions = section(InputOptions, "inputs")
    onnxruntime: SessionOptions = section(SessionOptions, "onnxruntime")
    cache: CacheOptions = section(CacheOptions, "cache")
    limits: LimitOptions = section(LimitOptions, "limits")
    ranks: RankOptions = section(RankOptions, "ranks")
    bundle: BundleOptions = section(BundleOptions, "bundle")
    store: str | None = given(
        "folder",
        "A folder that the client and every worker can read and write: models that were given as bytes are put"
        " there for the workers to map. Without one, they lie in a temporary folder, and a copy is sent to workers"
        " that cannot see it.",
    )
    scheduler: PluginOptions = section(PluginOptions, "scheduler")
    worker: WorkerOptions = section(WorkerOptions, "worker")
    device: DeviceOptions = section(DeviceOptions, "device")
    elastic: ElasticOptions = section(ElasticOptions, "elastic")
    stream: StreamOptions = section(StreamOptions, "stream")
    trace: TraceOptions = section(TraceOptions, "trace")


# Keys of job files by section, which are given to a call by whoever reads the file; Dask reads such files as well.
OF_JOB_FILES = {"elastic": ("minimum", "maximum")}
# By key, without "ferro.": "cache.bytes".
OPTIONS: dict[str, Option] = dict(options_of(Ferro))
