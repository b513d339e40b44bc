"""`ff.tape`: a run as instructions, one a row: what was asked, rewritten and executed, in order.

It is read off the run's `Trace`, which is the one that the views draw: there is no second log.  Where the ops inside of
bundles were recorded (`ff.trace(client, ops=True)`) a row is an op, elsewhere a task: a bundle, an action of a
pipeline, a step of a collective.  What was fetched for a task is a row of its own, "transfer", with the region,
placement, stage and micro-batch of that task.  Seconds are the instruction's own, sizes bytes.

A graph that was written without signals, mesh or stages has none of those: the cells are empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from dask_ferro.errors import ConfigError
from dask_ferro.trace import About, Span, Trace

# The names under which a trace counts what is missing.
_LOST = {"dropped": "tasks", "dropped_ops": "ops", "workers_without_ops": "workers that did not answer"}


class Recorded(Protocol):
    """What has recorded a run: `ff.trace(client)`, after its block."""

    @property
    def trace(self) -> Trace:
        """The run."""


class Instruction(NamedTuple):
    """One row of a tape.

    Attributes
    ----------
    op : str
        The op's type; of a task that was recorded whole, its prefix; "transfer" for what was fetched.
    region : str
        The signals that it was written under, "layer1/attention backward" say; of a task, those of its nodes.
    placement : str
        How what it makes lies on the mesh: "S(0),R"; of a task, of its nodes.
    stage, micro_batch : int or None
        Of a pipeline.
    worker : str
        Address or virtual name; of a transfer, the receiver's.
    seconds : float
    nbytes : int
        Of the result, or of what was moved.
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
    """The rows of a tape, in the order in which they began; printed as a table.

    Attributes
    ----------
    missing : str
        What the recording had no room for, in words; "" where all is there.
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


def tape(run: Recorded | Trace | str | os.PathLike[str]) -> Instructions:
    """Return a run as instructions.

    Parameters
    ----------
    run : what `ff.trace(client)` gives, Trace or path
        A recording whose block has ended, a trace (measured or simulated), or the file of one.

    Raises
    ------
    ConfigError
        It is none of these, its block has not ended, or the file is no trace.

    Examples
    --------
    >>> with ff.trace(client) as run:   # doctest: +SKIP
    ...     step(batch).compute()
    >>> print(ff.tape(run))             # doctest: +SKIP
    op        region           placement  stage  micro_batch  worker           seconds   nbytes
    forward   layer1                      0      0            tcp://...:35213  0.001204  4096
    """
    trace = _trace_of(run)
    about = {task.key: task.about for task in trace.tasks}
    inside = {(span.key, span.worker) for span in trace.of("op")}
    rows = [
        _instruction(span, about.get(span.key, About()))
        for span in sorted(trace.spans, key=lambda span: (span.start, span.stop))
        if span.kind in ("op", "transfer")
        or (span.kind == "compute" and (span.key, span.worker) not in inside)
    ]
    lost = [f"{trace.counts[name]:.0f} {what}" for name, what in _LOST.items() if trace.counts.get(name)]
    return Instructions(rows, " and ".join(lost))


def _trace_of(run: Recorded | Trace | str | os.PathLike[str]) -> Trace:
    if isinstance(run, (str, os.PathLike)):
        return Trace.load(run)
    found = run if isinstance(run, Trace) else getattr(run, "trace", None)
    if not isinstance(found, Trace):
        wanted = "what ff.trace(client) gives, a Trace, or the path of one"
        raise ConfigError(f"tape: run: got {type(run).__name__}, wanted {wanted}")
    return found


def _instruction(span: Span, about: About) -> Instruction:
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
    plain = row._replace(seconds=round(row.seconds, 6))
    return tuple("" if cell is None else str(cell) for cell in plain)
