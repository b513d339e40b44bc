"""A run of nodes as one ONNX Runtime session on the device of its values.

Inputs and outputs use I/O binding, and are exchanged by DLPack without a copy.  An input is the memory of the argument;
an output is written into memory of the arrays' own allocator, which therefore counts it, and which frees no result when
a session leaves the cache.  ONNX Runtime allocates an output whose shape is not known beforehand, and all outputs of a
first run, which shows whether shapes are as declared; these outputs are copied on the device.

Memory: a session keeps its weights on the device, so the manager of that memory keeps the session too, and may drop it;
the next run builds it again.  The session's arena, its working memory, is not counted, so it is freed after each run.

Streams: a session runs on streams of its own, which are not ordered after the stream of its inputs.  The device is
therefore synchronized before a run, a run returns when its streams are done, and a run waits for copies of its outputs.
These are two or three waits per session, and none between its nodes.  DLPack names the memory of the arrays, which
decides the provider: arrays in host memory (`array_api_strict` in the tests) run the same code on the CPU provider.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.device.device import Device, Memory
from dask_ferro.engines.onnxruntime import HOST
from dask_ferro.engines.onnxruntime.session import (
    DEFAULTS,
    SessionSettings,
    session_options,
    shrink_options,
    smallest_model,
)
from dask_ferro.engines.onnxruntime.session_model import disabled_optimizers
from dask_ferro.engines.subgraph import extract
from dask_ferro.errors import InputError

CUDA = "CUDAExecutionProvider"
# By DLPack's device type: ONNX Runtime's names of provider and memory.
_PLACES = {1: (HOST, "cpu"), 2: (CUDA, "cuda")}
Dim = int | str | None

logger = logging.getLogger(__name__)


class ProviderPlace(NamedTuple):
    """A provider, its name for its memory, and the number of the device."""

    provider: str
    memory: str
    number: int


def place_of(device: Device) -> ProviderPlace:
    """Return the provider that reads the device's arrays without a copy.

    Raises
    ------
    InputError
        If no provider here reads this kind of memory.
    """
    kind, index = device.namespace.empty(0).__dlpack_device__()
    if int(kind) not in _PLACES:
        raise InputError(
            f"arrays of {device.namespace.__name__} have memory of DLPack's kind {int(kind)}, which no"
            " provider of ONNX Runtime reads here; let the array table compute this bundle"
        )
    return ProviderPlace(*_PLACES[int(kind)], int(index))


@cache
def works(provider: str) -> bool:
    """Return whether a session really gets this provider."""
    # A built-in provider may lack its libraries or a driver: ONNX Runtime then silently runs on the CPU.
    if provider not in ort.get_available_providers():
        return False
    if provider == CUDA and hasattr(ort, "preload_dlls"):
        # Loads CUDA and cuDNN if they are installed as packages.
        ort.preload_dlls()
    options = session_options(None, DEFAULTS)
    try:
        found = _session(smallest_model(), options, provider, {})
    except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises, this provider does not work
        logger.info("dask_ferro: ONNX Runtime's %s does not work: %r", provider, error)
        return False
    return bool(found.get_providers()[0] == provider)


class HeldSession(NamedTuple):
    """A session, and the bytes that it keeps on the device."""

    session: ort.InferenceSession
    nbytes: int


Holder = Callable[[Callable[[], HeldSession]], HeldSession]


class DeviceSessionRun:
    """The nodes between `inputs` and `outputs` as one session on a device, on arrays of the device.

    Parameters
    ----------
    device : Device
        The session's arena may take at most half of its memory that is free now.
    held : callable
        Keeps the session that it builds, and builds it again if it was dropped; see `Residency.slot`.

    Raises
    ------
    InputError
        If the provider of the device's memory does not work here.
    """

    def __init__(
        self,
        model: ir.Model,
        nodes: Sequence[ir.Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
        settings: SessionSettings,
        *,
        device: Device,
        held: Holder,
    ) -> None:
        piece = extract(model, nodes, inputs, outputs, opset=opset)
        self._device = device
        self._place = place_of(device)
        if not works(self._place.provider):
            raise InputError(
                f"ONNX Runtime's {self._place.provider} does not work here; see docs/howto/gpu.md"
            )
        self._content = piece.proto.SerializeToString()
        self._settings = piece.folder, settings._replace(prepack=False)
        self._apart = disabled_optimizers(nodes, exact=settings.exact)
        self._inputs = {value.name: _dims(value) for value in piece.proto.graph.input}
        self._outputs = {value.name: _dims(value) for value in piece.proto.graph.output}
        self._dtypes = {v.name: _dtype(device.namespace, v) for v in piece.proto.graph.output}
        # By output: whether its shape has been as declared in all runs so far.
        self._kept: dict[str, bool] = {}
        arena = "gpu" if self._place.provider == CUDA else "cpu"
        self._shrinking = shrink_options(f"{arena}:{self._place.number}")
        self._weights = sum(tensor.nbytes for tensor in piece.weights.values())
        self._held = held
        self._held(self._built)
        # Bytes on the host; `HeldSession` has the bytes on the device.
        self.nbytes = len(self._content) * 5

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        session = self._held(self._built).session
        binding = session.io_binding()
        given = [self._device.to_device(a) if isinstance(a, np.ndarray) else a for a in arrays]
        for name, array in zip(self._inputs, given, strict=True):
            binding.bind_ortvalue_input(name, as_value(self._device.namespace, array))
        sizes = sizes_of(self._inputs.values(), [a.shape for a in given])
        shapes = {name: resolve_shape(dims, sizes) for name, dims in self._outputs.items()}
        # Memory for the outputs whose shapes are known, and have been as declared in earlier runs.
        made = {
            name: self._device.namespace.empty(shape, dtype=self._dtypes[name])
            for name, shape in shapes.items()
            if shape is not None and self._kept.get(name)
        }
        for name in self._outputs:
            if name in made:
                binding.bind_ortvalue_output(name, ort.OrtValue.from_dlpack(made[name]))
            else:
                binding.bind_output(name, self._place.memory, self._place.number)
        # The session's streams are not ordered after the stream that computes the inputs.
        self._device.synchronize()
        session.run_with_iobinding(binding, self._shrinking if is_short(self._device.memory()) else None)
        values = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        results = tuple(made[n] if n in made else self._taken(n, v, shapes[n]) for n, v in values.items())
        # The arena is the source of the copies, and serves other threads' runs as soon as this returns.
        if len(made) < len(results):
            self._device.synchronize()
        return results

    def _built(self) -> HeldSession:
        options = session_options(*self._settings)
        # The arena is the driver's memory, none of a pool.
        settings = provider_options(self._place, self._device.memory().unused // 2, self._device.tf32)
        session = _session(self._content, options, self._place.provider, settings, self._apart)
        return HeldSession(session, self._weights)

    def _taken(self, name: str, value: ort.OrtValue, declared: tuple[int, ...] | None) -> Array:
        """Return a copy, in memory of the arrays' allocator, of an output that ONNX Runtime allocated."""
        xp, dtype = self._device.namespace, self._dtypes[name]
        found = xp.from_dlpack(value)
        # ONNX Runtime 1.31 returns bytes.
        if value.data_type() == "tensor(bool)":
            return xp.astype(found, xp.bool)
        if declared is not None and dtype is not None:
            self._kept[name] = self._kept.get(name, True) and declared == tuple(found.shape)
        return xp.asarray(found, copy=True)


def provider_options(place: ProviderPlace, limit: int, tf32: bool) -> dict[str, str]:
    """Return a provider's options: `limit` bytes of arena, and TF32 (its default) only where requested."""
    if place.provider != CUDA:
        return {}
    return {
        "device_id": str(place.number),
        "use_tf32": str(int(tf32)),
        # The default doubles each request.
        "arena_extend_strategy": "kSameAsRequested",
        # The default tries all algorithms at each new shape.
        "cudnn_conv_algo_search": "HEURISTIC",
        "gpu_mem_limit": str(limit),
    }


def is_short(memory: Memory) -> bool:
    """Return whether the driver has less than a quarter of a device's memory left.

    If it has more, arenas keep their memory between runs, because allocating it again takes up to a millisecond a run.
    """
    return memory.unused < memory.total // 4


def as_value(xp: Namespace, array: Array) -> ort.OrtValue:
    """Return an array as ONNX Runtime's value on the same memory; an array not in C order is copied first."""
    flat = xp.reshape(xp.reshape(array, (-1,)), array.shape)
    if flat.dtype == xp.bool and not _knows_bool():
        # The form that ONNX Runtime 1.31 accepts: bytes that have the dtype bool.
        flat = SimpleNamespace(dtype=np.dtype(bool), __dlpack__=xp.astype(flat, xp.uint8).__dlpack__)
    return ort.OrtValue.from_dlpack(flat)


@cache
def _knows_bool() -> bool:
    """Return whether ONNX Runtime supports DLPack's bool, since 1.32: 1.31 uses bytes."""
    value = ort.OrtValue.ortvalue_from_numpy(np.zeros(1, bool))
    return bool(np.from_dlpack(value).dtype == np.bool_)


def sizes_of(declared: Iterable[Sequence[Dim] | None], shapes: Sequence[Sequence[int]]) -> Mapping[str, int]:
    """Return the sizes of symbolic dimensions in some shapes; a dimension with two sizes is omitted.

    >>> sizes_of([("n", 3), ("n", "k")], [(2, 3), (2, 5)])
    {'n': 2, 'k': 5}
    """
    found: dict[str, set[int]] = {}
    for dims, shape in zip(declared, shapes, strict=True):
        for dim, size in zip(dims or (), shape, strict=False):
            if isinstance(dim, str):
                found.setdefault(dim, set()).add(size)
    return {name: sizes.pop() for name, sizes in found.items() if len(sizes) == 1}


def resolve_shape(dims: tuple[Dim, ...] | None, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return a declared shape with its symbols' sizes; None if a dimension or the rank is unknown."""
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
    """Return the namespace's dtype of an output; None if its memory cannot be allocated beforehand."""
    kind = ir.DataType(value.type.tensor_type.elem_type)
    if kind in (ir.DataType.BOOL, ir.DataType.UNDEFINED):
        return None
    return getattr(xp, kind.numpy().name, None)


def _session(
    content: bytes,
    options: ort.SessionOptions,
    provider: str,
    settings: dict[str, str],
    apart: Sequence[str] = (),
) -> ort.InferenceSession:
    """Return a session on one provider; nodes without a kernel there run on the CPU."""
    providers: list[str | tuple[str, dict[str, str]]] = [(provider, settings)]
    if provider != HOST:
        providers.append(HOST)
    return ort.InferenceSession(
        content,
        options,
        providers=providers,
        disabled_optimizers=list(apart),
        # The fallback would answer a shortage of memory with a session on the host or without these settings.
        enable_fallback=0,
    )
