"""ONNX Runtime's own profile of a session: the times of each operator in the first runs.

A profile costs 16 us and 0.4 kB of file per operator, and needs a second session, with weights packed a second time;
ONNX Runtime can end a profile, but not begin another.  So only the first runs of a session are profiled, up to 20,000
operators (8 MB of file), and a process profiles up to 100,000 operators in all its sessions.  The file has the system's
clock in microseconds.
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
from dask_ferro.engines.onnxruntime.faster_nodes import IN_PLACE_OF

# Operators in one profile, which take 0.2 s to read.
_OPS = 20_000
# Operators in all profiles of a process: 40 MB of files, then 20 MB of memory.
_BUDGET = 100_000
_granted = [0]
_grants = threading.Lock()
# The suffix of an event's name, after the node's name.
_KERNEL = "_kernel_time"


class ProfiledRun:
    """A session's run whose first calls ONNX Runtime profiles.

    Parameters
    ----------
    build : callable (prefix of the profile's path or None) -> ort.InferenceSession
    plain : callable (session or None, arrays) -> tuple of arrays
        The run itself, on a session from `build`, or on its own session.
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
        """Compute the outputs, profiled within the bound."""
        with self._lock:
            session = self._session if self._left > 0 else None
            # Also below 0: the last profiled run to end ends the profile.
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
        """Stop profiling, and return the operators; none while a profiled run has not ended."""
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
    """Take operators from the process's budget: at most `wanted`, and none if fewer than `least` remain."""
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
    # Nodes in place of one count for that one; an If there contains those of its branch, which are told too.
    node, _, in_place = event["name"].removesuffix(_KERNEL).partition(IN_PLACE_OF)
    if in_place and told.get("op_name") == "If":
        return None
    size = int(told.get("output_size") or 0)
    return ProfiledOp(event["tid"], told.get("op_name", ""), node, start, start + event["dur"] * 1e-6, size)
