"""What is wrong with a cluster and why, in plain words; pure, a rule for each kind.

Tasks, workers or processes with the same trouble are one finding, which names the worst of them, so there are as many
findings as troubles, however large the cluster is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import inf
from operator import attrgetter
from time import localtime, strftime

from dask_ferro.lower import portable, stand_in
from dask_ferro.observe.facts import (
    PACKAGES,
    ClusterFacts,
    ProcessFacts,
    UnplacedTask,
    WorkerView,
)
from dask_ferro.observe.findings import ClusterFinding, fault, sort_findings
from dask_ferro.policy.waits import REASONS, WaitingTask
from dask_ferro.words import duration, list_names, pluralize, size

# Seconds of silence after which a worker counts as hung: some heartbeats of 0.5 s; with 50 workers and more, at which
# Dask asks for fewer heartbeats, this many of them.
_SILENT, _BEATS = 3.0, 2.5
# Seconds of silence after which it is taken to be gone: few calls hold the interpreter's lock for as long.
_SILENCE = 30.0
# Waits shorter than these seconds are no news: a restriction may be on purpose.  Steps of stealing are under way
# within less, so that "steal_pending" and "about_to_move" have their own; a worker has been silent for long when it is
# reported.
_PATIENCE = 3.0
_PATIENCE_OF = {"steal_pending": 2.0, "about_to_move": 2.0, "worker_unresponsive": 0.0}
# Ready tasks without any worker for these seconds; with a controller, which has to decide and to submit.
_UNPLACED_WAIT, _DECISION_WAIT = 3.0, 10.0
# Seconds that a batch system takes to start a job at once, or to give a reason.
_SUBMIT_WAIT = 2.0
# Pending for this many times as long as the pool's jobs did so far, and for these seconds, is a queue that is slow.
_QUEUE_FACTOR, _QUEUE_WAIT = 2.0, 60.0
# How SLURM's reasons begin for which a pending job waits until something is done, or for long; and what is in the
# reasons of a job that is larger than a limit for one job.
ENDLESS = (
    "BeginTime", "DependencyNeverSatisfied", "ReqNodeNotAvail", "Nodes required", "Partition", "QOSNotAllowed",
    "AccountNotAllowed", "Invalid", "BadConstraints", "JobHeld", "AssocMaxJobs", "ReservationDeleted",
)  # fmt: skip
_TOO_LARGE = "PerJob"
# A flow of which no member ends for so many times its projection, and these seconds: one lasts 5 s at most.
_HANG, _HANG_S = 10.0, 20.0
# What all processes have.
_DASK = ("dask", "distributed")
_STEALING_OFF = "stealing is off, which would move it", "ff.install(client, stealing='informed')"


Rule = Callable[[ClusterFacts], Iterator[ClusterFinding]]


def findings(facts: ClusterFacts) -> tuple[ClusterFinding, ...]:
    """Return what is wrong, the most severe first."""
    return sort_findings(chain.from_iterable(rule(facts) for rule in _RULES))


# ---- what processes say of themselves ----------------------------------------------------------------------


def _answers(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    silent = {at: one.failure for at, one in facts.processes.items() if one.failure}
    yield from fault(
        "error", "does not answer", silent, f"an answer within {facts.patience:g} s",
        "read its log, and end it if it is stopped: by a signal, a debugger, or a file system that hangs",
    )  # fmt: skip


def releases_differ(releases: Mapping[str, str | None], release: str) -> Iterator[ClusterFinding]:
    """Yield the findings for places without dask_ferro (None), or with another release than the client's."""
    missing = {where: stand_in.ABSENT for where, got in releases.items() if got is None}
    yield from fault("error", "dask_ferro", missing, release or "the client's", portable.remedy(release))
    others = {where: got for where, got in releases.items() if got and release and got != release}
    yield from fault(
        "error", "dask_ferro", others, f"{release} as in the client",
        f"install the same release on both sides: pip install dask-ferro=={release}",
    )  # fmt: skip


def _packages(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    """Yield the findings for packages that processes lack, or have in another release than the client."""
    if not facts.processes:
        # Workers tell the scheduler without being asked.
        release = stand_in.own_version()
        expected = f"{release}: tasks of models and bundles fail there, and nothing is measured"
        got = {f"worker {name}": has for name, has in facts.lacking.items()}
        yield from fault("warning", "dask_ferro", got, expected, portable.remedy(release), "workers")
        return
    client, processes = facts.processes["client"], facts.answered
    releases = {at: one.versions.get("dask_ferro", "") for at, one in processes.items()}
    yield from releases_differ(releases, client.versions.get("dask_ferro") or "")
    minor = _minor(client)
    yield from fault(
        "error", "Python", {at: one.python for at, one in processes.items() if _minor(one) != minor},
        f"{minor} as in the client",
        "start it from an environment with the client's Python: functions are sent as its bytecode",
    )  # fmt: skip
    for package in PACKAGES:
        if package != "dask_ferro":
            # The scheduler runs no task: of packages that tasks need it may have any release.
            some = {at: one for at, one in processes.items() if at != "scheduler" or package in _DASK}
            yield from _package(package, client.versions.get(package) or "", some)


def _package(package: str, release: str, processes: Mapping[str, ProcessFacts]) -> Iterator[ClusterFinding]:
    # A worker that lacks dask_ferro needs its whole environment.
    bare = [at for at, one in processes.items() if one.lacks(package) and not one.lacks("dask_ferro")]
    yield from fault(
        "error", package, dict.fromkeys(bare, stand_in.ABSENT), release or "the client's",
        f"install it in the worker's environment: pip install {package}=={release}",
    )  # fmt: skip
    releases = {at: one.versions.get(package) for at, one in processes.items()}
    yield from fault(
        "warning", package, {at: got for at, got in releases.items() if got and release and got != release},
        f"{release} as in the client",
        f"install one release everywhere, since messages and results may differ: pip install {package}=={release}",
    )  # fmt: skip


def _minor(process: ProcessFacts) -> str:
    return ".".join(process.python.split(".")[:2])


def _plugin(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    scheduler = facts.answered.get("scheduler")
    # Without dask_ferro there, `_packages` says what to do first.
    is_off = scheduler is not None and not scheduler.plugin and not scheduler.lacks("dask_ferro")
    yield from fault(
        "slow", "scheduler plugin", {"scheduler": "off"} if is_off else {},
        "on: stealing and placement are stock Dask's without it", "ff.install(client), which warns if it cannot be on",
    )  # fmt: skip
    if scheduler is None or not scheduler.plugin:
        return
    # A worker with the client's release that cannot be imported has a stand-in.
    release = facts.processes["client"].versions.get("dask_ferro")
    broken = [
        at for at, one in facts.answered.items()
        if at != "scheduler" and not one.plugin and one.versions.get("dask_ferro") == release
    ]  # fmt: skip
    yield from fault(
        "error", "worker plugin", dict.fromkeys(broken, "off"),
        "on as in the scheduler: tasks of models and bundles fail without it",
        "import dask_ferro in the worker's environment and read the error, or restart the worker",
    )  # fmt: skip


def _gpus(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    bare = [at for at, one in facts.answered.items() if one.gpus and one.lacks("cupy")]
    yield from fault(
        "slow", "extra gpu", dict.fromkeys(bare, "a GPU and no cupy"), "cupy, which computes on it",
        "pip install 'dask-ferro[gpu]' in the worker's environment",
    )  # fmt: skip


# ---- workers -----------------------------------------------------------------------------------------------


def silence_limit(count: int) -> float:
    """Return the seconds without a heartbeat after which one of `count` workers counts as hung."""
    interval = 2.0 if count < 200 else count / 200 + 1  # Dask's own, for 50 workers and more
    return _SILENT if count < 50 else max(_SILENT, _BEATS * interval)


def _silent(facts: ClusterFacts) -> list[WorkerView]:
    bound = silence_limit(len(facts.workers))
    return [one for one in facts.workers if one.silent_for > bound]


def _hung_workers(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    # Those that were asked have answered, or are told of as processes.
    if facts.processes or not (hung := _silent(facts)):
        return
    worst = max(hung, key=lambda one: (_is_gone(one), one.tasks, one.silent_for))
    is_gone, tasks, task = _is_gone(worst), sum(one.tasks for one in hung), worst.longest
    names = [worst.name, *(one.name for one in hung if one is not worst)]
    why = "it may be in a call that holds the interpreter's lock, or be stopped, or its host be gone"
    if worst.silent_for >= _SILENCE:
        why = "the process is stopped, its host is gone, or one call blocks all of it"
    began = f"; it began {task.key} {duration(task.seconds)} ago" if task is not None else ""
    sentence = (
        f"no report from {_workers(names)} for {duration(worst.silent_for)}: {why}{_tasks(tasks)}{began}"
    )
    end = "; end what does not come back, and Dask computes its tasks elsewhere" if is_gone else ""
    severity = "error" if is_gone else "warning"
    yield ClusterFinding(severity, tuple(names), "hung", sentence, f"{_look_at(names)}{end}", "workers")


def _is_gone(worker: WorkerView) -> bool:
    return worker.silent_for >= _SILENCE and worker.tasks > 0


def _tasks(tasks: int) -> str:
    return f", with {pluralize(tasks, 'task')}" if tasks else ""


def _workers(names: Sequence[str], number: int | None = None) -> str:
    """Return workers by their names, a few of `number`."""
    return f"worker{'s' if (number or len(names)) > 1 else ''} {list_names(names, number)}"


def _look_at(names: Sequence[str]) -> str:
    return f"look at the process and the log of {_workers(names)}"


def _memory(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    """Yield a finding for the paused workers, and one for those that are about to pause."""
    pause, terminate = (facts.shares.get(name) or inf for name in ("pause", "terminate"))
    remedy = "release results that are not needed (del future), run fewer tasks at a time (fewer threads), in smaller"
    remedy += " pieces, or give workers more memory"
    paused = [one for one in facts.workers if one.status == "paused"]
    near = [one for one in facts.workers if _share(one) >= pause and one not in paused]
    if paused:
        worst, tasks = max(paused, key=attrgetter("tasks")), sum(one.tasks for one in paused)
        names = [worst.name, *(one.name for one in paused if one is not worst)]
        sentence = f"no task starts at {_workers(names)}, which paused{_format_memory(worst)}{_tasks(tasks)}"
        severity = "error" if tasks or len(paused) == len(facts.workers) else "warning"
        yield ClusterFinding(severity, tuple(names), "memory", sentence, remedy, "workers")
    if near:
        worst, names = max(near, key=_share), [one.name for one in near]
        ends = f"; at {terminate:.0%} its process is ended" if terminate <= 1 else ""
        sentence = f"{_workers(names)}: memory is nearly full{_format_memory(worst)}{ends}"
        yield ClusterFinding("warning", tuple(names), "memory", sentence, remedy, "workers")


def _share(worker: WorkerView) -> float:
    return worker.memory / worker.limit if worker.limit else 0.0


def _format_memory(worker: WorkerView) -> str:
    return (
        f": {_share(worker):.0%} of {size(worker.limit)} in use at worker {worker.name}"
        if worker.limit
        else ""
    )


def _no_workers(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    if "scheduler" in facts.answered and not facts.asked_workers and not facts.remaining:
        remedy = "start workers, or wait for their jobs"
        yield from fault("warning", "workers", {"scheduler": "none"}, "at least 1", remedy)
    # With jobs on their way, or pools that cannot have any, there is a reason already.
    decision, unserved = facts.decision, facts.unserved
    if not facts.remaining or facts.workers or decision.get("jobs") or decision.get("closed"):
        return
    # Dask's own adapt is not known here.
    sentence, severity = f"there is no worker for {pluralize(facts.remaining, 'task')}", "error"
    remedy = (
        "start workers, cluster.scale(n), or let the number follow the work: cluster.adapt(...); if it does, the"
        " cluster's log says why no worker starts"
    )
    if decision:
        sentence += (
            f"; the controller was asked for workers {duration(unserved)} ago, and has no job on its way"
        )
        remedy = "look at the controller's reason, and at maximum= of cluster.adapt and of its pools"
        severity = "error" if unserved >= _QUEUE_WAIT else "warning"
    if unserved >= (_DECISION_WAIT if decision else _UNPLACED_WAIT):
        yield ClusterFinding(severity, (), "workers", sentence, remedy, "ferro-elastic")


# ---- tasks -------------------------------------------------------------------------------------------------


def _waits(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    """Yield a finding for each reason why tasks wait at workers although others are idle."""
    # Tasks at the scheduler are unplaced, too, and told of there.
    lasts = [
        one for one in facts.waits if one.worker and one.seconds >= _PATIENCE_OF.get(one.reason, _PATIENCE)
    ]
    longest = {one.name: one.longest for one in facts.workers}
    lasts.sort(key=lambda one: (list(REASONS).index(one.reason), -one.seconds))
    for reason, waits in groupby(lasts, attrgetter("reason")):
        one, *others = waits
        is_off = facts.stealing == "none" and reason in (
            "steal_pending",
            "about_to_move",
            "transfer_too_slow",
        )
        why, remedy = _STEALING_OFF if is_off else REASONS[reason]
        long = longest.get(one.worker)
        behind = f", behind {long.key}, which has run there for {duration(long.seconds)}" if long else ""
        sentence = (
            f"{one.key} has waited at worker {one.worker} for {duration(one.seconds)}{behind}, while"
            f" nothing runs at {_workers(one.some, one.idle)}: {why}{_likewise(len(others))}"
        )
        yield ClusterFinding(_severity_of(one), (str(one.key),), "waits", sentence, remedy, "ferro-stealing")


def _likewise(number: int, what: str = "more task") -> str:
    return f"; likewise {pluralize(number, what)}" if number else ""


def _severity_of(wait: WaitingTask) -> str:
    if wait.reason != "worker_unresponsive":
        return "slow"
    return "error" if wait.seconds >= _SILENCE else "warning"


def _unplaced_tasks(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    """Yield a finding for each reason why ready tasks are on no worker."""
    if not any(one.status == "running" for one in facts.workers):
        return  # then all of them wait, whatever they require
    by_reason: dict[tuple[str, str, str], list[UnplacedTask]] = {}
    for one in facts.unplaced:
        by_reason.setdefault(_lacks(one, facts), []).append(one)
    for (why, severity, remedy), tasks in by_reason.items():
        worst = max(tasks, key=attrgetter("seconds"))
        # Only some of many tasks are looked at: the others may have other reasons.
        number = facts.unplaced_count if len(by_reason) == 1 else len(tasks)
        sentence = (
            f"{worst.key} has waited for a worker for {duration(worst.seconds)}: {why}{_likewise(number - 1)}"
        )
        what = "no_eligible_worker" if severity == "error" else "waits"
        yield ClusterFinding(severity, (worst.key,), what, sentence, remedy, "graph")


def _lacks(task: UnplacedTask, facts: ClusterFacts) -> tuple[str, str, str]:
    """Return what no worker has that a task requires, how severe that is, and the remedy."""
    if task.reason not in ("no_eligible_worker", "wrong_device"):
        why, remedy = REASONS[task.reason]
        return why, "slow", remedy
    if task.device and task.device not in facts.devices:
        there = list_names(sorted(facts.devices)) or "unknown"
        why = f"it requires a worker with a {task.device}, and all workers have only {there}"
        return (
            why,
            "error",
            f"start a worker with a {task.device}, or use ff.prefer_device instead of ff.require_device",
        )
    for name, amount in sorted(task.resources.items()):
        most = facts.resources.get(name, 0)
        if most < amount:
            has = f"has more than {most:g}" if most else "declares that resource"
            why = f"it requires the resource {name}={amount:g}, and no worker {has}"
            return why, "error", f"start a worker with --resources {name}={amount:g}"
    return _lacks_worker(task, facts)


def _lacks_worker(task: UnplacedTask, facts: ClusterFacts) -> tuple[str, str, str]:
    """Return why none of the workers that a task may run at takes it, how severe that is, and the remedy."""
    only = list_names((*task.workers, *task.hosts))
    may = [one for one in facts.workers if not task.workers or one.name in task.workers]
    silent = [one for one in _silent(facts) if one in may]
    if silent and all(one in silent or one.status != "running" for one in may):
        worst, names = max(silent, key=attrgetter("silent_for")), [one.name for one in silent]
        why = f"{_workers(names)} did not report for {duration(worst.silent_for)}"
        severity = "error" if worst.silent_for >= _SILENCE else "warning"
        return f"it may run at {only} only, and {why}" if only else why, severity, _look_at(names)
    if only:
        there = list_names([f"{one.name} is {one.status}" for one in may if task.workers])
        why = f"it may run at {only} only, and {there or 'no worker there takes it'}"
        return why, "error", "look at those workers, start them, or submit it without workers="
    why, remedy = REASONS["no_eligible_worker"]
    return why, "error", remedy


def _failed_tasks(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    if total := sum(facts.failed.values()):
        worst = sorted(facts.failed, key=lambda name: (-facts.failed[name], name))
        sentence = f"{pluralize(total, 'task')} failed: of {list_names(worst)}"
        remedy = "correct the cause and submit the tasks again"
        if task := facts.failure:
            sentence += f"; {task.key} failed last, at {_workers(task.workers)}: {task.error}"
            remedy = f"the log of {_workers(task.workers)} has the traceback; {remedy}"
        yield ClusterFinding("warning", tuple(worst), "failed", sentence, remedy, "graph")


def _flows(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    still = [
        one
        for one in facts.flows
        if one.state == "runs" and not one.ended and one.seconds > max(_HANG_S, _HANG * one.projected)
    ]
    if not still:
        return
    worst = max(still, key=attrgetter("seconds"))
    sentence = (
        f"flow {worst.name} has run for {duration(worst.seconds)} at {_workers(worst.workers)}, its members have"
        f" tasks for {duration(worst.projected)} (projected), and none of them has ended"
        f"{_likewise(len(still) - 1, 'more flow')}"
    )
    remedy = "client.call_stack() shows what these workers run: end what keeps them from the flow's tasks"
    yield ClusterFinding("warning", (worst.name,), "flow", sentence, remedy, "workers")


# ---- jobs --------------------------------------------------------------------------------------------------


def _pools(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    lacks = bool(facts.without_worker)
    for name, pool in facts.decision.get("closed", {}).items():
        is_paused, reopens = pool.get("paused", False), pool.get("until", 0.0)
        if is_paused and not (lacks and not facts.workers):
            continue  # as its user ordered, and nothing waits for it alone
        if not is_paused and 0 < reopens < facts.now:
            continue  # it is tried again now
        until = f" until {strftime('%H:%M:%S', localtime(reopens))}" if reopens else ""
        waiting = f"; {pluralize(facts.without_worker, 'task')} without a worker" if lacks else ""
        state = "paused" if is_paused else "closed"
        sentence = f"pool {name} is {state}{until}: {pool.get('why', '').rstrip('.')}{waiting}"
        severity = "error" if lacks and not facts.workers else "warning"
        resume = f"cluster.pools.resume({name!r})"
        remedy = f"correct the cause; it is tried again by itself, or at once by {resume}"
        output = pool.get("output", "")
        yield ClusterFinding(
            severity, (name,), "pool", sentence, resume if is_paused else remedy, "ferro-elastic", output
        )


def _queues(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    for name, queue in facts.decision.get("pending", {}).items():
        # A job that may start by itself is late when it has waited for longer than the pool's other jobs did.
        reasons, seconds = queue["reasons"], facts.now - queue["since"]
        is_endless = bool(reasons) and all(map(_is_endless, reasons)) and not facts.workers
        patience = _SUBMIT_WAIT if is_endless else max(_QUEUE_WAIT, _QUEUE_FACTOR * queue["expected"])
        if not facts.remaining or seconds < patience:
            continue
        why = max(reasons, key=lambda reason: (reasons[reason], reason), default="no reason is given")
        sentence = (
            f"{pluralize(queue['jobs'], 'job')} of pool {name} in the batch system's queue, for up to"
            f" {duration(seconds)}, and {pluralize(len(facts.workers), 'worker')} at work: {why}"
        )
        severity = "error" if is_endless else "slow"
        remedy = "dask ferro jobs has each job; a smaller or shorter job, or another queue, may start earlier"
        yield ClusterFinding(severity, (name,), "queue", sentence, remedy, "ferro-elastic")


def _is_endless(reason: str) -> bool:
    return reason.startswith(ENDLESS) or _TOO_LARGE in reason


_RULES: tuple[Rule, ...] = (
    _answers, _packages, _hung_workers, _pools, _queues, _no_workers, _unplaced_tasks, _waits, _flows,
    _memory, _failed_tasks, _gpus, _plugin,
)  # fmt: skip
