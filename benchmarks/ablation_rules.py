"""The rules that `ablation.py` switches off, one a row: what each says, and how it is off.

A rule with a parameter is off at the value that takes its effect away, or makes it extreme.  One without is off while
a function of ours is replaced (`Swap`).  A function that is no longer there ends the benchmark: its row has to go too.
Rules that no simulated run can show are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import inf
from typing import Any, NamedTuple

from ablation_workloads import Setup

HUGE = 2**60
POLICY = "dask_ferro.policy."


class Swap(NamedTuple):
    """A replacement of a function: "module:name" or "module:Class.name", and what makes the new from the old one."""

    where: str
    make: Callable[[Any], Any]

    @contextmanager
    def applied(self) -> Iterator[None]:
        module, _, path = self.where.partition(":")
        *outer, name = path.split(".")
        owner: Any = import_module(POLICY + module if not module.startswith("dask_ferro") else module)
        for part in outer:
            owner = getattr(owner, part)
        old = vars(owner)[name]
        setattr(owner, name, self.make(old))
        try:
            yield
        finally:
            setattr(owner, name, old)


@dataclass(frozen=True)
class Rule:
    """A rule; `unseen`: why no simulated run can show it."""

    area: str
    name: str
    says: str
    off: Callable[[Setup], Setup] = lambda setup: setup
    swaps: tuple[Swap, ...] = ()
    unseen: str = ""

    @property
    def held(self) -> str:
        """What is seen without the rule where no simulated figure changes; "": a figure does."""
        return HELD.get(f"{self.area}: {self.name}", "")

    @contextmanager
    def switched_off(self) -> Iterator[Setup]:
        """Yield the setup in which all rules but this one are on."""
        with ExitStack() as stack:
            for swap in self.swaps:
                stack.enter_context(swap.applied())
            yield self.off(Setup())


# ---- how a rule is off -------------------------------------------------------------------------------------


def _settings(setup: Setup, **values: Any) -> Setup:
    return replace(setup, settings=replace(setup.settings, **values))


def _place(setup: Setup, **values: Any) -> Setup:
    return _settings(setup, placement=replace(setup.settings.placement, **values))


def _steal(setup: Setup, **values: Any) -> Setup:
    return _settings(setup, parameters=replace(setup.settings.parameters, **values))


def _scale(setup: Setup, **values: Any) -> Setup:
    return replace(setup, scaling=lambda bounds: replace(bounds, **values))


def _spare(setup: Setup) -> Setup:
    return _steal(_place(setup, spare=0.0), spare=0.0)


def rule(
    area: str, how: Callable[..., Setup], name: str, value: float | str | bool, says: str, **more: Any
) -> Rule:
    """Return a rule that is off at a value of its parameter."""
    shown = "huge" if value == HUGE else f"{value}"
    return Rule(area, f"{name} = {shown}", says, partial(how, **{name: value}, **more))


def swap(area: str, name: str, says: str, *swaps: tuple[str, Callable[[Any], Any]]) -> Rule:
    """Return a rule that is off while functions are replaced."""
    return Rule(area, name, says, swaps=tuple(Swap(*one) for one in swaps))


def gives(value: Any) -> Callable[[Any], Any]:
    """Return what makes a function that always returns a value."""
    return lambda old: lambda *args, **options: value


def becomes(value: Any) -> Callable[[Any], Any]:
    """Return what replaces anything by a value."""
    return lambda old: value


def unseen(area: str, name: str, says: str, why: str) -> Rule:
    """Return a rule that no simulated run can show."""
    return Rule(area, name, says, unseen=why)


# ---- placement ---------------------------------------------------------------------------------------------

P, C = "placement:PlacementParameters.", "candidates:Candidates."
ADAPTER, FACTS = "dask_ferro.simulate.core_adapter:", "dask_ferro.simulate.task_facts:SimulatedFacts."


def _without_turns(old: Any) -> Any:
    return lambda *args, **options: old(*args, **options)._replace(turn=0)


def _helps_where_it_may(self: Any, task: Any, worker: Any, *rest: Any) -> bool:
    return bool(self.may_begin(task, worker))


place = partial(rule, "placement", _place)
swap_place = partial(swap, "placement")
PLACEMENT = (
    place(
        "margin",
        0.0,
        "A task leaves the worker that holds its inputs only for one where it ends 5 ms earlier.",
    ),
    place("candidates", 1, "Four workers that run dry first are weighed beside the holders; off: one."),
    place(
        "candidates",
        64,
        "Four workers that run dry first are weighed beside the holders, to save time (no figure); off: 64.",
    ),
    place("burden", 0.0, "The bytes of a transfer count 2.5 times beside its own seconds."),
    place("soon", 1e9, "Another worker than a holder has to run dry within the task's duration."),
    place("soon", 0.0, "Such a worker may run dry within the task's duration; off: it has to be idle now."),
    place("light", HUGE, "A task with an input over 64 KiB is not placed away from its holders."),
    place("light", 0, "Inputs up to 64 KiB hold a task less; off: none is light."),
    place("ahead", 0.0, "Queued tasks that are short are sent several at a time, 5 ms in all."),
    place("ahead_tasks", HUGE, "They are eight at most."),
    place("ahead_bytes", HUGE, "Their results take 1 MiB at most."),
    place("patience", 0.0, "A task waits 0.5 s for room on an idle device before that has to spill."),
    place(
        "wide",
        HUGE,
        "Wider graphs than four tasks a thread keep Dask's order, for memory (no figure); off: all are ranked.",
    ),
    Rule(
        "placement",
        "rank = False",
        "Narrow graphs run their longest chains first.",
        partial(_settings, rank=False),
    ),
    Rule(
        "placement",
        "spare = 0",
        "Two seconds lie between a task's projected end and its worker's (stealing too).",
        _spare,
    ),
    swap_place(
        "weigh all that are shown",
        "Holders first: others only where `soon` and `light` let a task leave.",
        (P + "_near", lambda old: lambda self, task, workers: workers),
    ),
    swap_place(
        "no turns",
        "Ties go to the worker whose newest task is the oldest.",
        ("ledger:Ledger.worker", _without_turns),
    ),
    swap_place(
        "full devices are weighed",
        "Devices without room are left out if others of their class have some.",
        ("placement:_roomy", lambda old: lambda task, workers: workers),
    ),
    swap_place(
        "too small devices are weighed",
        "Devices that could never hold a task are left out.",
        ("placement:_could_take", lambda old: lambda task, workers: workers),
    ),
    swap_place(
        "assigned without room",
        "A task waits for the device on which it ends first if that has no room.",
        (P + "may_begin", gives(True)),
    ),
    swap_place(
        "queued tasks go to anybody",
        "A queued task goes to a slow device only if the fast ones would finish all later.",
        (P + "helps", lambda old: _helps_where_it_may),
    ),
    swap_place(
        "ends do not matter",
        "A task of known duration goes to no worker that ends before it.",
        (P + "_lasts", gives(True)),
        (C + "lasting", gives(0.0)),
    ),
    swap_place(
        "no wait for a fresh worker",
        "Where none lasts, a task waits for a worker to come that would.",
        (P + "waits", gives(False)),
    ),
    swap_place(
        "no queueing by time left",
        "A queued task is sent to workers that have the time for it.",
        (C + "in_time", lambda old: lambda self, seconds, known, free, fresh, now: free),
    ),
    unseen(
        "placement",
        "HOLDERS",
        "Of the holders of its inputs the eight with most bytes are weighed.",
        "it bounds the scheduler's time: facts of a holder take 2 us",
    ),
    swap_place(
        "candidates without room first",
        "Where bytes are counted, the workers with room are the first candidates.",
        (
            C + "_soonest",
            lambda old: (
                lambda self, count, priority, now, lasting, need: self.ledger.soonest(
                    now, count, priority, lasting
                )
            ),
        ),
    ),
    swap_place(
        "no headroom",
        "A device keeps room for the results of a task's readers.",
        (FACTS + "headroom", gives(0)),
    ),
    swap_place(
        "queues without priority",
        "A task starts at its place by priority in a worker's queue.",
        (
            "worker_load:WorkerLoad.starts_in",
            lambda old: lambda self, now, priority=None: old(self, now),
        ),
    ),
    swap_place(
        "bytes of devices are not counted",
        "Bytes of devices are projected, and a task waits for room.",
        ("ledger:Ledger.set_memory", gives(None)),
    ),
    unseen(
        "placement",
        "Candidates.stays",
        "A task with one holder is placed without weighing others where that is sure.",
        "saves the plugin's time; the simulator always weighs",
    ),
    unseen(
        "placement",
        "restrictions, affinity, resources",
        "Restrictions and classes are obeyed; 64 admitted are weighed.",
        "virtual tasks have none but a pinned root",
    ),
    unseen(
        "placement",
        "IdleOrder",
        "Over 24 workers are kept in a heap by when they run dry.",
        "saves time; same order",
    ),
)

# ---- what is learned and believed --------------------------------------------------------------------------

W, L, D = "worker_load:WorkerLoad.", "ledger:Ledger.", "estimates:Durations."


def _no_longer_than_projected(old: Any) -> Any:
    def remaining(self: Any, entry: Any, now: float) -> float:
        return max(entry.seconds * self.slowness - max(now - entry.started, 0.0), 0.0)

    return remaining


def _without_own_estimate(old: Any) -> Any:
    return lambda self, prefix, device, seconds, annotated=None: old(self, prefix, device, seconds)


swap_belief = partial(swap, "estimates")


def _constant(name: str, value: float, says: str, *places: str) -> Rule:
    """Return a rule that is off while a module's constant has another value."""
    shown = "huge" if value == HUGE else f"{value}"
    return swap_belief(f"{name} = {shown}", says, *((f"{place}:{name}", becomes(value)) for place in places))


E = "estimates"
ESTIMATES = (
    _constant(
        "GUESS",
        0.001,
        "A task never measured is projected to take 0.1 s; off: 1 ms.",
        E,
        "dask_ferro.simulate.virtual_tasks",
    ),
    _constant(
        "GUESS",
        0.5,
        "A task never measured is projected to take 0.1 s; off: 0.5 s, as in Dask.",
        E,
        "dask_ferro.simulate.virtual_tasks",
    ),
    _constant(
        "SLOWEST",
        1.0,
        "Projections are multiplied by a worker's measured slowness; off: never.",
        "worker_load",
    ),
    _constant("USUAL_TASKS", 0.0, "A worker's slowness begins with two tasks as projected.", "worker_load"),
    _constant("SPREAD_FACTOR", 1.0, "Slowness within a factor of two is noise.", "worker_load"),
    _constant(
        "LIGHT", 0, "A transfer up to 64 KiB tells of latency, not of bandwidth; off: of bandwidth.", E
    ),
    _constant(
        "UNSEEN_RESULTS",
        HUGE,
        "Four results of a prefix never seen are thought to fill a device; off: they take what inputs do.",
        E,
    ),
    swap_belief(
        "links are never measured",
        "Latencies and bandwidths are learned.",
        ("estimates:Links.add", gives(None)),
    ),
    swap_belief(
        "own estimates are not corrected",
        "A task's own estimate is corrected by what its like took.",
        (D + "add", _without_own_estimate),
    ),
    swap_belief(
        "classes tell nothing of each other",
        "A class without measurements is projected from another's speed.",
        (D + "_elsewhere", gives(None)),
    ),
    swap_belief(
        "queued guesses are kept",
        "Tasks queued with a guess are projected again at the first measurement.",
        (D + "is_provisional", gives(False)),
    ),
    swap_belief(
        "an overrun ends now",
        "A task that overran its projection takes as long again.",
        (W + "_remaining", _no_longer_than_projected),
    ),
    swap_belief(
        "moves on the way are not counted",
        "A task asked for counts at its thief already.",
        (L + "_announce", gives(None)),
    ),
    swap_belief(
        "starts at assignment",
        "A task starts when its message has been sent, not when it is assigned.",
        (L + "_touch", lambda old: lambda self, row, now: (self.listen(now), old(self, row, now))),
    ),
    swap_belief(
        "reports are not read",
        "A worker's report of what runs replaces what was inferred.",
        (L + "hear", gives(None)),
    ),
    unseen(
        "estimates",
        "Estimate",
        "A task's operations and bytes give seconds by the roofline model.",
        "virtual tasks state seconds",
    ),
)

# ---- stealing ----------------------------------------------------------------------------------------------

N, V, S = "stealing.informed:", "ledger:Ledger.", "scheduling_core:SchedulingCore."


def _without(**values: Any) -> Callable[[Any], Any]:
    """Return what shows a method of the policy other facts of the task."""
    return lambda old: lambda self, task, *rest: old(self, task._replace(**values), *rest)


def _seen_without(**values: Any) -> Callable[[Any], Any]:
    return lambda old: lambda self, address, now: old(self, address, now)._replace(**values)


steal = partial(rule, "stealing", _steal)
swap_steal = partial(swap, "stealing")


STEALING = (
    Rule(
        "stealing", "policy = none", "Tasks are stolen at all.", lambda setup: replace(setup, policy="none")
    ),
    Rule(
        "stealing",
        "policy = last-victim",
        "Victims are the longest queues; off: the last one, then any.",
        lambda setup: replace(setup, policy="last-victim"),
    ),
    steal("threshold", 0.001, "A worker steals under 5 ms of backlog, at first; off: 1 ms."),
    steal("threshold", 0.05, "A worker steals under 5 ms of backlog, at first; off: 50 ms."),
    steal("threshold_follow", 0.0, "The threshold follows the time from a request to the task's start."),
    steal("threshold_follow", 1.0, "It follows a measurement by a quarter; off: at once."),
    steal("reach", 0.0, "A step gives a thief 0.1 s of work at most; off: one task."),
    steal("reach", HUGE, "A step gives a thief 0.1 s of work at most; off: any."),
    steal("margin", 0.0, "A task moves if it ends 2 ms earlier."),
    steal("burden", 0.0, "The bytes of a transfer count 2.5 times beside its own seconds."),
    swap_steal(
        "transfers under way do not matter",
        "A task whose victim fetches its inputs is projected to fetch them for as long elsewhere.",
        (N + "InformedPolicy._fetches", gives(False)),
    ),
    steal("shortest", 1e-6, "A task under 2 ms moves only when it is projected to wait."),
    steal("bears", 1.0, "Such a wait is ten times the cost of the move; off: once."),
    steal("bears", 100.0, "Such a wait is ten times the cost of the move; off: 100 times."),
    steal(
        "patience",
        HUGE,
        "A task of unknown duration leaves after 0.5 s at most, and a task that waited so long is overdue; off: never.",
    ),
    steal(
        "patience",
        0.05,
        "A task of unknown duration leaves after 0.5 s at most, and a task that waited so long is overdue; off: 50 ms.",
    ),
    steal("tries", 1, "Eight tasks of a queue are considered for a move; off: one."),
    steal(
        "tries", HUGE, "Eight tasks of a queue are considered for a move, to save time (no figure); off: all."
    ),
    steal(
        "quick",
        HUGE,
        "A step first considers 16 tasks a thread of its thieves, to save time (no figure); off: 640 at once.",
    ),
    steal("pause", 0.0, "A paused worker is projected to stay paused for 1 s."),
    swap_steal(
        "tasks about to start may move",
        "A task that starts within its worker's threshold stays.",
        (N + "InformedPolicy._best", lambda old: lambda self, *facts: old(self, *facts[:-1], 0.0)),
    ),
    swap_steal(
        "no task unlocks",
        "A worker whose task unlocks others steals only when it has none.",
        (L + "_seen", _seen_without(unlocks=False)),
    ),
    swap_steal(
        "thieves may end",
        "No task moves to a worker that ends before it.",
        ("facts:Worker.has_time", gives(True)),
    ),
    swap_steal(
        "back and forth",
        "A task that was moved returns only after a wait, doubled by each move.",
        (N + "InformedPolicy._stays", _without(origins=())),
    ),
    swap_steal(
        "overdue tasks as projected",
        "A tick shows some overdue tasks of all queues, which are expected to wait as long again.",
        (W + "overdue", gives(0.0)),
    ),
    swap_steal(
        "one queue is shown",
        "A step sees the ten longest queues; off: the longest.",
        (L + "snapshot", lambda old: lambda *args, **options: old(*args, **options, victims=1)),
    ),
    swap_steal(
        "always the longest queues",
        "A step after one without moves sees other queues.",
        (L + "_busiest", lambda old: lambda self, count, skip: old(self, count, 0)),
    ),
    swap_steal(
        "one thief a step",
        "A step feeds 32 thieves at most; off: one.",
        ("scheduling_core:THIEVES", becomes(1)),
    ),
    swap_steal(
        "overdue by patience alone",
        "A task is overdue at twice the wait that was projected for it.",
        (
            W + "overdue",
            lambda old: (
                lambda self, entry, now, patience, projected=True: old(self, entry, now, patience, False)
            ),
        ),
    ),
    swap_steal("steps at ticks alone", "A step runs when an event calls for one.", (S + "_ask", gives(None))),
    swap_steal(
        "steps whenever somebody waits",
        "Steps run only while a queue is worth it or stalls.",
        (S + "_is_worth_it", lambda old: lambda self, now: bool(self.ledger.waiting)),
    ),
    swap_steal(
        "no second look",
        "A step that left thieves hungry is repeated, at growing intervals.",
        (S + "_look_again", gives(None)),
    ),
    unseen(
        "stealing",
        "actors, resources, reserve",
        "Actors stay; a task moves where its resources are free.",
        "virtual tasks have none",
    ),
    unseen(
        "stealing",
        "RequestWithdrawn, RequestUnsent, seceded",
        "A request without an answer, or of a task that seceded, ends.",
        "virtual victims always answer",
    ),
    unseen(
        "stealing",
        "HISTORY, MAX_IDLE, _MAX_SCANNED, OVERDUE",
        "Kept outcomes, idle workers and scanned entries are bounded.",
        "they bound the scheduler's time",
    ),
)

# ---- messages ----------------------------------------------------------------------------------------------

when = partial(rule, "messages", _settings)
MESSAGES = (
    when("coalesce", 0.0001, "Events within 1 ms share a step; off: within 0.1 ms."),
    when("coalesce", 0.02, "Events within 1 ms share a step; off: within 20 ms."),
    when("tick", 5.0, "A tick looks at every worker each 0.5 s; off: 5 s."),
    when("scheduler_sends", 0.005, "The scheduler batches messages for 1 ms; off: 5 ms, as Dask."),
    when("worker_sends", 0.002, "A worker batches messages for 1 ms; off: 2 ms, as Dask."),
    rule(
        "messages",
        _steal,
        "plenty",
        HUGE,
        "Messages to a worker with over 10 ms of queue are batched for 5 ms.",
    ),
    rule(
        "messages",
        _steal,
        "saturated",
        2.0,
        "While the loop is busy for 0.9 of the time, all messages are batched.",
    ),
    unseen(
        "messages",
        "client_sends",
        "A client batches messages for 2 ms, not 10.",
        "the virtual client's cost is fixed",
    ),
    unseen(
        "messages",
        "RELEASE_FACTOR",
        "A saturated loop counts as such down to 0.9 of the bound.",
        "loads between are rare",
    ),
)

# ---- scaling -----------------------------------------------------------------------------------------------

G, F, R = "scaling.grow:", "scaling.fleet:", "scaling.shrink:"
scale = partial(rule, "scaling", _scale)
swap_scale = partial(swap, "scaling")
SCALING = (
    scale(
        "efficiency",
        1e-9,
        "A job has to save one and a half times as much as it is idle while it starts; off: anything.",
    ),
    scale("worth", 0.0, "A job has to save 5 job-seconds."),
    scale("idle_timeout", 0.0, "An idle job stays for 10 s at least."),
    scale("patience_most", HUGE, "It stays for 10 min at most, however long a new one takes."),
    scale("notice", 0.0, "A job is drained 1.5 s before it has to move its data."),
    scale("max_pending", 1, "Any number of jobs may be pending (the default); on: one."),
    swap_scale(
        "no growth by work", "Jobs are requested by the work that they would do.", (G + "_serve", gives(None))
    ),
    swap_scale(
        "power at its arrival",
        "The work left when a job arrives counts, not the work now.",
        (G + "advance", lambda old: lambda profile, shifts, until, fastest=1.0: profile),
    ),
    swap_scale(
        "queue waits are the mean",
        "A pending job's age lengthens the projected wait.",
        (F + "_wait", lambda old: lambda pool, jobs: pool.queue_wait),
    ),
    swap_scale(
        "late jobs are no later",
        "A late job takes as long again as it is late.",
        (
            F + "Fleet.arrival",
            lambda old: lambda self, job: self.pools[job.pool].start_up if job.state == "pending" else 0.0,
        ),
    ),
    swap_scale(
        "late jobs count",
        "Another pool is asked for the work of jobs that are late.",
        (F + "Outlook.is_late", gives(False)),
    ),
    swap_scale(
        "no successor ahead",
        "A successor is requested before a job's end, by its longest task.",
        (F + "Outlook.ahead", lambda old: lambda self, works: self.parameters.notice),
    ),
    swap_scale(
        "works are alone",
        "Threads that another work keeps busy do not help.",
        (G + "_shared_load", gives([])),
    ),
    swap_scale(
        "no room for starving works",
        "Each starving work gets one job before others get more.",
        (F + "Fleet.starves", gives(False)),
    ),
    swap_scale(
        "no successor for data",
        "Successors are requested where data fits on no other job.",
        (G + "_succeed", gives(None)),
    ),
    swap_scale(
        "all end together",
        "Jobs that end together go in turn, for successors to take over.",
        (R + "due_jobs", gives([])),
    ),
    swap_scale("idle jobs stay", "Idle jobs go.", (R + "_dismiss_idle", gives([]))),
    swap_scale(
        "data keeps no job", "A job stays if its data fits nowhere.", (R + "_Exits.fits", gives(True))
    ),
    swap_scale(
        "any width is soon",
        "A job is spared by the width of the work within its arrival.",
        (
            R + "peak",
            lambda old: lambda profile, threads, within, fastest=1.0: old(profile, threads, inf, fastest),
        ),
    ),
    swap_scale(
        "a running task ends as projected",
        "One that overran takes as long again, one never measured twice the longest run.",
        (ADAPTER + "seconds_left", lambda old: lambda takes, ran: max(takes - ran, 1e-4)),
        (ADAPTER + "extrapolate", lambda old: lambda longest, guess: guess),
    ),
    unseen(
        "scaling",
        "order_patience, ordered",
        "`scale(n)` ends jobs within 30 s, whatever they hold.",
        "the virtual user gives bounds",
    ),
    unseen(
        "scaling",
        "closed, is_paused, lingering, held, stalled",
        "Pools and jobs with these marks are left out.",
        "virtual pools stay open and virtual jobs behave",
    ),
    unseen("scaling", "_advice", "Pools whose jobs live too short are named.", "a text"),
)

# ---- replication -------------------------------------------------------------------------------------------

_NOT_PREEMPTED = (
    "virtual jobs are not preempted, and nothing is copied for it (`preemption.py` measures it on SLURM)"
)
REPLICATION = tuple(
    unseen("replication", name, says, _NOT_PREEMPTED)
    for name, says in (
        (
            "copy-share",
            "Workers receive copies of results that preemptible jobs hold up to half of their memory.",
        ),
        ("_BANDWIDTH, _MESSAGE", "A copy costs its bytes over 100 MB/s, and 5 ms."),
        ("_MIN_GAIN", "A result is copied if computing it takes twice as long as its copy."),
        ("rank", "Results with most seconds saved per byte come first."),
        ("droppable", "Replicas that insure each other are not dropped."),
        ("host", "A copy on another preemptible job goes to another host."),
    )
)

# What is seen without a rule that changes no simulated figure: a test that fails, by file, or a figure of real workers.
HELD = {
    "placement: margin = 0.0": "projections of real transfers are noisy; it also saves the plugin weighing others",
    "placement: ahead_tasks = huge": "on a clock that says 0 s a thread would be sent thousands (`test_placement.py`)",
    "placement: ahead_bytes = huge": "results that nobody reads yet fill a worker (`test_placement.py`)",
    "placement: patience = 0.0": "a task spills while a message that frees bytes is on its way (`test_devices.py`)",
    "placement: full devices are weighed": "a full device spills beside an empty one (`test_devices.py`)",
    "placement: too small devices are weighed": "a task waits for a device that never has room (`test_devices.py`)",
    "placement: candidates without room first": "a task waits beside a device with room (`test_devices.py`)",
    "estimates: own estimates are not corrected": "an estimate ten times off stays so (`test_estimates.py`)",
    "estimates: starts at assignment": "a task is thought to run that was not sent (`test_waits.py`)",
    "estimates: reports are not read": "an overdue task waits behind one wrongly thought to run (`test_waits.py`)",
    "stealing: threshold_follow = 1.0": "one late start sets the threshold (`test_scheduling_core.py`)",
    "stealing: margin = 0.0": "real projections are noisy, and a request costs both workers a message",
    "stealing: patience = huge": "a task of unknown duration waits for ever beside an idle worker (`test_policies.py`)",
    "stealing: pause = 0.0": "a short task waits at a paused worker (`test_policies.py`)",
    "stealing: tasks about to start may move": "fork-join on 8 processes: 12 of 60 steals refused, makespan 1.03",
    "stealing: back and forth": "tasks move between two workers for ever (`test_policies.py`)",
    "stealing: overdue tasks as projected": "what waits behind a wrong projection waits for ever (`test_waits.py`)",
    "stealing: always the longest queues": "a movable task hides behind unmovable ones (`test_scheduling_core.py`)",
    "stealing: one thief a step": "many idle workers are served one by one (`test_scheduling_core.py`)",
    "stealing: overdue by patience alone": "a task that is about to start counts as overdue (`test_waits.py`)",
    "stealing: steps whenever somebody waits": "each event costs a step (`test_scheduling_core.py`)",
    "messages: tick = 5.0": "an overdue task, or a worker that was missed, is looked at once in 5 s",
    "messages: scheduler_sends = 0.005": "a hop takes 4 ms more (2026-11-23, a saturated scheduler)",
    "messages: worker_sends = 0.002": "a hop takes 1 ms more",
    "messages: saturated = 2.0": "a flood of tasks takes 1.11 of stock's time, not 0.93 (2026-11-23)",
    "scaling: efficiency = 1e-09": "it is the user's price of a node-second (`test_step.py`)",
    "scaling: patience_most = huge": "after a queue of days idle jobs stay for days",
    "scaling: notice = 0.0": "a job ends before the step that would have drained it",
    "scaling: queue waits are the mean": "a full cluster flaps (`scaling/test_step.py`)",
    "scaling: late jobs count": "work waits for a stuck queue beside a free one (`scaling/test_step.py`)",
    "scaling: works are alone": "more work wants fewer jobs (a property of `scaling/test_step.py`)",
    "scaling: no room for starving works": "work that one pool may run gets no job (`scaling/test_step.py`)",
    "scaling: no successor for data": "results are lost at the end of the last job (`test_early_exit.py`)",
    "scaling: any width is soon": "more work wants fewer jobs (a property of `scaling/test_step.py`)",
}

RULES: tuple[Rule, ...] = (*PLACEMENT, *ESTIMATES, *STEALING, *MESSAGES, *SCALING, *REPLICATION)
