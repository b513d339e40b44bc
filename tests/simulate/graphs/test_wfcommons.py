"""WfCommons instances as graphs; a bad file is refused by name at its first problem."""

from __future__ import annotations

import copy
import json
from contextlib import suppress

import pytest
from dask.utils import key_split
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.errors import InputError
from dask_ferro.simulate.graphs.wfcommons import load

# A workflow of our own: one split, two searches, one merge.
SPECIFIED = {
    "name": "search",
    "schemaVersion": "1.5",
    "workflow": {
        "specification": {
            "tasks": [
                {"name": "merge_ID04", "id": "merge_ID04", "parents": ["look_up_ID02", "look_up_ID03"],
                 "children": [], "inputFiles": ["a.out", "b.out"], "outputFiles": ["all.out"]},
                {"name": "split_ID01", "id": "split_ID01", "parents": [],
                 "children": ["look_up_ID02", "look_up_ID03"],
                 "inputFiles": ["in.fasta"], "outputFiles": ["a", "b"]},
                {"name": "look_up_ID02", "id": "look_up_ID02", "parents": ["split_ID01"],
                 "children": ["merge_ID04"], "inputFiles": ["a"], "outputFiles": ["a.out"]},
                {"name": "look_up_ID03", "id": "look_up_ID03", "parents": ["split_ID01"],
                 "children": ["merge_ID04"], "inputFiles": ["b"], "outputFiles": ["b.out"]},
            ],
            "files": [
                {"id": "in.fasta", "sizeInBytes": 900}, {"id": "a", "sizeInBytes": 500},
                {"id": "b", "sizeInBytes": 400}, {"id": "a.out", "sizeInBytes": 10},
                {"id": "b.out", "sizeInBytes": 20}, {"id": "all.out", "sizeInBytes": 30},
            ],
        },
        "execution": {
            "makespanInSeconds": 9.0,
            "tasks": [
                {"id": "split_ID01", "runtimeInSeconds": 1.5},
                {"id": "look_up_ID02", "runtimeInSeconds": 4},
                {"id": "look_up_ID03", "runtimeInSeconds": 5.0},
                {"id": "merge_ID04", "runtimeInSeconds": 0.5},
            ],
        },
    },
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "instance.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write


def test_a_workflow_is_a_graph(written):
    graph = load(written(SPECIFIED))
    assert graph.name == "search"
    assert [(t.prefix, t.seconds, t.nbytes) for t in sorted(graph.tasks, key=lambda t: t.seconds)] == [
        ("merge", 0.5, 30),
        ("split", 1.5, 900),
        ("look-up", 4.0, 10),
        ("look-up", 5.0, 20),
    ]
    assert graph.work == 11.0
    assert graph.critical_path == 7.0
    assert all(key_split(t.key) == t.prefix for t in graph.tasks)


def test_tasks_stand_after_their_parents_whatever_the_order_of_the_file(written):
    graph = load(written(SPECIFIED))
    place = {task.key: index for index, task in enumerate(graph.tasks)}
    assert all(place[d] < place[t.key] for t in graph.tasks for d in t.dependencies)
    assert [len(t.dependencies) for t in graph.tasks] == [0, 1, 1, 2]


def test_children_alone_make_the_edges_too(written):
    content = copy.deepcopy(SPECIFIED)
    for task in content["workflow"]["specification"]["tasks"]:
        task["parents"] = []
    assert load(written(content)).critical_path == 7.0


def broken(change):
    content = copy.deepcopy(SPECIFIED)
    change(content["workflow"]["specification"]["tasks"], content["workflow"]["execution"]["tasks"])
    return content


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param("{", "wanted a WfCommons instance of version 1.5 (JSONDecodeError", id="not JSON"),
        pytest.param("[" * 100_000, "(RecursionError", id="lists in lists"),
        pytest.param([], "(TypeError", id="not an object"),
        pytest.param({"workflow": {"tasks": []}}, "version 1.5 (KeyError: 'specification')", id="of version 1.4"),
        pytest.param(broken(lambda tasks, _: tasks.clear()), "it has no tasks", id="an empty workflow"),
        pytest.param(broken(lambda tasks, _: tasks.append(3)), "(TypeError", id="a task that is none"),
        pytest.param(broken(lambda tasks, _: tasks[0].update(parents=["look_up_ID09"])),
            "task merge_ID04: parents or children have 'look_up_ID09', which is no task", id="an unknown parent"),
        pytest.param(broken(lambda tasks, _: tasks.append(tasks[0])), "an id of a task occurs twice",
            id="a task twice"),
        pytest.param(broken(lambda tasks, _: tasks[1].update(parents=["merge_ID04"])), "tasks wait for each other",
            id="a circle"),
        pytest.param(broken(lambda _, measured: measured.pop()), "task merge_ID04: runtimeInSeconds is None",
            id="never measured"),
        pytest.param(broken(lambda _, measured: measured[0].update(runtimeInSeconds=-1)),
            "task split_ID01: runtimeInSeconds is -1, wanted a number from 0", id="a negative duration"),
        pytest.param(broken(lambda tasks, _: tasks[0].update(outputFiles=["lost"])),
            "task merge_ID04: size of file 'lost' is None", id="a file without a size"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_what_is_wrong(written, content, told):
    with pytest.raises(InputError) as refused:
        load(written(content))
    assert told in str(refused.value)
    assert "instance.json" in str(refused.value)


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.json' cannot be read: No such file"):
        load(tmp_path / "nowhere.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("name", "id", "parents", "children", "outputFiles")


@given(st.integers(0, 3), st.sampled_from(FIELDS), JSON)
def test_whatever_stands_in_a_field_the_answer_is_a_graph_or_a_refusal(tmp_path_factory, index, field, value):
    content = broken(lambda tasks, _: tasks[index].update({field: value}))
    path = tmp_path_factory.mktemp("instance") / "instance.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    graph = None
    with suppress(InputError):
        graph = load(path)
    assert graph is None or len(graph.tasks) == 4
