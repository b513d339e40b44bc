"""A run of nodes as one ONNX Runtime session on the device where the values lie.

Values go in and out by I/O binding, and pass by DLPack without a copy: an input is the memory of the array that comes,
an output is written into memory of the arrays' own allocator, so that its live bytes are the truth and a session that
leaves the cache takes no result with it.  An output whose shape is not known before, and any of a first run, which
shows whether shapes are as declared, is ONNX Runtime's to allocate, and is copied into that memory, on the device.

Memory: a session keeps its weights on the device, so the manager of that memory may keep the session too, and drop it;
it is built again for the next run.  Its arena, its working memory, is given back after each run: it is in no account.

Streams: a session runs on streams of its own, which know nothing of the stream that the inputs were made on, so the
device is synchronized before a run, a run returns when its streams are done, and copies out of a session are
waited for.  That is two or three waits a session, and none between its nodes.  The provider is the one whose memory the
arrays lie in, as DLPack tells: arrays in host memory (`array_api_strict` in the tests) run the same code on the CPU
provider.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.device.device import Device
from dask_ferro.engines.hooks import OpHook, Watched
from dask_ferro.engines.onnxruntime.host_memory import shrinking, smallest_model
from dask_ferro.engines.onnxruntime.profile import ProfiledRun
from dask_ferro.engines.onnxruntime.session import kept_apart, session_options
from dask_ferro.engines.onnxruntime.support import HOST
from dask_ferro.engines.subgraph import extract, weights_of
from dask_ferro.errors import ConfigError

CUDA = "CUDAExecutionProvider"
# DLPack's device types, as ONNX Runtime names provider and memory.
_PLACES = {1: (HOST, "cpu"), 2: (CUDA, "cuda")}
# Words by which ONNX Runtime tells of memory that ran out; it raises its general error.
_OUT_OF_MEMORY = (
    *("Failed to allocate memory", "bad_alloc", "smaller than requested bytes", "out of memory"),
    # Of cuBLAS's and cuDNN's handles and workspaces.
    *("STATUS_ALLOC_FAILED", "STATUS_NOT_INITIALIZED"),
)
Dim = int | str | None

logger = logging.getLogger(__name__)


class ProviderPlace(NamedTuple):
    """A provider, its name for the memory that it works in, and the number of the device."""

    provider: str
    memory: str
    number: int


def place_of(device: Device) -> ProviderPlace:
    """Return the provider that reads the device's arrays without a copy.

    Raises
    ------
    ConfigError
        For a kind of memory that no provider here reads.
    """
    kind, index = device.namespace.empty(0).__dlpack_device__()
    if int(kind) not in _PLACES:
        raise ConfigError(
            f"arrays of {device.namespace.__name__} lie in memory of DLPack's kind {int(kind)}, which no provider of"
            " ONNX Runtime reads here; let the array table compute this bundle"
        )
    return ProviderPlace(*_PLACES[int(kind)], int(index))


@cache
def works(provider: str) -> bool:
    """Return whether a session really gets this provider."""
    # It may be built in, and yet lack its libraries or a driver: ONNX Runtime runs on the CPU then, in silence.
    if provider not in ort.get_available_providers():
        return False
    if provider == CUDA and hasattr(ort, "preload_dlls"):
        # The CUDA and cuDNN that are installed as packages.
        ort.preload_dlls()
    options = session_options(None, 1, True, None)
    try:
        found = _session(smallest_model(), options, provider, {})
    except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises, this provider does not work
        logger.info("dask_ferro: ONNX Runtime's %s does not work: %r", provider, error)
        return False
    return bool(found.get_providers()[0] == provider)


class Held(NamedTuple):
    """A session, and the bytes that it keeps on the device."""

    session: ort.InferenceSession
    nbytes: int


Holder = Callable[[Callable[[], Held]], Held]


def holder() -> Holder:
    """Return a factory that builds a session once and keeps it, for a device whose memory is not managed."""
    lock, kept = threading.Lock(), list[Held]()

    def held(build: Callable[[], Held]) -> Held:
        with lock:
            if not kept:
                kept.append(build())
            return kept[0]

    return held


class DeviceSessionRun:
    """The nodes between `inputs` and `outputs` as one session on a device; takes and gives the device's arrays.

    Parameters
    ----------
    device : Device
        Half of its memory that is free now is the most that the session's own arena may take.
    exact : bool, optional
        As `SessionRun` takes it.
    held : callable, optional
        Gives the session, and builds it where it is not kept any more; default: built once, and kept with the run.

    Raises
    ------
    ConfigError
        When the provider of the device's memory does not work here.
    MemoryError
        When the device has not enough of it for the session.
    """

    def __init__(
        self,
        model: ir.Model,
        nodes: Sequence[ir.Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
        *,
        device: Device,
        threads: int = 1,
        exact: bool = False,
        held: Holder | None = None,
    ) -> None:
        piece = extract(model, nodes, inputs, outputs, opset=opset)
        self._device = device
        self._place = place_of(device)
        if not works(self._place.provider):
            raise ConfigError(f"ONNX Runtime's {self._place.provider} does not work here; see docs/gpu.md")
        self._content = piece.proto.SerializeToString()
        self._options = partial(session_options, piece.folder, threads, False)
        self._nodes = len(nodes)
        self._apart = kept_apart(nodes, exact=exact)
        self._inputs = {value.name: _dims(value) for value in piece.proto.graph.input}
        self._outputs = {value.name: _dims(value) for value in piece.proto.graph.output}
        self._dtypes = {v.name: _dtype(device.namespace, v) for v in piece.proto.graph.output}
        # By output: whether its shape was as declared in all runs so far.
        self._kept: dict[str, bool] = {}
        self._run_options = run_options(self._place)
        self._weights = sum(t.nbytes for t in weights_of(model, nodes).values())
        self._held = holder() if held is None else held
        self._held(self._for_keeping)
        # On the host; `Held` has the bytes on the device.
        self.nbytes = len(self._content) * 5

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        return self._on(None, arrays)

    def watched(self, watch: OpHook) -> Watched:
        """Return the same run on a second session, which ONNX Runtime profiles at first."""
        return Watched(watch.session(self._nodes, ProfiledRun(self._built, self._on, self._nodes)))

    def _for_keeping(self) -> Held:
        return Held(self._built(), self._weights)

    def _built(self, profile: str | None = None) -> ort.InferenceSession:
        options = self._options(profile)
        settings = provider_options(self._place, self._device.memory().free // 2, self._device.tf32)
        with memory_errors():
            return _session(self._content, options, self._place.provider, settings, self._apart)

    def _on(self, session: ort.InferenceSession | None, arrays: Sequence[Array]) -> tuple[Array, ...]:
        session = self._held(self._for_keeping).session if session is None else session
        binding = session.io_binding()
        given = [self._device.to_device(a) if isinstance(a, np.ndarray) else a for a in arrays]
        for name, array in zip(self._inputs, given, strict=True):
            binding.bind_ortvalue_input(name, as_value(self._device.namespace, array))
        made = self._targets(given)
        for name in self._outputs:
            if name in made:
                binding.bind_ortvalue_output(name, ort.OrtValue.from_dlpack(made[name]))
            else:
                binding.bind_output(name, self._place.memory, self._place.number)
        # The session's streams know nothing of the stream on which the inputs are made.
        self._device.synchronize()
        with memory_errors():
            session.run_with_iobinding(binding, self._run_options)
        values = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        results = tuple(made[n] if n in made else self._taken(n, v, given) for n, v in values.items())
        # The arena that was copied from serves other threads' runs as soon as this returns.
        if len(made) < len(results):
            self._device.synchronize()
        return results

    def _targets(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Return memory for the outputs whose shapes are known, and were as declared when they were first made."""
        sizes = sizes_of(self._inputs.values(), [a.shape for a in arrays])
        shapes = {name: resolved(self._outputs[name], sizes) for name, kept in self._kept.items() if kept}
        empty = self._device.namespace.empty
        return {n: empty(s, dtype=self._dtypes[n]) for n, s in shapes.items() if s is not None}

    def _taken(self, name: str, value: ort.OrtValue, arrays: Sequence[Array]) -> Array:
        """Return an output that ONNX Runtime allocated, copied on the device into memory of the arrays' allocator."""
        xp, dtype = self._device.namespace, self._dtypes[name]
        found = xp.from_dlpack(value)
        declared = resolved(self._outputs[name], sizes_of(self._inputs.values(), [a.shape for a in arrays]))
        # ONNX Runtime 1.31 gives bytes.
        if value.data_type() == "tensor(bool)":
            return xp.astype(found, xp.bool)
        if declared is not None and dtype is not None:
            self._kept[name] = self._kept.get(name, True) and declared == tuple(found.shape)
        return xp.asarray(found, copy=True)


def provider_options(place: ProviderPlace, limit: int, tf32: bool) -> dict[str, str]:
    """Return a provider's options: `limit` bytes of arena, and TF32, which is its own default, only where asked for."""
    if place.provider != CUDA:
        return {}
    return {
        "device_id": str(place.number),
        "use_tf32": str(int(tf32)),
        # The default doubles what was asked for.
        "arena_extend_strategy": "kSameAsRequested",
        # The default tries all of them at each new shape.
        "cudnn_conv_algo_search": "HEURISTIC",
        "gpu_mem_limit": str(limit),
    }


def run_options(place: ProviderPlace) -> ort.RunOptions:
    """Return the options of a run after which the arena gives back its unused memory."""
    kind = "gpu" if place.provider == CUDA else "cpu"
    return shrinking(f"{kind}:{place.number}")


def as_value(xp: Namespace, array: Array) -> ort.OrtValue:
    """Return an array as ONNX Runtime's value on the same memory; one that is not in C order is copied first."""
    flat = xp.reshape(xp.reshape(array, (-1,)), array.shape)
    return ort.OrtValue.from_dlpack(_Flags(xp, flat) if flat.dtype == xp.bool and not _knows_bool() else flat)


@cache
def _knows_bool() -> bool:
    """Return whether ONNX Runtime has DLPack's bool, as 1.32 has: 1.31 gives and takes bytes."""
    value = ort.OrtValue.ortvalue_from_numpy(np.zeros(1, bool))
    return bool(np.from_dlpack(value).dtype == np.bool_)


class _Flags:
    """A bool array as ONNX Runtime 1.31 wants it by DLPack: bytes under the name of bool."""

    dtype = np.dtype(bool)

    def __init__(self, xp: Namespace, array: Array) -> None:
        self._bytes = xp.astype(array, xp.uint8)

    def __dlpack__(self) -> object:
        return self._bytes.__dlpack__()


def sizes_of(declared: Iterable[Sequence[Dim] | None], shapes: Sequence[Sequence[int]]) -> Mapping[str, int]:
    """Return the sizes that shapes give to symbolic dimensions; one that they give two sizes has none.

    >>> sizes_of([("n", 3), ("n", "k")], [(2, 3), (2, 5)])
    {'n': 2, 'k': 5}
    """
    found: dict[str, set[int]] = {}
    for dims, shape in zip(declared, shapes, strict=True):
        for dim, size in zip(dims or (), shape, strict=False):
            if isinstance(dim, str):
                found.setdefault(dim, set()).add(size)
    return {name: sizes.pop() for name, sizes in found.items() if len(sizes) == 1}


def resolved(dims: tuple[Dim, ...] | None, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return a declared shape with its symbols' sizes; None where a dimension or the rank stays unknown."""
    if dims is None:
        return None
    found = [sizes.get(dim) if isinstance(dim, str) else dim for dim in dims]
    return None if None in found else tuple(size for size in found if size is not None)


def _dims(value: onnx.ValueInfoProto) -> tuple[Dim, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)


def _dtype(xp: Namespace, value: onnx.ValueInfoProto) -> object:
    """Return the namespace's dtype of an output; None where memory for it cannot be made before."""
    kind = ir.DataType(value.type.tensor_type.elem_type)
    if kind in (ir.DataType.BOOL, ir.DataType.UNDEFINED):
        return None
    return getattr(xp, kind.numpy().name, None)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise ONNX Runtime's out-of-memory errors, which it reports by text alone, as MemoryError."""
    try:
        yield
    except Exception as error:
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            raise MemoryError(str(error)) from error
        raise


def _session(
    content: bytes,
    options: ort.SessionOptions,
    provider: str,
    settings: dict[str, str],
    apart: Sequence[str] = (),
) -> ort.InferenceSession:
    """Return a session on one provider; nodes that it has no kernel for run on the CPU's."""
    providers: list[str | tuple[str, dict[str, str]]] = [(provider, settings)]
    if provider != HOST:
        providers.append(HOST)
    return ort.InferenceSession(
        content,
        options,
        providers=providers,
        disabled_optimizers=list(apart),
        # It would be a session on the host, or one without our settings, where memory is short.
        enable_fallback=0,
    )
