"""ONNX Runtime's own profile of a session: each op with its times, for the first runs.

A profile costs 16 us an op and 0.4 kB of file an op, and a session that has one is a second session, with weights
packed a second time; ONNX Runtime can end it, but not begin another.  So a session is profiled for its first runs,
20,000 ops at most (8 MB of file), and then runs without; and a process profiles 100,000 ops, of all its sessions.
The clock of the file is the system's, in microseconds.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import onnxruntime as ort

from dask_ferro.engines import Array
from dask_ferro.engines.hooks import ProfiledOp

# Ops in one profile: 0.2 s to read.
_OPS = 20_000
# Ops in the profiles that a process holds: 40 MB of files, then 20 MB of memory.
_BUDGET = 100_000
_granted = [0]
_grants = threading.Lock()
# The end of an event's name, behind the node's.
_KERNEL = "_kernel_time"


class ProfiledRun:
    """A session's run that ONNX Runtime profiles at first.

    Parameters
    ----------
    build : callable (prefix of the profile's path or None) -> ort.InferenceSession
    plain : callable (session or None, arrays) -> tuple of arrays
        The run itself, on a session of `build`, or on its own.
    nodes : int
    """

    def __init__(
        self,
        build: Callable[[str], ort.InferenceSession],
        plain: Callable[..., tuple[Array, ...]],
        nodes: int,
    ) -> None:
        self._plain = plain
        self._lock = threading.Lock()
        self._running = 0
        self._file = self._folder = ""
        self._session: ort.InferenceSession | None = None
        self._zero = 0.0
        self._granted = _granted_of(max(_OPS, nodes), nodes)
        self._left = self._granted // max(nodes, 1)
        if self._left:
            self._folder = tempfile.mkdtemp(prefix="ferro-profile-")
            self._session = build(os.path.join(self._folder, "ops"))
            self._zero = self._session.get_profiling_start_time_ns() * 1e-9

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs, profiled while that is bounded."""
        with self._lock:
            session = self._session if self._left > 0 else None
            # Counted down beyond 0 too: the run that ends last ends the profile.
            self._left -= 1
            self._running += session is not None
        if session is None:
            return self._plain(None, arrays)
        try:
            return self._plain(session, arrays)
        finally:
            with self._lock:
                self._running -= 1
                self._end_if_over()

    def ops(self) -> list[ProfiledOp]:
        """Stop profiling, and return the ops; none where a profiled run has not ended."""
        with self._lock:
            self._left = 0
            self._end_if_over()
            file, self._file = self._file, ""
        if not file:
            return []
        with open(file, encoding="utf-8") as opened:
            events = json.load(opened)
        shutil.rmtree(self._folder, ignore_errors=True)
        return [op for event in events if (op := _op(event, self._zero)) is not None]

    def _end_if_over(self) -> None:
        """End the profile once, and never during a run."""
        if self._session is not None and self._left <= 0 and not self._running:
            self._file = self._session.end_profiling()
            self._session = None

    def __del__(self) -> None:
        with _grants:
            _granted[0] -= self._granted
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _granted_of(wanted: int, least: int) -> int:
    """Take ops of the process's budget, as many as are left; none where that is less than the least."""
    with _grants:
        found = min(wanted, _BUDGET - _granted[0])
        found = found if found >= least else 0
        _granted[0] += found
    return found


def _op(event: dict[str, Any], zero: float) -> ProfiledOp | None:
    if event.get("cat") != "Node" or not event["name"].endswith(_KERNEL):
        return None
    told = event.get("args", {})
    start = zero + event["ts"] * 1e-6
    node = event["name"].removesuffix(_KERNEL)
    size = int(told.get("output_size") or 0)
    return ProfiledOp(event["tid"], told.get("op_name", ""), node, start, start + event["dur"] * 1e-6, size)
