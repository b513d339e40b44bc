"""The task of one bundle, on the arrays of one chunk.

A task holds names only: the model (path and content digest), the bundle (the names of its inputs and outputs) and the
engines.  The process loads the model from its path, or from a copy that is sent as a Dask value where it cannot see
the path; it keeps the opened model and the compiled bundle for the next task.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import onnx_ir as ir

from dask_ferro import config
from dask_ferro.engines.cache import Cache
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.executable import Executable, compile_bundle, nodes_between
from dask_ferro.engines.onnxruntime.host_memory import Returns
from dask_ferro.engines.time_limit import within
from dask_ferro.errors import ConfigError, ModelError, UnsupportedOp
from dask_ferro.graph.ir.inference import ValueType, infer
from dask_ferro.graph.model.load import Loaded, load
from dask_ferro.lower.annotations import Told, told
from dask_ferro.lower.limits import limits
from dask_ferro.lower.worker import device
from dask_ferro.lower.worker.bundle_ref import BundleRef, ModelRef
from dask_ferro.lower.worker.late import BundleInputs, Expectations, arrived
from dask_ferro.lower.worker.no_rows import reads_nothing, run_on_nothing
from dask_ferro.lower.worker.output_check import Shapes, check_outputs
from dask_ferro.lower.worker.outputs import together, together_by_name
from dask_ferro.lower.worker.threads import intra_op_threads
from dask_ferro.lower.worker.unshared import unshared

# The number of opened models kept: each holds its weights, or maps large ones (ferro.limits.mapped-above).
_MODELS_KEPT = 8


_expectations = Expectations()
Compute = Callable[..., tuple[Any, ...]]
# Wraps an Executable; its second argument returns the regions and placements of the nodes.
Listener = Callable[[Any, Callable[[], Told]], Compute]
# The hook that wraps each bundle that runs in this process, to see its ops; None: none is installed.
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Install a hook that wraps each bundle before it runs; None removes it."""
    global _listener
    _listener = listener


def run_bundle(
    model: ModelRef, bundle: BundleRef, *arguments: Any, copy: Any = None, rows: int | None = None
) -> Any:
    """Return the bundle's output, or a tuple or dict of several.

    Parameters
    ----------
    model : ModelRef
    bundle : BundleRef
    *arguments
        Values of other tasks: an array, or a bundle's tuple.
    copy : ndarray of uint8, optional
        The model file's content, for workers that cannot see its path.
    rows : int, optional
        Rows of the chunk, where they were known when the graph was built.

    Raises
    ------
    ConfigError
        A model file that is missing or has changed, or an input or a row count that does not fit.
    ModelError, UnsupportedOp
        As the engine raises them, with the model's path.
    """
    residency = device.current()
    arrays = [arguments[p] if i < 0 else arguments[p][i] for p, i in bundle.picks]
    for position, value in enumerate(arrays):
        if type(value) is not np.ndarray:
            arrays[position] = _array(value)
    if residency is None:
        arrays = _arrived(model, bundle, arrays, copy)
    try:
        # 0: no bound.
        with within(config.value("limits.run")):
            results = _results(model, bundle, arrays, copy, residency)
    except (ModelError, UnsupportedOp) as error:
        named = type(error)(f"model {model.path!r}: {error.headline}", error.problems)
        named.add_note(_situation(model, bundle, arrays))
        raise named from error.__cause__
    except Exception as error:
        error.add_note(_situation(model, bundle, arrays))
        raise
    if bundle.check is not None:
        by_name = dict(zip(bundle.inputs, arrays, strict=True))
        check_outputs(
            bundle.check, results, by_name, rows, lambda s: _inferred(open_model(model, copy).model, s)
        )
    return _shown(bundle, results if residency is not None else unshared(results, arrays))


def _results(
    model: ModelRef, bundle: BundleRef, arrays: list[Any], copy: Any, residency: Residency | None
) -> tuple[Any, ...]:
    """Compute the bundle's outputs on the host, or on the device of this process."""
    executable = (
        _executable(model, bundle, copy) if residency is None else _placed(model, bundle, copy, residency)
    )
    if residency is None and reads_nothing(arrays) and not bundle.rows:
        return run_on_nothing(executable, arrays)
    run: Compute = executable
    if _listener is not None:
        run = _listener(executable, lambda: _told(model, bundle, copy))
    return _by_rows(run, arrays, bundle) if bundle.rows else run(*arrays)


def _shown(bundle: BundleRef, results: Sequence[Any]) -> Any:
    """Return the results as the task's value: one array, or several together."""
    if bundle.by_name:
        return together_by_name(dict(zip(bundle.outputs, results, strict=True)))
    return results[0] if len(results) == 1 else together(results)


def _arrived(model: ModelRef, bundle: BundleRef, arrays: list[Any], copy: Any) -> list[Any]:
    """Return the arrays; those of the model's own inputs are checked against its declarations."""
    inputs = BundleInputs(model.digest, bundle.inputs, bundle.split if bundle.rows else ())
    expected = _expectations.known(inputs)
    if expected is None:
        expected = _expectations.learn(inputs, open_model(model, copy).model)
    return arrived(expected, arrays, model.path)


def _array(value: Any) -> Any:
    """Return `value`, or for a numpy scalar (a sum, `x[()]`) a 0-d array, since engines take no scalars."""
    return np.asarray(value) if isinstance(value, np.generic) else value


@lru_cache(maxsize=_MODELS_KEPT)
def _inferred(model: ir.Model, shapes: Shapes) -> Mapping[str, ValueType]:
    """Return the types of a model's values for shapes of its inputs; declared shapes do not count."""
    return infer(model, shapes={n: s for n, s in shapes if s is not None}, trusts_declared=False)


def _told(model: ModelRef, bundle: BundleRef, copy: Any) -> Told:
    return told(nodes_between(open_model(model, copy).model, bundle.inputs, bundle.outputs))


def _situation(model: ModelRef, bundle: BundleRef, arrays: Sequence[Any]) -> str:
    """Return the context of an error in a task: the model, the bundle, and its arrays' dtypes and shapes."""
    given = ", ".join(
        f"{name}: {getattr(a, 'dtype', type(a).__name__)}{list(getattr(a, 'shape', ()))}"
        for name, a in zip(bundle.inputs, arrays, strict=True)
    )
    return f"in {model.path}, between ({given}) and ({', '.join(bundle.outputs)})"


def _by_rows(run: Compute, arrays: Sequence[Any], bundle: BundleRef) -> tuple[Any, ...]:
    """Run a model of batch 1 over a longer batch, row by row; an input of one row is used for every row."""
    carried = [carries and len(a) != 1 for a, carries in zip(arrays, bundle.split, strict=True)]
    # Rows of a device's array are taken on the host.
    arrays = [np.asarray(a) if cut else a for a, cut in zip(arrays, carried, strict=True)]
    total = next((len(a) for a, cut in zip(arrays, carried, strict=True) if cut), 1)
    # An empty chunk still has the shapes of its outputs.
    if total == 0:
        one = [
            np.zeros((1, *a.shape[1:]), a.dtype) if cut else a for a, cut in zip(arrays, carried, strict=True)
        ]
        return tuple(out[:0] for out in run(*one))
    parts = [run(*_row(arrays, carried, row)) for row in range(total)]
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _row(arrays: Sequence[Any], carried: Sequence[bool], row: int) -> list[Any]:
    return [a[row : row + 1] if cut else a for a, cut in zip(arrays, carried, strict=True)]


@cache
def _executables() -> Cache[Any]:
    return Cache(config.value("cache.bytes"), Returns())


def _current(key: Hashable, build: Callable[[], Any]) -> Any:
    """Return the executable of `key`, built again where a file that it maps was touched; changed content raises."""
    found = _executables().get(key, build)
    if not found.is_current():
        _executables().drop(key)
        found = _executables().get(key, build)
    return found


def _executable(ref: ModelRef, bundle: BundleRef, copy: Any) -> Executable:
    threads = intra_op_threads() if bundle.parallel else 1
    prepack = config.value("onnxruntime.prepack")
    # Everything that a compiled bundle depends on: after a change of settings another one is compiled.
    key = (ref.digest, bundle.inputs, bundle.outputs, bundle.engines, bundle.exact, threads, prepack)

    def build() -> Executable:
        model = open_model(ref, copy).model
        return compile_bundle(
            model,
            bundle.inputs,
            bundle.outputs,
            bundle.engines,
            threads=threads,
            prepack=prepack,
            exact=bundle.exact,
        )

    return _current(key, build)  # type: ignore[no-any-return]


def _placed(ref: ModelRef, bundle: BundleRef, copy: Any, residency: Residency) -> Executable:
    """Return the bundle compiled for this process's device, cached beside those for the host."""
    provider = device.session_provider(residency.device)
    threads = intra_op_threads() if bundle.parallel else 1
    prepack = config.value("onnxruntime.prepack")
    key = (
        *(ref.digest, bundle.inputs, bundle.outputs, bundle.down),
        *(residency, provider, bundle.exact, threads, prepack),
    )

    def build() -> Executable:
        return device.compiled(
            open_model(ref, copy).model, bundle, residency, provider, threads=threads, prepack=prepack
        )

    return _current(key, build)  # type: ignore[no-any-return]


_lock = threading.Lock()
_turns: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()


def turn(key: Hashable) -> Any:
    """Return the lock of a key: what two threads ask for at a time is made once, and other things meanwhile."""
    with _lock:
        return _turns.setdefault(key, threading.Lock())


class _OpenModels:
    """The models that this process has opened, newest last."""

    def __init__(self) -> None:
        self._kept: dict[ModelRef, Loaded] = {}

    def get(self, ref: ModelRef, build: Callable[[], Loaded]) -> Loaded:
        """Return the open model of `ref`, which `build` opens the first time and where a mapped file has changed."""
        with turn(ref):
            kept = self._kept.get(ref)
            if kept is None or not kept.files.are_unchanged():
                self._kept.pop(ref, None)
                kept = self._kept[ref] = build()
                for oldest in list(self._kept)[:-_MODELS_KEPT]:
                    self._kept.pop(oldest, None)
            return kept


_models = _OpenModels()


def remember(ref: ModelRef, loaded: Loaded) -> None:
    """Register an opened model, so that tasks of this process do not load it again."""
    _models.get(ref, lambda: loaded)


def open_model(ref: ModelRef, copy: Any = None) -> Loaded:
    """Return the model that `ref` names, opened once per process.

    Raises
    ------
    ConfigError
        The file is missing, or is no longer the file that the graph was built from.
    """
    return _models.get(ref, lambda: _open(ref, copy))


def _open(ref: ModelRef, copy: Any) -> Loaded:
    is_there = os.path.exists(ref.path)
    if not is_there and copy is not None:
        # The client checked the model when it built the graph, so the limits are those of models made here.
        content = np.ascontiguousarray(copy).tobytes()
        return load(content, limits=limits(ours=True), outputs=ref.outputs or None)
    if not is_there:
        raise ConfigError(
            f"model file {ref.path!r}: this process cannot see it; put it on a file system that all workers share, or"
            " pass the model's bytes to ff.from_onnx, which travel with it; or call the model while the client is"
            " connected, so that a copy is sent"
        )
    try:
        loaded = load(ref.path, limits=limits(ours=True), outputs=ref.outputs or None)
    except (ModelError, ConfigError) as error:
        if isinstance(error, ConfigError) and not ref.outputs:
            raise
        # The client loaded it, with these outputs, so the file has changed since.
        reason = error.problems[0] if isinstance(error, ModelError) and error.problems else error
        raise ConfigError(
            f"model file {ref.path!r} changed after it was opened, and cannot be loaded any more: {reason}"
        ) from error
    if loaded.digest != ref.digest:
        raise ConfigError(
            f"model file {ref.path!r} changed after it was opened (digest {loaded.digest[:12]}, wanted"
            f" {ref.digest[:12]}); open it again with ff.from_onnx"
        )
    return loaded
