"""What is stuck on a cluster and why, in plain words; pure, a rule for each kind.

"stuck": work does not go on until something is done.  "risk": it may stop, or fail.  "slow": it goes on, and takes
longer than it has to.  Tasks or workers with the same trouble are one finding, which names the worst of them, so there
are as many findings as troubles, however large the cluster is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from time import localtime, strftime

from dask.utils import format_bytes

from dask_ferro.lower import absent
from dask_ferro.runtime.telemetry.overview.facts import (
    IdleWait,
    OverviewFacts,
    QueuedJobs,
    RunningTask,
    ShutPool,
    Unplaced,
    WorkerSight,
)
from dask_ferro.runtime.telemetry.overview.words import (
    OFF,
    QUEUES,
    WAITS,
    and_more,
    counted,
    few,
    is_endless,
    lasting,
    workers,
)

SEVERITIES = ("stuck", "risk", "slow")
KINDS = ("hung", "pool", "queue", "workers", "nobody", "waits", "memory", "failed", "package", "straggler")

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


@dataclass(frozen=True)
class OverviewFinding:
    """Something that is stuck, or may be soon.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    severity : str
        One of `SEVERITIES`.
    sentence, remedy : str
        What is wrong and why; what to do.
    page : str
        The page of the dashboard that has the details, as an address relative to this one.
    output : str
        The last lines that a job printed; "": none.
    """

    kind: str
    severity: str
    sentence: str
    remedy: str
    page: str
    output: str = ""


Rule = Callable[[OverviewFacts], Iterator[OverviewFinding]]


def findings(facts: OverviewFacts) -> list[OverviewFinding]:
    """Return what is wrong, the most severe first."""
    found = chain.from_iterable(rule(facts) for rule in _RULES)
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), KINDS.index(one.kind)))


# ---- workers -----------------------------------------------------------------------------------------------


def silence(count: int) -> float:
    """Return the seconds without a heartbeat after which one of `count` workers counts as hung."""
    interval = 2.0 if count < 200 else count / 200 + 1  # Dask's own, for 50 workers and more
    return _SILENT if count < 50 else max(_SILENT, _BEATS * interval)


def _hung(facts: OverviewFacts) -> Iterator[OverviewFinding]:
    bound = silence(len(facts.workers))
    hung = [one for one in facts.workers if one.silent_for > bound]
    if not hung:
        return
    worst = max(hung, key=lambda one: (_is_gone(one), one.tasks, one.silent_for))
    tasks = sum(one.tasks for one in hung)
    names = [worst.name, *(one.name for one in hung if one is not worst)]
    is_one = len(hung) == 1
    there = f"; {counted(tasks, 'task')} {'is' if tasks == 1 else 'are'} there" if tasks else ""
    sentence = (
        f"{workers(names)} {'has' if is_one else 'have'} not reported for {lasting(worst.silent_for)}:"
        f" {_silence_of(worst)}{there}{_while(worst.longest)}"
    )
    remedy = _look_at(names)
    if _is_gone(worst):
        ended = "it" if is_one else "those that do not come back"
        remedy += f"; end {ended}, and Dask computes {'its' if is_one else 'their'} tasks elsewhere"
    yield OverviewFinding("hung", "stuck" if _is_gone(worst) else "risk", sentence, remedy, "workers")


def _look_at(names: Sequence[str]) -> str:
    noun = "process and the log" if len(names) == 1 else "processes and the logs"
    return f"look at the {noun} of {workers(names)}"


def _is_gone(worker: WorkerSight) -> bool:
    return worker.silent_for >= _GONE and worker.tasks > 0


def _silence_of(worker: WorkerSight) -> str:
    """Return why a worker may be silent, the most likely first."""
    if worker.silent_for >= _GONE:
        return "the process is stopped, its host is gone, or one call blocks all of it"
    return "it may be in a call that holds the interpreter's lock, or be stopped, or its host be gone"


def _while(task: RunningTask | None) -> str:
    return f"; it began {task.key} {lasting(task.seconds)} ago" if task is not None else ""


def _package(facts: OverviewFacts) -> Iterator[OverviewFinding]:
    if facts.lacking:
        got, wanted = few(sorted(set(facts.lacking.values()))), absent.own_version()
        lack = f"{workers(list(facts.lacking))}: dask_ferro: got {got}, wanted {wanted}"
        sentence = f"{lack}; tasks of models and bundles fail there, and nothing is measured"
        yield OverviewFinding("package", "risk", sentence, absent.remedy(wanted), "workers")


def _memory(facts: OverviewFacts) -> Iterator[OverviewFinding]:
    """Yield a finding for the paused workers, one for those near their end, and one for those that spill."""
    limited = sorted((one for one in facts.workers if one.limit), key=_share, reverse=True)
    paused = [one for one in facts.workers if one.status == "paused"]
    near = [one for one in limited if _share(one) >= facts.shares.pause and one not in paused]
    spill = [one for one in limited if one not in paused and one not in near and _spills(one, facts)]
    if paused:
        worst = max(paused, key=lambda one: (one.tasks, _share(one)))
        tasks = sum(one.tasks for one in paused)
        names = [worst.name, *(one.name for one in paused if one is not worst)]
        verb = "is" if len(names) == 1 else "are"
        sentence = f"{workers(names)} {verb} paused and {'starts' if verb == 'is' else 'start'} no task{_used(worst)}"
        waiting = f"; {counted(tasks, 'task')} {'is' if tasks == 1 else 'are'} there" if tasks else ""
        severity = "stuck" if tasks or len(paused) == len(facts.workers) else "risk"
        yield OverviewFinding("memory", severity, sentence + waiting, _free(worst), "workers")
    if near:
        ends = (
            f"; at {facts.shares.terminate:.0%} its process is ended" if facts.shares.terminate <= 1 else ""
        )
        sentence = f"{workers([one.name for one in near])}: memory is nearly full{_used(near[0])}{ends}"
        yield OverviewFinding("memory", "risk", sentence, _free(near[0]), "workers")
    if spill:
        spillers, disk = workers([one.name for one in spill]), sum(one.spilled for one in spill)
        full = f"memory is filling up{_used(spill[0])}" if _share(spill[0]) >= facts.shares.spill else ""
        told = f"{format_bytes(disk)} of results are on disk, which take time to read" if disk else ""
        sentence = f"{spillers}: {'; '.join(filter(None, (full, told)))}"
        yield OverviewFinding("memory", "slow", sentence, _free(spill[0]), "workers")


def _share(worker: WorkerSight) -> float:
    return worker.memory / worker.limit if worker.limit else 0.0


def _spills(worker: WorkerSight, facts: OverviewFacts) -> bool:
    return _share(worker) >= facts.shares.spill or worker.spilled > _SPILLED * worker.limit


def _used(worker: WorkerSight) -> str:
    if not worker.limit:
        return f", with {format_bytes(worker.memory)} in use" if worker.memory else ""
    results = f", {format_bytes(worker.results)} of it results" if worker.results else ""
    return f": {_share(worker):.0%} of {format_bytes(worker.limit)} in use at worker {worker.name}{results}"


def _free(worker: WorkerSight) -> str:
    """Return what frees a worker's memory: results are its users', the rest is what tasks allocate or leak."""
    if worker.memory and worker.results < worker.memory / 2:
        return "run fewer tasks at a time (fewer threads), in smaller pieces, or give workers more memory"
    return "release results that are not needed (del future), start more workers, or give them more memory"


def _stragglers(facts: OverviewFacts) -> Iterator[OverviewFinding]:
    """Yield a finding for running tasks that take far longer than the others of their prefix."""
    bound = silence(len(facts.workers))
    heard = [(one, one.longest) for one in facts.workers if one.longest and one.silent_for <= bound]
    far = [(task.seconds, one.name, task) for one, task in heard if task is not None and _is_far(task)]
    if far:
        seconds, name, task = max(far)
        others = and_more(len(far) - 1, "task", "run")
        sentence = (
            f"{task.key} has run at worker {name} for {lasting(seconds)}; the {task.finished:,} finished tasks of"
            f" {task.prefix} took {lasting(task.mean)} on average{others}"
        )
        remedy = f"look at what it does: client.call_stack() shows the line at which worker {name} is"
        yield OverviewFinding("straggler", "slow", sentence, remedy, "tasks")


def _is_far(task: RunningTask) -> bool:
    return task.finished >= _KNOWN and task.seconds >= max(_LONG, _FAR * task.mean)


# ---- tasks -------------------------------------------------------------------------------------------------


def _waits(facts: OverviewFacts) -> Iterator[OverviewFinding]:
    """Yield a finding for each reason why tasks wait at workers although others are idle."""
    # Tasks at the scheduler are unplaced, too, and told of there.
    lasts = [
        one for one in facts.waits if one.worker and one.seconds >= _PATIENCE_OF.get(one.reason, _PATIENCE)
    ]
    for reason, waits in _by_reason(lasts):
        is_off = facts.stealing == "none" and reason in (*_BRIEF, "costs")
        why, remedy = OFF if is_off else WAITS[reason]
        one = waits[0]
        behind = (
            f", behind {one.behind.key}, which has run there for {lasting(one.behind.seconds)}"
            if one.behind
            else ""
        )
        sentence = (
            f"{one.key} has waited at worker {one.worker} for {lasting(one.seconds)}{behind}, while"
            f" {workers(one.some, one.idle)} {'is' if one.idle == 1 else 'are'} idle: {why}"
        )
        more = and_more(len(waits) - 1, "task", "wait")
        yield OverviewFinding("waits", _severity_of(one), sentence + more, remedy, "ferro-stealing")


def _severity_of(wait: IdleWait) -> str:
    if wait.reason != "silent":
        return "slow"
    return "stuck" if wait.seconds >= _GONE else "risk"


def _by_reason(waits: Iterable[IdleWait]) -> Iterator[tuple[str, list[IdleWait]]]:
    """Yield the waits of each reason, the longest first."""
    ordered = sorted(waits, key=lambda one: (list(WAITS).index(one.reason), -one.seconds))
    yield from ((reason, list(some)) for reason, some in groupby(ordered, attrgetter("reason")))


def _nobody(facts: OverviewFacts) -> Iterator[OverviewFinding]:
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
        others = and_more(number - 1, "task", "wait")
        sentence = f"{worst.key} has waited for a worker for {lasting(worst.seconds)}: {why}{others}"
        kind = "nobody" if severity == "stuck" else "waits"
        yield OverviewFinding(kind, severity, sentence, remedy, "graph")


def _lacks(task: Unplaced, facts: OverviewFacts) -> tuple[str, str, str]:
    """Return what no worker has that a task requires, how severe that is, and the remedy."""
    if task.reason not in ("nobody", "class"):
        why, remedy = WAITS[task.reason]
        return why, "slow", remedy
    if task.device and task.device not in facts.devices:
        there = few(sorted(facts.devices)) or "unknown"
        why = f"it requires a worker with a {task.device}, and all workers have only {there}"
        return why, "stuck", f"start a worker with a {task.device}, or use ff.Prefer in place of ff.Require"
    for name, amount in sorted(task.resources.items()):
        most = facts.resources.get(name, 0)
        if most < amount:
            has = f"has more than {most:g}" if most else "declares that resource"
            why = f"it requires the resource {name}={amount:g}, and no worker {has}"
            return why, "stuck", f"start a worker with --resources {name}={amount:g}"
    return _lacks_worker(task, facts)


def _lacks_worker(task: Unplaced, facts: OverviewFacts) -> tuple[str, str, str]:
    """Return why none of the workers that a task may run at takes it, how severe that is, and the remedy."""
    names = {one.name for one in facts.workers}
    if silent := _all_silent(task, facts):
        worst = max(silent, key=attrgetter("silent_for"))
        only = f"it may run at {workers(task.workers)} only, and " if task.workers else ""
        why = f"{only}{workers([one.name for one in silent])} did not report for {lasting(worst.silent_for)}"
        severity = "stuck" if worst.silent_for >= _GONE else "risk"
        return why, severity, _look_at([one.name for one in silent])
    if task.workers and names.isdisjoint(task.workers):
        why = f"it may run at {workers(task.workers)} only, and no such worker is there"
        return why, "stuck", "start that worker, or submit it without workers="
    paused = [one.name for one in facts.workers if one.name in task.workers and one.status == "paused"]
    if paused:
        why = (
            f"it may run at {workers(task.workers)} only, which {'is' if len(paused) == 1 else 'are'} paused"
        )
        return why, "stuck", "free memory there, or submit it without workers="
    if task.workers or task.hosts:
        why = f"it may run at {few((*task.workers, *task.hosts))} only, where no worker takes it now"
        return why, "stuck", "look at those workers, or submit it without workers="
    why, remedy = WAITS["nobody"]
    return why, "stuck", remedy


def _all_silent(task: Unplaced, facts: OverviewFacts) -> list[WorkerSight]:
    """Return the workers that a task may run at, if none of them reports."""
    bound = silence(len(facts.workers))
    running = [one for one in facts.workers if one.status == "running"]
    may = [one for one in running if not task.workers or one.name in task.workers]
    return may if all(one.silent_for > bound for one in may) else []


def _failed(facts: OverviewFacts) -> Iterator[OverviewFinding]:
    if total := sum(facts.failed.values()):
        worst = sorted(facts.failed, key=lambda name: (-facts.failed[name], name))
        sentence = f"{counted(total, 'task')} failed: of {few(worst)}"
        remedy = "correct the cause and submit the tasks again"
        if task := facts.failure:
            sentence += f"; {task.key} failed last, at {workers(task.workers)}: {task.error}"
            remedy = f"the log of {workers(task.workers)} has the traceback; {remedy}"
        yield OverviewFinding("failed", "risk", sentence, remedy, "graph")


# ---- jobs --------------------------------------------------------------------------------------------------


def _pools(facts: OverviewFacts) -> Iterator[OverviewFinding]:
    for pool in facts.shut:
        lacks = bool(facts.without_worker)
        if pool.is_paused and not (lacks and not facts.workers):
            continue  # as its user ordered, and nothing waits for it alone
        if not pool.is_paused and 0 < pool.until < facts.now:
            continue  # it is tried again now
        until = f" until {strftime('%H:%M:%S', localtime(pool.until))}" if pool.until else ""
        waiting = f"; {counted(facts.without_worker, 'task')} without a worker" if lacks else ""
        state = "paused" if pool.is_paused else "closed"
        sentence = f"pool {pool.pool} is {state}{until}: {pool.why.rstrip('.')}{waiting}"
        severity = "stuck" if lacks and not facts.workers else "risk"
        yield OverviewFinding("pool", severity, sentence, _opens(pool), "ferro-elastic", pool.output)


def _opens(pool: ShutPool) -> str:
    if pool.is_paused:
        return f"cluster.pools.resume({pool.pool!r})"
    return (
        f"correct the cause; it is tried again by itself, or at once by cluster.pools.resume({pool.pool!r})"
    )


def _queues(facts: OverviewFacts) -> Iterator[OverviewFinding]:
    for queue in facts.queued_jobs:
        # A job that may start by itself is late when it has waited for longer than the pool's other jobs did.
        is_endless_now = bool(queue.reasons) and all(map(is_endless, queue.reasons)) and not facts.workers
        patience = _QUEUED if is_endless_now else max(_LATE, _OFTEN * queue.expected)
        if not facts.remaining or queue.seconds < patience:
            continue
        oldest = "it has" if queue.jobs == 1 else "the oldest has"
        has = (
            "no worker is there" if not facts.workers else f"{counted(len(facts.workers), 'worker')} at work"
        )
        sentence = (
            f"{counted(queue.jobs, 'job')} of pool {queue.pool} {'is' if queue.jobs == 1 else 'are'} in the batch"
            f" system's queue; {oldest} waited for {lasting(queue.seconds)}, and {has}: {_queue_reason(queue)}"
        )
        severity = "stuck" if is_endless_now else "slow"
        remedy = "dask ferro jobs has each job; a smaller or shorter job, or another queue, may start earlier"
        yield OverviewFinding("queue", severity, sentence, remedy, "ferro-elastic")


def _queue_reason(queue: QueuedJobs) -> str:
    if not queue.reasons:
        return "no reason is given"
    said = max(queue.reasons, key=lambda reason: (queue.reasons[reason], reason))
    plain = next((words for start, words in QUEUES.items() if said.startswith(start)), "")
    return f"{plain} ({said})" if plain else said


def _no_workers(facts: OverviewFacts) -> Iterator[OverviewFinding]:
    # With jobs on their way, or pools that cannot have any, there is a reason already.
    if not facts.remaining or facts.workers or facts.jobs or facts.shut:
        return
    if facts.unserved < (_DECIDED if facts.is_controlled else _ALONE):
        return
    sentence = f"there is no worker for {counted(facts.remaining, 'task')}"
    if facts.is_controlled:
        asked = (
            f"; the controller was asked for workers {lasting(facts.unserved)} ago, and has no job on its way"
        )
        remedy = "look at the controller's reason, and at maximum= of cluster.adapt and of its pools"
        severity = "stuck" if facts.unserved >= _LATE else "risk"
        yield OverviewFinding("workers", severity, sentence + asked, remedy, "ferro-elastic")
    else:
        # Dask's own adapt is not known here.
        remedy = (
            "start workers, cluster.scale(n), or let the number follow the work: cluster.adapt(...); if it does, the"
            " cluster's log says why no worker starts"
        )
        yield OverviewFinding("workers", "stuck", sentence, remedy, "ferro-elastic")


_RULES: tuple[Rule, ...] = (
    _hung, _pools, _queues, _no_workers, _nobody, _waits, _memory, _failed, _package, _stragglers,
)  # fmt: skip
