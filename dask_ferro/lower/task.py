"""What runs in a worker: one bundle, on the arrays of one chunk.

A task carries names only: which model (path and content digest), which bundle of it (the values between which
it lies) and which engines.  The process finds the model at its path, memory-mapped, or in the copy that travels
as a Dask value when it cannot see the path; it keeps the opened model and the compiled bundle for the next task.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.graph.load import Limits, Loaded, load
from dask_ferro.kernels.cache import Cache
from dask_ferro.kernels.executable import Executable, compile_bundle, nodes_between
from dask_ferro.kernels.ondevice import DeviceExecutable
from dask_ferro.kernels.resident import Residency
from dask_ferro.kernels.route import Engine
from dask_ferro.lower import device
from dask_ferro.lower.about import Told, told
from dask_ferro.lower.device_engines import chosen
from dask_ferro.lower.outputs import together, together_by_name
from dask_ferro.lower.threads import intra_op_threads

# Opened models map their weights, so a few cost little; one that travelled as a copy holds it.
_MODELS_KEPT = 8


class ModelRef(NamedTuple):
    """A model by name: where its file lies, and what the file was when the graph was built."""

    path: str
    digest: str
    size: int
    mtime_ns: int


class BundleRef(NamedTuple):
    """A bundle by name, and how to run it.

    Attributes
    ----------
    inputs, outputs : tuple of str
        The values between which it lies.
    engines : tuple of (engine, count)
        Runs of nodes in topological order.
    picks : tuple of (position, index)
        For each input, which argument of the task it is (or, where index >= 0, which item of that argument).
    rows : int
        1 for a model of batch 1 that is to run over a longer batch; 0: takes whatever comes.
    split : tuple of bool
        With `rows`: which inputs carry the batch.
    parallel : bool
        Whether it is long enough for a session to have threads of its own.
    by_name : bool
        Give the outputs as a dict by name: the bundle is all there is to compute.
    title : str
        Some of its nodes by name, for people.
    flops : float
        Projected, of a whole chunk; 0: not known.
    down : tuple of int
        Outputs, by position, that are the model's own: on a device, they come down to the host.
    exact : bool
        Whether its bits may not depend on where the model was cut.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    engines: tuple[tuple[Engine, int], ...]
    picks: tuple[tuple[int, int], ...]
    rows: int = 0
    split: tuple[bool, ...] = ()
    parallel: bool = True
    by_name: bool = False
    title: str = ""
    flops: float = 0.0
    down: tuple[int, ...] = ()
    exact: bool = False


Compute = Callable[..., tuple[Any, ...]]
# Of an Executable or a DeviceExecutable, and of what gives what the graph tells of its nodes.
Listener = Callable[[Any, Callable[[], Told]], Compute]
# Who is shown each bundle that runs in this process, and gives what is to run in its place; None: nobody.
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Let somebody take each bundle's place before it runs, to see its ops; None: nobody any more."""
    global _listener
    _listener = listener


def run_bundle(model: ModelRef, bundle: BundleRef, *arguments: Any, copy: Any = None) -> Any:
    """Return the bundle's output, or when it has several a tuple or dict of them.

    Parameters
    ----------
    model : ModelRef
    bundle : BundleRef
    *arguments
        Values of other tasks: an array, or a bundle's tuple.
    copy : ndarray of uint8, optional
        The model file's content, for workers that cannot see its path.
    """
    residency = device.current()
    arrays = [arguments[p] if i < 0 else arguments[p][i] for p, i in bundle.picks]
    executable = (
        _executable(model, bundle, copy)
        if residency is None
        else _placed(model, bundle, copy, residency, arrays)
    )
    run: Compute = executable
    if _listener is not None:
        run = _listener(executable, lambda: _told(model, bundle, copy))
    try:
        results = _by_rows(run, arrays, bundle) if bundle.rows and residency is None else run(*arrays)
    except Exception as error:
        error.add_note(_situation(model, bundle, arrays))
        raise
    if bundle.by_name:
        return together_by_name(dict(zip(bundle.outputs, results, strict=True)))
    return results[0] if len(results) == 1 else together(results)


def _told(model: ModelRef, bundle: BundleRef, copy: Any) -> Told:
    return told(nodes_between(open_model(model, copy).model, bundle.inputs, bundle.outputs))


def _situation(model: ModelRef, bundle: BundleRef, arrays: Sequence[Any]) -> str:
    """Return what an error in a task needs to be understood: the model, the bundle, what it was handed."""
    given = ", ".join(
        f"{name}: {getattr(a, 'dtype', type(a).__name__)}{list(getattr(a, 'shape', ()))}"
        for name, a in zip(bundle.inputs, arrays, strict=True)
    )
    return f"in {model.path}, between ({given}) and ({', '.join(bundle.outputs)})"


def _by_rows(run: Compute, arrays: Sequence[Any], bundle: BundleRef) -> tuple[Any, ...]:
    """Run a model of batch 1 over a longer batch, row by row; an input of one row serves every row."""
    carried = [carries and len(a) != 1 for a, carries in zip(arrays, bundle.split, strict=True)]
    total = next((len(a) for a, cut in zip(arrays, carried, strict=True) if cut), 1)
    if total == 0:  # an empty chunk still has the shapes of its outputs
        one = [
            np.zeros((1, *a.shape[1:]), a.dtype) if cut else a for a, cut in zip(arrays, carried, strict=True)
        ]
        return tuple(out[:0] for out in run(*one))
    parts = [
        run(*(a[row : row + 1] if cut else a for a, cut in zip(arrays, carried, strict=True)))
        for row in range(total)
    ]
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def pick(value: Any, index: int | str) -> Any:
    """Return one output of a bundle that has several."""
    return value[index]


@cache
def _executables() -> Cache[Any]:
    return Cache(config.size("cache.bytes"))


def _executable(ref: ModelRef, bundle: BundleRef, copy: Any) -> Executable:
    threads = intra_op_threads() if bundle.parallel else 1
    prepack = config.flag("onnxruntime.prepack")
    key = (ref.digest, bundle.inputs, bundle.outputs, bundle.engines, bundle.exact, threads, prepack)

    def build() -> Executable:
        return compile_bundle(
            open_model(ref, copy).model,
            bundle.inputs,
            bundle.outputs,
            bundle.engines,
            threads=threads,
            prepack=prepack,
            exact=bundle.exact,
        )

    return _executables().get(key, build)  # type: ignore[no-any-return]


def _placed(
    ref: ModelRef, bundle: BundleRef, copy: Any, residency: Residency, arrays: Sequence[Any]
) -> DeviceExecutable:
    """The bundle on this process's device, kept beside those for the host."""
    engines = chosen(
        residency.device,
        lambda: open_model(ref, copy).model,
        (ref.digest, bundle.inputs, bundle.outputs),
        arrays,
    )
    threads = intra_op_threads() if bundle.parallel else 1
    prepack = config.flag("onnxruntime.prepack")
    key = (
        *(ref.digest, bundle.inputs, bundle.outputs, bundle.down, bundle.split),
        *(residency, engines, bundle.exact, threads, prepack),
    )

    def build() -> DeviceExecutable:
        return device.compiled(
            open_model(ref, copy).model, bundle, residency, engines, threads=threads, prepack=prepack
        )

    return _executables().get(key, build)  # type: ignore[no-any-return]


class _Open(NamedTuple):
    """An opened model, and size and time of change of its file when it was opened (None: of a copy)."""

    loaded: Loaded
    status: tuple[int, int] | None


class _OpenModels:
    """The models that this process has opened, newest last; a second thread waits for the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[ModelRef, _Open] = {}

    def get(self, ref: ModelRef, build: Callable[[], _Open]) -> Loaded:
        """Return what `build` opened under `ref`, opening again when the file is another one now."""
        with self._lock:
            kept = self._kept.get(ref)
            if kept is None or kept.status not in (None, _status(ref.path)):
                self._kept.pop(ref, None)
                kept = self._kept[ref] = build()
                while len(self._kept) > _MODELS_KEPT:
                    del self._kept[next(iter(self._kept))]
            return kept.loaded


_models = _OpenModels()


def remember(ref: ModelRef, loaded: Loaded) -> None:
    """Let tasks that run in this very process use a model that is already open."""
    _models.get(ref, lambda: _Open(loaded, (ref.size, ref.mtime_ns)))


def open_model(ref: ModelRef, copy: Any = None) -> Loaded:
    """Return the model that `ref` names, opened once per process.

    Raises
    ------
    ConfigError
        When the file is not there, or is no longer the file that the graph was built from.
    """
    return _models.get(ref, lambda: _open(ref, copy))


def _status(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _open(ref: ModelRef, copy: Any) -> _Open:
    limits = Limits(value_bytes=config.size("limits.value-bytes"))
    status = _status(ref.path)
    if status is None and copy is not None:
        return _Open(load(np.ascontiguousarray(copy).tobytes(), limits=limits), None)
    if status is None:
        raise ConfigError(
            f"model file {ref.path!r}: this worker cannot see it; put it on a file system that all workers"
            " share, or build the graph while the client is connected, so that a copy travels"
        )
    loaded = load(ref.path, limits=limits)
    if loaded.digest != ref.digest:
        raise ConfigError(
            f"model file {ref.path!r} changed after the graph was built (digest {loaded.digest[:12]}, wanted"
            f" {ref.digest[:12]}); build the graph again with ff.from_onnx"
        )
    return _Open(loaded, status)
