"""The task of one action of a pipeline, for one micro-batch of one chunk.

An action is up to three bundles of one model, F, I and W, and runs those whose results are not there yet, usually the
last one.  Values of a result that only its own stage reads (`kept`) are left out when the result is sent to another
worker or written to disk: activations are never sent.  If their worker dies, the action that reads them finds them
missing and computes them again from its inputs, by the same bundles, so with the same bits.

Dask keeps a result for as long as any task depends on it: another stage that reads its `sent` values, or a task that
may have to compute it again.  So the last reader of the kept values removes them from the result: activations are
freed when their backward ends, as schedules count them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dask_ferro.graph.ir.dtypes import HALF_NAMES
from dask_ferro.lower.worker.bundle_ref import BundleRef, ModelRef
from dask_ferro.lower.worker.task import run_bundle


class ActionValues:
    """The result of an action: arrays by name, those sent to other stages and those kept for its own."""

    __slots__ = ("kept", "sent")

    def __init__(self, sent: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        self.sent = dict(sent)
        self.kept = dict(kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return ActionValues, (self.sent, {})

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + sum(map(sys.getsizeof, (*self.sent.values(), *self.kept.values())))


class ActionRef(NamedTuple):
    """An action by name, and the order of its arguments: model inputs, results, and tasks that are only waited for.

    Attributes
    ----------
    steps : tuple of BundleRef
        The bundles of its chunk, up to the action's own; each returns its values by name.
    inputs : tuple of str
        Model inputs, which are the first arguments.
    results : int
        The number of `ActionValues` that follow.
    sent, kept : tuple of str
        The values that it returns.
    frees : tuple of str
        Kept values that no task reads after it.
    """

    steps: tuple[BundleRef, ...]
    inputs: tuple[str, ...]
    results: int
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    frees: tuple[str, ...] = ()


def run_action(model: ModelRef, action: ActionRef, *arguments: Any, copy: Any = None) -> ActionValues:
    """Return the values that an action computes for one micro-batch."""
    known = _known(model, action, arguments, copy)
    _free(action, arguments)
    return ActionValues({n: known[n] for n in action.sent}, {n: known[n] for n in action.kept})


def run_sum(model: ModelRef, action: ActionRef, *arguments: Any, copy: Any = None) -> dict[str, Any]:
    """Return the action's results, added to the sum of the micro-batches before, which is the next argument.

    Sums of half precision are float32 until `of_dtype` rounds them, once.
    """
    known = _known(model, action, arguments, copy)
    before = arguments[len(action.inputs) + action.results]
    terms = {name: widened(known[name]) for name in action.kept}
    _free(action, arguments)
    # An infinite gradient is a result of the model, and needs no warning from numpy.
    with np.errstate(all="ignore"):
        return terms if before is None else {name: before[name] + term for name, term in terms.items()}


class UpdateRef(NamedTuple):
    """An optimizer's step by name, and the order of its arguments: parameters, state, sums of gradients.

    Attributes
    ----------
    bundle : BundleRef
        Returns its values by name.
    given : tuple of str
        Parameters, state and settings.
    share : int
        The divisor of the sums.
    dtypes : dict
        The dtypes of the sums' terms, by name.
    """

    bundle: BundleRef
    given: tuple[str, ...]
    share: int
    dtypes: dict[str, np.dtype[Any] | None]


def run_update(model: ModelRef, update: UpdateRef, *arguments: Any, copy: Any = None) -> dict[str, Any]:
    """Return parameters and state after a step, by name."""
    known = dict(zip(update.given, arguments[: len(update.given)], strict=True))
    for sums in arguments[len(update.given) :]:
        known |= {
            n: run_share(sums, n, update.share, update.dtypes[n]) for n in sums if n in update.bundle.inputs
        }
    return run_bundle(model, update.bundle, *(known[n] for n in update.bundle.inputs), copy=copy)  # type: ignore[no-any-return]


def run_share(sums: Mapping[str, Any], name: str, share: int, dtype: np.dtype[Any] | None) -> Any:
    """Return one of the sums of `run_sum`, divided and rounded by `of_dtype`."""
    return of_dtype(sums[name], share, dtype)


def of_dtype(total: Any, share: int, dtype: np.dtype[Any] | None) -> Any:
    """Return a sum of `run_sum` divided by `share`, in the dtype of its terms (None: the sum's own)."""
    found = np.asarray(total / share)
    return found if dtype is None else found.astype(dtype, copy=False)


def widened(term: Any) -> Any:
    """Return half precision as float32: sums of ten float16 or bfloat16 terms already lose their last digits."""
    array = np.asarray(term)
    return array.astype(np.float32) if _is_half(array.dtype) else array


def _is_half(dtype: np.dtype[Any]) -> bool:
    return dtype.name in HALF_NAMES


def _free(action: ActionRef, arguments: tuple[Any, ...]) -> None:
    own = len(action.inputs)
    for values in arguments[own : own + action.results]:
        for name in action.frees:
            values.kept.pop(name, None)


def _known(model: ModelRef, action: ActionRef, arguments: tuple[Any, ...], copy: Any) -> dict[str, Any]:
    """Return the values that an action reads and returns, by name: from its arguments, or computed."""
    own = len(action.inputs)
    known = dict(zip(action.inputs, arguments[:own], strict=True))
    for values in arguments[own : own + action.results]:
        known |= values.sent | values.kept
    makers: dict[str, BundleRef] = {}
    for step in action.steps:
        makers |= dict.fromkeys(step.outputs, step)

    def ensure(names: Iterable[str]) -> None:
        for name in names:
            if name not in known:
                step = makers[name]
                ensure(step.inputs)
                known.update(run_bundle(model, step, *(known[n] for n in step.inputs), copy=copy))

    ensure((*action.sent, *action.kept))
    return known
