"""The task of one bundle, on the arrays of one chunk.

A task holds names only: the model (path and content digest), the bundle (the names of its inputs and outputs) and the
engines.  The process loads the model from its path, or from a copy that is sent as a Dask value where it cannot see
the path; it keeps the opened model and the compiled bundle for the next task.

ONNX Runtime ends the process on a GRU without rows, and refuses some operators.  So a bundle on arrays without
elements, such as a chunk of no rows, runs on one and on three made-up rows in their place: an axis that is three times
as long then is the axis of the rows, and has none.

    x [0, 5, 3] --GRU--> y: [1, 5, 4] of one row, [3, 5, 4] of three, so it is [0, 5, 4]

A result that has elements all the same (a mean over the rows, or their number) is left to the engines, with the arrays
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro import config
from dask_ferro.engines.cache import Cache
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.device_executable import compile_on_device
from dask_ferro.engines.executable import Executable, compile_bundle, nodes_between
from dask_ferro.engines.onnxruntime.host_memory import Returns
from dask_ferro.engines.onnxruntime.session import SessionSettings
from dask_ferro.engines.selection import Engine
from dask_ferro.errors import ModelError, UnsupportedOp
from dask_ferro.graph.ir.inference import ValueType, infer
from dask_ferro.lower.annotations import NodeLabels, node_labels
from dask_ferro.lower.worker import device
from dask_ferro.lower.worker.checks import LateInputs, OutputCheck, Shapes, check_outputs
from dask_ferro.lower.worker.models import MODELS_KEPT, ModelRef, open_model
from dask_ferro.lower.worker.outputs import together, unshared
from dask_ferro.lower.worker.threads import intra_op_threads

# The number of bundles whose inputs a process knows: names, and a tuple each.
_INPUTS_KEPT = 4096
# Rows that are made up where there are none: three, not two, as an axis that is halved and padded has one element for
# one row, two for two, and one for none.
_MADE_UP_ROWS = (1, 3)

Compute = Callable[..., tuple[Any, ...]]
# Wraps an Executable; its second argument returns the regions and placements of the nodes.
Listener = Callable[[Any, Callable[[], NodeLabels]], Compute]
# The hook that wraps each bundle that runs in this process, to see its ops; None: none is installed.
_listener: Listener | None = None
# What is known of the inputs of bundles, by the model, their names, and which are cut row by row.
_late: Cache[LateInputs] = Cache(_INPUTS_KEPT, size=lambda inputs: 1)


class BundleRef(NamedTuple):
    """A reference to a bundle, and how to run it.

    Attributes
    ----------
    inputs, outputs : tuple of str
        The names of the values that it reads and makes.
    engines : tuple of (engine, count)
        Runs of nodes in topological order.
    picks : tuple of (position, index)
        For each input, the argument of the task that it is (or, where index >= 0, the item of that argument).
    split : tuple of bool
        Which inputs carry the batch, for a model of batch 1 that runs row by row over a longer batch; (): the bundle
        runs on any batch at once.
    parallel : bool
        Whether it is long enough for a session to have threads of its own.
    down : tuple of int
        Positions of the outputs that are the model's own: a device copies them to the host.
    exact : bool
        Whether its bits must not depend on where the model was cut.
    check : OutputCheck or None
        What the results have to be that are outputs of the model.
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

    def each(self, results: Any) -> tuple[Any, ...]:
        """Return what `run_bundle` returns as a tuple, also where there is only one output."""
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
        Rows of the chunk, where they were known when the graph was built.

    Raises
    ------
    ConfigError
        A model file that is missing or has changed, or an input or a row count that does not fit.
    ModelError, UnsupportedOp
        As the engine raises them, with the model's path.
    """
    residency = device.current()
    picked = [arguments[p] if i < 0 else arguments[p][i] for p, i in bundle.picks]
    # Engines take a numpy scalar (a sum, `x[()]`) as an array without axes.
    arrays = [np.asarray(value) if isinstance(value, np.generic) else value for value in picked]
    if residency is None:
        arrays = _arrived(model, bundle, arrays, copy)
    try:
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
    if residency is None:
        results = unshared(results, arrays)
    return results[0] if len(results) == 1 else together(results)


def _results(
    model: ModelRef, bundle: BundleRef, arrays: list[Any], copy: Any, residency: Residency | None
) -> tuple[Any, ...]:
    """Compute the bundle's outputs on the host, or on the device of this process."""
    executable = _executable(model, bundle, copy, residency)
    if residency is None and _reads_nothing(arrays) and not bundle.split:
        return _run_on_nothing(executable, arrays)
    run: Compute = executable
    if _listener is not None:
        run = _listener(
            executable,
            lambda: node_labels(nodes_between(open_model(model, copy).model, bundle.inputs, bundle.outputs)),
        )
    return _by_rows(run, arrays, bundle) if bundle.split else run(*arrays)


def _arrived(model: ModelRef, bundle: BundleRef, arrays: list[Any], copy: Any) -> list[Any]:
    """Return the arrays; those of the model's own inputs are checked against its declarations."""
    key = (model.digest, bundle.inputs, bundle.split)
    inputs = _late.get(key, lambda: LateInputs(open_model(model, copy).model, bundle.inputs, bundle.split))
    return inputs.checked(arrays, model.path)


@lru_cache(maxsize=MODELS_KEPT)
def _inferred(model: ir.Model, shapes: Shapes) -> Mapping[str, ValueType]:
    """Return the types of a model's values for shapes of its inputs; declared shapes do not count."""
    return infer(model, shapes={n: s for n, s in shapes if s is not None}, trusts_declared=False)


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
        one = [_filled(a, 1) if cut else a for a, cut in zip(arrays, carried, strict=True)]
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
        one, three = (run(*[_filled(value, rows) for value in arrays]) for rows in _MADE_UP_ROWS)
    except Exception:  # noqa: BLE001 - made-up rows may not fit sizes that come from other bundles
        return run(*arrays)
    made = tuple(map(_without_rows, one, three))
    return run(*arrays) if any(value is None for value in made) else made


def _filled(value: Any, rows: int) -> Any:
    """Return an array with made-up rows along its axes without elements; every other value as it is."""
    if type(value) is not np.ndarray or value.size:
        return value
    filler = "a" if value.dtype.hasobject else 0
    return np.full([size or rows for size in value.shape], filler, value.dtype)


def _without_rows(one: Any, three: Any) -> Any:
    """Return a result of no rows by those of one and three; None if it has elements, or may have."""
    if isinstance(one, list):
        return [] if (len(one), len(three)) == _MADE_UP_ROWS else None
    if type(one) is not np.ndarray or one.ndim != three.ndim:
        return None
    sizes = [0 if longer == 3 * size else size for size, longer in zip(one.shape, three.shape, strict=True)]
    changed = any(size and size != longer for size, longer in zip(sizes, three.shape, strict=True))
    return None if changed or 0 not in sizes else np.empty(sizes, one.dtype)


@cache
def _executables() -> Cache[Executable]:
    return Cache(config.value("cache.bytes"), Returns())


def _executable(ref: ModelRef, bundle: BundleRef, copy: Any, residency: Residency | None) -> Executable:
    """Return the compiled bundle, built again where a file that it maps was touched; changed content raises."""
    settings = SessionSettings(
        intra_op_threads() if bundle.parallel else 1,
        config.value("onnxruntime.prepack"),
        bundle.exact,
        config.value("limits.run"),
    )
    provider = None if residency is None else device.session_provider(residency.device)

    def build() -> Executable:
        model, names = open_model(ref, copy).model, (bundle.inputs, bundle.outputs)
        if residency is None:
            return compile_bundle(model, *names, bundle.engines, settings)
        return compile_on_device(
            model, *names, residency, settings=settings, down=bundle.down, provider=provider
        )

    # Everything that a compiled bundle depends on: after a change of settings another one is compiled.
    key = (
        *(ref.digest, bundle.inputs, bundle.outputs, bundle.engines, settings),
        *(() if residency is None else (residency, provider, bundle.down)),
    )
    return _executables().get(key, build, Executable.is_current)
