"""Which inputs carry the batch (by name, by the caller's word, or by their lengths), and the rows of each chunk.

Inputs whose axis 0 has the batch's symbol are.  Of others whose axis 0 is open (skl2onnx's `[None, 1]` for each
column, torch's `dynamic_axes` with a name for each input) those come into question that have as many rows.  That may
be chance: a table of as many entries.  So sets of them are tried on the model, and one with which each output row is
made of its own rows alone is right, whichever was meant; where there is none, the caller has to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.lower.inputs.row_check import refuse_sure
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.signature import Signature, fixed_batch, is_dask_array, may_carry, shape_of

# Sets that are tried: each takes the walk over the model twice.
_SETS = 32


def cut(
    model: PreparedModel, arrays: Mapping[str, Any], names: Collection[str] | None, batch: int | None
) -> tuple[PreparedModel, Mapping[str, Any], tuple[int, ...] | None]:
    """Return a call cut into chunks: the model with the inputs that are cut, the inputs, and the rows of each chunk.

    Rows are None where the inputs are taken whole.
    """
    is_cut = batch is not None or any(map(is_dask_array, arrays.values()))
    # Which inputs carry the batch has to be known before chunks are made or looked at.
    model = batched(model, arrays, names, is_cut=is_cut)
    arrays = _rechunked(arrays, model.signature.carried, batch)
    return model, arrays, _row_chunks(model.signature, arrays, batch)


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
    alike = _alike(sig, arrays)
    return _independent(opened, arrays, sig.carried, alike) if alike else opened


def _independent(
    opened: PreparedModel, arrays: Mapping[str, Any], sure: Sequence[str], alike: Sequence[str]
) -> PreparedModel:
    """Return the model cut along the first set of inputs that is right."""
    is_sure = True
    most = opened.with_batch((*sure, *alike))
    for more in _sets(alike):
        view = opened.with_batch((*sure, *more))
        findings = view.row_dependence(arrays).values()
        if not findings:
            return view
        is_sure = is_sure and any(f.sure for f in findings)
    if is_sure:
        refuse_sure(opened.name, most.row_dependence(arrays).values())
    reasons = dict.fromkeys(f.why for f in most.row_dependence(arrays).values())
    shown = ", ".join(map(repr, (*sure, *alike)))
    raise ConfigError(
        f"model {opened.name!r}: inputs {shown} have as many rows and no common name for them, and the model does not"
        f" tell which are cut together ({'; '.join(reasons)}); name them: batched=({shown}), or"
        f" batched=({sure[0]!r},) if the others go whole to each chunk"
    )


def _sets(alike: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return subsets of the inputs, `_SETS` at the most."""
    # Larger sets first: inputs with as many rows mostly belong together.
    sizes = range(len(alike), -1, -1)
    return islice(chain.from_iterable(combinations(alike, size) for size in sizes), _SETS)


def _alike(sig: Signature, arrays: Mapping[str, Any]) -> list[str]:
    """Return the inputs whose axis 0 has another name or none, and as many rows as the batch."""
    rows = {name: _rows(arrays[name]) for name in arrays}
    wanted = next((rows[name] for name in sig.carried if rows[name] is not None), None)
    others = [s.name for s in sig.inputs if s.name not in sig.carried and may_carry(s)]
    return [name for name in others if wanted is not None and rows[name] == wanted]


def _rows(value: Any) -> float | None:
    """Return the rows of an array; None where it has no axis 0, or none yet."""
    shape = shape_of(value)
    if not shape:
        return None
    # Of unknown rows, which are nan, the number of chunks counts.
    return shape[0] if shape[0] == shape[0] else -len(value.chunks[0])


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


# ---- chunks --------------------------------------------------------------------------------------------------


def _rechunked(arrays: Mapping[str, Any], names: Collection[str], batch: int | None) -> dict[str, Any]:
    """Return the inputs, of which those of dask of these names have chunks of `batch` rows.

    If there are such, all dask arrays have one chunk along the other axes, as a task takes whole rows.
    """
    made = dict(arrays)
    if not any(is_dask_array(arrays[name]) for name in names):
        return made
    for name, array in arrays.items():
        if not is_dask_array(array):
            continue
        sizes = {axis: -1 for axis, sizes in enumerate(array.chunks) if axis and len(sizes) > 1}
        if batch is not None and name in names:
            if any(n != n for n in array.chunks[0]):
                raise ConfigError(
                    f"input {name!r} is a dask array whose chunks have unknown sizes, so batch={batch} cannot cut it;"
                    " call .compute_chunk_sizes() first, or leave batch= out"
                )
            sizes[0] = batch
        made[name] = array.rechunk(sizes) if sizes else array
    return made


def _row_chunks(sig: Signature, arrays: Mapping[str, Any], batch: int | None) -> tuple[int, ...] | None:
    """Return the rows of each chunk, or None when the inputs are taken whole.

    Raises
    ------
    ConfigError
        When the inputs that carry the batch are chunked differently, or their lengths differ.
    """
    carried = {name: arrays[name] for name in sig.carried}
    chunked = {name: tuple(a.chunks[0]) for name, a in carried.items() if is_dask_array(a)}
    if _differ(list(chunked.values())):
        raise ConfigError(f"inputs are chunked differently along axis 0: {chunked}; rechunk them alike")
    lengths = {name: len(a) for name, a in carried.items() if shape_of(a) and not is_dask_array(a)}
    # Sizes that dask does not know are nan, and so is their sum, which equals nothing.
    lengths |= {name: sum(sizes) for name, sizes in chunked.items() if sum(sizes) == sum(sizes)}
    # An input of one row is repeated for every row, so its length does not count.
    if sig.fixed_rows:
        lengths = {name: n for name, n in lengths.items() if n != 1 or len(lengths) == 1}
    cutting = bool(chunked) or batch is not None
    if (cutting or sig.fixed_rows) and len(set(lengths.values())) > 1:
        raise ConfigError(f"inputs differ in length along the batch axis: {lengths}")
    if cutting and not all(shape_of(a) for a in carried.values()):
        raise ConfigError(
            "an input that carries the batch is a future or a delayed value: it cannot be cut in chunks"
        )
    splitting = bool(sig.fixed_rows) and any(n != sig.fixed_rows for n in lengths.values())
    if (cutting or splitting) and not all(sig.gives):
        _refuse_outputs(sig, chunked=bool(chunked), splitting=splitting)
    rows = next(iter(lengths.values()), 0)
    if chunked:
        chunks = next(iter(chunked.values()))
    elif batch is None or rows <= batch:
        return None
    else:
        chunks = tuple(min(batch, rows - start) for start in range(0, rows, batch))
    if isinstance(sig.batch, int) and sig.batch > 1 and any(n != sig.batch for n in chunks):
        first = sig.inputs[sig.carries.index(True)]
        raise ConfigError(
            f"the model's batch is fixed at {sig.batch} rows, so it cannot be cut into chunks of {chunks}; run without"
            f" batch=, and with dask arrays of one chunk along axis 0; {fixed_batch(first)}"
        )
    return chunks


def _differ(chunks: Sequence[tuple[float, ...]]) -> bool:
    """Whether chunks differ in number, or in a size that is known of both."""
    if len({len(sizes) for sizes in chunks}) > 1:
        return True
    # Dask's unknown sizes are nan, which equals nothing, itself included.
    return any(len({n for n in sizes if n == n}) > 1 for sizes in zip(*chunks, strict=True))


def _refuse_outputs(sig: Signature, *, chunked: bool, splitting: bool) -> None:
    """Raise `ConfigError` for the outputs that chunks cannot be joined to."""
    without = [str(s) for s, gives in zip(sig.outputs, sig.gives, strict=True) if not gives]
    if splitting:
        why = "the model's batch is fixed at 1, and it was given more"
        remedy = f"pass one row at a time; {fixed_batch(sig.inputs[sig.carries.index(True)])}"
    elif chunked:
        why, remedy = "an input is a dask array", "pass it as one numpy array (.compute())"
    else:
        why, remedy = "batch= cuts the rows", "run without batch="
    raise ConfigError(
        f"outputs without the batch axis cannot be joined from chunks: {without}; {why}: {remedy}"
    )
