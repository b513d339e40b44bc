"""The maximum of jobs holds whatever `squeue` says: the life of jobs and the steps of scaling, tick by tick."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dask_ferro.policy.scaling.facts import PENDING, Job, Pool, ScalingFacts, Submit
from dask_ferro.policy.scaling.step import ScalingParameters, step
from dask_ferro.slurm.job_lifecycle import BatchJob, Patience
from dask_ferro.slurm.parsing import TERMINAL, QueueRow

MOST = 4
BOUNDS = ScalingParameters(minimum=MOST, maximum=MOST)
# Ticks until a job starts.
STARTS = 1


class Toy:
    """A site whose jobs start and connect after some ticks, and a controller whose view of the queue a test sets."""

    def __init__(self, connected: int = 3) -> None:
        self.connected = connected
        self.now = 1000.0
        self.book: dict[str, BatchJob] = {}
        self.unproven: dict[str, BatchJob] = {}
        self.ages: dict[str, int] = {}
        self.dead: set[str] = set()
        self.listings: list[dict[str, QueueRow]] = [{}]
        self.surplus: dict[str, float] = {}
        self.submitted = 0

    @property
    def alive(self) -> set[str]:
        return self.ages.keys() - self.dead

    def truth(self) -> dict[str, QueueRow]:
        states = {
            i: "CANCELLED" if i in self.dead else "RUNNING" if age > STARTS else "PENDING"
            for i, age in self.ages.items()
        }
        return {i: QueueRow(i, state, submitted=1.0, starts=2.0) for i, state in states.items()}

    def tick(self, answer: str, age: int, second_answers: bool, dies: bool, seconds: float) -> None:
        self.now += seconds
        self.ages = {i: n + 1 for i, n in self.ages.items()}
        if dies and self.alive:
            self.dead.add(min(self.alive))
        self.listings.append(self.truth())
        if answer != "none":
            old = self.listings[max(len(self.listings) - 1 - age, 0)]
            self.follow({"true": self.truth(), "empty": {}, "old": old}[answer], second_answers)
        self.decide()

    def follow(self, rows: dict[str, QueueRow], second_answers: bool) -> None:
        """Do as `QueueFollower` does."""
        others = self.truth() if second_answers else {}
        names = {f"cpu-{i}" for i in self.alive if self.ages[i] > self.connected}
        for name, job in list(self.book.items()):
            row = rows.get(job.job_id) or others.get(job.job_id)
            if job.follow(row, names, self.now, Patience(), is_sure=False) is not None:
                assert name not in names
                del self.book[name]
                if row is None or row.phase != TERMINAL:
                    self.unproven[job.job_id] = job
        self.unproven = {i: job for i, job in self.unproven.items() if i not in self.dead}

    def decide(self) -> None:
        pool = Pool("cpu", lingering=len(self.unproven))
        jobs = tuple(
            Job(job.name, "cpu", PENDING if job.state == "submitting" else job.state, order=job.order)
            for job in self.book.values()
        )
        decision = step(ScalingFacts(self.now, (pool,), jobs), BOUNDS, self.surplus)
        self.surplus = dict(decision.surplus)
        for action in decision.actions:
            assert isinstance(action, Submit), action
            for _ in range(action.count):
                self.submitted += 1
                number = str(self.submitted)
                name = f"cpu-{number}"
                self.book[name] = BatchJob(name, "cpu", self.submitted, 1, self.now, number)
                self.ages[number] = 0


TICKS = st.tuples(
    st.sampled_from(["true", "empty", "old", "none"]),
    st.integers(0, 25),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([1.0, 1.0, 5.0, 40.0]),
)


# The queue is empty for eight minutes, and no other command replies.
SILENCE = [(("true", 0, True, False, 1.0), 1), (("empty", 0, False, False, 40.0), 12)]


@settings(deadline=None)
@example(100, SILENCE)
@given(st.sampled_from([2, 10, 100]), st.lists(st.tuples(TICKS, st.integers(1, 12)), min_size=1, max_size=8))
def test_no_more_jobs_are_there_than_the_maximum_whatever_squeue_says(connected, spells) -> None:
    """A queue that is true, empty, up to 25 looks old or silent; another command that replies or does not."""
    toy = Toy(connected)
    for tick, times in spells:
        for _ in range(times):
            toy.tick(*tick)
            assert len(toy.alive) <= MOST
    assert toy.submitted <= MOST + len(toy.dead)


def test_a_job_that_died_is_replaced_once_the_queue_says_so() -> None:
    toy = Toy()
    for dies in (False, False, False, False, True):
        toy.tick("true", 0, True, dies, 1.0)
    assert Counter(job.state for job in toy.book.values()) == {"running": 3, "submitting": 1}
    assert toy.submitted == MOST + 1
