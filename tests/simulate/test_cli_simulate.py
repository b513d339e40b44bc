"""`dask ferro simulate`, called as a shell calls it."""

import json

import pytest
from click.testing import CliRunner
from simulated.generators import build

from dask_ferro.cli import main
from dask_ferro.simulate.cluster import VirtualCluster
from dask_ferro.simulate.compare import of_trace
from dask_ferro.simulate.engine import simulate
from tests.clusters import tuned

WORKFLOW = {
    "name": "two",
    "workflow": {
        "specification": {
            "tasks": [{"name": "first_1", "id": "1", "children": ["2"]}, {"name": "second_2", "id": "2"}]
        },
        "execution": {"tasks": [{"id": "1", "runtimeInSeconds": 2.0}, {"id": "2", "runtimeInSeconds": 3.0}]},
    },
}


def call(*arguments):
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)], prog_name="dask ferro")


def compared(*arguments):
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A function that returns a file with the run of a graph."""
    folder = tmp_path_factory.mktemp("recorded")

    def save(name, **params):
        path = folder / f"{name}.ferrotrace"
        simulate(build(name, **params), VirtualCluster.local(4), policy="none").save(path)
        return path

    return save


def test_what_the_plugin_is_set_to_holds_in_the_simulator_too(recorded):
    graph = ("--graph", recorded("sparse-gemm"), "--workers", 8, "--policy", "informed")
    assert compared(*graph)["rows"][0]["confirmed"] > 10
    with tuned(margin=1000.0):
        assert compared(*graph)["rows"][0]["confirmed"] == 0


def test_a_graph_is_compared_under_every_policy_that_was_named(recorded):
    found = compared("--graph", recorded("cholesky"), "--workers", 8, "--policy", "informed,none")
    assert [row["policy"] for row in found["rows"]] == ["informed", "none"]
    assert (found["graph"], found["tasks"], found["threads"]) == ("cholesky.ferrotrace", 220, 8)
    assert all(1 < row["over_lower_bound"] < 1.4 for row in found["rows"])


def test_the_table_has_a_line_for_each_policy(recorded):
    done = call("--graph", recorded("skew", tasks=20), "--policy", "informed,none")
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["graph", "skew.ferrotrace,", "20", "tasks"] in lines
    assert [line[0] for line in lines if line and line[0] in ("informed", "none")] == ["informed", "none"]


def test_workers_and_threads_reach_the_cluster(recorded):
    graph = recorded("straggler", tasks=12, seconds=0.5)
    found = compared("--graph", graph, "--threads", 3, "--workers", 2, "--policy", "none")
    assert (found["tasks"], found["threads"], found["lower_bound"]) == (12, 6, pytest.approx(1.0))


def test_a_recorded_run_is_simulated_again(tmp_path):
    trace = simulate(build("gemm"), VirtualCluster.local(4), policy="none")
    trace.save(tmp_path / "run.ferrotrace.gz")
    found = compared("--graph", tmp_path / "run.ferrotrace.gz", "--workers", 4, "--policy", "none")
    assert found["tasks"] == len(trace.tasks)
    assert found["rows"][0]["makespan"] == pytest.approx(trace.counts["elapsed"], rel=0.03)


def test_what_a_trace_read_from_outside_is_left_out():
    trace = simulate(build("pinned"), VirtualCluster.local(2))
    cut = trace.__class__(tasks=trace.tasks[10:])
    assert len(of_trace(cut).tasks) == len(trace.tasks) - 10


def test_a_workflow_of_wfcommons_is_simulated(tmp_path):
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(WORKFLOW))
    (row,) = compared("--graph", path, "--policy", "none")["rows"]
    assert row["makespan"] == pytest.approx(5.0, rel=0.01)


def test_equal_seeds_print_equal_figures(recorded):
    arguments = ("--graph", recorded("skew"), "--policy", "last-victim", "--seed", 3)
    assert compared(*arguments) == compared(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((), "'--graph'", id="nothing to simulate"),
        pytest.param(("--graph", "THIS", "--policy", "best"), "no policy 'best'", id="no such policy"),
        pytest.param(("--graph", "THIS", "--workers", "0"), "--workers", id="no workers"),
        pytest.param(("--graph", "THIS"), "THIS", id="a file that is no graph"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_one_line_and_status_two(tmp_path, arguments, message):
    path = tmp_path / "THIS.json"
    path.write_text("[]")
    done = call(*(path if a == "THIS" else a for a in arguments))
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_graph_is_compared_in_bundles_too(recorded):
    graph = recorded("chains", seconds=0.001)
    names, seconds = zip(
        *((row["policy"], row["makespan"]) for row in compared("--graph", graph, "--bundles")["rows"]),
        strict=True,
    )
    assert names[:3] == ("informed", "last-victim", "none")
    assert names[3].startswith("informed, ")
    assert names[3].endswith(" bundles")
    assert seconds[3] < seconds[0]
