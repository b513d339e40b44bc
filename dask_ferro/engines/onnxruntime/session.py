"""A run of nodes as one ONNX Runtime session on the CPU.

The session gets an extracted model whose weights are external data: the loaded model's arrays in memory or, for large
models, the user's own memory-mapped file, whose pages all processes of a host share.  With prepacking (the default)
matrix products are faster, but each session keeps its own packed copy.  A session is thread-safe and releases the GIL,
so the threads of a worker share one, with `threads` = cores / worker threads (more oversubscribes: 0.77 x measured).
ONNX Runtime's global thread pool is not an alternative for many small sessions: it makes every other session of the
process fail, also a user's own.

All sessions of a process share one arena, which is shrunk periodically.  By default each keeps an arena of its own, as
large as its largest run: the arenas of nine small image models kept 196 MiB, which nothing counted.  With one shared
arena they kept 64 MiB, at no cost: paired runs took 0.93 to 1.09 of the time, without a trend.  (Without an arena a
worker takes 0 to 47 % longer, with shrinking after each run up to 16 %.)  A run option shrinks the arena.  glibc keeps
freed memory in its heaps until they are trimmed: building ResNet-50 leaves 137 MiB there.  Both are done each time that
`TRIM_INTERVAL_BYTES` bytes have been built or dropped.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from functools import cache
from threading import Lock, Timer
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from dask_ferro.engines import Array
from dask_ferro.engines.onnxruntime import HOST
from dask_ferro.errors import InputError

# A session with prepacked weights takes 1.6 x their size (measured).
_PREPACK_FACTOR = 1.6
# A session on one tiny operator takes 64 kB of RSS.
_SESSION_BYTES = 64 * 2**10
# The severity of a session's log: fatal errors.  ONNX Runtime raises an error, and also writes it to standard error, in
# red.  A run has the severity of its session.
RAISED_ALONE = 4
# Memory is returned after this many bytes built or dropped; it takes 1 to 40 ms.
TRIM_INTERVAL_BYTES = 64 * 2**20
# ONNX Runtime's message if the process has already registered an arena.
_ARENA_EXISTS = "already been registered"


class SessionSettings(NamedTuple):
    """Settings of a session on the host.

    Attributes
    ----------
    threads : int
        Intra-op threads.
    prepack : bool
        Whether the session may keep rearranged copies of constant weights.
    exact : bool
        Whether results have the same bits wherever the model is cut; see `disabled_optimizers`.
    limit : float or None
        Seconds that a run may take; it is stopped at the next node, also inside the body of a Loop.
    """

    threads: int = 1
    prepack: bool = True
    exact: bool = False
    limit: float | None = None


DEFAULTS = SessionSettings()


class SessionModel(NamedTuple):
    """A model of nodes as a session loads it.

    Attributes
    ----------
    content : bytes
        A serialized ModelProto.
    folder : str or None
        The folder of its external data; None without external data.
    inputs, outputs : tuple of str
    disabled : tuple of str
        The optimizers of ONNX Runtime that the session must not use.
    shared : mapping of str to ndarray
        Weights that the session reads in place.
    weight_bytes : int
        Bytes of all weights.
    constant_bytes : int
        Bytes of the values that ONNX Runtime computes when it builds the session.
    """

    content: bytes
    folder: str | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    disabled: tuple[str, ...]
    shared: Mapping[str, np.ndarray]
    weight_bytes: int
    constant_bytes: int


class SessionRun:
    """A model as one session."""

    def __init__(self, model: SessionModel, settings: SessionSettings) -> None:
        # The session reads these arrays in place, so they have to live as long.
        self._shared = model.shared
        self._session = self._built(model, session_options(model.folder, settings))
        self._run = self._session.run
        self._inputs, self._outputs = model.inputs, list(model.outputs)
        self._limit = settings.limit
        held = sum(array.nbytes for array in self._shared.values())
        packed = int(model.weight_bytes * (_PREPACK_FACTOR if settings.prepack else 0.0))
        self.nbytes = len(model.content) * 5 + held + _SESSION_BYTES + packed + model.constant_bytes

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        run, feeds = self._run, dict(zip(self._inputs, arrays, strict=True))
        # The usual case needs no options of a run.
        if self._limit is None:
            return tuple(run(self._outputs, feeds))
        options = ort.RunOptions()
        timer = Timer(self._limit, setattr, (options, "terminate", True))
        # A daemon, so that a process can end before the limit.
        timer.daemon = True
        timer.start()
        try:
            return tuple(run(self._outputs, feeds, options))
        except Exception as error:
            if not options.terminate:
                raise
            raise InputError(
                f"stopped after {self._limit:g} s, the limit of one bundle (ferro.limits.run); raise it if"
                " the model is expected to take longer"
            ) from error
        finally:
            timer.cancel()

    def _built(self, model: SessionModel, options: ort.SessionOptions) -> ort.InferenceSession:
        share_arena(options)
        if self._shared:
            values = [ort.OrtValue.ortvalue_from_numpy(array) for array in self._shared.values()]
            options.add_external_initializers(list(self._shared), values)
        return ort.InferenceSession(
            model.content, options, providers=[HOST], disabled_optimizers=list(model.disabled)
        )


def session_options(folder: str | None, settings: SessionSettings) -> ort.SessionOptions:
    """Return the options of a session on a model with its weights under `folder`."""
    options = ort.SessionOptions()
    options.log_severity_level = RAISED_ALONE
    options.intra_op_num_threads = settings.threads
    # Nodes run one after the other; the worker's threads and the threads inside a node are parallel.
    options.inter_op_num_threads = 1
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    if not settings.prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


# ---- memory of the host ------------------------------------------------------------------------------------


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
        if _ARENA_EXISTS not in str(error):
            raise


def give_back() -> None:
    """Return the unused memory of the arena and of glibc's heaps to the system."""
    session, options = _shrink_session()
    session.run(None, {"x": np.zeros(1, np.float32)}, options)
    _trim()(0)


@cache
def _shrink_session() -> tuple[ort.InferenceSession, ort.RunOptions]:
    """Return the smallest session on the shared arena, and options that let its run shrink it."""
    # ONNX Runtime shrinks an arena only at the end of a run.
    options = ort.SessionOptions()
    options.log_severity_level = RAISED_ALONE
    options.intra_op_num_threads = 1
    share_arena(options)
    return ort.InferenceSession(smallest_model(), options, providers=[HOST]), shrink_options("cpu:0")


def shrink_options(arena: str) -> ort.RunOptions:
    """Return the options of a run after which an arena frees its unused memory."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arena)
    return options


def smallest_model() -> bytes:
    """Return a model of one node, "x" to "y", that every release of ONNX Runtime loads."""
    # y = Relu(x), of float32 and one element; IR version 8, opset 17.
    return (
        b'\x08\x08:<\n\x0e\n\x01x\x12\x01y"\x04Relu:\x00\x12\x08smallestZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
        b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
    )


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

    def __init__(self, after: int = TRIM_INTERVAL_BYTES) -> None:
        self._after = after
        self._bytes = 0
        self._lock = Lock()

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
