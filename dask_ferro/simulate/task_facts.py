"""The facts that the scheduling core is given about a simulated task: projected seconds and bytes.

Sizes and durations are learned from results, as in the plugin; of the true values this module reads only those that
a scheduler is told.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf

from dask_ferro.policy.candidates import Candidates
from dask_ferro.policy.estimates import ResultSizes
from dask_ferro.policy.facts import Address, Key, Replica, TaskFacts
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.worker_load import Entry, WorkerLoad
from dask_ferro.simulate.virtual_scheduler import Scheduler
from dask_ferro.simulate.virtual_tasks import VirtualTask

# Inputs of a task that are shown one by one; more are summed up by who holds them.  Of its readers, as many are seen.
FEW_INPUTS = 8
# Of a task's many dependents this many are checked for whether one of them waits for this task only.
FEW_READERS = 16
HOST = "cpu"


class SimulatedFacts:
    """The core's `Facts` about virtual tasks; the owner sets `ledger` and `candidates`."""

    ledger: Ledger
    candidates: Candidates

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._sizes = ResultSizes()
        self._held: dict[Address, int] = {}  # bytes of results
        self._thieves: Sequence[Address] = ()  # of the current stealing step

    # ---- what happens --------------------------------------------------------------------------------------

    def done(self, job: VirtualTask, address: Address) -> None:
        """Learn a result's size and record its worker."""
        self._sizes.add(job.spec.prefix, job.spec.nbytes)
        self.came(job, address)

    def came(self, job: VirtualTask, address: Address) -> None:
        """Record that a worker holds a result."""
        self._held[address] = self._held.get(address, 0) + job.spec.nbytes

    def dropped(self, job: VirtualTask) -> None:
        """Record that a result leaves its holders, which the task still lists."""
        for address in job.holders:
            self._held[address] = self._held.get(address, 0) - job.spec.nbytes

    def gone(self, address: Address) -> None:
        """Forget the results of a worker."""
        self._held.pop(address, None)

    # ---- what the core asks --------------------------------------------------------------------------------

    def begin(self, thieves: Sequence[Address]) -> None:
        """Begin a stealing step for some thieves."""
        self._thieves = thieves

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts | None:
        """Return the facts of a queued task for the thieves; None if it must not move."""
        job = self.job(entry.key)
        if job.pinned:
            return None
        return TaskFacts(
            entry.key,
            entry.seconds,
            entry.known,
            self.inputs(job, self._thieves),
            origins=entry.origins,
            device=entry.device,
            others=self.ledger.others(entry),
            nbytes=entry.nbytes,
            headroom=self.headroom(job),
        )

    def reserve(self, key: Key, victim: Address, thief: Address) -> bool:
        """Return whether a task may be asked for: virtual workers have no resources."""
        return True

    def unlocks(self, key: Key) -> bool:
        """Whether the task is the last input that some other task lacks."""
        return any(other.missing == 1 for other in islice(self.job(key).after, FEW_READERS))

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries of tasks that may run on more than one worker."""
        return [entry for entry in entries if not self.job(entry.key).pinned]

    def job(self, key: Key) -> VirtualTask:
        """Return a task by its number."""
        return self._scheduler.jobs[int(str(key))]

    # ---- what is known -------------------------------------------------------------------------------------

    def task(self, job: VirtualTask, waited: float = inf) -> TaskFacts:
        """Return the facts of a task without a worker, which has waited that many seconds."""
        device, seconds, known, others = self.candidates.seconds_by_class(job.spec.prefix, job.spec.annotated)
        return TaskFacts(
            job.number, seconds, known, self.inputs(job, ()), device=device, others=others,
            nbytes=self.takes(job), headroom=self.headroom(job), waited=waited,
        )  # fmt: skip

    def held(self, job: VirtualTask) -> tuple[dict[Address, int], int]:
        """Return the bytes of a task's inputs on each holder, and the bytes of all inputs."""
        held: dict[Address, int] = {}
        for dependency in job.inputs:
            for address in dependency.holders:
                if address in self.ledger.rows:
                    held[address] = held.get(address, 0) + dependency.spec.nbytes
        return held, sum(dependency.spec.nbytes for dependency in job.inputs)

    def takes(self, job: VirtualTask) -> int:
        """Return the projected bytes of a result; 0 if no device counts them."""
        if not self.ledger.counts_bytes:
            return 0
        found = self._sizes.of(job.spec.prefix)
        if found is not None:
            return found
        return self._sizes.guess((d.spec.nbytes for d in job.inputs), self.ledger.least)

    def size_of(self, prefix: str) -> int | None:
        """Return the projected bytes of a prefix's results; None before the first."""
        return self._sizes.of(prefix)

    def headroom(self, job: VirtualTask) -> int:
        """Return the projected bytes of the largest result of its dependents, less the bytes that it frees."""
        if not self.ledger.counts_bytes:
            return 0
        own = self.takes(job)
        found = (self._sizes.of(after.spec.prefix) for after in job.after[:FEW_INPUTS])
        freed = sum(d.spec.nbytes for d in job.inputs if d.needed == 1 and not d.is_requested)
        return max(max((own if nbytes is None else nbytes for nbytes in found), default=own) - freed, 0)

    def live(self, address: Address) -> int:
        """Return the bytes of results that a worker holds or has still to fetch."""
        jobs, record = self._scheduler.jobs, self._scheduler.records[address]
        coming = (jobs[number] for number in record.needs)
        return self._held.get(address, 0) + sum(j.spec.nbytes for j in coming if address not in j.holders)

    def holds(self, address: Address) -> int:
        """Return the bytes of results on a worker."""
        return self._held.get(address, 0)

    def inputs(self, job: VirtualTask, fetching: Iterable[Address]) -> tuple[Replica, ...]:
        """Return the inputs; workers in `fetching` that an input is being sent to count as its holders."""
        if len(job.inputs) > FEW_INPUTS:
            held: dict[frozenset[Address], int] = {}
            for dependency in job.inputs:
                holders = frozenset(dependency.holders)
                held[holders] = held.get(holders, 0) + dependency.spec.nbytes
            return tuple(Replica(nbytes, holders) for holders, nbytes in held.items())
        records = self._scheduler.records
        inputs = []
        for dependency in job.inputs:
            number = dependency.number
            coming = (a for a in fetching if a in records and number in records[a].needs)
            holders = frozenset([*dependency.holders, *coming])
            inputs.append(Replica(dependency.spec.nbytes, holders))
        return tuple(inputs)
