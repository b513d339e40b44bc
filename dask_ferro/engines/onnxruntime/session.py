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
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from threading import Lock, Timer
from typing import NamedTuple

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort

from dask_ferro.engines import Array
from dask_ferro.engines.onnxruntime import HOST
from dask_ferro.engines.onnxruntime.faster_nodes import SLOW, faster
from dask_ferro.engines.subgraph import extract
from dask_ferro.errors import InputError
from dask_ferro.graph.ir.nodes import bodies, type_of, value_bytes
from dask_ferro.graph.ir.regions import REMAT_KEY

# A session with prepacked weights takes 1.6 x their size (measured).
_PREPACK_FACTOR = 1.6
# A session on one tiny operator takes 64 kB of RSS.
_SESSION_BYTES = 64 * 2**10
# Folds `product * scale` into a float32 attribute of the product.  For doubles this changes the eighth digit, and
# whether a product has its scale in the same bundle depends on the cut.  Without it an encoder takes 1.5 % longer in
# float32.
_FOLDS_SCALES = "MatMulScaleFusion"
_MERGES = "CommonSubexpressionElimination"
# Mistakes the padding of a convolution's computed kernel for the padding of its image, and refuses the graph.
_PADS = "Pad_Fusion"
# Makes convolutions with constant kernels faster.  If all kernels are computed, as in training, it moves only pools
# to another layout and back: 0.95 of the CPU time of two convolutions' step without it.
_BLOCKS = "NchwcTransformer"
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


class SessionRun:
    """The nodes between `inputs` and `outputs` as one session."""

    def __init__(
        self,
        model: ir.Model,
        nodes: Sequence[ir.Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
        settings: SessionSettings,
    ) -> None:
        piece = extract(model, nodes, inputs, outputs, opset=opset, shares=True)
        if not SLOW.isdisjoint(node.op_type for node in nodes):
            found = faster(nodes, piece.proto.graph.node, opset)
            del piece.proto.graph.node[:]
            piece.proto.graph.node.extend(found)
        self._content = piece.proto.SerializeToString()
        # The session reads these arrays in place, so they have to live as long.
        self._shared = piece.shared
        self._apart = disabled_optimizers(nodes, exact=settings.exact)
        weights = {name: tensor.nbytes for name, tensor in piece.weights.items()}
        self._session = self._built(session_options(piece.folder, settings))
        self._run = self._session.run
        self._inputs = tuple(inputs)
        self._outputs = list(outputs)
        self._limit = settings.limit
        held = sum(array.nbytes for array in self._shared.values())
        packed = int(sum(weights.values()) * (_PREPACK_FACTOR if settings.prepack else 0.0))
        self.nbytes = len(self._content) * 5 + held + _SESSION_BYTES + packed + constant_bytes(nodes, weights)

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

    def _built(self, options: ort.SessionOptions) -> ort.InferenceSession:
        share_arena(options)
        if self._shared:
            values = [ort.OrtValue.ortvalue_from_numpy(array) for array in self._shared.values()]
            options.add_external_initializers(list(self._shared), values)
        return ort.InferenceSession(self._content, options, providers=[HOST], disabled_optimizers=self._apart)


def constant_bytes(nodes: Iterable[ir.Node], weights: Iterable[str]) -> int:
    """Return the bytes of the values that depend on no input, which ONNX Runtime computes when it builds a session.

    The onnx package's light models build their weights like this, 490 MB from a file of 4 kB.
    """
    known, total = set(weights), 0
    for node in nodes:
        if not bodies(node) and all(v.name in known for v in node.inputs if v is not None and v.name):
            known.update(v.name for v in node.outputs if v.name)
            total += sum(value_bytes(type_of(v, {})) for v in node.outputs if v.name)
    return total


def disabled_optimizers(nodes: Sequence[ir.Node], *, exact: bool) -> list[str]:
    """Return the optimizers of ONNX Runtime that a session on `nodes` must not use.

    Parameters
    ----------
    exact : bool
        Whether the bits of results must not depend on the other nodes of the session; for doubles they never do.
    """
    values = chain.from_iterable((*node.inputs, *node.outputs) for node in nodes)
    has_doubles = any(v is not None and v.dtype is ir.DataType.DOUBLE for v in values)
    # ONNX Runtime would take a node that is computed again for a copy of the first one, and keep that one's result.
    repeats = any(REMAT_KEY in node.metadata_props for node in nodes)
    # Second derivatives of convolutions have such names.
    kernels = [node.inputs[1] for node in nodes if node.op_type == "Conv"]
    computed = [kernel is not None and kernel.const_value is None for kernel in kernels]
    apart = {
        _FOLDS_SCALES: exact or has_doubles,
        _MERGES: repeats,
        _PADS: any(computed),
        # In that layout a window's mean is summed in another order.
        _BLOCKS: bool(computed) and all(computed) and not exact,
    }
    return [name for name, is_apart in apart.items() if is_apart]


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
