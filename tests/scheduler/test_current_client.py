"""`ff.install` and `ff.uninstall` without a client: the current one's cluster, or an error that says what to do."""

from __future__ import annotations

import pytest
from distributed import Client, LocalCluster

import dask_ferro as ff
from dask_ferro.scheduler.plugin import NAME


def is_installed(client: Client) -> bool:
    return bool(client.run_on_scheduler(lambda dask_scheduler: NAME in dask_scheduler.plugins))


@pytest.mark.cluster
def test_the_current_client_is_the_default() -> None:
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            ff.install()
            assert is_installed(client)
            ff.uninstall()
            assert not is_installed(client)
        with Client(cluster, set_as_default=False) as client, client.as_current():
            ff.install(bundles=True)
            assert is_installed(client)
            ff.uninstall()


@pytest.mark.parametrize("function", [ff.install, ff.uninstall])
def test_without_a_client_is_an_error(function) -> None:
    with pytest.raises(ff.InputError, match="there is no client; create one first"):
        function()


@pytest.mark.parametrize("function", [ff.install, ff.uninstall])
def test_what_is_no_client_is_named(function) -> None:
    with pytest.raises(ff.InputError, match=r"got str, wanted a distributed\.Client"):
        function("tcp://127.0.0.1:8786")
