"""Graphs with bundles: the same results as without, for any graph, and the keys that others rely on."""

from __future__ import annotations

import pickle
import random
import sys
from collections import Counter
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from dask.core import get_dependencies
from dask.local import get_sync
from distributed.utils import key_split_group

from dask_ferro.flow.member import is_ours, is_pick, share_of
from dask_ferro.flow.run import Share
from dask_ferro.flow.task_cost import TaskCost
from dask_ferro.lower.bundling.choice import HeldResult, _ranks, choose, find_needed
from dask_ferro.lower.bundling.rewrite import PICK_BYTES, reuse_bundles, rewrite_graph
from dask_ferro.lower.upstream import Alias, DataNode, GraphNode, List, Task, TaskRef, references
from tests.each import each, every
from tests.lower.bundling.graphs import facts, random_graph, random_wanted, told
from tests.programs import ran

ROOT = Path(__file__).parents[3]


def chain(length: int, name: str = "inc") -> dict[Any, GraphNode]:
    tasks = [Task((name, 0), told, name)]
    tasks += [Task((name, i), told, name, TaskRef((name, i - 1))) for i in range(1, length)]
    return {task.key: task for task in tasks}


def programs(graph: dict[Any, Any]) -> list[Share]:
    return [share for task in graph.values() if (share := share_of(task)) is not None]


def test_any_graph_gives_the_same_results_in_bundles() -> None:
    each(range(1000), lambda seed: _check_bundled(random.Random(seed)))


def _check_bundled(rng: random.Random) -> None:
    graph = random_graph(rng)
    wanted = random_wanted(rng, graph)
    annotations = {"priority": {key: rng.choice([1, 2]) for key in rng.sample(list(graph), len(graph) // 3)}}
    holds, workers = rng.choice([1e9, 1e3]), rng.choice([1, 2, 8])
    known = facts(rng, seconds=10.0 ** rng.uniform(-6, -1), workers=workers, holds=holds)
    made = rewrite_graph(graph, wanted, annotations, known)
    # As it is sent to workers.
    sent = pickle.loads(pickle.dumps(made.graph))
    assert get_sync(sent, wanted) == get_sync(graph, wanted)
    assert set(wanted) <= set(sent)
    for program in programs(made.graph):
        told_of = {annotations["priority"].get(task.key) for task in program.tasks}
        assert len(told_of) == 1
    runs = Counter(task.key for program in programs(made.graph) for task in program.tasks)
    assert not runs or max(runs.values()) == 1


@every("at", range(5))
@every("kind", ["task", "data", "alias", "list"])
def test_a_task_under_another_key_than_its_own(at: int, kind: str) -> None:
    """Dask's dataframes make such graphs: `df.isin([1, 2])` has a delayed value under a key of its own."""
    graph = chain(5)
    before = [TaskRef(("inc", at - 1))] if at else []
    if kind == "task":
        graph["inc", at] = Task("other", told, "inc", *before)
    elif kind == "data":
        graph["inc", at] = DataNode("other", 7)
    elif kind == "list":
        # It has no key at all.
        graph["inc", at] = List(*before)
    elif at:
        graph["inc", at] = Alias("other", ("inc", at - 1))
    wanted = [("inc", 4), ("inc", at)]
    made = rewrite_graph(graph, wanted, {}, facts()).graph
    sent = pickle.loads(pickle.dumps(made))
    # Data takes no time, so that too little is left to be bundled.
    assert programs(made) or kind == "data"
    assert get_sync(sent, wanted) == get_sync(graph, wanted)


def test_roots_are_projected_to_run_when_nothing_else_is_ready() -> None:
    places = _ranks([[], [0], [], [2], [1, 3]])
    assert sorted(range(5), key=places.__getitem__)[3:] in ([0, 2], [2, 0])


def test_what_nobody_needs_is_left_out() -> None:
    graph = {**chain(3), **chain(3, "other")}
    made = rewrite_graph(graph, [("inc", 2)], {}, facts()).graph
    assert list(made) == [("inc", 2)]


def test_each_wanted_key_has_a_task() -> None:
    graph = chain(6)
    wanted = [("inc", 1), ("inc", 3), ("inc", 5)]
    made = rewrite_graph(graph, wanted, {}, facts()).graph
    assert set(wanted) <= set(made)
    assert get_sync(made, wanted) == get_sync(graph, wanted)


def test_no_task_is_bundled_whose_cost_is_not_known() -> None:
    graph = chain(5)
    known = facts()
    unknown = facts(existing=known.existing)
    made = rewrite_graph(graph, [("inc", 4)], {}, replace(known, cost=lambda key: None)).graph
    assert made == graph
    assert unknown.cost(("inc", 1)) == TaskCost(1e-3, 28)


async def coroutine(value: Any) -> Any:
    return value


def test_a_coroutine_is_by_itself() -> None:
    graph = chain(8)
    graph["waits"] = Task("waits", coroutine, TaskRef(("inc", 7)))
    graph["end"] = Task("end", told, "end", TaskRef("waits"))
    made = rewrite_graph(graph, ["end"], {}, facts()).graph
    assert made["waits"].func is coroutine
    assert len(made) == 3


class Barrier(Task):  # type: ignore[misc]
    """A task as the barrier of Dask's shuffles."""

    @property
    def block_fusion(self) -> bool:
        return True


def test_what_dask_forbids_to_fuse_is_by_itself_and_so_is_what_is_next_to_it() -> None:
    graph = {**chain(4)}
    graph["barrier"] = Barrier("barrier", told, "barrier", TaskRef(("inc", 3)))
    graph["read"] = Task("read", told, "read", TaskRef("barrier"))
    graph["end"] = Task("end", told, "end", TaskRef("read"))
    choice = choose(graph, ["end"], {}, facts())
    alone = {choice.tasks.order[b[0]] for b in choice.bundles if len(b) == 1}
    assert {("inc", 3), "barrier", "read"} <= alone


@pytest.mark.parametrize("name", ["workers", "resources", "priority", "allow_other_workers"])
def test_tasks_of_different_annotations_are_not_in_one_bundle(name: str) -> None:
    values = {**{("inc", i): "a" for i in range(4, 8)}, ("inc", 8): "b"}
    made = rewrite_graph(chain(12), [("inc", 11)], {name: values}, facts())
    groups = [tuple(task.key[1] for task in program.tasks) for program in programs(made.graph)]
    assert (0, 1, 2, 3) in groups
    assert (4, 5, 6, 7) in groups
    assert made.annotations[name][("inc", 8)] == "b"
    assert sorted(map(str, made.annotations[name].values())) == ["a", "b"]


@pytest.mark.parametrize(
    ("own", "common", "alone"),
    [
        ({("inc", 6): 2}, {}, [6]),
        ({}, {"retries": 2}, [*range(24)]),
        ({("inc", i): 0 for i in range(18)}, {"retries": 2}, [*range(18, 24)]),
        ({}, {"retries": lambda key: 3 * (key[1] == 23)}, [23]),
    ],
)
def test_a_task_with_retries_is_by_itself(
    own: dict[Any, int], common: dict[str, Any], alone: list[int]
) -> None:
    made = rewrite_graph(chain(24), [("inc", 23)], {"retries": own}, facts(), common).graph
    inside = {task.key[1] for program in programs(made) for task in program.tasks}
    assert sorted(set(range(24)) - inside) == alone


def test_estimates_of_one_task_are_not_those_of_a_bundle() -> None:
    said = {("inc", i): {"seconds": 1.0, "flops": 1e9, "require": "gpu"} for i in range(5)}
    made = rewrite_graph(chain(5), [("inc", 4)], {"ferro": said}, facts(seconds=2e-3))
    assert made.annotations["ferro"]["inc", 4] == {"seconds": pytest.approx(0.01), "require": "gpu"}


def diamond() -> dict[Any, GraphNode]:
    """Return two results of one chain, each read by a task of another annotation."""
    graph = chain(30)
    graph["left"] = Task("left", told, "left", TaskRef(("inc", 14)))
    graph["right"] = Task("right", told, "right", TaskRef(("inc", 29)))
    graph["end"] = Task("end", told, "end", TaskRef("left"), TaskRef("right"))
    return graph


@pytest.mark.parametrize(("nbytes", "picks"), [(28.0, 0), (4.0 * PICK_BYTES, 2)])
def test_small_results_are_read_from_the_tuple_and_large_ones_are_picked(nbytes: float, picks: int) -> None:
    graph = diamond()
    notes = {"resources": {"left": {"A": 1}, "right": {"B": 1}, "end": {"C": 1}}}
    costed = replace(facts(workers=1), cost=lambda key: TaskCost(1e-4, nbytes), holds=1e12)
    made = rewrite_graph(graph, ["end"], notes, costed).graph
    assert get_sync(made, "end") == get_sync(graph, "end")
    assert sum(is_pick(task) for task in made.values()) == picks


# ---- what the scheduler has already --------------------------------------------------------------------------


def test_keys_of_the_scheduler_keep_their_tasks_and_all_behind_them() -> None:
    graph = chain(6)
    had = rewrite_graph(chain(3), [("inc", 2)], {}, facts()).graph
    made = rewrite_graph(graph, [("inc", 5)], {}, facts(existing=had.get)).graph
    assert made["inc", 2] is had["inc", 2]
    assert [t.key[1] for t in made["inc", 5].args[0].tasks] == [3, 4, 5]
    assert get_sync(made, ("inc", 5)) == get_sync(graph, ("inc", 5))


def test_any_second_graph_reads_what_the_first_one_made() -> None:
    each(range(300), lambda seed: _check_second(random.Random(seed)))


def _check_second(rng: random.Random) -> None:
    graph = random_graph(rng)
    first = rewrite_graph(graph, random_wanted(rng, graph), {}, facts(rng)).graph
    wanted = random_wanted(rng, graph)
    second = rewrite_graph(graph, wanted, {}, facts(rng, existing=first.get)).graph
    assert get_sync(second, wanted) == get_sync(graph, wanted)
    # The scheduler takes another task of a known key for a mistake.
    assert all(second[key] is first[key] for key in second if key in first)
    # Without bundles, too.
    culled = {key: graph[key] for key in find_needed(graph, wanted, lambda key: None, lambda key: None).order}
    stock = reuse_bundles(graph, wanted, first.get, lambda key: None) or culled
    assert get_sync(stock, wanted) == get_sync(graph, wanted)
    for key in stock:
        if key in first and any(is_ours(first.get(dep)) for dep in (key, *first[key].dependencies)):
            assert stock[key] is first[key]


def test_a_task_that_the_scheduler_forgets_meanwhile_is_taken_from_the_graph() -> None:
    graph = chain(6)
    had = dict(graph)

    def existing(key: Any) -> GraphNode | None:
        # Another client releases them: each is there once.
        return had.pop(key, None) if key[1] == 3 else None

    made = rewrite_graph(graph, [("inc", 5)], {}, facts(existing=existing)).graph
    assert get_sync(made, ("inc", 5)) == get_sync(graph, ("inc", 5))


def test_tasks_whose_inputs_are_on_different_workers_are_not_in_one_bundle() -> None:
    graph: dict[Any, GraphNode] = {
        ("part", i): Task(("part", i), told, "part", TaskRef(("x", i))) for i in range(20)
    }
    graph["sum"] = Task("sum", told, "sum", *map(TaskRef, list(graph)))

    def held(key: Any) -> HeldResult | None:
        return HeldResult(1e8, (f"worker-{key[1] % 2}",)) if key[0] == "x" else None

    made = rewrite_graph(graph, ["sum"], {}, facts(held=held)).graph
    reads = [task.args[1] for task in made.values() if share_of(task) is not None]
    sources = [{read.key[1] % 2 for read in own if read.key[0] == "x"} for own in reads]
    assert len(made) < 20
    assert all(len(workers) <= 1 for workers in sources)


def test_large_data_in_a_graph_stays_by_itself() -> None:
    graph: dict[Any, GraphNode] = {("x", i): DataNode(("x", i), bytes(100_000)) for i in range(8)}
    graph |= {("y", i): Task(("y", i), len, TaskRef(("x", i))) for i in range(8)}
    graph["sum"] = Task("sum", told, "sum", *(TaskRef(("y", i)) for i in range(8)))
    made = rewrite_graph(graph, ["sum"], {}, facts()).graph
    assert set(graph) <= set(made)


def test_a_graph_of_more_results_than_there_is_room_for_is_left_as_it_is() -> None:
    graph = chain(5)
    assert rewrite_graph(graph, [("inc", 4)], {}, facts(memory=4 * 28.0)).graph == graph
    assert rewrite_graph(graph, [("inc", 4)], {}, facts(memory=5 * 28.0)).graph != graph


def test_where_inputs_are_is_asked_for_several_tasks_and_not_for_one() -> None:
    asked: list[Any] = []
    graph: dict[Any, GraphNode] = {i: Task(i, told, i, TaskRef("x")) for i in range(2)}
    for wanted, times in (([0], 0), ([0, 1], 2)):
        asked.clear()
        made = rewrite_graph(graph, wanted, {}, facts(held=asked.append))
        assert (made.graph, asked) == ({i: graph[i] for i in wanted}, ["x"] * times)


@pytest.mark.parametrize(("allowance", "is_flow"), [(8.0e6, False), (8.1e6, True)])
def test_a_flow_has_room_for_its_inputs(allowance: float, is_flow: bool) -> None:
    """Those with retries are by themselves, and in memory until the last member has ended."""
    graph: dict[Any, GraphNode] = {("x", i): Task(("x", i), told, "x") for i in range(8)}
    for i in range(64):
        reads = [("x", i % 8), *([("y", i - 8)] if i >= 8 else [])]
        graph["y", i] = Task(("y", i), told, "y", *map(TaskRef, reads))
    ends = [("y", i) for i in range(56, 64)]
    known = replace(
        facts(seconds=1e-2, members=2, allowance=allowance),
        cost=lambda key: TaskCost(1e-2, 1e6 if key[0] == "x" else 28),
    )
    chosen = choose(graph, ends, {"retries": {("x", i): 1 for i in range(8)}}, known)
    assert bool(chosen.flows) == is_flow


@every(
    ("seconds", "unknown", "limits", "count"),
    [
        pytest.param(1e-3, (), {}, 1, id="as long as a flow may last"),
        pytest.param(0.1, (), {}, 4, id="too long for three"),
        pytest.param(0.1, (), {"workers": 2, "members": 0}, 0, id="no members"),
        pytest.param(0.02, (("s", 20, 0),), {}, 2, id="a task of unknown cost in the midst"),
        pytest.param(1e-3, (("s", 20, 0),), {}, 0, id="too short for two flows"),
        pytest.param(0.05, (), {"allowance": 28.0 * 100}, 2, id="room for some rows"),
        pytest.param(0.05, (), {"allowance": 28.0 * 8}, 0, id="no room for a row"),
    ],
)
def test_a_graph_is_as_many_flows_as_it_needs(
    seconds: float, unknown: tuple[Any, ...], limits: dict[str, Any], count: int
) -> None:
    graph: dict[Any, GraphNode] = {}
    for s in range(40):
        for x in range(8):
            reads = [TaskRef(("s", s - 1, y)) for y in (x - 1, x, x + 1) if s and 0 <= y < 8]
            graph["s", s, x] = Task(("s", s, x), told, "s", *reads)
    known = replace(
        facts(seconds=seconds, **{"members": 2, **limits}),
        cost=lambda key: None if key in unknown else TaskCost(seconds, 28),
    )
    chosen = choose(graph, [("s", 39, x) for x in range(8)], {}, known)
    assert len(chosen.flows) == count
    inside = [i for flow in chosen.flows for i in flow.tasks]
    assert sorted([*inside, *(i for part in chosen.bundles for i in part)]) == list(
        range(len(chosen.tasks.order))
    )


def test_tasks_of_different_spans_are_of_different_groups() -> None:
    graph = {**chain(40, "a"), **chain(40, "a2")}
    graph["end"] = Task("end", told, "end", TaskRef(("a", 39)), TaskRef(("a2", 39)))
    spans = {key: {"name": "first" if key[0] == "a" else "second"} for key in graph if key != "end"}
    made = rewrite_graph(graph, ["end"], {"span": spans}, facts(seconds=0.02))
    found: dict[str, set[str]] = {}
    for key, span in made.annotations["span"].items():
        found.setdefault(key_split_group(key), set()).add(span["name"])
    assert all(len(names) == 1 for names in found.values())


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_same_graph_has_the_same_bundles_in_every_process(hash_seed: str) -> None:
    program = (
        "from tests.lower.bundling.graphs import facts, told\n"
        "from dask_ferro.lower.bundling.choice import choose\n"
        "from dask_ferro.lower.upstream import Task, TaskRef\n"
        "graph = {('s', 0, i): Task(('s', 0, i), told, 's') for i in range(20)}\n"
        "for t in range(1, 10):\n"
        "    for i in range(20):\n"
        "        reads = [TaskRef(('s', t - 1, j)) for j in (i - 1, i, i + 1) if 0 <= j < 20]\n"
        "        graph['s', t, i] = Task(('s', t, i), told, 's', *reads)\n"
        "wanted = [('s', 9, i) for i in range(20)]\n"
        "choice = choose(graph, wanted, {}, facts())\n"
        "print([[choice.tasks.order[i] for i in b] for b in choice.bundles])\n"
    )
    run = ran([sys.executable, "-c", program], cwd=ROOT, env={"PYTHONHASHSEED": hash_seed})
    other = ran([sys.executable, "-c", program], cwd=ROOT, env={"PYTHONHASHSEED": "3"})
    assert run.stdout == other.stdout != ""


def test_a_graph_is_planned_once_under_whatever_names() -> None:
    """Dask's delayed values have other names at each call, whose order says nothing."""
    known = facts(seconds=1e-2, members=2)
    flows = []
    for _ in range(3):
        row = [Task(uuid4().hex, told, "s") for _ in range(8)]
        graph: dict[Any, GraphNode] = {task.key: task for task in row}
        for _ in range(10):
            reads = [[TaskRef(task.key) for task in row[max(i - 1, 0) : i + 2]] for i in range(8)]
            row = [Task(uuid4().hex, told, "s", near[0], more=List(*near[1:])) for near in reads]
            row = [Task.fuse(task, Task(uuid4().hex, told, "s", TaskRef(task.key))) for task in row]
            graph |= {task.key: task for task in row}
        choice = choose(graph, [task.key for task in row], {}, known)
        flows.append(choice.flows)
    assert flows[0]
    assert all(flow is flows[0] for flow in flows)


def test_what_a_fused_task_reads_may_have_another_name_inside() -> None:
    inner = Task("inner", told, "s", TaskRef("y"), more=List(TaskRef("x"), TaskRef("z")))
    fused = Task.fuse(inner, Task("outer", told, "s", TaskRef("inner"))).substitute({"x": "a", "y": "b"})
    assert list(references(fused)) == ["b", "a", "z"]


def test_a_chain_longer_than_pythons_stack_is_no_trouble() -> None:
    graph = chain(5000)
    made = rewrite_graph(graph, [("inc", 4999)], {}, facts(seconds=1e-6)).graph
    assert get_sync(made, ("inc", 4999))[0] == "inc"
    assert get_dependencies(made, next(iter(made))) is not None


def test_a_key_outside_of_the_graph_is_an_input() -> None:
    # A future's.
    graph = {"end": Task("end", add, TaskRef("future"), 1), "more": Task("more", add, TaskRef("end"), 1)}
    made = rewrite_graph(graph, ["more"], {}, facts()).graph
    assert made["more"].dependencies == {"future"}
