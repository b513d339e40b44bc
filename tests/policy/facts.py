"""Workers, tasks and snapshots that tests are written in: durations in seconds, one queue per worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from dask_ferro.policy.estimates import Link, Links
from dask_ferro.policy.facts import Address, Key, Move, Replica, TaskFacts, Worker
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.placement import NoWorker, Placement, Wait, WorkerChoice
from dask_ferro.policy.stealing.informed import Asks, Policy, StealingState
from dask_ferro.policy.stealing.snapshot import Snapshot
from dask_ferro.policy.worker_load import Entry, WorkerLoad

MB = 1_000_000


def where(answer: Placement) -> Address | Wait | NoWorker:
    """The worker of a placed task, or why there is none."""
    return answer.worker if isinstance(answer, WorkerChoice) else answer


class Stand(NamedTuple):
    """A worker, and its queue with the task that would start last first."""

    worker: Worker
    queue: tuple[TaskFacts, ...]


def task(key: Key, seconds: float = 0.05, **facts: object) -> TaskFacts:
    """A task of a known duration and without inputs, but for the facts given; a stolen one has just come."""
    if facts.get("origins"):
        facts.setdefault("waited", facts.get("overdue", 0.0))
    return TaskFacts(key, seconds, **facts)  # type: ignore[arg-type]


def needs(nbytes: int, *holders: str) -> Replica:
    """An input and the workers that hold it."""
    return Replica(nbytes, frozenset(holders))


def stand(
    address: str,
    *queue: TaskFacts,
    running: float | None = None,
    nthreads: int = 1,
    slowness: float = 1.0,
    accepts: bool = True,
    host: str = "h",
    ends_in: float = inf,
) -> Stand:
    """A worker whose threads all run for `running` seconds yet, and its queue; idle if neither is given."""
    busy = nthreads if running is not None or len(queue) >= nthreads else len(queue)
    work = sum(t.seconds for t in queue) * slowness / nthreads
    starts_in = (running or 0.0) + work if busy == nthreads else 0.0
    row = Worker(address, host, "cpu", nthreads, starts_in, busy, len(queue), slowness, accepts)
    return Stand(row._replace(ends_in=ends_in), queue)


def snapshot(
    stands: Sequence[Stand],
    hungry: Iterable[str] | None = None,
    asked: Asks | None = None,
    links: Links | None = None,
    hosts: Mapping[str, str] | None = None,
) -> Snapshot:
    """A snapshot in which everybody may be hungry, unless said otherwise."""
    workers = {s.worker.address: s.worker for s in stands}
    loads = sorted(
        (-sum(t.seconds for t in s.queue) * s.worker.slowness / s.worker.nthreads, s.worker.address)
        for s in stands
        if s.queue
    )
    return Snapshot(
        now=0.0,
        hungry=tuple(workers if hungry is None else hungry),
        busiest=tuple(address for _, address in loads[:10]),
        workers=workers,
        queues={s.worker.address: s.queue for s in stands},
        links=free_links() if links is None else links,
        hosts=hosts or {},
        asked=asked or {},
    )


def decided(
    policy: Policy,
    stands: Sequence[Stand],
    state: StealingState | None = None,
    hungry: Iterable[str] | None = None,
) -> tuple[Move, ...]:
    """What a policy moves, shown whom it asks for."""
    workers = [s.worker.address for s in stands]
    thieves, state = tuple(workers if hungry is None else hungry), state or StealingState()
    asked = policy.asks(thieves, sorted(workers), state)
    return policy.step(snapshot(stands, thieves, asked), state)


def free_links() -> Links:
    """Links on which 100 MB take a second, and a message nothing."""
    return Links({kind: Link(0.0, 100.0 * MB) for kind in ("host", "hosts")})


class FakeFacts:
    """Facts of tasks without inputs, of which some may not move; `lying` are the bytes on devices."""

    def __init__(self, lying: Mapping[str, int] | None = None) -> None:
        self.bound: set[Key] = set()
        self.refused: set[Key] = set()
        self.looks: list[tuple[str, ...]] = []
        self.described = 0
        self.lying = lying or {}

    def begin(self, thieves: Sequence[str]) -> None:
        self.looks.append(tuple(thieves))

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts | None:
        self.described += 1
        allowed = frozenset((row.address,)) if entry.key in self.bound else None
        return TaskFacts(entry.key, entry.seconds, entry.known, allowed=allowed, origins=entry.origins)

    def reserve(self, key: Key, victim: str, thief: str) -> bool:
        return key not in self.refused

    def unlocks(self, key: Key) -> bool:
        return False

    def live(self, address: str) -> int:
        return self.lying.get(address, 0)

    def holds(self, address: str) -> int:
        return 0

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        return [entry for entry in entries if entry.key not in self.bound]


def ledger(threads: Mapping[str, int], **seconds: float) -> Ledger:
    """A ledger of workers on one host that knows the seconds of some prefixes."""
    made = Ledger(FakeFacts())
    for prefix, each in seconds.items():
        made.durations.add(prefix, "cpu", each)
    for address, nthreads in threads.items():
        made.add_worker(address, nthreads, "h")
    return made


def ways(moves: Iterable[Move]) -> list[tuple[Key, str, str]]:
    """Key, victim and thief of each move."""
    return [(move.key, move.victim, move.thief) for move in moves]
