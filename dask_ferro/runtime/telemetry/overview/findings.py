"""What is stuck on a cluster and why, in plain words; pure, a rule for each kind.

Tasks or workers with the same trouble are one finding, which names the worst of them, so there are as many findings as
troubles, however large the cluster is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from time import localtime, strftime

from dask_ferro.lower import absent
from dask_ferro.policy.waits import REASONS
from dask_ferro.runtime.telemetry.findings import ClusterFinding, fault, ordered
from dask_ferro.runtime.telemetry.overview.facts import (
    IdleWait,
    OverviewFacts,
    RunningTask,
    Unplaced,
    WorkerSight,
)
from dask_ferro.runtime.telemetry.overview.queue_reasons import is_endless, plain
from dask_ferro.words import duration, few, many, size

# Seconds of silence after which a worker counts as hung: some heartbeats of 0.5 s; with 50 workers and more, at which
# Dask asks for fewer heartbeats, this many of them.
_SILENT, _BEATS = 3.0, 2.5
# Seconds of silence after which it is taken to be gone: few calls hold the interpreter's lock for as long.
_GONE = 30.0
# Waits shorter than these seconds are no news: a restriction may be on purpose.  Steps of stealing are under way
# within less, so that "asked" and "soon" have their own; a worker has been silent for long when it is told of.
_PATIENCE = 3.0
_PATIENCE_OF = {"asked": 2.0, "soon": 2.0, "silent": 0.0}
# Ready tasks without any worker for these seconds; with a controller, which has to decide and to submit.
_ALONE, _DECIDED = 3.0, 10.0
# Seconds that a batch system takes to start a job at once, or to give a reason.
_QUEUED = 2.0
# Pending for this many times as long as the pool's jobs did so far, and for these seconds, is a queue that is slow.
_OFTEN, _LATE = 2.0, 60.0
# A running task is far longer than the others of its prefix from this multiple of their mean on, and these seconds;
# the mean of fewer finished tasks says little.
_FAR, _LONG, _KNOWN = 10.0, 10.0, 3
# The share of a memory limit that results on disk have to have, to be worth a sentence.
_SPILLED = 0.05
# Reasons of a wait that end by themselves in a moment.
_BRIEF = ("asked", "soon")
_OFF = "stealing is off, which would move it", "ff.install(client, stealing='informed')"


Rule = Callable[[OverviewFacts], Iterator[ClusterFinding]]


def findings(facts: OverviewFacts) -> tuple[ClusterFinding, ...]:
    """Return what is wrong, the most severe first."""
    return ordered(chain.from_iterable(rule(facts) for rule in _RULES))


# ---- workers -----------------------------------------------------------------------------------------------


def silence(count: int) -> float:
    """Return the seconds without a heartbeat after which one of `count` workers counts as hung."""
    interval = 2.0 if count < 200 else count / 200 + 1  # Dask's own, for 50 workers and more
    return _SILENT if count < 50 else max(_SILENT, _BEATS * interval)


def _hung(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    bound = silence(len(facts.workers))
    hung = [one for one in facts.workers if one.silent_for > bound]
    if not hung:
        return
    worst = max(hung, key=lambda one: (_is_gone(one), one.tasks, one.silent_for))
    tasks = sum(one.tasks for one in hung)
    names = [worst.name, *(one.name for one in hung if one is not worst)]
    sentence = (
        f"no report from {_workers(names)} for {duration(worst.silent_for)}:"
        f" {_silence_of(worst)}{_with(tasks)}{_while(worst.longest)}"
    )
    remedy = _look_at(names)
    if _is_gone(worst):
        remedy += "; end what does not come back, and Dask computes its tasks elsewhere"
    severity = "error" if _is_gone(worst) else "warning"
    yield ClusterFinding(severity, tuple(names), "hung", sentence, remedy, "workers")


def _with(tasks: int) -> str:
    return f", with {many(tasks, 'task')}" if tasks else ""


def _workers(names: Sequence[str], number: int | None = None) -> str:
    """Return workers by their names, a few of `number`."""
    return f"worker{'s' if (number or len(names)) > 1 else ''} {few(names, number)}"


def _look_at(names: Sequence[str]) -> str:
    return f"look at the process and the log of {_workers(names)}"


def _is_gone(worker: WorkerSight) -> bool:
    return worker.silent_for >= _GONE and worker.tasks > 0


def _silence_of(worker: WorkerSight) -> str:
    """Return why a worker may be silent, the most likely first."""
    if worker.silent_for >= _GONE:
        return "the process is stopped, its host is gone, or one call blocks all of it"
    return "it may be in a call that holds the interpreter's lock, or be stopped, or its host be gone"


def _while(task: RunningTask | None) -> str:
    return f"; it began {task.key} {duration(task.seconds)} ago" if task is not None else ""


def _package(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    got, wanted = {f"worker {name}": has for name, has in facts.lacking.items()}, absent.own_version()
    told = f"{wanted}: tasks of models and bundles fail there, and nothing is measured"
    yield from fault("warning", "dask_ferro", got, told, absent.remedy(wanted), "workers")


def _memory(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    """Yield a finding for the paused workers, one for those near their end, and one for those that spill."""
    limited = sorted((one for one in facts.workers if one.limit), key=_share, reverse=True)
    paused = [one for one in facts.workers if one.status == "paused"]
    near = [one for one in limited if _share(one) >= facts.shares.pause and one not in paused]
    spill = [one for one in limited if one not in paused and one not in near and _spills(one, facts)]
    if paused:
        worst = max(paused, key=lambda one: (one.tasks, _share(one)))
        tasks = sum(one.tasks for one in paused)
        names = [worst.name, *(one.name for one in paused if one is not worst)]
        sentence = f"no task starts at {_workers(names)}, which paused{_used(worst)}{_with(tasks)}"
        severity = "error" if tasks or len(paused) == len(facts.workers) else "warning"
        yield ClusterFinding(severity, tuple(names), "memory", sentence, _free(worst), "workers")
    if near:
        names = [one.name for one in near]
        is_ended = facts.shares.terminate <= 1
        ends = f"; at {facts.shares.terminate:.0%} its process is ended" if is_ended else ""
        sentence = f"{_workers(names)}: memory is nearly full{_used(near[0])}{ends}"
        yield ClusterFinding("warning", tuple(names), "memory", sentence, _free(near[0]), "workers")
    if spill:
        names, disk = [one.name for one in spill], sum(one.spilled for one in spill)
        full = f"memory is filling up{_used(spill[0])}" if _share(spill[0]) >= facts.shares.spill else ""
        told = f"{size(disk)} of results are on disk, which take time to read" if disk else ""
        sentence = f"{_workers(names)}: {'; '.join(filter(None, (full, told)))}"
        yield ClusterFinding("slow", tuple(names), "memory", sentence, _free(spill[0]), "workers")


def _share(worker: WorkerSight) -> float:
    return worker.memory / worker.limit if worker.limit else 0.0


def _spills(worker: WorkerSight, facts: OverviewFacts) -> bool:
    return _share(worker) >= facts.shares.spill or worker.spilled > _SPILLED * worker.limit


def _used(worker: WorkerSight) -> str:
    if not worker.limit:
        return f", with {size(worker.memory)} in use" if worker.memory else ""
    results = f", {size(worker.results)} of it results" if worker.results else ""
    return f": {_share(worker):.0%} of {size(worker.limit)} in use at worker {worker.name}{results}"


def _free(worker: WorkerSight) -> str:
    """Return what frees a worker's memory: results are its users', the rest is what tasks allocate or leak."""
    if worker.memory and worker.results < worker.memory / 2:
        return "run fewer tasks at a time (fewer threads), in smaller pieces, or give workers more memory"
    return "release results that are not needed (del future), start more workers, or give them more memory"


def _stragglers(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    """Yield a finding for running tasks that take far longer than the others of their prefix."""
    bound = silence(len(facts.workers))
    heard = [(one, one.longest) for one in facts.workers if one.longest and one.silent_for <= bound]
    far = [(task.seconds, one.name, task) for one, task in heard if task is not None and _is_far(task)]
    if far:
        seconds, name, task = max(far)
        sentence = (
            f"{task.key} has run at worker {name} for {duration(seconds)}; the {task.finished:,} finished tasks of"
            f" {task.prefix} took {duration(task.mean)} on average{_likewise(len(far) - 1)}"
        )
        remedy = f"look at what it does: client.call_stack() shows the line at which worker {name} is"
        yield ClusterFinding("slow", (name,), "straggler", sentence, remedy, "tasks")


def _likewise(number: int) -> str:
    return f"; likewise {many(number, 'more task')}" if number else ""


def _is_far(task: RunningTask) -> bool:
    return task.finished >= _KNOWN and task.seconds >= max(_LONG, _FAR * task.mean)


# ---- tasks -------------------------------------------------------------------------------------------------


def _waits(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    """Yield a finding for each reason why tasks wait at workers although others are idle."""
    # Tasks at the scheduler are unplaced, too, and told of there.
    lasts = [
        one for one in facts.waits if one.worker and one.seconds >= _PATIENCE_OF.get(one.reason, _PATIENCE)
    ]
    for reason, waits in _by_reason(lasts):
        is_off = facts.stealing == "none" and reason in (*_BRIEF, "costs")
        why, remedy = _OFF if is_off else REASONS[reason]
        one = waits[0]
        behind = (
            f", behind {one.behind.key}, which has run there for {duration(one.behind.seconds)}"
            if one.behind
            else ""
        )
        sentence = (
            f"{one.key} has waited at worker {one.worker} for {duration(one.seconds)}{behind}, while"
            f" nothing runs at {_workers(one.some, one.idle)}: {why}{_likewise(len(waits) - 1)}"
        )
        yield ClusterFinding(_severity_of(one), (one.key,), "waits", sentence, remedy, "ferro-stealing")


def _severity_of(wait: IdleWait) -> str:
    if wait.reason != "silent":
        return "slow"
    return "error" if wait.seconds >= _GONE else "warning"


def _by_reason(waits: Iterable[IdleWait]) -> Iterator[tuple[str, list[IdleWait]]]:
    """Yield the waits of each reason, the longest first."""
    ordered = sorted(waits, key=lambda one: (list(REASONS).index(one.reason), -one.seconds))
    yield from ((reason, list(some)) for reason, some in groupby(ordered, attrgetter("reason")))


def _nobody(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    """Yield a finding for each reason why ready tasks are on no worker."""
    if not any(one.status == "running" for one in facts.workers):
        return  # then all of them wait, whatever they require
    told: dict[tuple[str, str, str], list[Unplaced]] = {}
    for one in facts.unplaced:
        told.setdefault(_lacks(one, facts), []).append(one)
    for (why, severity, remedy), tasks in told.items():
        worst = max(tasks, key=attrgetter("seconds"))
        # Only some of many tasks are looked at: the others may have other reasons.
        number = facts.unplaced_count if len(told) == 1 else len(tasks)
        sentence = (
            f"{worst.key} has waited for a worker for {duration(worst.seconds)}: {why}{_likewise(number - 1)}"
        )
        what = "nobody" if severity == "error" else "waits"
        yield ClusterFinding(severity, (worst.key,), what, sentence, remedy, "graph")


def _lacks(task: Unplaced, facts: OverviewFacts) -> tuple[str, str, str]:
    """Return what no worker has that a task requires, how severe that is, and the remedy."""
    if task.reason not in ("nobody", "class"):
        why, remedy = REASONS[task.reason]
        return why, "slow", remedy
    if task.device and task.device not in facts.devices:
        there = few(sorted(facts.devices)) or "unknown"
        why = f"it requires a worker with a {task.device}, and all workers have only {there}"
        return why, "error", f"start a worker with a {task.device}, or use ff.Prefer in place of ff.Require"
    for name, amount in sorted(task.resources.items()):
        most = facts.resources.get(name, 0)
        if most < amount:
            has = f"has more than {most:g}" if most else "declares that resource"
            why = f"it requires the resource {name}={amount:g}, and no worker {has}"
            return why, "error", f"start a worker with --resources {name}={amount:g}"
    return _lacks_worker(task, facts)


def _lacks_worker(task: Unplaced, facts: OverviewFacts) -> tuple[str, str, str]:
    """Return why none of the workers that a task may run at takes it, how severe that is, and the remedy."""
    names = {one.name for one in facts.workers}
    if silent := _all_silent(task, facts):
        worst = max(silent, key=attrgetter("silent_for"))
        only = f"it may run at {_workers(task.workers)} only, and " if task.workers else ""
        why = (
            f"{only}{_workers([one.name for one in silent])} did not report for {duration(worst.silent_for)}"
        )
        severity = "error" if worst.silent_for >= _GONE else "warning"
        return why, severity, _look_at([one.name for one in silent])
    if task.workers and names.isdisjoint(task.workers):
        why = f"it may run at {_workers(task.workers)} only, and no such worker is there"
        return why, "error", "start that worker, or submit it without workers="
    paused = [one.name for one in facts.workers if one.name in task.workers and one.status == "paused"]
    if paused:
        why = f"it may run at {_workers(task.workers)} only, and {few(paused)} paused"
        return why, "error", "free memory there, or submit it without workers="
    if task.workers or task.hosts:
        why = f"it may run at {few((*task.workers, *task.hosts))} only, where no worker takes it now"
        return why, "error", "look at those workers, or submit it without workers="
    why, remedy = REASONS["nobody"]
    return why, "error", remedy


def _all_silent(task: Unplaced, facts: OverviewFacts) -> list[WorkerSight]:
    """Return the workers that a task may run at, if none of them reports."""
    bound = silence(len(facts.workers))
    running = [one for one in facts.workers if one.status == "running"]
    may = [one for one in running if not task.workers or one.name in task.workers]
    return may if all(one.silent_for > bound for one in may) else []


def _failed(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    if total := sum(facts.failed.values()):
        worst = sorted(facts.failed, key=lambda name: (-facts.failed[name], name))
        sentence = f"{many(total, 'task')} failed: of {few(worst)}"
        remedy = "correct the cause and submit the tasks again"
        if task := facts.failure:
            sentence += f"; {task.key} failed last, at {_workers(task.workers)}: {task.error}"
            remedy = f"the log of {_workers(task.workers)} has the traceback; {remedy}"
        yield ClusterFinding("warning", tuple(worst), "failed", sentence, remedy, "graph")


# ---- jobs --------------------------------------------------------------------------------------------------


def _pools(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    lacks = bool(facts.without_worker)
    for name, pool in facts.decision.get("closed", {}).items():
        is_paused, reopens = pool.get("paused", False), pool.get("until", 0.0)
        if is_paused and not (lacks and not facts.workers):
            continue  # as its user ordered, and nothing waits for it alone
        if not is_paused and 0 < reopens < facts.now:
            continue  # it is tried again now
        until = f" until {strftime('%H:%M:%S', localtime(reopens))}" if reopens else ""
        waiting = f"; {many(facts.without_worker, 'task')} without a worker" if lacks else ""
        state = "paused" if is_paused else "closed"
        sentence = f"pool {name} is {state}{until}: {pool.get('why', '').rstrip('.')}{waiting}"
        severity = "error" if lacks and not facts.workers else "warning"
        resume = f"cluster.pools.resume({name!r})"
        remedy = f"correct the cause; it is tried again by itself, or at once by {resume}"
        output = pool.get("output", "")
        yield ClusterFinding(
            severity, (name,), "pool", sentence, resume if is_paused else remedy, "ferro-elastic", output
        )


def _queues(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    for name, queue in facts.decision.get("pending", {}).items():
        # A job that may start by itself is late when it has waited for longer than the pool's other jobs did.
        reasons, seconds = queue["reasons"], facts.now - queue["since"]
        is_endless_now = bool(reasons) and all(map(is_endless, reasons)) and not facts.workers
        patience = _QUEUED if is_endless_now else max(_LATE, _OFTEN * queue["expected"])
        if not facts.remaining or seconds < patience:
            continue
        sentence = (
            f"{many(queue['jobs'], 'job')} of pool {name} in the batch system's queue, for up to {duration(seconds)},"
            f" and {many(len(facts.workers), 'worker')} at work: {_queue_reason(reasons)}"
        )
        severity = "error" if is_endless_now else "slow"
        remedy = "dask ferro jobs has each job; a smaller or shorter job, or another queue, may start earlier"
        yield ClusterFinding(severity, (name,), "queue", sentence, remedy, "ferro-elastic")


def _queue_reason(reasons: Mapping[str, int]) -> str:
    if not reasons:
        return "no reason is given"
    said = max(reasons, key=lambda reason: (reasons[reason], reason))
    return f"{words} ({said})" if (words := plain(said)) else said


def _no_workers(facts: OverviewFacts) -> Iterator[ClusterFinding]:
    # With jobs on their way, or pools that cannot have any, there is a reason already.
    decision, unserved = facts.decision, facts.unserved
    if not facts.remaining or facts.workers or decision.get("jobs") or decision.get("closed"):
        return
    sentence = f"there is no worker for {many(facts.remaining, 'task')}"
    if decision and unserved >= _DECIDED:
        sentence += (
            f"; the controller was asked for workers {duration(unserved)} ago, and has no job on its way"
        )
        remedy = "look at the controller's reason, and at maximum= of cluster.adapt and of its pools"
        severity = "error" if unserved >= _LATE else "warning"
        yield ClusterFinding(severity, (), "workers", sentence, remedy, "ferro-elastic")
    elif not decision and unserved >= _ALONE:
        # Dask's own adapt is not known here.
        remedy = (
            "start workers, cluster.scale(n), or let the number follow the work: cluster.adapt(...); if it does, the"
            " cluster's log says why no worker starts"
        )
        yield ClusterFinding("error", (), "workers", sentence, remedy, "ferro-elastic")


_RULES: tuple[Rule, ...] = (
    _hung, _pools, _queues, _no_workers, _nobody, _waits, _memory, _failed, _package, _stragglers,
)  # fmt: skip
