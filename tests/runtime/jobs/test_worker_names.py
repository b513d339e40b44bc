"""What workers are called, and which of a job's workers one is whose name a shell has changed."""

from __future__ import annotations

import pytest

import dask_ferro as ff
from dask_ferro.runtime.jobs.worker_names import WorkerNames


@pytest.mark.parametrize(
    ("name", "pool", "prefix"),
    [
        pytest.param(None, "default", "default", id="without a name, the pool's"),
        pytest.param(None, "gpu", "gpu", id="and another pool's"),
        pytest.param("run", "default", "run", id="the cluster's name"),
        pytest.param("run", "gpu", "run-gpu", id="the cluster's name, and another pool's"),
        pytest.param(7, "default", "7", id="a number is text"),
    ],
)
def test_what_names_begin_with(name, pool, prefix):
    assert WorkerNames(name).prefix(pool) == prefix


@pytest.mark.parametrize(
    ("name", "processes", "worker", "learned"),
    [
        pytest.param("run", 1, "run-3", {}, id="nothing to learn without a variable"),
        pytest.param("r-$SLURM_JOB_ID", 1, "r-99-3", {"r-$SLURM_JOB_ID-3": "r-99-3"}, id="a variable"),
        pytest.param("r-$J", 2, "r-99-3-0", {"r-$J-3-0": "r-99-3-0"}, id="one of several processes"),
        pytest.param("r-$J", 1, "r-9.9-3.2", {"r-$J-3.2": "r-9.9-3.2"}, id="a job that was requeued"),
        pytest.param("${USER}@$(hostname)", 1, "me@c-1-3", {"${USER}@$(hostname)-3": "me@c-1-3"}, id="two"),
        pytest.param("r-$J", 1, "r-99-gpu-4", {"r-$J-gpu-4": "r-99-gpu-4"}, id="another pool's"),
        pytest.param("r-$J", 1, "r-99-5", {}, id="no job of this cluster"),
        pytest.param("r-$J", 1, "other-3", {}, id="a stranger"),
    ],
)
def test_which_worker_came(name, processes, worker, learned):
    names = WorkerNames(name)
    jobs = {f"{name}-3", f"{name}-gpu-4"}
    names.learn(worker, {"default": processes, "gpu": processes}, jobs.__contains__)
    assert names.actual == learned


@pytest.mark.parametrize("name", ['a"b', "a`id`", "a\\", "a\nb", "", " ", 1.5, True])
def test_a_name_that_no_script_can_say_is_refused(name):
    with pytest.raises(ff.ConfigError, match=r"ff\.SLURMCluster: name: got .*, wanted text"):
        WorkerNames(name)
