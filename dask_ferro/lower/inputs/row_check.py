"""The check that a batch may be cut: models that certainly combine rows are refused, doubtful ones are tried.

`graph.batch_independence` tells of most models.  Of the others (bodies, custom operators, shapes that only a run
tells) it cannot be known ahead, so a few made-up rows are run at once and in pieces before the first task: other
numbers are a refusal, equal ones a warning, as they prove nothing about other rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any
from weakref import WeakSet

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ops.states import Finding
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.signature import ValueSpec, made_up, may_carry, shape_of

# Rows that are tried, and in which pieces: one alone, which may be taken for no batch at all, and several.  Even and
# odd numbers, as a value that depends on the number of rows may depend on no more than its parity.
_PIECES = (1, 3, 2)
# A model that takes longer for so few rows is not run twice before the caller's own.
_WORTH_TRYING_S = 2.0
# Sums of a few thousand floats in another order differ by less, and numbers that depend on other rows by more.
_RELATIVE = 1e-3
_REMEDY = "run it on all rows at once: no batch=, dask arrays of one chunk along axis 0, in ff.run a batch= of all rows"

# Models of which a few rows were tried in chunks, and the caller warned.
_tried_models: WeakSet[PreparedModel] = WeakSet()
# A function of arrays by name that returns the model's outputs: one value, or a dict of them.
Run = Callable[[Mapping[str, Any]], Any]


def check_rows(opened: PreparedModel, arrays: Mapping[str, Any], run: Run) -> None:
    """Check that chunks of the rows give the same numbers as all rows at once.

    Parameters
    ----------
    opened : PreparedModel
    arrays : mapping of str to array
        Checked inputs, of which the shapes count.
    run : callable
        Computes the model in this process.

    Raises
    ------
    ConfigError
        Rows depend on each other, by the graph or by a trial.

    Warns
    -----
    UserWarning
        Once a model, when they may.
    """
    found = list(opened.row_dependence(arrays).values())
    refuse_sure(opened.name, found)
    if not found or opened in _tried_models:
        return
    reasons = "; ".join(dict.fromkeys(f.why for f in found))
    seen = _tried(opened, arrays, run)
    if seen:
        raise ConfigError(
            f"model {opened.name!r}: its rows depend on each other: {seen}; as to why, {reasons}; {_REMEDY}"
        )
    _tried_models.add(opened)
    warnings.warn(
        f"model {opened.name!r}: its rows may depend on each other ({reasons}); if they do, chunks of them give"
        " other numbers than all rows at once",
        UserWarning,
        stacklevel=4,
    )


def refuse_sure(name: str, found: Collection[Finding]) -> None:
    """Raise `ConfigError` where one of the findings is sure."""
    sure = list(dict.fromkeys(f.why for f in found if f.sure))
    if sure:
        raise ConfigError(
            f"model {name!r}: the rows cannot be cut, as chunks of them give other numbers than all:"
            f" {'; '.join(sure)}; {_REMEDY}"
        )


def _tried(opened: PreparedModel, arrays: Mapping[str, Any], run: Run) -> str | None:
    """Run a few rows at once and in pieces; return the difference as text, None where there is none or nothing ran."""
    sig, total = opened.signature, sum(_PIECES)
    # Rows are made up, as those of the caller may be large, or not there yet.
    rows = {
        spec.name: _rows(spec, arrays[spec.name], total if spec.name in sig.carried else None)
        for spec in sig.inputs
    }
    if any(value is None for value in rows.values()):
        return None
    if opened.sized(rows, total).seconds > _WORTH_TRYING_S:
        return None
    try:
        whole = _by_name(opened, run(rows))
    except Exception:  # noqa: BLE001 - engines raise many kinds: this is no model for made-up rows
        others = ", ".join(repr(s.name) for s in sig.inputs if s.name not in sig.carried and may_carry(s))
        unfit = f"other rows do not go with all of {others}, so name the inputs that are cut with batched="
        return unfit if others else None
    try:
        parts = [_by_name(opened, run(piece)) for piece in _pieces(rows, sig.carried)]
    except Exception:  # noqa: BLE001 - any failure is reported
        return f"{total} rows run at once, and one of them alone does not"
    differ = [name for name in whole if not _same(whole[name], list(map(itemgetter(name), parts)))]
    return f"{', '.join(map(repr, differ))} of {total} rows differ when they are cut" if differ else None


def _pieces(rows: Mapping[str, Any], carried: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the inputs of each piece: the rows of those that carry the batch, the others whole."""
    for stop, size in zip(np.cumsum(_PIECES), _PIECES, strict=True):
        yield {**rows, **{name: rows[name][stop - size : stop] for name in carried}}


def _rows(spec: ValueSpec, given: Any, rows: int | None) -> Any:
    """Return made-up rows of an input, or the given array of one that is taken whole; None if there is neither."""
    if rows is None and isinstance(given, np.ndarray):
        return given
    shape = shape_of(given)
    if spec.kind != "tensor" or spec.dtype is None or (shape is None and rows is None):
        return None
    if shape is not None:
        # Dask's unknown sizes are nan.
        sizes = [d if d == d else 1 for d in shape]
        spec = spec._replace(shape=tuple(map(int, sizes)))
    return made_up(spec, rows)


def _by_name(opened: PreparedModel, results: Any) -> dict[str, Any]:
    names = [s.name for s in opened.signature.outputs]
    return results if len(names) > 1 else {names[0]: results}


def _same(whole: Any, parts: Sequence[Any]) -> bool:
    """Whether parts, put together, are the whole but for the order of sums."""
    if isinstance(whole, list):
        joined = list(chain.from_iterable(parts))
        return len(joined) == len(whole) and all(map(_equal, whole, joined))
    if any(np.ndim(part) == 0 or np.shape(part)[1:] != np.shape(whole)[1:] for part in parts):
        return False
    return np.shape(whole) != () and _equal(whole, np.concatenate(parts))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape:
        return False
    if a.dtype.kind not in "fc":
        return bool((a == b).all())
    # Relative to the largest number, as sums near zero differ by more than themselves.
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=0))
    return bool(np.allclose(a, b, rtol=_RELATIVE, atol=_RELATIVE * scale, equal_nan=True))
