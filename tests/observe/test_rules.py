"""What is found of a snapshot, and what the overview says of it: no cluster takes part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dask_ferro.observe.facts import (
    PACKAGES,
    ClusterFacts,
    FailedTask,
    ProcessFacts,
    RunningTask,
    UnplacedTask,
    WorkerView,
)
from dask_ferro.observe.findings import fault
from dask_ferro.observe.rules import ENDLESS, findings, silence_limit
from dask_ferro.observe.summary import TaskProgress, overview
from dask_ferro.policy.waits import REASONS, WaitingTask
from dask_ferro.scheduler.events import ClosedPool, PendingJobs, ScaleEvent
from dask_ferro.scheduler.flow_log import FlowRow

GB = 10**9
IDLE, OTHER = WorkerView("0"), WorkerView("1")
BUSY = WorkerView("0", tasks=3, longest=RunningTask("long", 40.0))
WAIT = WaitingTask("held", "0", 4.2, 2, ("1", "2"), "restricted")
PENDING: PendingJobs = {"jobs": 2, "since": 96.0, "expected": 0.0, "reasons": {"Resources": 2}}
OPEN = {"waiting": 1, "processing": 3}
LOST = {"no-worker": 12}
SHARES = {"spill": 0.7, "pause": 0.8, "terminate": 0.95}


def seen(*workers: WorkerView, **facts: Any) -> ClusterFacts:
    """A snapshot of workers, by default with tasks that remain."""
    common = {"tasks": OPEN, "threads": 2 * len(workers), "shares": SHARES}
    return ClusterFacts(100.0, workers=workers, **{**common, **facts})


def closed(why: str, until: float = 0.0, output: str = "", is_paused: bool = False) -> ScaleEvent:
    """A decision of a controller with a closed pool."""
    pool: ClosedPool = {"why": why, "until": until, "output": output, "paused": is_paused}
    return {"time": 99.0, "closed": {"cpu": pool}}


def pending(**changes: Any) -> ScaleEvent:
    """A decision of a controller with jobs in a queue."""
    queue: Any = {**PENDING, **changes}
    return {"time": 99.0, "jobs": {"pending": queue["jobs"]}, "pending": {"cpu": queue}}


def flow(seconds: float, **more: Any) -> FlowRow:
    """A flow that has run for a time, whose longest member has tasks for three seconds."""
    return FlowRow("step", 2, state="runs", seconds=seconds, projected=3.0, workers=("0", "1"), **more)


def full(share: float, status: str = "running", **more: Any) -> WorkerView:
    """A worker that uses a share of its memory."""
    return WorkerView("0", status, memory=int(share * 4 * GB), limit=4 * GB, **more)


# Each row: the facts, and the kind, the severity, words of the sentence and words of the remedy of each finding.
ROWS = [
    pytest.param(seen(IDLE, OTHER), [], id="nothing is wrong"),
    pytest.param(
        seen(unserved=3.0), [("workers", "error", "there is no worker for 4 tasks")], id="no worker for 3 s"
    ),
    pytest.param(
        seen(unserved=12.0, decision={"time": 99.0}),
        [("workers", "warning", "the controller was asked for workers 12 s ago, and has no job on its way")],
        id="a controller that does not start any",
    ),
    pytest.param(
        seen(unserved=60.0, decision={"time": 99.0}), [("workers", "error", "60 s ago")], id="nor within a minute"
    ),
    pytest.param(
        seen(IDLE, OTHER, lacking={"0": "0.0.1", "1": "none that can be imported"}),
        [("dask_ferro", "warning", "worker 0 and worker 1: dask_ferro: got 0.0.1 and none that", "pip install")],
        id="workers without the package",
    ),
    # -- flows
    pytest.param(
        seen(IDLE, OTHER, flows=(flow(29.0), replace(flow(900.0), state="ended"), replace(flow(90.0), ended=1))),
        [],
        id="flows that take long, that end, and that are over",
    ),
    pytest.param(
        seen(IDLE, OTHER, flows=(flow(31.0), flow(40.0))),
        [
            (
                "flow",
                "warning",
                "flow step has run for 40 s at workers 0 and 1, its members have tasks for 3 s (projected), and none"
                " of them has ended; likewise 1 more flow",
                "client.call_stack()",
            )
        ],
        id="a flow that does not move for ten times its projection",
    ),
    pytest.param(
        seen(IDLE, OTHER, flows=(replace(flow(19.0), projected=0.01),)), [], id="a short flow that waits its turn"
    ),
    # -- 1: a task that waits while workers idle
    pytest.param(
        seen(BUSY, OTHER, waits=(WAIT,)),
        [
            ("waits", "slow", "held has waited at worker 0 for 4.2 s, behind long, which has run there for 40 s"),
        ],
        id="a short task behind a long one",
    ),
    pytest.param(
        seen(BUSY, OTHER, waits=(WAIT._replace(idle=7), WAIT._replace(key="b", seconds=9.0))),
        [("waits", "slow", "b has waited at worker 0 for 9 s")],
        id="of several with one reason the longest wait is told",
    ),
    pytest.param(
        seen(BUSY, waits=(WAIT, WAIT._replace(reason="resources"), WAIT._replace(reason="transfer_too_slow"))),
        [
            ("waits", "slow", "it may not run on the idle workers (workers=)"),
            ("waits", "slow", "do not have enough of a resource free"),
            ("waits", "slow", "its input is so large"),
        ],
        id="each reason is a finding",
    ),
    pytest.param(
        seen(BUSY, waits=(WAIT._replace(reason="about_to_move"),), stealing="none"),
        [("waits", "slow", "stealing is off")],
        id="that stealing is off is the reason",
    ),
    pytest.param(
        seen(BUSY, waits=(WAIT._replace(reason="worker_unresponsive"),)),
        [("waits", "warning", "its worker does not answer")],
        id="a worker that does not answer has the only copy",
    ),
    pytest.param(
        seen(BUSY, waits=(WAIT._replace(reason="worker_unresponsive", seconds=30.0),)),
        [("waits", "error", "its worker does not answer")],
        id="and has not answered for long",
    ),
    pytest.param(
        seen(BUSY, waits=(WAIT._replace(worker="", reason="no_eligible_worker"),)), [], id="at the scheduler: told once"
    ),
    # -- 2: a hung worker
    pytest.param(
        seen(BUSY._replace(silent_for=4.0), OTHER),
        [
            (
                "hung",
                "warning",
                "no report from worker 0 for 4 s: it may be in a call that holds the interpreter's lock, or be"
                " stopped, or its host be gone, with 3 tasks; it began long 40 s ago",
            )
        ],
        id="a silent worker with tasks",
    ),
    pytest.param(
        seen(BUSY._replace(silent_for=30.0), OTHER._replace(silent_for=4.0, tasks=9)),
        [
            (
                "hung",
                "error",
                "no report from workers 0 and 1 for 30 s: the process is stopped, its host is gone, or one call"
                " blocks all of it, with 12 tasks",
                "workers 0 and 1; end what does not come back, and Dask computes its tasks elsewhere",
            )
        ],
        id="a worker that has been silent for long",
    ),
    pytest.param(
        seen(IDLE._replace(silent_for=90.0), OTHER), [("hung", "warning", "for 90 s")], id="it has no tasks"
    ),
    pytest.param(
        seen(BUSY._replace(silent_for=4.0), OTHER, unplaced=(UnplacedTask("a", 3.5, workers=("0",)),)),
        [("hung", "warning", "worker 0"), ("waits", "warning", "0 only, and worker 0 did not report for 4 s")],
        id="the only worker of a task is silent",
    ),
    pytest.param(
        seen(BUSY._replace(silent_for=31.0), unplaced=(UnplacedTask("a", 31.0),)),
        [("hung", "error", "worker 0"), ("no_eligible_worker", "error", "for 31 s: worker 0 did not report for 31 s")],
        id="all workers are silent for long",
    ),
    pytest.param(
        seen(IDLE._replace(silent_for=4.0), OTHER._replace(silent_for=5.0)),
        [("hung", "warning", "no report from workers 1 and 0 for 5 s", "the log of workers 1 and 0")],
        id="hung workers without tasks",
    ),
    # -- 3: a closed pool
    pytest.param(
        seen(decision=closed("3 jobs ended", 4000.0, "no module"), tasks=LOST),
        [("pool", "error", "3 jobs ended; 12 tasks without a worker")],
        id="a closed pool, and no worker",
    ),
    pytest.param(
        seen(BUSY, decision=closed("3 jobs ended.", 4000.0)),
        [("pool", "warning", "pool cpu is closed until")],
        id="a closed pool while others work",
    ),
    pytest.param(seen(BUSY, decision=closed("x", 99.0)), [], id="a closed pool that is tried again"),
    pytest.param(seen(BUSY, decision=closed("x", is_paused=True)), [], id="a pool paused on purpose"),
    pytest.param(
        seen(decision=closed("by its user", is_paused=True), tasks=LOST),
        [("pool", "error", "pool cpu is paused: by its user; 12 tasks without a worker")],
        id="a paused pool, and nothing else",
    ),
    # -- 4: memory near its limit
    pytest.param(seen(full(0.6)), [], id="memory in use"),
    pytest.param(
        seen(full(0.85)),
        [("memory", "warning", "full: 85% of 3.73 GiB in use at worker 0; at 95%")],
        id="it is about to pause",
    ),
    pytest.param(
        seen(full(0.9, "paused", tasks=2), OTHER),
        [("memory", "error", "no task starts at worker 0, which paused: 90% of 3.73 GiB")],
        id="a paused worker with tasks",
    ),
    pytest.param(
        seen(full(0.9, "paused"), OTHER), [("memory", "warning", "which paused")], id="a paused worker without tasks"
    ),
    pytest.param(
        seen(WorkerView("0", "paused"), WorkerView("1", "paused")),
        [("memory", "error", "no task starts at workers 0 and 1, which paused")],
        id="all are paused, and have no limit",
    ),
    pytest.param(
        seen(full(0.99), shares={"pause": False, "terminate": False}), [], id="no worker pauses, as configured"
    ),
    # -- 5: a queue that does not move
    pytest.param(
        seen(decision=pending(reasons={"PartitionDown": 2})),
        [
            (
                "queue",
                "error",
                "2 jobs of pool cpu in the batch system's queue, for up to 4 s, and"
                " 0 workers at work: PartitionDown",
            )
        ],
        id="no job can start",
    ),
    pytest.param(
        seen(decision=pending(since=40.0, jobs=1, reasons={"odd": 1})),
        [("queue", "slow", "pool cpu in the batch system's queue, for up to 60 s, and 0 workers at work: odd")],
        id="no job starts within a minute",
    ),
    pytest.param(
        seen(IDLE, decision=pending(since=10.0, expected=10.0, reasons={})),
        [("queue", "slow", "and 1 worker at work: no reason is given")],
        id="more workers are late",
    ),
    # -- 6: tasks that no worker may run
    pytest.param(
        seen(IDLE, unplaced=(UnplacedTask("a", 3.0, resources={"GPU": 1}),), unplaced_count=5),
        [("no_eligible_worker", "error", "a has waited for a worker for 3 s: it requires the resource GPU=1, and no"
          " worker declares that resource; likewise 4 more tasks")],
        id="a resource that no worker declares",
    ),
    pytest.param(
        seen(IDLE, unplaced=(UnplacedTask("a", 3.0, resources={"GPU": 4}),), unplaced_count=1, resources={"GPU": 2}),
        [("no_eligible_worker", "error", "no worker has more than 2")],
        id="more of a resource than a worker has",
    ),
    pytest.param(
        seen(IDLE, unplaced=(UnplacedTask("a", 3.0, "wrong_device", device="gpu"),), devices=("cpu",)),
        [("no_eligible_worker", "error", "it requires a worker with a gpu, and all workers have only cpu")],
        id="a device class that is missing",
    ),
    pytest.param(
        seen(IDLE, unplaced=(UnplacedTask("a", 3.0, workers=("gone",)),)),
        [("no_eligible_worker", "error", "it may run at gone only, and no worker there takes it")],
        id="a worker that has left",
    ),
    pytest.param(
        seen(IDLE, unplaced=(UnplacedTask("a", 3.0, hosts=("node7",)),)),
        [("no_eligible_worker", "error", "it may run at node7 only, and no worker there takes it")],
        id="a host without workers",
    ),
    pytest.param(
        seen(IDLE, WorkerView("1", "paused"), unplaced=(UnplacedTask("a", 3.0, workers=("1",)),)),
        [("no_eligible_worker", "error", "it may run at 1 only, and 1 is paused"),
         ("memory", "warning", "which paused")],
        id="a worker that is paused",
    ),
    pytest.param(
        seen(IDLE, unplaced=(UnplacedTask("a", 3.0, "reserved_for_new_worker"),), unplaced_count=1),
        [("waits", "slow", "it is held for a new worker")],
        id="held back for a reason",
    ),
    # -- beside these
    pytest.param(
        seen(IDLE, failed={"load": 2, "sum": 1}), [("failed", "warning", "3 tasks failed: of load and")], id="failed"
    ),
    pytest.param(
        seen(IDLE, failed={"load": 1}, failure=FailedTask("load-1", "OSError('disk')", ("0",))),
        [("failed", "warning", "of load; load-1 failed last, at worker 0: OSError('disk')", "the log of worker 0 has")],
        id="failed, with the newest failure",
    ),
]  # fmt: skip


# Healthy clusters, of which some look ill for a moment.
GIL = BUSY._replace(silent_for=4.0)
STARTS = {"queued": 4}
HEALTHY = [
    pytest.param(seen(tasks={}), id="no worker, and no task"),
    pytest.param(seen(unserved=1.6, tasks=STARTS), id="Dask's adapt starts the first workers"),
    pytest.param(seen(unserved=8.0, tasks=STARTS, decision={"time": 99.0}), id="the controller starts the first job"),
    pytest.param(seen(unserved=90.0, tasks=STARTS, decision={"jobs": {"booting": 1}}), id="a job is starting"),
    pytest.param(
        seen(unserved=9.0, unplaced=(UnplacedTask("a", 3.0),), decision={"jobs": {"booting": 1}}),
        id="any worker would do",
    ),
    pytest.param(seen(IDLE, tasks=STARTS), id="a cluster that has just started"),
    pytest.param(
        seen(BUSY, BUSY._replace(name="1"), tasks={"queued": 90, "processing": 6}), id="long tasks at all workers"
    ),
    *(
        pytest.param(seen(BUSY, OTHER, waits=(WAIT._replace(seconds=seconds, reason=reason),)), id=f"{reason} so far")
        for reason, seconds in {
            "restricted": 1.0, "resources": 2.9, "device_memory_full": 2.9, "about_to_move": 1.9, "steal_pending": 1.9,
        }.items()
    ),
    pytest.param(seen(BUSY._replace(silent_for=2.9)), id="two heartbeats late"),
    pytest.param(seen(*(WorkerView(str(i), silent_for=4.0) for i in range(100))), id="100 report less often"),
    *(
        pytest.param(
            seen(unserved=9.0, decision=pending(since=100 - seconds, reasons=reasons)),
            id=f"pending for {seconds} s: {'and '.join(reasons)}",
        )
        for seconds in (2.1, 59.0)
        for reasons in ({}, {"None": 2}, {"Priority": 2}, {"Resources": 1}, {"Priority": 1, "BadConstraints": 1})
    ),
    pytest.param(
        seen(decision=pending(since=98.1, reasons={"BeginTime": 2})),
        id="a reason that may still change",
    ),
    pytest.param(
        seen(decision=pending(since=-600.0, expected=400.0)),
        id="as long as jobs wait there",
    ),
    pytest.param(seen(IDLE, decision=pending(reasons={"QOS": 2})), id="more workers are on their way"),
    pytest.param(seen(tasks={}, decision=pending(since=10.0)), id="no task waits for those jobs"),
]  # fmt: skip


@pytest.mark.parametrize("facts", HEALTHY)
def test_a_healthy_cluster_has_no_finding(facts: ClusterFacts) -> None:
    assert findings(facts) == ()


def test_a_call_that_holds_the_interpreters_lock_is_a_risk_that_ends_no_worker() -> None:
    (found,) = findings(seen(GIL, OTHER))
    assert (found.what, found.severity) == ("hung", "warning")
    assert "; end" not in found.remedy
    (found,) = findings(seen(GIL._replace(silent_for=30.0), OTHER))
    assert (found.severity, "; end" in found.remedy) == ("error", True)


@pytest.mark.parametrize("reason", ENDLESS)
def test_a_reason_that_does_not_end_by_itself_is_told_at_once(reason: str) -> None:
    facts = seen(decision=pending(since=98.0, reasons={f"{reason}Limit": 1}))
    assert [(one.what, one.severity) for one in findings(facts)] == [("queue", "error")]


@pytest.mark.parametrize(("facts", "wanted"), ROWS)
def test_findings(facts: ClusterFacts, wanted: list[tuple[str, ...]]) -> None:
    found = findings(facts)
    assert [(one.what, one.severity) for one in found] == [row[:2] for row in wanted]
    for one, (_, _, words, *remedy) in zip(found, wanted, strict=True):
        assert words in one.sentence
        assert one.remedy
        assert all(words in one.remedy for words in remedy)


def test_the_most_severe_comes_first() -> None:
    paused = full(0.9, "paused", tasks=1)
    facts = seen(
        paused, OTHER._replace(silent_for=9.0), waits=(WAIT,), failed={"f": 1}, decision=closed("x", 4000.0)
    )  # fmt: skip
    found = findings(facts)
    assert [one.what for one in found] == ["memory", "hung", "pool", "failed", "waits"]
    assert [one.severity for one in found] == ["error", "warning", "warning", "warning", "slow"]


def test_there_are_as_few_findings_as_troubles_however_many_workers_and_tasks() -> None:
    workers = [full(0.9, "paused", tasks=9)._replace(name=f"w{i}", silent_for=60.0) for i in range(1000)]
    waits = [WAIT._replace(key=f"k{i}", reason=reason) for i in range(1000) for reason in REASONS]
    facts = seen(*workers, waits=tuple(waits))
    found = findings(facts)
    assert len(found) == len(REASONS) + 2
    assert max(len(one.sentence) for one in found) < 320
    assert "workers w0, w1, w2 and 997 more, which paused" in next(
        o.sentence for o in found if o.what == "memory"
    )


@pytest.mark.parametrize(("count", "wanted"), [(1, 3.0), (49, 3.0), (50, 5.0), (400, 7.5)])
def test_the_more_workers_the_less_often_they_report(count: int, wanted: float) -> None:
    assert silence_limit(count) == wanted


@pytest.mark.parametrize(
    ("facts", "health", "doing"),
    [
        pytest.param(seen(tasks={}), "nothing is wrong", ("no tasks", "no workers"), id="an empty cluster"),
        pytest.param(
            seen(BUSY, OTHER, tasks={"memory": 6, "processing": 3, "waiting": 1}, running=2, work=8.0),
            "nothing is wrong",
            (
                "6 of 10 tasks done (60%), 2 running",
                "the rest takes 2 s or longer: 8 s of work for 4 threads",
                "2 workers with 4 threads: 1 busy, 1 idle",
            ),
            id="the end is projected",
        ),
        pytest.param(
            seen(
                BUSY,
                unmeasured="f",
                waits=(WAIT,),
                decision={"jobs": {"running": 1, "pending": 2}},
            ),
            "1 slow",
            (
                "0 of 4 tasks done (0%), 0 running",
                "when they end is not known: tasks of f have no measured duration yet",
                "1 worker with 2 threads: 1 busy",
                "jobs: 1 running, 2 pending",
            ),
            id="the end is not known",
        ),
        pytest.param(
            seen(IDLE, tasks={"memory": 3, "erred": 1}, failed={"f": 1}),
            "1 warning",
            ("all 4 tasks ended, 1 of them failed", "1 worker with 2 threads: 1 idle"),
            id="all ended",
        ),
        pytest.param(
            seen(unserved=4.0),
            "1 error",
            ("0 of 4 tasks done (0%), 0 running", "no workers"),
            id="no worker",
        ),
    ],
)
def test_health_and_what_is_done(facts: ClusterFacts, health: str, doing: tuple[str, ...]) -> None:
    found = overview(facts)
    assert (found.health, found.doing) == (health, doing)


def test_what_stealing_moved_is_told_as_measured_and_projected() -> None:
    told = overview(
        seen(BUSY, counts={"confirmed": 39, "seconds_worked": 4.13, "seconds_moving": 0.2})
    ).gained
    assert "39 tasks" in told
    assert "4.13 s of work there (measured), and moving took 200 ms (projected)" in told
    assert overview(seen(BUSY)).gained == ""


def test_progress_counts_each_task_once() -> None:
    tasks = {
        "memory": 2,
        "released": 1,
        "processing": 4,
        "queued": 5,
        "waiting": 6,
        "no-worker": 1,
        "erred": 7,
    }
    assert overview(seen(BUSY, tasks=tasks, running=3)).progress == TaskProgress(3, 3, 13, 7)


# ---- what processes say of themselves ---------------------------------------------------------------------

PROCESS = ProcessFacts(
    host="node", python="3.11.7", versions={**dict.fromkeys(PACKAGES, "1.2.3"), "cupy": None}, threads=2,
    memory_limit=2**30,
)  # fmt: skip
AT = "tcp://a:1"


def checked(scheduler: ProcessFacts = PROCESS, **workers: ProcessFacts) -> ClusterFacts:
    """A check of a scheduler and workers, by default of a sound one."""
    asked = {f"tcp://{name}:1": one for name, one in workers.items()} or {AT: PROCESS}
    return ClusterFacts(processes={"client": PROCESS, "scheduler": scheduler, **asked}, patience=1.0)


def other(package: str, version: str | None) -> dict[str, Any]:
    return {"versions": {**PROCESS.versions, package: version}}


NONE = "none that can be imported"
# What differs from a sound process; the severity, the subject and what was got.
ON_BOTH = {
    "no answer": ({"failure": "nothing in 1 s"}, "error", "does not answer", "nothing in 1 s"),
    "without dask_ferro": (other("dask_ferro", None), "error", "dask_ferro", NONE),
    "another dask_ferro": (other("dask_ferro", "2.0.0"), "error", "dask_ferro", "2.0.0"),
    "another dask": (other("dask", "2025.1.0"), "warning", "dask", "2025.1.0"),
    "another Python": ({"python": "3.13.1"}, "error", "Python", "3.13.1"),
}
ON_SCHEDULER = {"no plugin": ({"plugin": False}, "slow", "scheduler plugin", "off")}
ON_WORKER = {
    "without onnxruntime": (other("onnxruntime", None), "error", "onnxruntime", NONE),
    "another onnxruntime": (other("onnxruntime", "1.0.0"), "warning", "onnxruntime", "1.0.0"),
    "an import that fails": ({"plugin": False}, "error", "worker plugin", "off"),
    "a GPU without cupy": ({"gpus": 1}, "slow", "extra gpu", "a GPU and no cupy"),
}  # fmt: skip
FAULTS = [
    *(
        pytest.param("scheduler", *row, id=f"scheduler: {name}")
        for name, row in (ON_BOTH | ON_SCHEDULER).items()
    ),
    *(pytest.param(AT, *row, id=f"worker: {name}") for name, row in (ON_BOTH | ON_WORKER).items()),
]


@pytest.mark.parametrize(("where", "change", "severity", "what", "got"), FAULTS)
def test_faults_of_a_process(where: str, change: dict[str, Any], severity: str, what: str, got: str) -> None:
    faulty = replace(PROCESS, **change)
    [found] = findings(checked(faulty) if where == "scheduler" else checked(a=faulty))
    assert (found.severity, found.where, found.what) == (severity, (where,), what)
    assert found.sentence.startswith(f"{where}: {what}: got {got}, wanted ")
    assert found.remedy


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(checked(), id="a sound cluster"),
        pytest.param(checked(replace(PROCESS, python="3.11.9")), id="another patch of Python"),
        pytest.param(checked(a=replace(PROCESS, **other("dask_ferro", ""))), id="a version that is not known"),
        pytest.param(checked(replace(PROCESS, **other("onnxruntime", None))), id="a scheduler without onnxruntime"),
        pytest.param(checked(replace(PROCESS, **other("numpy", "1.0"))), id="a scheduler with another numpy"),
    ],
)  # fmt: skip
def test_what_is_no_fault(facts: ClusterFacts) -> None:
    assert findings(facts) == ()


def test_a_check_without_workers_is_a_finding() -> None:
    processes = {"client": PROCESS, "scheduler": PROCESS}
    assert [found.what for found in findings(ClusterFacts(processes=processes))] == ["workers"]


def test_a_check_has_what_the_scheduler_knows_and_tells_of_a_silent_worker_once() -> None:
    hung = BUSY._replace(silent_for=9.0)
    asked = checked(a=ProcessFacts(failure="nothing within 1 s")).processes
    found = findings(replace(seen(hung, OTHER, waits=(WAIT,)), processes=asked, patience=1.0))
    assert [one.what for one in found] == ["does not answer", "waits"]


def test_the_same_fault_of_many_workers_is_one_finding_with_all_of_them() -> None:
    bare = replace(PROCESS, **other("dask_ferro", None))
    facts = checked(**{f"a{i}": bare for i in range(9)})
    [found] = findings(facts)
    assert found.where == tuple(facts.asked_workers)
    assert str(found).startswith("tcp://a0:1, tcp://a1:1, tcp://a2:1 and 6 more: dask_ferro: got none")


def test_a_sentence_has_where_what_got_wanted_and_the_remedy() -> None:
    got = {"scheduler": "3.13.1"}
    [found] = fault("error", "Python", got, "3.11 as in the client", "start it from there")
    assert str(found) == "scheduler: Python: got 3.13.1, wanted 3.11 as in the client; start it from there"
