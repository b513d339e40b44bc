"""A process that has imported the package and forks for each job: a child of its own, with limits, in milliseconds.

    test process --one JSON line a job--> zygote --fork--> child: limits, the job, its answer through a pipe
                 <--one JSON line-------         <--------

The zygote has one thread of Python's, so a fork is a whole copy of it; ONNX Runtime starts one of its own on import,
which sessions do without (every row here runs some).  A child gets `RLIMIT_DATA` (heap and private writable
pages, of which what the zygote holds already is not counted) in place of `RLIMIT_AS`, which also counts libraries and
files that are only mapped; `RLIMIT_CPU`; and a limit of wall-clock time, after which it is killed.  No core is dumped.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

MEMORY_BYTES = 1 << 30
SECONDS = 10

# What a child would import for itself: a second each time, of which 0.05 s remain.
_WARM = (
    *("dask.array", "dask.threaded", "distributed", "narwhals", "onnx.reference", "onnxruntime"),
    *("dask_ferro.lower.inputs.tables", "dask_ferro.lower.model.bound", "dask_ferro.lower.model.lowering"),
    *("dask_ferro.lower.model.row_check", "dask_ferro.lower.worker.task"),
)
_ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a child ended: its answer, or the signal or the time that ended it (0 and False: it answered)."""

    answer: Any
    signal: int
    too_late: bool

    @property
    def is_alive(self) -> bool:
        """Whether it came to its end by itself."""
        return not self.signal and not self.too_late


class Zygote:
    """The zygote, as the test process sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self, job: str, *, seconds: float = SECONDS, memory: int = MEMORY_BYTES, **arguments: Any
    ) -> Ended:
        """Return how ``job`` ("module:function") ended on JSON `arguments` in a child of its own."""
        line = json.dumps({"job": job, "seconds": seconds, "memory": memory, "arguments": arguments})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], seconds + 30)
        assert ready, f"the zygote did not answer in {seconds + 30} s about {job}"
        return Ended(**json.loads(self._process.stdout.readline()))


@contextmanager
def zygote(*modules: str) -> Iterator[Zygote]:
    """A zygote that has imported `modules`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.zygote", *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=_ROOT,
    ) as process:
        try:
            yield Zygote(process)
        finally:
            process.kill()


def serve(modules: list[str]) -> None:
    """Answer jobs from standard input until it ends."""
    for name in [*_WARM, *modules]:
        importlib.import_module(name)
    assert threading.active_count() == 1, "the zygote has threads of Python's, and forks only one of them"
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))._asdict()), flush=True)


def _forked(request: Mapping[str, Any]) -> Ended:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _work(request, writer)
    os.close(writer)
    try:
        content, too_late = _answer(reader, time.monotonic() + request["seconds"])
    finally:
        os.close(reader)
        if not _has_ended(child):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) and not content else 0
    answer = json.loads(content) if content else None
    return Ended(answer, 0 if too_late else killed, too_late)


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _answer(reader: int, end: float) -> tuple[bytes, bool]:
    """What the child wrote until it closed its end, and whether it took too long."""
    content = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return b"", True
        part = os.read(reader, 1 << 16)
        if not part:
            return content, False
        content += part


def _work(request: Mapping[str, Any], writer: int) -> None:
    """Do the job in this process, a child, and end it."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        _limit(request["memory"], int(request["seconds"]) + 1)
        module, _, name = request["job"].partition(":")
        answer = getattr(importlib.import_module(module), name)(**request["arguments"])
    except BaseException:  # noqa: BLE001 - the test judges what it was
        answer = {"raised": traceback.format_exc()}
    try:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(0)  # nothing of the zygote is closed or flushed twice


def _limit(memory: int, seconds: int) -> None:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + memory, held + memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    serve(sys.argv[1:])
