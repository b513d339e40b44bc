"""Devices: what a task takes on them, in seconds and bytes, and where it may therefore go.  1 ms is 100 kB of link."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.policy.candidates import Candidates
from dask_ferro.policy.estimates import GUESS, Durations, Estimate, ResultSizes, Speed
from dask_ferro.policy.facts import Replica, TaskFacts, Worker
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.placement import NoWorker, PlacementParameters, Wait, WorkerChoice
from dask_ferro.policy.stealing.informed import InformedPolicy, Policy, StealingParameters, StealingState
from dask_ferro.policy.stealing.last_victim import LastVictim
from tests.policy.facts import (
    MB,
    FakeFacts,
    Stand,
    decided,
    free_links,
    needs,
    snapshot,
    stand,
    task,
    ways,
    where,
)

PLACEMENT = PlacementParameters(margin=0.002, light=MB)
SPEEDS = {"cpu": Speed(1e11, 1e10), "gpu": Speed(2e12, 1e12)}


def gpu(
    address: str,
    *queue: TaskFacts,
    room: int | None = None,
    most: int | None = None,
    host: str = "h",
    **facts: Any,
) -> Stand:
    """A worker that is a device, of so many free bytes of all that it has."""
    made = stand(address, *queue, host=host, **facts)
    most = room if most is None else most
    return made._replace(worker=made.worker._replace(device="gpu", room=room, most=most))


def both(key: object, cpu: float, gpu: float, **facts: Any) -> TaskFacts:
    """A task of known seconds on a CPU and on a GPU."""
    return task(key, cpu, others={"gpu": gpu}, **facts)


def on_gpu(key: object, gpu: float, cpu: float | None = None, **facts: Any) -> TaskFacts:
    """A task that waits on a GPU."""
    return task(key, gpu, device="gpu", others={} if cpu is None else {"cpu": cpu}, **facts)


# ---- seconds -----------------------------------------------------------------------------------------------


def taught(speeds: bool = True) -> Durations:
    """Durations that know both classes' speeds, the second 20 times the first."""
    return Durations(speeds=dict(SPEEDS) if speeds else {})


@pytest.mark.parametrize(
    ("annotated", "device", "wanted"),
    [
        pytest.param(0.2, "cpu", (0.2, True), id="annotated seconds are a CPU's"),
        pytest.param(0.2, "gpu", (0.01, True), id="a faster class takes what it is faster"),
        pytest.param(0.2, "tpu", (0.2, True), id="a class of unknown speed is as fast as a CPU"),
        pytest.param(Estimate(None, 4e10, 1e8), "cpu", (0.4, True), id="operations bound a dense one"),
        pytest.param(Estimate(None, 4e10, 1e8), "gpu", (0.02, True), id="and on the faster class as well"),
        pytest.param(Estimate(None, 4e7, 1e10), "cpu", (1.0, True), id="bytes bound a thin one"),
        pytest.param(Estimate(9.0, 4e10), "cpu", (0.4, True), id="operations are more than seconds"),
        pytest.param(Estimate(9.0, 4e10), "tpu", (9.0, True), id="seconds stand where the speed is unknown"),
        pytest.param(Estimate(), "gpu", (GUESS, False), id="an estimate of nothing is none"),
        pytest.param(Estimate(float("nan"), float("inf")), "gpu", (GUESS, False), id="nor one of no numbers"),
        pytest.param(None, "gpu", (GUESS, False), id="without one it is a guess"),
    ],
)
def test_what_a_task_says_of_itself(annotated: Any, device: str, wanted: tuple[float, bool]) -> None:
    assert taught().of("matmul", device, annotated) == pytest.approx(wanted)


def test_a_class_on_which_nothing_ran_is_told_from_another_until_something_did() -> None:
    known = taught()
    known.add("matmul", "cpu", 0.2)
    assert known.of("matmul", "gpu") == pytest.approx((0.01, True))
    assert known.is_provisional("matmul", "gpu")
    known.add("matmul", "gpu", 0.04)
    assert known.of("matmul", "gpu") == pytest.approx((0.04, True))
    assert not known.is_provisional("matmul", "gpu")


def test_without_speeds_another_class_tells_nothing() -> None:
    known = taught(speeds=False)
    known.add("matmul", "cpu", 0.2)
    assert known.of("matmul", "gpu") == (GUESS, False)


def test_an_estimate_is_corrected_by_class() -> None:
    known = taught()
    known.add("matmul", "gpu", 0.02, annotated=0.2)  # it takes twice what its class was projected to
    assert known.of("matmul", "gpu", 0.4) == pytest.approx((0.04, True))
    assert known.of("matmul", "cpu", 0.4) == pytest.approx((0.4, True))
    assert known.is_provisional("relu", "gpu", 0.4)
    assert not known.is_provisional("matmul", "gpu", 0.4)


def test_what_was_projected_from_another_class_says_nothing_of_the_worker() -> None:
    """A tenth of the speed that its class promised: the tasks behind it are projected anew, and nobody is slow."""
    book = Ledger(FakeFacts(), taught())
    book.durations.add("matmul", "cpu", 0.2)
    row = book.add_worker("a", 1, "h", "gpu")
    for key in range(12):
        book.assign(0.0, key, "a", "matmul", key)
    assert row.waiting_seconds == pytest.approx(11 * 0.01)
    book.finish(0.1, 0, 0.1)
    assert row.waiting_seconds == pytest.approx(10 * 0.1)
    assert row.slowness == 1.0


# ---- bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "room", "fits"),
    [
        pytest.param({"nbytes": MB}, None, True, id="anything, where nobody counts"),
        pytest.param({"nbytes": MB}, MB, True, id="as many bytes as are free"),
        pytest.param({"nbytes": MB + 1}, MB, False, id="not one more"),
        pytest.param({"inputs": (needs(MB, "x"),)}, MB - 1, False, id="not with an input that has to come"),
        pytest.param({"inputs": (needs(MB, "x", "g"),)}, 0, True, id="with an input that is there"),
        pytest.param({"nbytes": MB, "headroom": 1}, MB, False, id="not without room for what reads it"),
        pytest.param({}, -1, False, id="nothing, where too much was promised"),
    ],
)
def test_a_device_takes(facts: dict[str, Any], room: int | None, fits: bool) -> None:
    assert task("t", **facts).fits(gpu("g", room=room).worker) is fits


def test_a_result_is_as_large_as_the_largest_of_late() -> None:
    sizes = ResultSizes()
    assert sizes.of("load") is None
    sizes.add("load", 100)
    sizes.add("load", 10)
    assert sizes.of("load") == 91
    sizes.add("load", 200)
    assert sizes.of("load") == 200


@pytest.mark.parametrize(
    ("inputs", "device", "wanted"),
    [
        pytest.param([], 400, 100, id="a quarter of the device"),
        pytest.param([10, 250], 400, 250, id="or the largest input, if that is more"),
        pytest.param([], 0, 0, id="nothing where there is no device"),
    ],
)
def test_a_result_of_which_nobody_saw_the_like_is_thought_to_take(
    inputs: list[int], device: int, wanted: int
) -> None:
    assert ResultSizes().guess(inputs, device) == wanted


# ---- placement ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready", "stands", "wanted"),
    [
        pytest.param(both("t", 1.0, 0.05), [stand("c"), gpu("g")], "g", id="goes where it is faster"),
        pytest.param(both("t", 1.0, 0.05), [stand("c"), gpu("g", running=2.0)], "c", id="or where it is done earlier"),
        pytest.param(both("t", 1.0, 0.05), [stand("c"), gpu("g", running=0.5)], "g",
            id="waits in the queue of the faster one, if it is done earlier even so"),
        pytest.param(both("t", 1.0, 0.05, inputs=(needs(2 * MB, "c"),)), [stand("c"), stand("d"), gpu("g")], "g",
            id="leaves a large input for a faster class"),
        pytest.param(both("t", 0.06, 0.05, inputs=(needs(2 * MB, "c"),)), [stand("c"), stand("d"), gpu("g")], "c",
            id="stays, if the way takes longer than that gains"),
        pytest.param(both("t", 1.0, 0.05, inputs=(needs(90 * MB, "g"),)),
            [stand("c"), gpu("g", running=1.2)], "g", id="stays with what lies on its device"),
        pytest.param(both("t", 1.0, 0.05, must="cpu"), [stand("c", running=9.0), gpu("g")], "c", id="obeys a must"),
        pytest.param(both("t", 1.0, 0.05, must="gpu"), [stand("c")], Wait("device_memory_full"),
            id="waits for its class"),
        pytest.param(both("t", 0.01, 1.0, likes="gpu"), [stand("c"), gpu("g")], "g",
            id="goes where it would rather run"),
        pytest.param(both("t", 0.01, 1.0, likes="gpu"), [stand("c")], "c", id="goes elsewhere without that class"),
        pytest.param(both("t", 1.0, 0.05, nbytes=MB),
            [gpu("f", room=MB - 1, most=9 * MB, running=0.0), gpu("g", room=MB, most=9 * MB, running=0.3)], "g",
            id="goes to the device that has room"),
        pytest.param(both("t", 1.0, 0.05, nbytes=MB, inputs=(needs(2 * MB, "f"),)),
            [gpu("f", room=0, most=9 * MB, running=0.3), gpu("g", room=3 * MB, most=9 * MB)], "g",
            id="leaves its inputs where there is no room for more"),
        pytest.param(both("t", 1.0, 0.05, nbytes=MB), [stand("c"), gpu("g", room=0, most=9 * MB, running=0.3)],
            Wait("device_memory_full"),
            id="waits for room that is worth it"),
        pytest.param(both("t", 1.0, 0.05, nbytes=MB), [stand("c"), gpu("g", room=0, most=9 * MB, running=3.0)], "c",
            id="goes to another class, if that is earlier"),
        pytest.param(both("t", 1.0, 0.05, nbytes=MB), [gpu("g", room=0, most=9 * MB)], "g",
            id="is given to a full device that has nothing else to do and will spill"),
        pytest.param(both("t", 1.0, 0.05, nbytes=MB, waited=0.4), [gpu("g", room=0, most=9 * MB)],
            Wait("device_memory_full"),
            id="but not at once: what frees bytes may be on its way"),
        pytest.param(both("t", 1.0, 0.05, nbytes=MB), [gpu("g", room=0, most=MB, running=1.0)],
            Wait("device_memory_full"),
            id="waits where nothing else is"),
        pytest.param(task("t"), [stand("c", accepts=False)], NoWorker(), id="waits for no worker that is paused"),
        pytest.param(both("t", 1.0, 0.05, nbytes=9 * MB), [stand("c"), gpu("g", room=MB, most=MB)], "c",
            id="never to a device that is too small"),
        pytest.param(both("t", 1.0, 0.05, nbytes=9 * MB, must="gpu"), [gpu("g", room=MB, most=MB)], "g",
            id="but where none is larger, to learn what it says"),
    ],
)  # fmt: skip
def test_a_ready_task(ready: TaskFacts, stands: list[Stand], wanted: str | Wait | NoWorker) -> None:
    assert where(PLACEMENT.choose(ready, [s.worker for s in stands], free_links(), {})) == wanted


@pytest.mark.parametrize(
    ("worker", "tasks", "fast", "wanted"),
    [
        pytest.param(stand("c"), 40, gpu("g"), True, id="helps where the faster ones are longer at all of them"),
        pytest.param(stand("c"), 10, gpu("g"), False, id="does not where they are done before it"),
        pytest.param(stand("c"), 10, gpu("g", running=0.8), True, id="helps where they have much to do before"),
        pytest.param(stand("c"), 1, gpu("g", accepts=False), True, id="helps where they are paused"),
        pytest.param(stand("c"), 1, gpu("g", room=1, most=1), True, id="helps where they are too small"),
        pytest.param(gpu("g", slowness=3.0), 1, gpu("h"), True, id="always, if its class is the fastest"),
        pytest.param(gpu("g", room=1, most=9 * MB, running=0.0), 9, gpu("h"), False, id="not without room"),
        pytest.param(gpu("g", room=1, most=9 * MB), 9, gpu("h"), True, id="without room, if it has nothing else"),
        pytest.param(gpu("g", room=1, most=1), 9, stand("c"), False, id="not if it is too small and another is not"),
    ],
)  # fmt: skip
def test_of_what_is_queued_a_worker(worker: Stand, tasks: int, fast: Stand, wanted: bool) -> None:
    first = {s.worker.device: s.worker._replace(runs_dry_in=s.worker.starts_in) for s in (worker, fast)}
    accepting = [w for w in first.values() if w.accepts]
    ready = both("t", 1.0, 0.05, nbytes=MB)
    assert PLACEMENT.helps(ready, worker.worker, tasks, {"cpu": 4, "gpu": 1}, accepting) is wanted


# ---- stealing ----------------------------------------------------------------------------------------------


def steps(stands: list[Stand], hungry: list[str], **facts: Any) -> list[Any]:
    """Moves of the informed policy."""
    hosts = {s.worker.address: s.worker.host for s in stands}
    seen = snapshot(stands, hungry, links=facts.pop("links", None), hosts=hosts)
    return list(InformedPolicy(StealingParameters(**facts)).step(seen, StealingState()))


def queue(count: int, seconds: float = 0.1, **facts: Any) -> list[TaskFacts]:
    """So many tasks that wait on a GPU."""
    return [on_gpu(f"t{n}", seconds, **facts) for n in range(count)]


def test_no_task_is_stolen_that_does_not_fit() -> None:
    full, empty = (gpu("b", room=room, most=9 * MB) for room in (MB - 1, MB))
    victim = gpu("a", *queue(8, nbytes=MB), running=0.1)
    assert ways(steps([victim, full], ["b"])) == []
    assert ways(steps([victim, empty], ["b"], reach=9.0)) == [("t0", "a", "b")]


def test_stolen_tasks_take_room_together_with_their_inputs() -> None:
    tasks = [on_gpu(f"t{n}", 0.1, inputs=(Replica(MB, frozenset("a")),)) for n in range(8)]
    stands = [gpu("a", *tasks, running=0.1), gpu("b", room=3 * MB, most=9 * MB)]
    moves = steps(stands, ["b"], reach=9.0)
    assert [(move.key, move.nbytes) for move in moves] == [("t0", MB), ("t1", MB), ("t2", MB)]


@pytest.mark.parametrize(
    ("facts", "thief", "moved"),
    [
        pytest.param({}, stand("c"), 0, id="not to a CPU that would be longer at it than the queue is"),
        pytest.param({"cpu": 0.15}, stand("c"), 1, id="to a CPU that is done earlier"),
        pytest.param({"cpu": 0.15, "must": "gpu"}, stand("c"), 0, id="not against a must"),
        pytest.param({"cpu": 0.65}, stand("c"), 1, id="to a CPU that is done a little earlier"),
        pytest.param({"cpu": 0.65, "likes": "gpu"}, stand("c"), 0, id="not against a wish that outweighs it"),
        pytest.param({}, gpu("c"), 1, id="to another device"),
    ],
)
def test_of_a_device_a_task_is_stolen(facts: dict[str, Any], thief: Stand, moved: int) -> None:
    facts = {"cpu": 2.0, **facts}
    victim = gpu("a", *queue(6, **facts), running=0.1)
    assert len(steps([victim, thief], ["c"], reach=0.01)) == moved


@given(
    rooms=st.lists(st.integers(-MB, 5 * MB), min_size=1, max_size=4),
    sizes=st.lists(st.tuples(st.integers(0, 2 * MB), st.booleans()), min_size=1, max_size=20),
    informed=st.booleans(),
)
def test_what_moves_to_a_device_fits_there_all_together(
    rooms: list[int], sizes: list[tuple[int, bool]], informed: bool
) -> None:
    tasks = []
    for n, (nbytes, reads) in enumerate(sizes):
        inputs = (Replica(MB // 2, frozenset("a")),) if reads else ()
        tasks.append(on_gpu(n, 0.1, nbytes=nbytes, inputs=inputs))
    thieves = [gpu(f"b{n}", room=room, most=5 * MB) for n, room in enumerate(rooms)]
    policy: Policy = InformedPolicy(StealingParameters(reach=9.0)) if informed else LastVictim()
    hungry = [thief.worker.address for thief in thieves]
    moves = decided(policy, [gpu("a", *tasks, running=0.1), *thieves], hungry=hungry)
    for thief, room in zip(thieves, rooms, strict=True):
        own = [move.nbytes for move in moves if move.thief == thief.worker.address]
        assert sum(own) <= max(room, 0)
        assert not own or room >= 0


@given(
    rooms=st.lists(st.one_of(st.none(), st.integers(0, 3 * MB)), min_size=1, max_size=5),
    running=st.lists(st.one_of(st.none(), st.floats(0.0, 2.0)), min_size=5, max_size=5),
    nbytes=st.integers(0, 4 * MB),
    headroom=st.integers(0, MB),
)
def test_nobody_with_something_to_do_is_given_what_does_not_fit(
    rooms: list[int | None], running: list[float | None], nbytes: int, headroom: int
) -> None:
    stands = [
        stand(f"w{n}", running=left) if room is None else gpu(f"w{n}", room=room, most=3 * MB, running=left)
        for n, (room, left) in enumerate(zip(rooms, running, strict=False))
    ]
    ready = both("t", 1.0, 0.05, nbytes=nbytes, headroom=headroom)
    workers: list[Worker] = [s.worker for s in stands]
    answer = PLACEMENT.choose(ready, workers, free_links(), {})
    if not isinstance(answer, WorkerChoice):
        assert answer == Wait("device_memory_full")
        return
    worker = next(w for w in workers if w.address == answer.worker)
    assert ready.fits(worker) or worker.busy == 0 or all(nbytes > (w.most or 0) for w in workers)


# ---- the book ----------------------------------------------------------------------------------------------


def book(live: dict[str, int], **most: int | None) -> Ledger:
    """A ledger of one-thread GPUs that knows what 10 ms tasks take."""
    made = Ledger(FakeFacts(live))
    made.durations.add("t", "gpu", 0.01)
    for address, total in most.items():
        made.add_worker(address, 1, "h", "gpu")
        made.set_memory(address, total)
    return made


def test_room_is_what_is_there_less_what_lies_there_and_what_was_promised() -> None:
    live = {"a": 100}
    made = book(live, a=1000)
    made.assign(0.0, "x", "a", "t", 0, nbytes=200)
    made.assign(0.0, "y", "a", "t", 1, nbytes=50)
    assert made.worker("a", 0.0).room == 650
    live["a"] = 300
    made.finish(0.01, "x", 0.01)  # its result lies there now
    assert made.worker("a", 0.0).room == 650
    assert made.worker("a", 0.0).most == 1000


def test_a_move_promises_its_bytes_and_its_inputs_to_the_thief() -> None:
    made = book({"a": 0, "b": 0}, a=1000, b=1000)
    for key in range(3):
        made.assign(0.0, key, "a", "t", key, nbytes=100)
    made.request(0.0, 2, "b", moving=40)
    assert [made.worker(address, 0.0).room for address in "ab"] == [800, 860]
    made.confirm(0.0, 2)  # from now on, Dask's books say what has to come
    assert [made.worker(address, 0.0).room for address in "ab"] == [800, 900]
    made.request(0.0, 1, "b", moving=40)
    made.refuse(0.0, 1)
    assert [made.worker(address, 0.0).room for address in "ab"] == [800, 900]


def test_a_worker_whose_bytes_nobody_counts_has_no_room_to_speak_of() -> None:
    made = book({}, a=None)
    assert made.worker("a", 0.0).room is None
    assert not made.counts_bytes


@pytest.mark.parametrize("many", [0, 30])
def test_the_soonest_are_those_of_each_class_that_have_room(many: int) -> None:
    made = book({f"g{n}": 0 for n in range(4)}, g0=100, g1=1000, g2=1000, g3=1000)
    for n in range(many):
        made.add_worker(f"c{n:02d}", 1, "h", "cpu", accepts=False)
    made.add_worker("d", 1, "h", "cpu")
    made.assign(0.0, "x", "g1", "t", 0)
    assert [w.address for w in made.soonest(0.0, 1)] == ["d", "g0"]
    assert [w.address for w in made.soonest(0.0, 2, room=500)] == ["d", "g2", "g3"]


def test_a_device_with_room_is_weighed_behind_many_without() -> None:
    full = {f"g{n}": 1000 for n in range(PLACEMENT.candidates + 1)}
    made = book(full, **full, roomy=1000)
    made.assign(0.0, "x", "roomy", "t", 0)
    weighed = Candidates(made, free_links(), PLACEMENT, is_open=lambda address: True)
    ready = task("y", 0.01, device="gpu", nbytes=500)
    found = weighed.candidates(ready, {}, 0, priority=1, now=0.0)
    assert where(weighed.choose(ready, found, fresh=0.0)) == "roomy"
