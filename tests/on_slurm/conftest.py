"""A private SLURM for the tests of this folder: real daemons on loopback, started once and taken away at the end."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dask_ferro as ff
from tests import needs, waiting
from tests.on_slurm.tools import Site, closing, executable, queue, settings, watchdogs
from tests.programs import ran

HERE = Path(__file__).parent
# The controller's port, and one for each of six nodes.
_PORTS = 7
# Seconds that bringing the daemons up or down may take: 2 to 5, more while others use the machine.
_UP_S = 120.0


@pytest.fixture(scope="session")
def slurm() -> Iterator[Path]:
    """SLURM with the partitions that `slurm-up` lists; returns its state directory.

    `FERRO_SLURM_DIR` and `FERRO_SLURM_PORT` choose one that may be running already.
    """
    needs.require("slurm")
    given = os.environ.get("FERRO_SLURM_DIR")
    folder = Path(given or tempfile.mkdtemp(prefix="ferro-slurm-", dir="/tmp"))  # paths of sockets are short
    folder.chmod(0o755)  # munged insists
    port = os.environ.get("FERRO_SLURM_PORT") or str(_free_ports(_PORTS))
    environment = os.environ | {"FERRO_SLURM_DIR": str(folder), "FERRO_SLURM_PORT": port}
    with _down_with_this_process(environment, [] if given else ["--purge"]):
        up = ran([HERE / "slurm-up"], env=environment)
        assert up.returncode == 0, up.stderr
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", up.stdout.strip().partition("=")[2])
            yield folder


@contextmanager
def _down_with_this_process(environment: dict[str, str], options: list[str]) -> Iterator[None]:
    """End the daemons with the block, or with this process, however it ends: then the pipe is closed."""
    waits = subprocess.Popen(
        [HERE / "slurm-down", "--at-eof", *options],
        env=environment,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert waits.stdin is not None
    try:
        yield
    finally:
        waits.stdin.close()
        assert waiting.ended(waits, "slurm-down", seconds=_UP_S) == 0


def _free_ports(count: int) -> int:
    """Return the first of so many ports below the ephemeral ones, with no process listening at any of them."""
    first = 16900 + os.getpid() % 1000 * count
    while not all(_is_free(first + i) for i in range(count)):
        first += count
    return first


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture
def site(slurm: Path, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Makes clusters with clients, and closes them."""
    yield from closing(partial(Site, tmp_path))


@pytest.fixture
def play(slurm: Path, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[ff.SLURMCluster]]:
    """Opens a cluster on an event loop, and sees to it that no job and no process is left of it."""

    @asynccontextmanager
    async def opened(leaves_nothing: bool = True, **options: Any) -> AsyncIterator[ff.SLURMCluster]:
        own = settings(tmp_path) | {"queue": "cpu"} | options
        async with asyncio.timeout(150), ff.SLURMCluster(**own, asynchronous=True) as cluster:
            yield cluster
        if leaves_nothing:
            assert queue(cluster) == {}
            assert watchdogs(cluster.job_name) == []

    return opened


@pytest.fixture
def fake(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a command before SLURM's own: its first calls do something else.  Returns the file with a line a call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name: str, times: int, instead: str) -> Path:
        real, calls = shutil.which(name), tmp_path / f"{name}-calls"
        calls.touch()
        # Stock Dask submits its jobs at the same time: one counts.
        script = f"""
            real={real}
            number=$(flock {calls} sh -c 'echo "$@" >> {calls}; wc -l < {calls}' sh "$@")
            if [ "$number" -le {times} ]; then
            {instead}
            fi
            exec $real "$@"
        """
        executable(folder / name, script)
        return calls

    return put
