"""`ff.list_instructions`: the instructions that a run executed, one a row, in the order in which they started.

The rows are read from the run's `Trace`; there is no second log.  Where the ops
inside of bundles were recorded (`ff.profile(client, ops=True)`) a row is an op, elsewhere a task: a bundle, an action
of a pipeline, a step of a collective.  A transfer of a task's input is a row of its own, "transfer", with the region,
placement, stage and micro-batch of that task.  Seconds are the duration of the instruction, sizes are bytes.

Regions, placements and stages are empty for a graph that was written without regions, mesh or pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from dask_ferro.errors import InputError
from dask_ferro.trace import ModelPart, Span, Trace

# The trace's counters of tasks and ops that are missing from it.
_LOSSES = {"dropped": "tasks", "dropped_ops": "ops", "workers_without_ops": "workers that did not answer"}


class Instruction(NamedTuple):
    """One row of a tape.

    Attributes
    ----------
    op : str
        The type of an op; the prefix of a task whose ops were not recorded; "transfer" for a fetched input.
    region : str
        The regions (`ft.region`) in which its nodes were written, such as "layer1/attention backward".
    placement : str
        The placement of its outputs on the mesh, such as "S(0),R".
    stage, micro_batch : int or None
        Pipeline stage and micro-batch; None outside of a pipeline.
    worker : str
        Address, or name of a virtual worker; the receiver of a transfer.
    seconds : float
        Its duration.
    nbytes : int
        Size of the result, or of the transfer.
    """

    op: str
    region: str
    placement: str
    stage: int | None
    micro_batch: int | None
    worker: str
    seconds: float
    nbytes: int


class Instructions(tuple[Instruction, ...]):
    """The instructions of a run in the order of their starts; prints as a table.

    Attributes
    ----------
    missing : str
        Tasks and ops that the recording dropped, such as "12 tasks"; "" where the recording is complete.
    """

    missing: str

    def __new__(cls, rows: Iterable[Instruction] = (), missing: str = "") -> Instructions:
        made = super().__new__(cls, rows)
        made.missing = missing
        return made

    def __repr__(self) -> str:
        return f"<{len(self)} instructions{f', without {self.missing}' if self.missing else ''}>"

    def __str__(self) -> str:
        cells = [Instruction._fields, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([*lines, *([f"without {self.missing}"] if self.missing else [])])


def list_instructions(run: Any) -> Instructions:
    """Return the instructions that a run executed.

    Parameters
    ----------
    run : the object of `ff.profile(client)`, Trace, or path
        A recording whose block has ended, a trace (measured or simulated), or a trace file.

    Raises
    ------
    InputError
        If `run` is none of these, its block has not ended, or the file is not a trace.

    Examples
    --------
    >>> with ff.profile(client) as run:   # doctest: +SKIP
    ...     step(batch).compute()
    >>> print(ff.list_instructions(run))             # doctest: +SKIP
    op        region           placement  stage  micro_batch  worker           seconds   nbytes
    forward   layer1                      0      0            tcp://...:35213  0.001204  4096
    """
    trace = Trace.load(run) if isinstance(run, str | os.PathLike) else getattr(run, "trace", run)
    if not isinstance(trace, Trace):
        wanted = "what ff.profile(client) gives, a Trace, or the path of one"
        raise InputError(f"list_instructions: run: got {type(run).__name__}, wanted {wanted}")
    about = {task.key: task.about for task in trace.tasks}
    inside = {(span.key, span.worker) for span in trace.of("op")}
    rows = [
        _instruction(span, about.get(span.key, ModelPart()))
        for span in sorted(trace.spans, key=lambda span: (span.start, span.stop))
        if span.kind in ("op", "transfer")
        or (span.kind == "compute" and (span.key, span.worker) not in inside)
    ]
    lost = [f"{trace.counts[name]:.0f} {what}" for name, what in _LOSSES.items() if trace.counts.get(name)]
    return Instructions(rows, " and ".join(lost))


def _instruction(span: Span, about: ModelPart) -> Instruction:
    return Instruction(
        span.kind if span.kind == "transfer" else span.prefix,
        span.region or about.region,
        span.placement or about.placement,
        about.stage,
        about.micro_batch,
        span.worker,
        span.seconds,
        span.nbytes,
    )


def _cells(row: Instruction) -> tuple[str, ...]:
    return tuple("" if cell is None else str(cell) for cell in row._replace(seconds=round(row.seconds, 6)))
