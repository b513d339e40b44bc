"""A worker that hangs holds up neither `ff.install` nor `ff.uninstall`: it is named, and set up when it comes back."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributed import Client, LocalCluster

import dask_ferro as ff
from tests.waiting import until

pytestmark = pytest.mark.cluster

# Far more than a bounded call takes, and far less than the stopped worker stays stopped.
WAITS = 60.0


def plugins(dask_worker):
    return sorted(name for name in dask_worker.plugins if "ferro" in name)


def bounded(call, *arguments, **options):
    """Call something that must not hang, in a thread that is waited for."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *arguments, **options).result(timeout=WAITS)


def test_install_and_uninstall_are_bounded_and_name_the_worker_that_hangs():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, timeout=WAITS) as client,
    ):
        pids = client.run(os.getpid)
        hung, well = sorted(pids)
        os.kill(pids[hung], signal.SIGSTOP)
        try:
            with pytest.warns(RuntimeWarning, match=rf"ff\.install: {hung} did not answer within 1 s"):
                bounded(ff.install, client, answer=1.0)
            assert client.submit(int, 3, workers=[well]).result(timeout=WAITS) == 3
            until(
                lambda: client.run(plugins, workers=[well]) == {well: ["ferro-worker"]},
                "the plugin of the other",
            )
        finally:
            os.kill(pids[hung], signal.SIGCONT)
        until(
            lambda: client.run(plugins, workers=[hung]) == {hung: ["ferro-worker"]},
            "the plugin of the late one",
        )
        os.kill(pids[hung], signal.SIGSTOP)
        try:
            with pytest.warns(RuntimeWarning, match=rf"ff\.uninstall: {hung} did not answer within 1 s"):
                bounded(ff.uninstall, client)
            with pytest.warns(RuntimeWarning, match=hung):  # and again, behind what is still on its way
                bounded(ff.install, client, answer=1.0)
            with pytest.warns(RuntimeWarning, match=hung):
                bounded(ff.uninstall, client)
        finally:
            os.kill(pids[hung], signal.SIGCONT)
        until(lambda: not any(client.run(plugins).values()), "the end of all plugins")
        assert client.submit(int, 4, workers=[hung]).result(timeout=WAITS) == 4
