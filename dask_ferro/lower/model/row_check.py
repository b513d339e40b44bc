"""Check that a batch may be cut: models that certainly combine rows are refused, doubtful models are tried.

`graph.batch_independence` decides for most models.  For the others (bodies, custom operators, shapes that only a run
determines) nothing can decide ahead of time, so a few made-up rows are run together and in pieces before the first
task. Different results are a refusal, equal results a warning, because they prove nothing about other rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakSet

import numpy as np

from dask_ferro.errors import InputError
from dask_ferro.lower.model.bound import IN_ONE_TASK, BoundModel, refuse_sure
from dask_ferro.lower.preparation.model import PreparedModel
from dask_ferro.lower.signature import ValueSpec, made_up_array, may_carry, shape_of

# Rows that are tried, and in which pieces: a single row, which a model may treat as no batch at all, and several.
# Even and odd numbers, because a value that depends on the number of rows may depend only on its parity.
_PIECES = (1, 3, 2)
# A model that takes longer than this many seconds for these few rows is not run twice before the caller's own run.
_WORTH_TRYING_S = 2.0
# Sums of a few thousand floats in another order differ by less, and numbers that depend on other rows by more.
_RELATIVE = 1e-3

# Models with which a few rows were tried in chunks and whose caller was warned.
_tried_models: WeakSet[PreparedModel] = WeakSet()


def check_rows(opened: PreparedModel, arrays: Mapping[str, Any]) -> None:
    """Check that chunks of the rows of checked inputs give the same results as all rows; only the inputs' shapes
    matter.

    Raises
    ------
    InputError
        If rows depend on each other, according to the graph or a trial.

    Warns
    -----
    UserWarning
        If they may depend on each other; once a model.
    """
    found = list(opened.row_dependence(arrays).values())
    refuse_sure(opened.name, found)
    if not found or opened in _tried_models:
        return
    reasons = "; ".join(dict.fromkeys(f.why for f in found))
    seen = _try_rows(opened, arrays)
    if seen:
        raise InputError(
            f"model {opened.name!r}: its rows depend on each other: {seen} (reason: {reasons}); {IN_ONE_TASK}"
        )
    _tried_models.add(opened)
    warnings.warn(
        f"model {opened.name!r}: its rows may depend on each other ({reasons}); if they do, chunks of them"
        " give other results than all rows together",
        UserWarning,
        stacklevel=4,
    )


def _try_rows(opened: PreparedModel, arrays: Mapping[str, Any]) -> str | None:
    """Run a few rows together and in pieces; return the difference as text, None if there is none or nothing ran."""
    # Dask's arrays are imported with the first call.
    from dask_ferro.lower.model.lowering import values_of

    sig, total = opened.signature, sum(_PIECES)
    # Rows are made up, because the caller's rows may be large, or not computed yet.
    rows = {
        spec.name: _rows(spec, arrays[spec.name], total if spec.name in sig.carried else None)
        for spec in sig.inputs
    }
    if any(value is None for value in rows.values()):
        return None
    if opened.sized(rows, total).seconds > _WORTH_TRYING_S:
        return None

    def run(given: Mapping[str, Any]) -> dict[str, Any]:
        return values_of(BoundModel(opened, given, None, "model"))

    try:
        whole = run(rows)
    except Exception:  # noqa: BLE001 - engines raise many kinds: this model cannot run made-up rows
        others = ", ".join(repr(s.name) for s in sig.inputs if s.name not in sig.carried and may_carry(s))
        unfit = (
            f"other rows do not go with all of {others}, so name the inputs that are cut with batch_inputs="
        )
        return unfit if others else None
    cuts = [np.split(rows[name], np.cumsum(_PIECES)[:-1]) for name in sig.carried]
    try:
        parts = [run({**rows, **dict(zip(sig.carried, cut, strict=True))}) for cut in zip(*cuts, strict=True)]
    except Exception:  # noqa: BLE001 - any failure is reported
        return f"{total} rows run together, and one of them on its own does not"
    differ = [name for name in whole if not _are_close(whole[name], [part[name] for part in parts])]
    return f"{', '.join(map(repr, differ))} of {total} rows differ when they are cut" if differ else None


def _rows(spec: ValueSpec, given: Any, rows: int | None) -> Any:
    """Return made-up rows of an input, or the caller's array of an input that is not cut; None if there is neither."""
    if rows is None and isinstance(given, np.ndarray):
        return given
    shape = shape_of(given)
    if spec.kind != "tensor" or spec.dtype is None or (shape is None and rows is None):
        return None
    if shape is not None:
        # Dask's unknown sizes are nan.
        spec = spec._replace(shape=tuple(int(d) if d == d else 1 for d in shape))
    return made_up_array(spec, rows)


def _are_close(whole: Any, parts: Sequence[Any]) -> bool:
    """Whether the parts together equal the whole, except for the order of sums."""
    if isinstance(whole, list):
        joined = list(chain.from_iterable(parts))
        return len(joined) == len(whole) and all(map(_are_equal, whole, joined))
    try:
        return _are_equal(whole, np.concatenate(parts))
    except ValueError:
        # Parts without axes, or of several widths.
        return False


def _are_equal(one: Any, other: Any) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape:
        return False
    if a.dtype.kind not in "fc":
        return bool((a == b).all())
    # Relative to the largest number, because sums near zero differ by more than themselves.
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=0))
    return bool(np.allclose(a, b, rtol=_RELATIVE, atol=_RELATIVE * scale, equal_nan=True))
