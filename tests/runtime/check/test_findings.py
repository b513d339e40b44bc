"""The findings of a check, row by row: a sound cluster has none, and each fault has its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_ferro.runtime.check.facts import (
    MODULES,
    PACKAGES,
    ClockOffset,
    ClusterFacts,
    ProcessFacts,
    SchedulerFacts,
    WorkerFacts,
)
from dask_ferro.runtime.check.findings import findings
from dask_ferro.runtime.telemetry.findings import fault

PROCESS = ProcessFacts("node", "3.11.7", dict.fromkeys(PACKAGES, "1.2.3"), MODULES)
SCHEDULER = SchedulerFacts("tcp://s:1", PROCESS, clock=ClockOffset(0.0))
WORKER = WorkerFacts(
    "tcp://a:1", "a", PROCESS, threads=2, memory_limit=2**30, cores=(0, 1), omp={"OMP_NUM_THREADS": "1"},
    sees="yes", local_directory="/tmp/a", disk="ext4", clock=ClockOffset(0.0),
)  # fmt: skip
SOUND = ClusterFacts(PROCESS, SCHEDULER, [WORKER], "/models")


def without(package):
    return replace(PROCESS, versions={**PROCESS.versions, package: None})


def other(package, version):
    return replace(PROCESS, versions={**PROCESS.versions, package: version})


def lacking(*modules):
    return replace(PROCESS, modules=[name for name in MODULES if name not in modules])


# A scheduler or a worker that differs from the sound one; the severity, the subject and what was got.
ON_SCHEDULER = {
    "no answer": ({"process": None, "failure": "nothing in 1 s"}, "error", "does not answer", "nothing in 1 s"),
    "without dask_ferro": ({"process": without("dask_ferro")}, "error", "dask_ferro", "none that can be imported"),
    "another patch of dask_ferro": ({"process": other("dask_ferro", "1.2.4")}, "warning", "dask_ferro", "1.2.4"),
    "another major of dask_ferro": ({"process": other("dask_ferro", "2.0.0")}, "error", "dask_ferro", "2.0.0"),
    "another dask": ({"process": other("dask", "2025.1.0")}, "warning", "dask", "2025.1.0"),
    "another Python": ({"process": replace(PROCESS, python="3.13.1")}, "error", "Python", "3.13.1"),
    "no plugin": ({"plugin": False}, "slow", "scheduler plugin", "off (it was not installed)"),
    "no plugin for a reason": ({"plugin": False, "off": "no X"}, "slow", "scheduler plugin", "off (no X)"),
    "no stealing": ({"steals": False}, "slow", "work stealing", "distributed.scheduler.work-stealing: False"),
    "validation": ({"validates": True}, "slow", "validation of each transition",
        "distributed.scheduler.validate: True"),
    "a skewed clock": ({"clock": ClockOffset(-60.0, 0.1)}, "warning", "clock", "-60.0 s from the client's"),
    "no bokeh": ({"process": lacking("bokeh")}, "warning", "extra dashboard", "no bokeh"),
}  # fmt: skip
ON_WORKER = {
    "no answer": ({"process": None, "failure": "nothing in 1 s"}, "error", "does not answer", "nothing in 1 s"),
    "without dask_ferro": ({"process": without("dask_ferro")}, "error", "dask_ferro", "none that can be imported"),
    "another patch of dask_ferro": ({"process": other("dask_ferro", "1.3.0")}, "warning", "dask_ferro", "1.3.0"),
    "another major of dask_ferro": ({"process": other("dask_ferro", "0.9.0")}, "error", "dask_ferro", "0.9.0"),
    "another distributed": ({"process": other("distributed", "2025.1.0")}, "warning", "distributed", "2025.1.0"),
    "another Python": ({"process": replace(PROCESS, python="3.12.1")}, "error", "Python", "3.12.1"),
    "without onnxruntime": ({"process": without("onnxruntime")}, "error", "onnxruntime", "none that can be imported"),
    "another onnxruntime": ({"process": other("onnxruntime", "1.0.0")}, "warning", "onnxruntime", "1.0.0"),
    "without zarr": ({"process": lacking("zarr", "pandas")}, "warning", "extra io", "no zarr, pandas"),
    "no folder": ({"sees": "no"}, "warning", "shared folder", "not visible"),
    "another folder": ({"sees": "other"}, "warning", "shared folder", "a file with other content"),
    "a folder that hangs": ({"sees": "hangs"}, "warning", "shared folder", "a file system that hangs"),
    "a local directory on NFS": ({"disk": "nfs4"}, "slow", "local directory", "/tmp/a on nfs4"),
    "a skewed clock": ({"clock": ClockOffset(3.0, 0.2)}, "warning", "clock", "+3.0 s from the client's"),
    "threads of linear algebra": ({"omp": {"OMP_NUM_THREADS": "8"}}, "slow", "threads",
        "16 on the 2 cores of one host (2 of tasks, with 8 of OMP_NUM_THREADS or the like each)"),
    "the largest of several limits": ({"omp": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "8"}}, "slow", "threads",
        "16 on the 2 cores of one host (2 of tasks, with 8 of OMP_NUM_THREADS or the like each)"),
    "no limit of those": ({"omp": {"OMP_NUM_THREADS": None}}, "slow", "threads",
        "4 on the 2 cores of one host (2 of tasks, with no OMP_NUM_THREADS each)"),
    "threads of tasks": ({"threads": 3}, "slow", "threads",
        "3 on the 2 cores of one host (3 of tasks, with 1 of OMP_NUM_THREADS or the like each)"),
    "no memory limit": ({"memory_limit": 0}, "warning", "memory limit", "none"),
    "paused": ({"status": "paused"}, "warning", "status", "paused, which takes no task"),
    "no worker plugin": ({"plugin": False}, "slow", "worker plugin", "none"),
    "a GPU without cupy": ({"gpus": 1, "process": lacking("cupy")}, "slow", "extra gpu", "a GPU and no cupy"),
}  # fmt: skip
FINE = {
    "a clock that is off by less than its doubt": ({}, {"clock": ClockOffset(3.0, 2.9)}),
    "another patch of Python": ({"process": replace(PROCESS, python="3.11.9")}, {}),
    "a version that is not known": ({}, {"process": other("dask_ferro", "")}),
    "no GPU and no cupy": ({}, {"process": lacking("cupy")}),
    "a scheduler without onnxruntime": ({"process": without("onnxruntime")}, {}),
}  # fmt: skip


def test_a_sound_cluster_has_no_findings():
    assert findings(SOUND) == ()


@pytest.mark.parametrize(("scheduler", "worker"), FINE.values(), ids=FINE)
def test_what_is_no_fault(scheduler, worker):
    facts = replace(SOUND, scheduler=replace(SCHEDULER, **scheduler), workers=[replace(WORKER, **worker)])
    assert findings(facts) == ()


@pytest.mark.parametrize(("change", "severity", "what", "got"), ON_SCHEDULER.values(), ids=ON_SCHEDULER)
def test_faults_of_the_scheduler(change, severity, what, got):
    [found] = findings(replace(SOUND, scheduler=replace(SCHEDULER, **change)))
    assert (found.severity, found.where, found.what) == (severity, ("scheduler",), what)
    assert found.sentence.startswith(f"scheduler: {what}: got {got}, wanted ")
    assert found.remedy


@pytest.mark.parametrize(("change", "severity", "what", "got"), ON_WORKER.values(), ids=ON_WORKER)
def test_faults_of_a_worker(change, severity, what, got):
    [found] = findings(replace(SOUND, workers=[replace(WORKER, **change)]))
    assert (found.severity, found.where, found.what) == (severity, ("tcp://a:1",), what)
    assert found.sentence.startswith(f"tcp://a:1: {what}: got {got}, wanted ")
    assert found.remedy


def test_a_path_that_could_not_be_asked_for_is_a_finding():
    [found] = findings(replace(SOUND, unseen="Read-only file system"))
    assert (found.severity, found.where) == ("warning", ("client",))
    assert "got Read-only file system, wanted" in found.sentence


def test_no_worker_is_a_finding():
    assert [found.what for found in findings(replace(SOUND, workers=[]))] == ["workers"]


def test_the_same_fault_of_many_workers_is_one_finding_with_all_of_them():
    workers = [
        replace(WORKER, address=f"tcp://a:{i}", cores=(i,), threads=1, process=without("dask_ferro"))
        for i in range(9)
    ]
    [found] = findings(replace(SOUND, workers=workers))
    assert found.where == tuple(one.address for one in workers)
    assert str(found).startswith("tcp://a:0, tcp://a:1, tcp://a:2 and 6 more: dask_ferro: got none")


def test_workers_on_the_same_cores_count_together_and_on_others_do_not():
    def counted(*cores):
        alone = replace(WORKER, threads=2)
        return [
            found.what for found in findings(replace(SOUND, workers=[replace(alone, cores=c) for c in cores]))
        ]

    assert counted((0, 1), (2, 3)) == []
    assert counted((0, 1), (0, 1)) == ["threads"]


def test_errors_come_first():
    faults = [replace(WORKER, sees="no", threads=3), replace(WORKER, cores=(7, 8), process=without("numpy"))]
    assert [found.severity for found in findings(replace(SOUND, workers=faults))] == [
        "error",
        "warning",
        "slow",
    ]


def test_a_sentence_has_where_what_got_wanted_and_the_remedy():
    got = {"scheduler": "3.13.1"}
    [found] = fault("error", "Python", got, "3.11 as in the client", "start it from there")
    assert str(found) == "scheduler: Python: got 3.13.1, wanted 3.11 as in the client; start it from there"
