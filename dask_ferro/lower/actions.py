"""What runs in a worker: one action of a pipeline, for one micro-batch of one chunk.

An action is up to three bundles of one model, F, I and W, of which those run whose results are not there yet.
Usually that is the last one.  What a result holds for its own stage alone stays behind when the result is sent to
another worker (or written to disk): activations never travel.  Should their holder die, the action that wants them
finds them missing and computes them again from its inputs, by the same bundles, so to the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dask_ferro.lower.task import BundleRef, ModelRef, run_bundle


class Values:
    """An action's result: arrays by name, those for other stages and those for its own."""

    __slots__ = ("kept", "sent")

    def __init__(self, sent: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        self.sent = dict(sent)
        self.kept = dict(kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return Values, (self.sent, {})

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + sum(map(sys.getsizeof, (*self.sent.values(), *self.kept.values())))


class ActionRef(NamedTuple):
    """An action by name, and how its arguments come: model inputs, then results, then what is only waited for.

    Attributes
    ----------
    steps : tuple of BundleRef
        Of its chunk, as far as the action goes; each gives its values by name.
    inputs : tuple of str
        Model inputs, which are the first arguments.
    results : int
        How many `Values` follow.
    sent, kept : tuple of str
        What it gives.
    """

    steps: tuple[BundleRef, ...]
    inputs: tuple[str, ...]
    results: int
    sent: tuple[str, ...]
    kept: tuple[str, ...]


def run_action(model: ModelRef, action: ActionRef, *arguments: Any, copy: Any = None) -> Values:
    """Return what an action computes for one micro-batch."""
    known = _known(model, action, arguments, copy)
    return Values({n: known[n] for n in action.sent}, {n: known[n] for n in action.kept})


def run_sum(model: ModelRef, action: ActionRef, *arguments: Any, copy: Any = None) -> dict[str, Any]:
    """Return the action's results, added to those of the micro-batches before, which come after its arguments."""
    known = _known(model, action, arguments, copy)
    before = arguments[len(action.inputs) + action.results]
    with np.errstate(all="ignore"):  # an infinite gradient is the model's, not news
        return {name: known[name] if before is None else before[name] + known[name] for name in action.kept}


def _known(model: ModelRef, action: ActionRef, arguments: tuple[Any, ...], copy: Any) -> dict[str, Any]:
    """What an action reads and gives, by name: found in its arguments, or computed."""
    own = len(action.inputs)
    known = dict(zip(action.inputs, arguments[:own], strict=True))
    for values in arguments[own : own + action.results]:
        known |= values.sent | values.kept
    makers = {name: step for step in action.steps for name in step.outputs}

    def ensure(names: Iterable[str]) -> None:
        for name in names:
            if name not in known:
                step = makers[name]
                ensure(step.inputs)
                known.update(run_bundle(model, step, *(known[n] for n in step.inputs), copy=copy))

    ensure((*action.sent, *action.kept))
    return known
