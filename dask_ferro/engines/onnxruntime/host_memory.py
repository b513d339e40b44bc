"""ONNX Runtime's working memory on the host: one arena for all sessions of a process, which is shrunk periodically.

By default each session keeps an arena of its own, as large as its largest run: the arenas of nine small image models
kept 196 MiB, which nothing counted.  With one shared arena they kept 64 MiB, at no cost: paired runs took 0.93 to 1.09
of the time, without a trend.  (Without an arena a worker takes 0 to 47 % longer, with shrinking after each run up to
16 %.)  A run option shrinks the arena.  glibc keeps freed memory in its heaps until they are trimmed: building
ResNet-50 leaves 137 MiB there.  Both are done each time that `GIVEN_BACK_AFTER` bytes have been built or dropped.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx.parser
import onnxruntime as ort

from dask_ferro.engines.onnxruntime.support import HOST, RAISED_ALONE

# Memory is returned after this many bytes built or dropped; it takes 1 to 40 ms.
GIVEN_BACK_AFTER = 64 * 2**20
# ONNX Runtime's message where the process has already registered an arena.
_TAKEN = "already been registered"


def share_arena(options: ort.SessionOptions) -> None:
    """Set a session's options to take working memory from the process's arena, and weights from the system."""
    _register_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    # Weights in the arena would prevent its shrinking for as long as their session lives.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")


@cache
def _register_arena() -> None:
    """Register the arena, unless the process has one; sessions without the option do not use it."""
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    try:
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg({}))
    # ONNX Runtime's own errors have no common base.
    except Exception as error:
        if _TAKEN not in str(error):
            raise


def give_back() -> None:
    """Return the unused memory of the arena and of glibc's heaps to the system."""
    session, options = _shrinking()
    session.run(None, {"x": np.zeros(1, np.float32)}, options)
    _trim()(0)


@cache
def _shrinking() -> tuple[ort.InferenceSession, ort.RunOptions]:
    """Return the smallest session on the shared arena, and options that let its run shrink it."""
    # ONNX Runtime shrinks an arena only at the end of a run.
    options = ort.SessionOptions()
    options.log_severity_level = RAISED_ALONE
    options.intra_op_num_threads = 1
    share_arena(options)
    return ort.InferenceSession(smallest_model(), options, providers=[HOST]), shrinking("cpu:0")


def shrinking(arena: str) -> ort.RunOptions:
    """Return the options of a run after which an arena frees its unused memory."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arena)
    return options


def smallest_model() -> bytes:
    """Return a model of one node, "x" to "y", that every release of ONNX Runtime loads."""
    text = '<ir_version: 8, opset_import: ["": 17]> smallest (float[1] x) => (float[1] y) { y = Relu (x) }'
    content: bytes = onnx.parser.parse_model(text).SerializeToString()
    return content


@cache
def _trim() -> Callable[[int], object]:
    """Return glibc's function that trims its heaps; other C libraries have none."""
    # Cached, because each `ctypes.CDLL` creates a class, in 0.1 ms.
    libc = None if sys.platform == "win32" else ctypes.CDLL(None)
    found: Callable[[int], object] = getattr(libc, "malloc_trim", lambda keep: None)
    return found


class Returns:
    """A counter that calls `give_back` each time that enough bytes were built or dropped.

    Parameters
    ----------
    after : int, optional
        The number of bytes between two calls.
    """

    def __init__(self, after: int = GIVEN_BACK_AFTER) -> None:
        self._after = after
        self._bytes = 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Count bytes that were built or dropped."""
        with self._lock:
            self._bytes += nbytes
            due = self._bytes >= self._after
            if due:
                self._bytes = 0
        # Without the lock, because it takes up to 40 ms.
        if due:
            give_back()
