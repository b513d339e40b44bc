"""`bind` checks the inputs of a call and decides which inputs are cut, the rows of each chunk, and the bundles.

Inputs whose axis 0 has the batch's symbol are cut.  Others whose axis 0 is open (skl2onnx's `[None, 1]` for each
column, torch's `dynamic_axes` with a name for each input) may be cut if they have as many rows, or the equal number
may be chance: a table of as many entries.  So rows are followed through the model with all of these cut, then with
none.  A cut with which each output row depends only on its own rows is correct, whichever was intended; if neither is
correct, the caller has to decide.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from dask_ferro.errors import InputError
from dask_ferro.graph.bundling.plan import Bundle, Granularity, Plan
from dask_ferro.graph.ops.states import Finding
from dask_ferro.lower.preparation.model import PreparedModel, SizedModel, with_defaults_replaced
from dask_ferro.lower.signature import (
    Signature,
    batch_remedy,
    call_arrays,
    is_dask_array,
    may_carry,
    shape_of,
)

IN_ONE_TASK = (
    "run it on all rows in one task: no batch_size=, dask arrays of one chunk along axis 0, in"
    " ff.predict_files a batch_size= of all rows"
)


class BoundModel:
    """A model on its inputs, before it is lowered to a Dask graph.

    The model has the inputs of this call that carry the batch; `arrays` are the checked inputs by name.  `rows` are
    the rows of each chunk, nan if dask does not know them; None: inputs are not cut.
    """

    def __init__(
        self,
        model: PreparedModel,
        arrays: Mapping[str, Any],
        rows: tuple[int, ...] | None,
        granularity: Granularity,
    ) -> None:
        self.model, self.arrays, self.rows, self.granularity = model, arrays, rows, granularity
        self.chunks = 1 if rows is None else len(rows)
        fixed, carried = model.signature.fixed_rows, [arrays[name] for name in model.signature.carried]
        # Whether an input that is cut is a dask array.
        self.has_dask_rows = any(map(is_dask_array, carried))
        # Shapes of the inputs by name; {} if some are dask arrays, whose chunks may differ from their declared shapes.
        has_dask = any(map(is_dask_array, arrays.values()))
        self.shapes = {} if has_dask else {name: shape_of(array) for name, array in arrays.items()}
        # Rows of the chunks, or of the inputs that carry the batch if these are not cut.
        self.lengths = rows or tuple(len(array) for array in carried if shape_of(array))
        # Whether a task runs the model's fixed batch size slice by slice.
        self.splits = bool(fixed) and any(n != fixed for n in self.lengths)
        # Dask's unknown sizes are nan.
        self._largest_chunk = max((n for n in rows or () if n == n), default=None)

    @cached_property
    def sized(self) -> SizedModel:
        """Types and costs of the largest chunk."""
        return self.model.sized(self.arrays, self._largest_chunk)

    @cached_property
    def plan(self) -> Plan:
        """The bundles of one chunk, and the sources of the outputs.

        A model that is run slice by slice is one bundle: its values do not leave the slice.  So is a model on chunks
        whose sizes are not known: the task that returns the outputs has to see their rows.
        """
        has_unknown_rows = any(n != n for n in self.rows or ())
        granularity = "model" if self.splits or has_unknown_rows else self.granularity
        return self.model.plan(self.arrays, self._largest_chunk, self.chunks, granularity)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles of one chunk."""
        return self.plan.bundles


def bind(
    model: PreparedModel,
    given: Any,
    *,
    batch_size: int | None,
    batch_inputs: Collection[str] | None,
    granularity: Granularity,
) -> BoundModel:
    """Return a model on its inputs: an array, a mapping of arrays by name, or a tuple of them.

    `batch_size` and `batch_inputs` are the rows of a chunk and the inputs that are cut, if the caller passes them.

    Raises
    ------
    InputError
        If names, dtypes, shapes or chunks do not fit the model; the message lists all of them.
    """
    names = frozenset(given if isinstance(given, Mapping) else ()) - {s.name for s in model.signature.inputs}
    if names:
        model = with_defaults_replaced(model, names)
    sig, title = model.signature, f"model {model.name!r}"
    batch_size = check_batch_size(batch_size, title)
    arrays = call_arrays(sig, given, title)
    # The inputs that carry the batch have to be known before chunks are created or read.
    is_cut = batch_size is not None or any(map(is_dask_array, arrays.values()))
    model = mark_batched(model, arrays, batch_inputs, is_cut=is_cut)
    arrays = _rechunk(arrays, model.signature.carried, batch_size)
    return BoundModel(model, arrays, _row_chunks(model.signature, arrays, batch_size), granularity)


def check_batch_size(batch_size: Any, title: str) -> int | None:
    """Return `batch_size` as an int, or None; raise `InputError` if it is not a number of rows."""
    if batch_size is None:
        return None
    # A bool is an int in Python, and a numpy integer is not: so `__index__`, and no bool.
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size < 1:
        raise InputError(
            f"{title}: batch_size={batch_size!r}, wanted a number of rows of at least 1, or None"
        )
    return operator.index(batch_size)


# ---- which inputs are cut ------------------------------------------------------------------------------------


def mark_batched(
    opened: PreparedModel, arrays: Mapping[str, Any], names: Collection[str] | None, *, is_cut: bool
) -> PreparedModel:
    """Return the model with the inputs that carry the batch in this call.

    `names` are the inputs that the caller declares as cut, and `is_cut` states whether rows are cut at all.

    Raises
    ------
    InputError
        If `names` cannot be cut, or several inputs may be cut and the model does not decide.
    """
    sig = opened.signature
    if names is not None:
        return opened.with_batch(_check_names(sig, names, f"model {opened.name!r}"))
    alike = _same_length_inputs(sig, arrays) if is_cut and not isinstance(sig.batch, int) else []
    if not alike:
        return opened
    found: list[Collection[Finding]] = []
    # All first: inputs with as many rows mostly belong together.
    for carrying in ((*sig.carried, *alike), sig.carried):
        view = opened.with_batch(carrying)
        found.append(view.row_dependence(arrays).values())
        if not found[-1]:
            return view
    if all(any(finding.sure for finding in findings) for findings in found):
        refuse_sure(opened.name, found[0])
    reasons = dict.fromkeys(finding.why for finding in found[0])
    shown = ", ".join(map(repr, (*sig.carried, *alike)))
    raise InputError(
        f"model {opened.name!r}: inputs {shown} have the same number of rows and no common name for them,"
        f" and the model does not determine which are cut together ({'; '.join(reasons)}); name them:"
        f" batch_inputs=({shown}), or batch_inputs=({sig.carried[0]!r},) if each chunk reads the others"
        " whole"
    )


def refuse_sure(name: str, found: Collection[Finding]) -> None:
    """Raise `InputError` if one of the findings is certain."""
    if sure := dict.fromkeys(finding.why for finding in found if finding.sure):
        raise InputError(
            f"model {name!r}: the rows cannot be cut, because chunks of them give other results than all"
            f" rows: {'; '.join(sure)}; {IN_ONE_TASK}"
        )


def _same_length_inputs(sig: Signature, arrays: Mapping[str, Any]) -> list[str]:
    """Return the inputs whose axis 0 has another name or none, and as many rows as the batch."""
    rows = {name: _rows(arrays[name]) for name in arrays}
    wanted = next((rows[name] for name in sig.carried if rows[name] is not None), None)
    others = [s.name for s in sig.inputs if s.name not in sig.carried and may_carry(s)]
    return [name for name in others if wanted is not None and rows[name] == wanted]


def _rows(value: Any) -> float | None:
    shape = shape_of(value)
    if not shape:
        return None
    # Unknown rows are nan, so the numbers of chunks are compared.
    return shape[0] if shape[0] == shape[0] else -len(value.chunks[0])


def _check_names(sig: Signature, names: Collection[str], title: str) -> tuple[str, ...]:
    if not isinstance(names, Collection):
        raise InputError(
            f"{title}: batch_inputs={names!r}, wanted names of inputs:"
            f" {', '.join(s.name for s in sig.inputs)}"
        )
    wanted = (names,) if isinstance(names, str) else tuple(names)
    known = {s.name: s for s in sig.inputs}
    unknown = [n for n in wanted if n not in known]
    if unknown or not wanted:
        got = ", ".join(map(repr, unknown)) or "nothing"
        raise InputError(f"{title}: batch_inputs= names {got}; wanted some of its inputs: {', '.join(known)}")
    fixed = [s for s in sig.inputs if s.name in wanted and not may_carry(s)]
    if fixed:
        listed = "; ".join(map(str, fixed))
        raise InputError(
            f"{title}: batch_inputs= names inputs without an open axis 0, which cannot be cut: {listed};"
            " leave them out"
        )
    symbols = {s.shape[0] for s in sig.inputs if s.name in wanted and s.shape} - {None}
    left = [s.name for s in sig.inputs if s.name not in wanted and s.shape and s.shape[0] in symbols]
    if left:
        raise InputError(
            f"{title}: batch_inputs= leaves out {', '.join(map(repr, left))}, whose axis 0 has the same name"
            " as axis 0 of an input that is cut; name them too"
        )
    return wanted


# ---- chunks --------------------------------------------------------------------------------------------------


def _rechunk(arrays: Mapping[str, Any], names: Collection[str], batch_size: int | None) -> dict[str, Any]:
    """Return the inputs; the dask arrays among these names have chunks of `batch_size` rows.

    If there are any, all dask arrays have one chunk along the other axes, because a task reads whole rows.
    """
    made = dict(arrays)
    if not any(is_dask_array(arrays[name]) for name in names):
        return made
    for name, array in arrays.items():
        if not is_dask_array(array):
            continue
        sizes = {axis: -1 for axis, sizes in enumerate(array.chunks) if axis and len(sizes) > 1}
        if batch_size is not None and name in names:
            if any(n != n for n in array.chunks[0]):
                raise InputError(
                    f"input {name!r} is a dask array whose chunks have unknown sizes, so"
                    f" batch_size={batch_size} cannot cut it; call .compute_chunk_sizes() first, or leave"
                    " batch_size= out"
                )
            sizes[0] = batch_size
        made[name] = array.rechunk(sizes) if sizes else array
    return made


def _row_chunks(sig: Signature, arrays: Mapping[str, Any], batch_size: int | None) -> tuple[int, ...] | None:
    """Return the rows of each chunk, or None if the inputs are not cut."""
    carried = {name: arrays[name] for name in sig.carried}
    chunked = {name: tuple(a.chunks[0]) for name, a in carried.items() if is_dask_array(a)}
    # Sizes that dask does not know are nan, which equals nothing: they are not compared, and neither is their sum.
    known = [{n for n in sizes if n == n} for sizes in zip(*chunked.values(), strict=False)]
    if len(set(map(len, chunked.values()))) > 1 or any(len(sizes) > 1 for sizes in known):
        raise InputError(f"inputs are chunked differently along axis 0: {chunked}; rechunk them alike")
    lengths = {name: len(a) for name, a in carried.items() if shape_of(a) and not is_dask_array(a)}
    lengths |= {name: sum(sizes) for name, sizes in chunked.items() if sum(sizes) == sum(sizes)}
    # An input of one row is repeated for every row, so its length does not count.
    if sig.fixed_rows:
        lengths = {name: n for name, n in lengths.items() if n != 1 or len(lengths) == 1}
    cutting = bool(chunked) or batch_size is not None
    if (cutting or sig.fixed_rows) and len(set(lengths.values())) > 1:
        raise InputError(f"inputs differ in length along the batch axis: {lengths}")
    if cutting and not all(shape_of(a) for a in carried.values()):
        raise InputError(
            "an input that carries the batch is a future or a delayed value: it cannot be cut in chunks"
        )
    splitting = bool(sig.fixed_rows) and any(n != sig.fixed_rows for n in lengths.values())
    if (cutting or splitting) and not all(sig.gives):
        without = [str(s) for s, gives in zip(sig.outputs, sig.gives, strict=True) if not gives]
        more = (
            f"the model's batch is fixed at 1, and it got more rows: pass one row at a time; {_remedy(sig)}"
        )
        raise InputError(
            f"outputs without the batch axis cannot be joined from chunks: {without};"
            f" {more if splitting else IN_ONE_TASK}"
        )
    rows = next(iter(lengths.values()), 0)
    if chunked:
        chunks = next(iter(chunked.values()))
    elif batch_size is None or rows <= batch_size:
        return None
    else:
        chunks = tuple(min(batch_size, rows - start) for start in range(0, rows, batch_size))
    if isinstance(sig.batch, int) and sig.batch > 1 and any(n != sig.batch for n in chunks):
        raise InputError(
            f"the model's batch is fixed at {sig.batch} rows, so it cannot be cut into chunks of {chunks}:"
            f" run without batch_size=, and with dask arrays of one chunk along axis 0; {_remedy(sig)}"
        )
    return chunks


def _remedy(sig: Signature) -> str:
    """Return how to export a model without its fixed batch."""
    return next((batch_remedy(spec) for spec in sig.inputs if spec.name in sig.carried), "")
