"""Runs of `ff.predict_files` in processes that stop or die at a chosen step: every step at which they change a file.

A parent imports everything once, and forks a child for each run.  The child counts its own audit events (Python tells
of each `open`, `rename`, `mkdir` and so on before it happens) and sends itself a signal at the one that is asked for.
Nothing of the program is replaced.  The test talks to the parent in lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Events of which the first argument is the path that is changed; `open` only when it is for writing.
CHANGES = frozenset({"open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"})
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# A child that neither ends nor stops for so long is a fault.
BOUND_S = 60.0


def count_down(steps: int, number: int, folder: str) -> None:
    """Send this process a signal at its `steps`-th change of a file in a folder."""
    left = steps

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in CHANGES or not str(args[0]).startswith(folder):
            return
        if event == "open" and not args[2] & WRITING:
            return
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)

    sys.addaudithook(hook)


def child(order: dict[str, Any]) -> None:
    """Run, and tell how it ended in the file `order["report"]`."""
    import resource
    import warnings

    import dask_ferro as ff

    warnings.simplefilter("ignore")
    if "most_bytes" in order:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["most_bytes"],) * 2)
    if "steps" in order:
        count_down(order["steps"], order["signal"], os.getcwd())
    try:
        summary = ff.predict_files(*order["args"], **order["kwargs"])
        said = {"computed": summary.chunks_computed, "reused": summary.chunks_reused}
    except Exception as error:  # noqa: BLE001 - the test looks at it
        said = {"error": type(error).__name__, "said": str(error)}
    with open(order["report"], "w") as file:
        json.dump(said, file)


def state_of(pid: int, report: str) -> dict[str, Any]:
    """Wait until a child ends or stops."""
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WUNTRACED | os.WNOHANG)
        if not found:
            time.sleep(0.002)
        elif os.WIFSTOPPED(status):
            return {"pid": pid, "stopped": True}
        elif os.WIFSIGNALED(status):
            return {"pid": pid, "killed": os.WTERMSIG(status)}
        else:
            said = json.loads(Path(report).read_text()) if os.path.exists(report) else {"error": "no report"}
            return {"pid": pid, **said}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return {"pid": pid, "error": "Hung", "said": f"neither ended nor stopped for {BOUND_S:g} s"}


def serve() -> None:
    """Fork a child for each line."""
    import onnxruntime  # noqa: F401 - what all children need is there before they are forked
    import pandas  # noqa: F401 - pyarrow imports it with the first array
    import pyarrow.parquet  # noqa: F401
    import zarr  # noqa: F401

    import dask_ferro.stream  # noqa: F401

    reports: dict[int, str] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "continue" in order:
            pid = order["continue"]
            os.kill(pid, signal.SIGCONT)
        elif pid := os.fork():
            reports[pid] = order["report"]
        else:
            sys.stdin.close()
            os.chdir(order["cwd"])
            child(order)
            sys.stdout.flush()
            os._exit(0)
        print(json.dumps(state_of(pid, reports[pid])), flush=True)


class Stepper:
    """The parent process, as the test sees it."""

    def __init__(self, process: subprocess.Popen[str], reports: Path) -> None:
        self._process, self._reports, self._count = process, reports, 0

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks the runs has ended"
        found: dict[str, Any] = json.loads(answer)
        return found

    def run(
        self, *args: Any, cwd: Path, limits: dict[str, Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Run to the end, or to the signal that `limits` ask for; return how it ended."""
        self._count += 1
        report = str(self._reports / f"{self._count}.json")
        order = {"args": args, "kwargs": kwargs, "cwd": str(cwd), "report": report, **(limits or {})}
        return self._ask(order)

    def go_on(self, pid: int) -> dict[str, Any]:
        """Let a stopped child go on to its end."""
        return self._ask({"continue": pid})


@contextmanager
def stepper(reports: Path) -> Iterator[Stepper]:
    """Start the parent process, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.stream.stepper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield Stepper(process, reports)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


if __name__ == "__main__":
    serve()
