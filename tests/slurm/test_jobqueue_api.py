"""dask-jobqueue's documented API on `ff.SLURMCluster`, beside the original: each directive of a script, and methods.

Nothing here needs SLURM: clusters that only render scripts are never started, and the others never submit.
"""

from __future__ import annotations

import asyncio
import copy
import re
import warnings
from collections.abc import Iterator
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Any

import dask
import dask_jobqueue
import pytest
from distributed import Scheduler, Security

import dask_ferro as ff
from dask_ferro.options import options_of
from dask_ferro.slurm.keywords import ClusterKeywords

SHAPE: dict[str, Any] = {"cores": 4, "processes": 2, "memory": "8GB", "walltime": "06:00:00"}
PLAIN = {"dashboard_address": "127.0.0.1:0", "interface": "lo"}


class OwnScheduler(Scheduler):
    """A scheduler of the user's."""


# -- the script ----------------------------------------------------------------------------------------------


def rendered(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """What a cluster makes of its options, in the words of dask-jobqueue, and of what it warns."""

    async def render() -> dict[str, Any]:
        cluster = kind(asynchronous=True, **options)
        try:
            return {
                "header": cluster.job_header,
                "scheduler": cluster.scheduler_spec,
                "name": cluster.name if "name" in options else None,
                "job_name": cluster.job_name,
                **parts(cluster.job_script()),
            }
        finally:
            await cluster.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = asyncio.run(render())
    told = {str(one.message) for one in caught if issubclass(one.category, FutureWarning)}
    return found | {"warnings": told}


def parts(script: str) -> dict[str, Any]:
    lines = script.splitlines()
    return {
        "shebang": lines[0],
        "directives": [line for line in lines if line.startswith("#SBATCH")],
        "lines": lines,
        "command": next(line for line in lines if " -m " in line).split(),
    }


def without(words: list[str], *options: str) -> list[str]:
    """Leave out options and their values."""
    kept, skip = [], False
    for word in words:
        if not skip and word not in options and word != "&":
            kept.append(word)
        skip = word in options
    return kept


def custom() -> dict[str, Any]:
    section = copy.deepcopy(dask.config.get("jobqueue.slurm"))
    return section | {"queue": "from-config", "account": "group", "cores": 3, "memory": "3GB", "processes": 1}


ROWS = [
    pytest.param({}, id="cores, memory, processes, walltime"),
    pytest.param({"processes": 1}, id="processes: one"),
    pytest.param({"processes": None, "cores": 16}, id="processes: by default about the root of the cores"),
    pytest.param({"walltime": None}, id="walltime: by default the configuration's"),
    pytest.param({"queue": "long"}, id="queue"),
    pytest.param({"account": "group"}, id="account"),
    pytest.param({"project": "group"}, id="project, which is now account"),
    pytest.param({"job_cpu": 24}, id="job_cpu"),
    pytest.param({"job_mem": "30G"}, id="job_mem"),
    pytest.param({"job_extra_directives": ["--gres=gpu:2", "-x c1"]}, id="job_extra_directives"),
    pytest.param({"job_extra": ["--gres=gpu:2"]}, id="job_extra, which is now job_extra_directives"),
    pytest.param({"job_directives_skip": ["--mem", "-J"]}, id="job_directives_skip"),
    pytest.param({"job_directives_skip": ["--signal"]}, id="job_directives_skip: our own"),
    pytest.param({"header_skip": ["--cpus-per-task"]}, id="header_skip, which is now job_directives_skip"),
    pytest.param({"job_script_prologue": ["module load x", "", "ulimit -c 0"]}, id="job_script_prologue"),
    pytest.param({"env_extra": ["export A=1"]}, id="env_extra, which is now job_script_prologue"),
    pytest.param({"python": "/opt/python"}, id="python"),
    pytest.param({"interface": "lo"}, id="interface"),
    pytest.param({"death_timeout": 90}, id="death_timeout"),
    pytest.param({"local_directory": "/scratch/$USER"}, id="local_directory"),
    pytest.param({"worker_extra_args": ["--lifetime", "55m"]}, id="worker_extra_args"),
    pytest.param({"extra": ["--lifetime", "55m"]}, id="extra, which is now worker_extra_args"),
    pytest.param({"worker_command": "dask_cuda.cli"}, id="worker_command"),
    pytest.param({"nanny": False}, id="nanny"),
    pytest.param({"log_directory": "logs"}, id="log_directory"),
    pytest.param({"shebang": "#!/bin/zsh"}, id="shebang"),
    pytest.param({"protocol": "tls://"}, id="protocol"),
    pytest.param({"security": Security(tls_ca_file="ca", tls_worker_cert="cert", tls_worker_key="key")},
        id="security"),
    pytest.param({"job_name": "mine"}, id="job_name"),
    pytest.param({"name": "run"}, id="name"),
    pytest.param({"scheduler_options": {"port": 8786, "dashboard_address": ":8"}}, id="scheduler_options"),
    pytest.param({"scheduler_options": {"interface": "lo"}, "interface": "eth0"}, id="interface of each side"),
    pytest.param({"scheduler_cls": OwnScheduler}, id="scheduler_cls"),
    pytest.param({"silence_logs": "info", "n_workers": 0, "loop": None}, id="silence_logs, n_workers, loop"),
    pytest.param({"config_name": "custom", **dict.fromkeys(("cores", "memory", "processes"))}, id="config_name"),
]  # fmt: skip


@pytest.mark.parametrize("options", ROWS)
def test_an_option_means_what_dask_jobqueue_says(options, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # log_directory is made
    with dask.config.set({"jobqueue.custom": custom()}):
        given = {name: value for name, value in (SHAPE | options).items() if value is not None}
        stock = rendered(dask_jobqueue.SLURMCluster, given)
        ours = rendered(ff.SLURMCluster, given)
    signal = {"#SBATCH --signal=B:USR1@60"} - (
        {"#SBATCH --signal=B:USR1@60"} if "--signal" in options.get("job_directives_skip", ()) else set()
    )
    assert [line for line in ours["directives"] if line not in signal] == stock["directives"]
    assert signal <= set(ours["directives"])
    assert [line for line in ours["header"].splitlines() if line not in signal] == stock[
        "header"
    ].splitlines()
    assert ours["shebang"] == stock["shebang"]
    assert ours["warnings"] == stock["warnings"]
    assert (ours["name"], ours["job_name"]) == (stock["name"], stock["job_name"])
    own = ("--name", "--preload", "--preload-nanny")
    assert without(ours["command"], *own) == without(stock["command"], *own)
    for line in stock["lines"][1:]:
        if not line.startswith("#SBATCH") and " -m " not in line:
            assert line in ours["lines"]
    assert ours["scheduler"]["cls"] is stock["scheduler"]["cls"]
    ferro = ours["scheduler"]["options"].pop("preload")
    assert ferro == ["dask_ferro.scheduler.preload"]
    assert ours["scheduler"]["options"] == stock["scheduler"]["options"]


def test_workers_are_named_after_the_cluster_where_it_has_a_name() -> None:
    """A name that the shell would take apart stays in quotes."""
    for name, first in (("a b", "a b"), (None, "default")):
        lines = rendered(ff.SLURMCluster, SHAPE | {"name": name})["lines"]
        assert f'FERRO_WORKER="{first}-$((0 + ${{SLURM_ARRAY_TASK_ID:-0}}))"' in lines


@pytest.mark.parametrize("name", ['a"b', "run-$SLURM_JOB_ID", "a`id`", "a\\", "a\nb", "", " ", 1.5, True])
def test_a_name_that_cannot_stand_in_a_script_is_refused(name: object) -> None:
    with pytest.raises(ff.InputError, match=r"ff\.SLURMCluster: name: got"):
        ff.SLURMCluster(**SHAPE, name=name)


def test_temporary_certificates_are_put_where_the_workers_find_them(tmp_path) -> None:
    """As those of `security=True`, which are text of several lines, and so is what is given here."""
    secret = "-----BEGIN\nEND-----"
    security = Security(tls_ca_file=secret, tls_worker_cert=secret, tls_worker_key=secret)
    for kind in (dask_jobqueue.SLURMCluster, ff.SLURMCluster):
        made = rendered(kind, SHAPE | {"security": security, "shared_temp_directory": str(tmp_path)})
        words = made["command"]
        for option, key in (("ca-file", "ca_file"), ("cert", "cert"), ("key", "key")):
            path = Path(words[words.index(f"--tls-{option}") + 1])
            assert path.name.startswith(f".dask-jobqueue.worker.{key}.")
            assert path.parent == tmp_path
        assert made["scheduler"]["options"]["protocol"] == "tls://"


# -- what is wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"cores": None, "memory": None}, r"cores and memory of a job must be given", id="no shape"),
        pytest.param({"memory": None}, r"memory of a job .*SLURMCluster\(cores=4, memory='24GB'\)", id="no memory"),
        pytest.param({"cores": None}, r"cores of a job .*SLURMCluster\(cores=8, memory='8GB'\)", id="no cores"),
        pytest.param({"walltme": "1"}, r"unknown walltme; wanted some of account, .*did you mean walltime", id="near"),
        pytest.param({"wrong_parameter": "x"}, "unknown wrong_parameter; wanted some of account, ", id="a strange one"),
        pytest.param({"pools": {"gpu": {"quue": "g"}}}, r"pool 'gpu': unknown quue; .*mean queue", id="a pool's"),
        pytest.param({"pools": {"gpu": {"job_name": "g"}}}, r"pool 'gpu': unknown job_name; wanted", id="one name"),
        pytest.param({"retire_before": "soon"}, "got retire_before='soon', wanted a duration such as", id="no time"),
        pytest.param({"timeouts": 3}, "got timeouts=3, wanted a mapping of names to values", id="one patience"),
        pytest.param({"timeouts": {"boots": 1}}, "timeouts: unknown boots; .*did you mean boot", id="patience's"),
        pytest.param({"pools": {"gpu": {"cots": 1}}}, r"pool 'gpu': unknown cots; .*did you mean cost", id="a price"),
        pytest.param({"config_name": "nosuch"}, "configuration has no jobqueue.nosuch", id="no such section"),
        pytest.param({"cores": "4"}, r"got cores='4', wanted a whole number", id="cores as text"),
        pytest.param({"processes": 0}, r"got processes=0, wanted a whole number", id="no process"),
        pytest.param({"processes": 5}, r"got processes=5 and cores=4, wanted at most as many", id="no thread for each"),
        pytest.param({"pools": {"s": {"cores": 1}}}, r"got processes=2 and cores=1, wanted", id="nor in a pool"),
        pytest.param({"pools": {"s": {"walltime": 5400}}}, "walltime=5400, wanted text such as", id="YAML's number"),
        pytest.param({"memory": "abc"}, r"Could not interpret 'abc' as a byte unit", id="no size"),
    ],
)  # fmt: skip
def test_an_error_names_the_class_and_the_arguments_that_were_written(options, said) -> None:
    with pytest.raises(ff.InputError, match=said) as caught:
        ff.SLURMCluster(**(SHAPE | options))
    assert str(caught.value).startswith("ff.SLURMCluster: ")
    assert "WorkerCluster" not in str(caught.value)
    assert "__init__" not in str(caught.value)


def test_each_keyword_of_ours_stands_in_the_source_of_the_call_and_is_explained():
    named = signature(ff.SLURMCluster).parameters
    own = {name for name, one in named.items() if one.kind is Parameter.KEYWORD_ONLY}
    assert own == {*options_of(ClusterKeywords)}
    parameters = getdoc(ff.SLURMCluster).partition("Raises")[0]
    for name in own:
        assert re.search(rf"^(\w+, )*{name}(, \w+)* : ", parameters, re.MULTILINE), name
        assert named[name].default is None  # the configuration's


@pytest.mark.parametrize("option", ["dashboard_address", "host"])
def test_what_belongs_to_the_scheduler_is_told_where_to_go(option) -> None:
    with pytest.raises(ValueError, match=f"pass '{option}' through 'scheduler_options'"):
        ff.SLURMCluster(**SHAPE, **{option: "x:1"})


# -- methods -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ff.SLURMCluster]:
    """A cluster that is asked for jobs and never submits one."""
    logs = tmp_path_factory.mktemp("logs")
    options = SHAPE | {"interface": "lo", "scheduler_options": PLAIN, "log_directory": str(logs)}
    with ff.SLURMCluster(**options, pools={"gpu": {"maximum": 4}}) as made:
        made.request = lambda pool, count: None
        yield made


@pytest.mark.parametrize(
    ("call", "workers"),
    [
        pytest.param({"n": 0}, 0, id="none"),
        pytest.param({"n": 3}, 4, id="whole jobs"),
        pytest.param({"jobs": 3}, 6, id="jobs"),
        pytest.param({"memory": "20GB"}, 6, id="memory, of all of them"),
        pytest.param({"cores": 9}, 6, id="cores, of all of them"),
        pytest.param({"n": 1, "jobs": 2, "cores": 9}, 6, id="the most of what is said"),
    ],
)
def test_scale_has_its_units(cluster, call, workers) -> None:
    for name in ("scale", "scale_up"):
        getattr(cluster, name)(**call)
        assert (cluster._adaptive.minimum, cluster._adaptive.maximum) == (workers, workers)
        assert f"bounds: {workers} workers" in repr(cluster)


def test_a_number_of_workers_to_begin_with_is_a_scale(monkeypatch) -> None:
    monkeypatch.setattr(ff.SLURMCluster, "request", lambda self, pool, count: None)
    options = SHAPE | {"interface": "lo", "scheduler_options": PLAIN}
    for made in (ff.SLURMCluster(3, **options), ff.SLURMCluster(n_workers=3, **options)):
        with made:
            assert (made._adaptive.minimum, made._adaptive.maximum) == (4, 4)


@pytest.mark.parametrize(
    ("call", "bounds"),
    [
        pytest.param({"minimum": 1, "maximum": 5}, (1, 5), id="workers"),
        pytest.param({"minimum_jobs": 1, "maximum_jobs": 3}, (2, 6), id="jobs"),
        pytest.param({"minimum_cores": 4, "maximum_cores": 10}, (2, 5), id="cores: two a worker"),
        pytest.param({"minimum_memory": "8GB", "maximum_memory": "20GB"}, (2, 5), id="memory: 4 GB a worker"),
    ],
)
def test_adapt_has_its_units(cluster, call, bounds) -> None:
    cluster.adapt(**call)
    assert (cluster._adaptive.minimum, cluster._adaptive.maximum) == bounds


@pytest.mark.parametrize(
    ("call", "said"),
    [
        pytest.param({"n": -1}, "got n=-1, wanted a number of at least 0", id="fewer than none"),
        pytest.param({"n": "3"}, "got n='3', wanted a number", id="text"),
        pytest.param({"n": True}, "got n=True, wanted a number", id="a truth"),
        pytest.param({"n": float("nan")}, "got n=nan, wanted a number", id="no number"),
        pytest.param({"jobs": -2}, "got jobs=-2, wanted a number", id="jobs"),
        pytest.param({"cores": "x"}, "got cores='x', wanted a number", id="cores"),
        pytest.param({"memory": "x"}, "got memory='x', wanted a size such as 64GiB", id="memory"),
    ],
)
def test_scale_refuses_what_is_no_number_and_changes_nothing(cluster, call, said) -> None:
    cluster.scale(2)
    with pytest.raises(ff.InputError, match=f"cluster.scale: {said}"):
        cluster.scale(**call)
    assert cluster._adaptive.maximum == 2


def test_workers_that_do_not_come_are_waited_for_as_long_as_was_said(cluster) -> None:
    with pytest.raises(TimeoutError):
        cluster.wait_for_workers(1, timeout=0.1)


def test_a_cluster_is_not_found_by_its_name_as_in_dask(cluster) -> None:
    for kind in (dask_jobqueue.SLURMCluster, ff.SLURMCluster):
        with pytest.raises(NotImplementedError):
            kind.from_name("run")


def test_a_cluster_has_them(cluster) -> None:
    cluster.scale(2)
    assert repr(cluster).startswith("SLURMCluster(")
    assert repr(cluster).endswith("bounds: 2 workers, pool default: no jobs, pool gpu 0..4: no jobs)")
    assert "pool gpu 0..4" in cluster._repr_html_()
    assert "Scaling" in cluster._repr_html_("<tr><td>Scaling</td></tr>")
