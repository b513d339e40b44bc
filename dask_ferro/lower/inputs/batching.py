"""Which inputs are cut together: by name, by what the caller says, or by what is fed.

Inputs whose axis 0 has the batch's symbol are.  Of others whose axis 0 is open (skl2onnx's `[None, 1]` for each
column, torch's `dynamic_axes` with a name for each input) those come into question that have as many rows.  That may
be chance: a table of as many entries.  So sets of them are tried on the model, and one with which each output row is
made of its own rows alone is right, whichever was meant; where there is none, the caller has to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.lower.inputs.keys import is_dask_array
from dask_ferro.lower.inputs.row_check import refuse_sure
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.signature import Signature, may_carry, shape_of

# Sets that are tried: each takes the walk over the model twice.
_SETS = 32


def batched(
    opened: PreparedModel, arrays: Mapping[str, Any], names: Collection[str] | None, *, is_cut: bool
) -> PreparedModel:
    """Return the model with the inputs that carry the batch in this call.

    Parameters
    ----------
    opened : PreparedModel
    arrays : mapping of str to array
        Inputs by name.
    names : collection of str or None
        Those that the caller says are cut.
    is_cut : bool
        Whether rows are cut at all; if not, it does not matter.

    Raises
    ------
    ConfigError
        `names` that cannot be cut, or several inputs that may be and no way to tell.
    """
    sig = opened.signature
    if names is not None:
        return opened.with_batch(_checked(sig, names, f"model {opened.name!r}"))
    if not is_cut or isinstance(sig.batch, int):
        return opened
    sure = [s.name for s, carries in zip(sig.inputs, sig.carries, strict=True) if carries]
    alike = _alike(sig, arrays, sure)
    if not alike:
        return opened
    return _told(opened, arrays, sure, alike)


def _told(
    opened: PreparedModel, arrays: Mapping[str, Any], sure: Sequence[str], alike: Sequence[str]
) -> PreparedModel:
    """Return the model cut along the first set of inputs that is right."""
    open_ones = []
    most = opened.with_batch((*sure, *alike))
    for more in _sets(alike):
        view = opened.with_batch((*sure, *more))
        found = view.row_dependence(arrays)
        if not found:
            return view
        if not any(f.sure for f in found.values()):
            open_ones.append(view)
    if not open_ones:
        refuse_sure(opened.name, most.row_dependence(arrays).values())
    reasons = dict.fromkeys(f.why for f in most.row_dependence(arrays).values())
    shown = ", ".join(map(repr, (*sure, *alike)))
    raise ConfigError(
        f"model {opened.name!r}: inputs {shown} have as many rows and no common name for them, and the model does not"
        f" tell which are cut together ({'; '.join(reasons)}); name them: batched=({shown}), or"
        f" batched=({sure[0]!r},) if the others go whole to each chunk"
    )


def _sets(alike: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield sets of the inputs, all of them first, `_SETS` at the most."""
    count = 0
    for size in range(len(alike), -1, -1):
        for chosen in combinations(alike, size):
            if count >= _SETS:
                return
            count += 1
            yield chosen


def _alike(sig: Signature, arrays: Mapping[str, Any], sure: Sequence[str]) -> list[str]:
    """The inputs of another or no name of axis 0 that have as many rows as the batch."""
    wanted = next((r for r in (_length(arrays[name]) for name in sure) if r is not None), None)
    if wanted is None:
        return []
    others = [s for s in sig.inputs if s.name not in sure and may_carry(s)]
    return [s.name for s in others if _agree(_length(arrays[s.name]), wanted)]


def _length(value: Any) -> tuple[float, int] | None:
    """Return rows (nan: unknown) and chunks of an array; None where it has no axis 0, or none yet."""
    shape = shape_of(value)
    if not shape:
        return None
    return shape[0], len(value.chunks[0]) if is_dask_array(value) else 1


def _agree(one: tuple[float, int] | None, other: tuple[float, int]) -> bool:
    if one is None:
        return False
    if one[0] == one[0] and other[0] == other[0]:
        return one[0] == other[0]
    return one[0] != one[0] and other[0] != other[0] and one[1] == other[1]


def _checked(sig: Signature, names: Collection[str], title: str) -> tuple[str, ...]:
    if not isinstance(names, Collection):
        raise ConfigError(
            f"{title}: batched={names!r}, wanted names of inputs: {', '.join(s.name for s in sig.inputs)}"
        )
    wanted = (names,) if isinstance(names, str) else tuple(names)
    known = {s.name: s for s in sig.inputs}
    unknown = [n for n in wanted if n not in known]
    if unknown or not wanted:
        got = ", ".join(map(repr, unknown)) or "nothing"
        raise ConfigError(f"{title}: batched= names {got}; wanted some of its inputs: {', '.join(known)}")
    fixed = [s for s in sig.inputs if s.name in wanted and not may_carry(s)]
    if fixed:
        listed = "; ".join(map(str, fixed))
        raise ConfigError(
            f"{title}: batched= names inputs without an open axis 0, which cannot be cut: {listed}; leave them out"
        )
    symbols = {s.shape[0] for s in sig.inputs if s.name in wanted and s.shape} - {None}
    left = [s.name for s in sig.inputs if s.name not in wanted and s.shape and s.shape[0] in symbols]
    if left:
        raise ConfigError(
            f"{title}: batched= leaves out {', '.join(map(repr, left))}, whose axis 0 has the same name as that of an"
            " input that is cut; name them too"
        )
    return wanted
