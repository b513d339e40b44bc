"""The task of one bundle, on the arrays of one chunk.

A task holds names only: the model (path and content digest), the bundle (the names of its inputs and outputs) and the
engines.  The process loads the model from its path, or from a copy that is sent as a Dask value if it cannot see the
path; it keeps the opened model and the compiled bundle for the next task.

ONNX Runtime ends the process on a GRU without rows, and refuses some operators.  So a bundle on arrays without
elements, such as a chunk of no rows, runs on one and on three made-up rows instead: an axis that is three times as
long then is the axis of the rows, and has none.

    x [0, 5, 3] --GRU--> y: [1, 5, 4] of one row, [3, 5, 4] of three, so it is [0, 5, 4]

A result that has elements nevertheless (a mean over the rows, or their number) is left to the engines, on the
unchanged arrays.

A worker whose device class is "gpu" (declared, or detected by CuPy) runs bundles on it; so does any other process
that declares it.  Without a device, or with ``ferro.worker.device: cpu``, the cost is one check per task.  Results
that only bundles read stay on the device, as `DeviceArray`, in `worker.data` like any value, with their bytes
counted; the model's own outputs are copied to the host, because any task or client may read them.

A session on the host has its share of the host's cores as threads: the cores, divided by the task threads of all
workers there.  The worker requests this number from the scheduler once, when the first session is created.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import numpy as np
from dask.system import CPU_COUNT

from dask_ferro import config
from dask_ferro.engines import Engine
from dask_ferro.engines.cache import Cache
from dask_ferro.engines.device.device import CupyDevice, Device, cupy_devices
from dask_ferro.engines.device.residency import ProcessDevice, Residency
from dask_ferro.engines.executable import Executable
from dask_ferro.engines.onnxruntime import HOST
from dask_ferro.engines.onnxruntime.session import Returns, SessionSettings
from dask_ferro.errors import ModelError, UnsupportedOpError
from dask_ferro.lower.shared_memory import SharedArray
from dask_ferro.lower.signature import LateInputs, shape_of
from dask_ferro.lower.worker.outputs import OutputCheck, check_outputs, copy_shared, pack_results
from dask_ferro.lower.worker.sessions import ModelRef, open_session

if TYPE_CHECKING:
    from dask_ferro.graph.ir.inference import ValueType
    from dask_ferro.lower.annotations import NodeLabels
    from dask_ferro.lower.worker.outputs import Shapes

# Minimum projected seconds of a run whose session has threads: starting threads has a cost.
WORTH_THREADS_S = 1e-3
# Made-up rows if there are none: three, not two, because an axis that is halved and padded has one element for one
# row, two for two, and one for none.
_MADE_UP_ROWS = (1, 3)

logger = logging.getLogger(__name__)

Compute = Callable[..., tuple[Any, ...]]
# Wraps an Executable; its second argument returns the regions and placements of the nodes.
Listener = Callable[[Any, "Callable[[], NodeLabels]"], Compute]
# The hook that wraps each bundle that runs in this process, to see its ops; None: none is installed.
_listener: Listener | None = None
# Whether the device of this process was chosen.
_is_chosen = False
# Held while a device is detected, and taken again by `use_device`.
_choosing = threading.RLock()


class BundleRef(NamedTuple):
    """A reference to a bundle, and how to run it.

    Attributes
    ----------
    inputs, outputs : tuple of str
        The names of the values that it reads and computes.
    engines : tuple of (engine, count)
        Runs of nodes in topological order.
    picks : tuple of (position, index)
        For each input, the position of the task's argument and, if index >= 0, of the item in that argument.
    split : tuple of bool
        Which inputs carry the batch, for a model of batch 1 that runs row by row over a longer batch; (): the bundle
        runs on any batch in one call.
    parallel : bool
        Whether it is long enough for a session to have threads of its own.
    down : tuple of int
        Positions of the outputs that are the model's own: a device copies them to the host.
    exact : bool
        Whether its bits must not depend on the places at which the model was cut.
    check : OutputCheck or None
        Requirements on the results that are outputs of the model.
    late : bool
        Whether an input of the model could not be checked when the graph was built.
    session : bytes or None
        The bundle's `BundleSession`, packed, if it is written for processes that have not loaded the model.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    engines: tuple[tuple[Engine, int], ...]
    picks: tuple[tuple[int, int], ...]
    split: tuple[bool, ...] = ()
    parallel: bool = True
    down: tuple[int, ...] = ()
    exact: bool = False
    check: OutputCheck | None = None
    late: bool = True
    session: bytes | None = None

    def each(self, results: Any) -> tuple[Any, ...]:
        """Return the result of `run_bundle` as a tuple, even if there is only one output."""
        return results if len(self.outputs) > 1 else (results,)


def listen(listener: Listener | None) -> None:
    """Install a hook that wraps each bundle before it runs; None removes it."""
    global _listener
    _listener = listener


def run_bundle(
    model: ModelRef, bundle: BundleRef, *arguments: Any, copy: Any = None, rows: int | None = None
) -> Any:
    """Return the bundle's output, or a tuple of several.

    Parameters
    ----------
    model : ModelRef
    bundle : BundleRef
    *arguments
        Values of other tasks: an array, or a bundle's tuple.
    copy : ndarray of uint8, optional
        The model file's content, for workers that cannot see its path.
    rows : int, optional
        Rows of the chunk, if they were known when the graph was built.

    Raises
    ------
    InputError
        If a model file is missing or has changed, or an input or a row count does not fit.
    ModelError, UnsupportedOpError
        If the engine raises them; the model's path is added.
    """
    residency = current_device()
    picked = [arguments[p] if i < 0 else arguments[p][i] for p, i in bundle.picks]
    # Engines treat a numpy scalar (a sum, `x[()]`) as an array without axes.
    arrays = [
        np.asarray(value) if isinstance(value, (np.generic, SharedArray)) else value for value in picked
    ]
    try:
        compiled = _compile(model, bundle, copy, residency)
        if residency is None and bundle.late:
            arrays = compiled.inputs.checked(arrays, model.path)
        results = _results(compiled.run, model, bundle, arrays, copy, on_host=residency is None)
    except (ModelError, UnsupportedOpError) as error:
        named = type(error)(f"model {model.path!r}: {error.headline}", error.problems)
        named.add_note(_situation(model, bundle, arrays))
        raise named from error.__cause__
    except Exception as error:
        error.add_note(_situation(model, bundle, arrays))
        raise
    if bundle.check is not None:
        by_name = dict(zip(bundle.inputs, arrays, strict=True))
        check_outputs(bundle.check, results, by_name, rows, partial(_infer_types, model, copy))
    if residency is None:
        results = copy_shared(results, arrays)
    return results[0] if len(results) == 1 else pack_results(results)


def _results(
    executable: Executable,
    model: ModelRef,
    bundle: BundleRef,
    arrays: list[Any],
    copy: Any,
    *,
    on_host: bool,
) -> tuple[Any, ...]:
    """Compute the bundle's outputs on the host, or on the device of this process."""
    if on_host and _reads_nothing(arrays) and not bundle.split:
        return _run_on_nothing(executable, arrays)
    run: Compute = executable
    if _listener is not None:
        run = _listener(executable, partial(_label_nodes, model, bundle, copy))
    return _by_rows(run, arrays, bundle) if bundle.split else run(*arrays)


def _infer_types(model: ModelRef, copy: Any, shapes: Shapes) -> Mapping[str, ValueType]:
    # Where it is needed: see `sessions`.
    from dask_ferro.lower.worker import models

    return models.infer_types(models.open_model(model, copy).model, shapes)


def _label_nodes(model: ModelRef, bundle: BundleRef, copy: Any) -> NodeLabels:
    from dask_ferro.lower.worker import models

    return models.bundle_labels(models.open_model(model, copy).model, bundle.inputs, bundle.outputs)


def _situation(model: ModelRef, bundle: BundleRef, arrays: Sequence[Any]) -> str:
    """Return the context of an error in a task: the model, the bundle, and its arrays' dtypes and shapes."""
    given = ", ".join(
        f"{name}: {getattr(a, 'dtype', type(a).__name__)}{list(shape_of(a) or ())}"
        for name, a in zip(bundle.inputs, arrays, strict=True)
    )
    return f"in {model.path}, between ({given}) and ({', '.join(bundle.outputs)})"


def _by_rows(run: Compute, arrays: Sequence[Any], bundle: BundleRef) -> tuple[Any, ...]:
    """Run a model of batch 1 over a longer batch, row by row; an input of one row is used for every row."""
    carried = [carries and len(a) != 1 for a, carries in zip(arrays, bundle.split, strict=True)]
    # Rows of a device's array are selected on the host.
    arrays = [np.asarray(a) if cut else a for a, cut in zip(arrays, carried, strict=True)]
    total = next((len(a) for a, cut in zip(arrays, carried, strict=True) if cut), 1)
    # An empty chunk still has the shapes of its outputs.
    if total == 0:
        one = [_fill_rows(a, 1) if cut else a for a, cut in zip(arrays, carried, strict=True)]
        return tuple(out[:0] for out in run(*one))
    parts = [
        run(*(a[row : row + 1] if cut else a for a, cut in zip(arrays, carried, strict=True)))
        for row in range(total)
    ]
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _reads_nothing(arrays: Iterable[Any]) -> bool:
    """Return whether one of the arrays has no elements."""
    for value in arrays:  # noqa: SIM110 - runs for each task: `any` takes three times as long
        if type(value) is np.ndarray and value.size == 0:
            return True
    return False


def _run_on_nothing(run: Compute, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a bundle computes from arrays some of which have no elements."""
    try:
        one, three = (run(*[_fill_rows(value, rows) for value in arrays]) for rows in _MADE_UP_ROWS)
    except Exception:  # noqa: BLE001 - made-up rows may not fit sizes that come from other bundles
        return run(*arrays)
    made = tuple(map(_without_rows, one, three))
    return run(*arrays) if any(value is None for value in made) else made


def _fill_rows(value: Any, rows: int) -> Any:
    """Return an array with made-up rows along its axes without elements; every other value unchanged."""
    if type(value) is not np.ndarray or value.size:
        return value
    filler = "a" if value.dtype.hasobject else 0
    return np.full([size or rows for size in value.shape], filler, value.dtype)


def _without_rows(one: Any, three: Any) -> Any:
    """Return the result of no rows from the results of one and three; None if it has elements, or may have."""
    if isinstance(one, list):
        return [] if (len(one), len(three)) == _MADE_UP_ROWS else None
    if type(one) is not np.ndarray or one.ndim != three.ndim:
        return None
    sizes = [0 if longer == 3 * size else size for size, longer in zip(one.shape, three.shape, strict=True)]
    changed = any(size and size != longer for size, longer in zip(sizes, three.shape, strict=True))
    return None if changed or 0 not in sizes else np.empty(sizes, one.dtype)


# ---- the compiled bundle -----------------------------------------------------------------------------------


class _CompiledBundle(NamedTuple):
    """A bundle as this process runs it, the check of its inputs that are the model's, and the bytes that it holds."""

    run: Executable
    inputs: LateInputs
    nbytes: int


@cache
def _bundles() -> Cache[_CompiledBundle]:
    return Cache(config.value("cache.bytes"), Returns())


def _compile(ref: ModelRef, bundle: BundleRef, copy: Any, residency: Residency | None) -> _CompiledBundle:
    """Return the compiled bundle, built again if a file that it maps was touched; changed content raises an error."""
    settings = SessionSettings(
        intra_op_threads() if bundle.parallel else 1,
        config.value("onnxruntime.prepack"),
        bundle.exact,
        config.value("limits.run"),
    )
    provider = None if residency is None else session_provider(residency.device)

    def build() -> _CompiledBundle:
        packed = bundle.session if residency is None else None
        opened = None if packed is None else open_session(ref, packed, copy, settings)
        if opened is not None:
            run, declared = opened
        else:
            from dask_ferro.lower.worker import models

            model, names = models.open_model(ref, copy).model, (bundle.inputs, bundle.outputs)
            declared = models.declared_inputs(model)
            run = models.compile_model(
                model, names, bundle.engines, settings, residency, provider, bundle.down
            )
        return _CompiledBundle(run, LateInputs(declared, bundle.inputs, bundle.split), run.nbytes)

    # All settings that a compiled bundle depends on: after a change of them, a new bundle is compiled.
    key = (
        *(ref.digest, bundle.inputs, bundle.outputs, bundle.split, bundle.engines, settings),
        *(() if residency is None else (residency, provider, bundle.down)),
    )
    return _bundles().get(key, build, lambda kept: kept.run.is_current())


# ---- the device of this process ----------------------------------------------------------------------------


def use_device(device: Device | None) -> Residency | None:
    """Compute later bundles of this process on `device`; None: on the host.  Return its residency.

    A worker detects its GPU automatically; this sets an emulated device on a machine without a GPU.
    """
    global _is_chosen
    with _choosing:
        ProcessDevice.residency = None if device is None else _residency_of(device)
        _is_chosen = True
        return ProcessDevice.residency


def current_device() -> Residency | None:
    """Return the residency of this process's device, which is detected once; None if there is none."""
    if not _is_chosen:
        with _choosing:
            if not _is_chosen:
                use_device(_detect_device())
    return ProcessDevice.residency


def _residency_of(device: Device) -> Residency:
    """Return an empty residency, bounded as configured."""
    worker = this_worker()
    return Residency(
        device,
        results=config.value("device.results-bytes"),
        weights=config.value("device.weights-bytes"),
        # A worker's values never change; in a process shared with the caller, the caller may write to an input.
        keeps_inputs=worker is not None and not str(worker.address).startswith("inproc"),
    )


def session_provider(device: Device) -> str | None:
    """Return ONNX Runtime's provider that may compute on a device (`device.onnxruntime`); None without one."""
    from dask_ferro.engines.onnxruntime.device_session import place_of, works

    allowed = config.value("device.onnxruntime")
    if allowed == "never":
        return None
    provider = place_of(device).provider
    return None if (allowed == "auto" and provider == HOST) or not works(provider) else provider


def _detect_device() -> Device | None:
    wanted = config.value("worker.device")
    if wanted == "cpu" or (wanted != "gpu" and this_worker() is None):
        return None
    tf32 = config.value("device.tf32")
    try:
        return CupyDevice(tf32=tf32) if cupy_devices() else None
    except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises, the worker runs on the host
        logger.warning("dask_ferro: the GPU is not used: %r", error)
        return None


# ---- the threads of a session ------------------------------------------------------------------------------


def intra_op_threads() -> int:
    """Return the intra-op threads of a session in this process (config ``ferro.onnxruntime.intra-op-threads``)."""
    wanted = config.value("onnxruntime.intra-op-threads")
    return wanted if wanted is not None else share_of(CPU_COUNT, _task_threads())


def share_of(cores: int, task_threads: int) -> int:
    """Return the whole cores that each of `task_threads` may use; at least one.

    >>> share_of(16, 2), share_of(2, 2), share_of(2, 3)
    (8, 1, 1)
    """
    return max(1, cores // max(1, task_threads))


def _task_threads() -> int:
    """Return how many Dask task threads share this host's cores."""
    if (worker := this_worker()) is not None:
        return _host_threads(worker.address)
    # Without a worker: 1 with the synchronous scheduler, else the pool's size.
    if dask.config.get("scheduler", None) in ("sync", "synchronous", "single-threaded"):
        return 1
    if threading.current_thread() is threading.main_thread():
        return 1
    return int(dask.config.get("num_workers", None) or CPU_COUNT)


def this_worker() -> Any:
    """Return the Dask worker that runs the calling task, or None."""
    # Called in each task, and an import statement takes 2 us.
    distributed = sys.modules.get("distributed")
    # Without distributed imported in full, no worker can be running here.
    if distributed is None or not hasattr(distributed, "get_worker"):
        return None
    try:
        return distributed.get_worker()
    except ValueError:
        return None


@cache
def _host_threads(address: str) -> int:
    from distributed.utils import sync

    worker = this_worker()
    identity = sync(worker.loop, worker.scheduler.identity, n_workers=-1)
    host = identity["workers"][address]["host"]
    return sum(w["nthreads"] for w in identity["workers"].values() if w["host"] == host)
