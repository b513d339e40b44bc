"""A worker that hangs holds up no `ff.install`, `ff.uninstall`, `ff.profile`: it is named, and set up when it is
back.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import dask
import numpy as np
import pytest
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.pickle import dumps

import dask_ferro as ff
from dask_ferro.lower.inputs.shipping import ask_workers
from dask_ferro.scheduler import reach
from tests.clusters import running, stopped
from tests.waiting import until

pytestmark = pytest.mark.cluster

# Far more than a bounded call takes, and far less than the stopped worker stays stopped.
WAITS = 60.0
# A model of two ops.
SLEEPS = ff.testing.build("wide", branches=1, length=2)


def plugins(dask_worker):
    return sorted(name for name in dask_worker.plugins if "ferro" in name)


def bounded(call, *arguments, **options):
    """Call something that must not hang, in a thread that is waited for."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call, *arguments, **options).result(timeout=WAITS)
    finally:
        pool.shutdown(wait=False)  # what hangs goes on when the worker does


def test_install_and_uninstall_are_bounded_and_name_the_worker_that_hangs():
    with running(2) as client:
        # A worker that imports the package beside other tests may take longer than the second that it has to answer.
        client.run(imported)
        pids = client.run(os.getpid)
        hung, well = sorted(pids)
        with stopped(pids[hung]):
            with pytest.warns(RuntimeWarning, match=rf"ff\.install: {hung} did not answer within 1 s"):
                bounded(ff.install, client, timeout=1.0)
            assert client.submit(int, 3, workers=[well]).result(timeout=WAITS) == 3
            until(
                lambda: client.run(plugins, workers=[well]) == {well: ["ferro-worker"]},
                "the plugin of the other",
            )
        until(
            lambda: client.run(plugins, workers=[hung]) == {hung: ["ferro-worker"]},
            "the plugin of the late one",
        )
        with stopped(pids[hung]):
            with pytest.warns(RuntimeWarning, match=rf"ff\.uninstall: {hung} did not answer within 1 s"):
                bounded(ff.uninstall, client)
            with pytest.warns(RuntimeWarning, match=hung):  # and again, behind what is still on its way
                bounded(ff.install, client, timeout=1.0)
            with pytest.warns(RuntimeWarning, match=hung):
                bounded(ff.uninstall, client)
        until(lambda: not any(client.run(plugins).values()), "the end of all plugins")
        assert client.submit(int, 4, workers=[hung]).result(timeout=WAITS) == 4


def imported():
    import dask_ferro.observe.op_recorder
    import dask_ferro.scheduler.worker_plugin  # noqa: F401


def sleeps(worker, seed):
    """Run two ops of a model on one worker."""
    x = np.full(256, seed, "f4")
    ff.from_onnx(SLEEPS, granularity="model")(x).compute(workers=[worker])


NONE_RECORDS = "no worker records"


@contextmanager
def warmed():
    """Two worker processes that have imported what a trace of ops takes, and were asked for the model's file."""
    with running(2) as client:
        pids = client.run(os.getpid)
        client.run(imported)  # what took seconds
        ff.install(client, timeout=2.0)
        for worker in pids:
            sleeps(worker, 0)
        yield client, pids, *sorted(pids)


def test_a_trace_of_ops_is_bounded_and_names_the_worker_that_hangs():
    with warmed() as (client, pids, hung, well):
        recording = ff.profile(client, ops=True)
        with stopped(pids[hung]):
            with pytest.warns(
                RuntimeWarning, match=rf"ff\.profile: {hung} did not .* within 2 s .*from when it"
            ):
                bounded(recording.__enter__)
            bounded(sleeps, well, 1)
            with pytest.warns(
                RuntimeWarning, match=rf"ff\.profile: {hung} did not .* within 2 s .*not in the trace"
            ):
                bounded(recording.__exit__, None, None, None)
        assert [(op.worker, op.prefix) for op in recording.trace.of("op")] == [(well, "Sleep")] * 2
        assert recording.trace.counts["workers_without_ops"] == 1
        until(lambda: all(names == ["ferro-worker"] for names in client.run(plugins).values()), NONE_RECORDS)


def test_a_worker_that_hangs_within_the_block_holds_up_no_trace_and_the_next_one_has_its_ops():
    with warmed() as (client, pids, hung, well):
        recording = ff.profile(client, ops=True)
        recording.__enter__()
        sleeps(hung, 1)
        sleeps(well, 2)
        with stopped(pids[hung]), pytest.warns(RuntimeWarning, match=rf"ff\.profile: {hung} did not"):
            bounded(recording.__exit__, None, None, None)
        assert {op.worker for op in recording.trace.of("op")} == {well}
        until(lambda: all(names == ["ferro-worker"] for names in client.run(plugins).values()), NONE_RECORDS)
        with ff.profile(client, ops=True) as again:
            sleeps(hung, 3)
        assert {op.worker for op in again.trace.of("op")} == {hung}
        assert "workers_without_ops" not in again.trace.counts


class Refusing(WorkerPlugin):
    """Lacks a file, and so is not set up."""

    name = "ferro-refusing"

    def setup(self, worker):
        raise FileNotFoundError("no such file on this worker")


def test_what_a_plugin_raises_itself_is_told_at_once_and_not_taken_for_a_lost_connection():
    with (
        running(1) as client,
        pytest.raises(RuntimeError, match=r"FileNotFoundError.*no such file on this worker") as told,
    ):
        bounded(client.run_on_scheduler, reach.put_on, Refusing.name, dumps(Refusing()), WAITS)
    assert isinstance(told.value.__cause__, FileNotFoundError)


def dies_as(pid):
    """Return True, but end the worker of this process."""
    if os.getpid() == pid:
        os._exit(1)
    return True


def test_a_worker_that_is_lost_as_it_is_asked_is_left_out():
    """The others answer: a training whose next batch had another number of rows ended with the lost connection."""
    with running(2) as client:
        pids = client.run(os.getpid)
        lost, well = sorted(pids)
        assert bounded(ask_workers, client, dies_as, pids[lost]) == {well: True}


def test_what_workers_see_is_not_asked_for_longer_than_that():
    """Whether they see the model's file is asked at its first use: one that hangs held up every compute."""
    with running(2) as client:
        pids = client.run(os.getpid)
        assert set(ask_workers(client, os.path.exists, __file__).values()) == {True}
        hung = min(pids)
        with stopped(pids[hung]), dask.config.set({"ferro.scheduler.timeout": "1s"}):
            assert bounded(ask_workers, client, os.path.exists, __file__) == {}
