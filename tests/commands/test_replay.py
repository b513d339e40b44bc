"""`dask ferro replay`: a recorded run, and what other policies make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from simulated.generators import build

from dask_ferro.commands.replay import replay as command
from dask_ferro.errors import InputError
from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker
from dask_ferro.simulate.compare import RECORDED_ROW, cluster_of, order_of, replay
from dask_ferro.simulate.engine import simulate
from dask_ferro.trace import Trace, TracedTask
from tests.runs import RUN, W0, W1


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    RUN.save(tmp_path / "run.ferrotrace")
    return tmp_path / "run.ferrotrace"


def test_the_first_row_is_what_was_measured(recorded: Path) -> None:
    found = json.loads(invoke(str(recorded), "--policy", "informed,none,last-victim", "--json").stdout)
    assert [row["policy"] for row in found["rows"]] == [RECORDED_ROW, "informed", "none", "last-victim"]
    first = found["rows"][0]
    assert (first["makespan"], first["confirmed"], first["refused"], first["bytes_moved"]) == (4.0, 1, 1, 200)
    assert (found["tasks"], found["workers"], found["threads"], found["lower_bound"]) == (3, 2, 3, 3.5)


def test_the_table_names_the_run(recorded: Path) -> None:
    done = invoke(str(recorded), "--policy", "informed")
    assert done.exit_code == 0
    assert "run.ferrotrace, 3 tasks" in done.stdout
    assert "as recorded" in done.stdout


def test_a_recording_that_is_not_whole_is_told(tmp_path: Path) -> None:
    cut = Trace(RUN.spans, RUN.tasks, RUN.workers, {**RUN.counts, "dropped": 7})
    cut.save(tmp_path / "cut.ferrotrace")
    done = invoke(str(tmp_path / "cut.ferrotrace"), "--policy", "none")
    assert "dropped its first 7 tasks" in done.stderr


def test_an_unknown_policy_is_a_usage_error(recorded: Path) -> None:
    done = invoke(str(recorded), "--policy", "informed,greedy")
    assert done.exit_code == 2
    assert "no policy 'greedy'; wanted some of informed, last-victim, none" in done.stderr


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        pytest.param(Trace(workers={"w": 1}), "no tasks", id="nothing to run"),
        pytest.param(Trace(RUN.spans, RUN.tasks, {}), "no worker", id="nobody to run it"),
        pytest.param(
            Trace((), (TracedTask("a", "a", "a", -1.0),), {"w": 1}), "s, wanted 0 to", id="time runs back"
        ),
    ],
)
def test_what_cannot_be_run_again_is_refused(trace: Trace, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replay(trace, ["informed"])


def test_the_workers_are_those_of_the_run() -> None:
    workers = cluster_of(RUN).workers
    assert workers == (VirtualWorker(W0, 2, "10.0.0.1"), VirtualWorker(W1, 1, "10.0.0.2"))


@pytest.mark.parametrize(
    ("address", "host"),
    [
        pytest.param("tls://[::1]:8786", "::1", id="IPv6"),
        pytest.param("w00001", "local", id="a virtual worker's name"),
        pytest.param("tcp://[broken", "local", id="no address at all"),
    ],
)
def test_hosts_are_read_from_addresses(address: str, host: str) -> None:
    assert cluster_of(Trace(workers={address: 1})).workers[0].host == host


def test_order_is_known_for_all_tasks_or_for_none() -> None:
    assert order_of(RUN) == {"load-0": 0, "load-1": 1, ("sum", 0): 2}
    tasks = (*RUN.tasks, TracedTask("old", "old", "old", 1.0))
    assert order_of(Trace(RUN.spans, tasks, RUN.workers)) is None


@pytest.mark.parametrize("policy", ["informed", "none"])
@pytest.mark.parametrize("workload", ["sparse-gemm", "chains"])
def test_a_virtual_run_replays_as_it_ran(workload: str, policy: str) -> None:
    """Priorities are what a recording needs beside durations: a block-sparse GEMM was up to 18 % off without them."""
    run = simulate(build(workload), VirtualCluster.local(8), policy=policy)
    measured, simulated = replay(run, [policy]).rows
    assert simulated.makespan == pytest.approx(measured.makespan, rel=0.01)


def twice(run: Trace) -> Trace:
    """A recording of a graph that ran two times, under the same keys."""
    later = (s._replace(start=s.start + 5.0, stop=s.stop + 5.0) for s in run.spans)
    return Trace((*run.spans, *later), run.tasks, run.workers, run.counts)


def test_tasks_that_ran_again_are_told(tmp_path: Path) -> None:
    twice(RUN).save(tmp_path / "twice.ferrotrace")
    assert (
        "the recording has 3 repeated computations"
        in invoke(str(tmp_path / "twice.ferrotrace"), "--policy", "none").stderr
    )
    assert "repeated computations" not in invoke(str(tmp_path / "twice.ferrotrace"), "--json").stderr
    RUN.save(tmp_path / "once.ferrotrace")
    assert invoke(str(tmp_path / "once.ferrotrace"), "--policy", "none").stderr == ""


def test_work_is_that_of_all_runs() -> None:
    assert (RUN.busy_seconds, twice(RUN).busy_seconds) == (4.0, 8.0)
    assert twice(RUN).lower_bound <= twice(RUN).makespan


# ---- recorded decisions --------------------------------------------------------------------------------------

FILES = sorted((Path(__file__).parents[1] / "policy" / "stealing" / "recorded").glob("*.decisions"))


@pytest.fixture
def decisions(tmp_path: Path) -> Path:
    path = tmp_path / "run.decisions"
    path.write_text("".join(file.read_text() for file in FILES))
    return path


def test_decisions_that_are_made_again_are_told_as_such(decisions: Path) -> None:
    done = invoke(str(decisions))
    assert (done.exit_code, done.stdout) == (0, "5 decisions and their 6 moves are the same\n")


def test_the_first_other_decision_is_shown_and_is_a_failure(decisions: Path) -> None:
    first, second, *others = decisions.read_text().splitlines()
    read = json.loads(second)
    read["moves"].clear()
    decisions.write_text("\n".join([first, json.dumps(read, separators=(",", ":")), *others, ""]))
    done = invoke(str(decisions))
    assert done.exit_code == 1
    assert "1 decisions and their 1 moves are the same\nline 2, at " in done.stdout
    assert "  recorded: ()\n  now:      (Move(key='t-3'," in done.stdout
    found = json.loads(invoke(str(decisions), "--json").stdout)
    assert (found["decisions"], found["difference"]["line"], found["difference"]["recorded"]) == (1, 2, [])


def test_a_policy_is_chosen_for_a_run_and_not_for_decisions(decisions: Path) -> None:
    done = invoke(str(decisions), "--policy", "none")
    assert done.exit_code == 2
    assert "--policy is for a recorded run" in done.output


@pytest.mark.parametrize("content", ["", "notes\n", "PK\x03\x04\n"], ids=["nothing", "text", "another file"])
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "notes").write_text(content)
    done = invoke(str(tmp_path / "notes"))
    assert done.exit_code == 2
    assert "wanted a trace of version 1" in done.output
