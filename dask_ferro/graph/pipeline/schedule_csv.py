"""Schedules as CSV text: a line per stage, a cell per action, in our notation and in that of PyTorch.

Files of `torch.distributed.pipelining` have more than actions.  In a task graph an edge between two stages is the
transfer, so these cells are checked and left out:

    2SEND_F0 3RECV_F0    the activations of chunk 2 are sent to chunk 3
    3SEND_B0 2RECV_B0    the gradient of chunk 3's input is sent to chunk 2
    2UNSHARD 2RESHARD    the weights of chunk 2 are gathered from all replicas, and freed again
    2REDUCE_GRAD         the gradients of chunk 2 are summed over all replicas

`(3F2;0B1)OVERLAP_F_B` is its actions, one after the other.  B is the whole backward.  Older files have W and no I: in
them B is the input gradient, and BW the whole backward.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    KINDS,
    RELEASING,
    WEIGHT_GRAD,
    Action,
)
from dask_ferro.graph.pipeline.sound import first, refusal

_WHOLE = "BW"
_SPELLED = {
    "FORWARD": FORWARD,
    "BACKWARD_INPUT": INPUT_GRAD,
    "BACKWARD_WEIGHT": WEIGHT_GRAD,
    "FULL_BACKWARD": BACKWARD,
}
_ACTIONS = (*KINDS, _WHOLE, *_SPELLED)
_SENT, _RECEIVED, _REDUCED = "SEND", "RECV", "REDUCE_GRAD"
_TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_OF_WEIGHTS = ("UNSHARD", "RESHARD", _REDUCED)

# Six digits, as in `Action.parse`.
_CELL = re.compile(rf"([0-9]{{1,6}})({'|'.join((*_ACTIONS, *_TRANSFERS, *_OF_WEIGHTS))})([0-9]{{1,6}})?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")

# A chunk, a word and a micro-batch.
_Key = tuple[int, str, int | None]


class CsvEntry(NamedTuple):
    """One action or other entry of a line; `line` and `cell` count from 1."""

    line: int
    cell: int
    chunk: int
    word: str
    micro_batch: int | None

    def __str__(self) -> str:
        return f"{self.chunk}{self.word}{'' if self.micro_batch is None else self.micro_batch}"

    @property
    def key(self) -> _Key:
        """What it is, wherever it stands."""
        return self.chunk, self.word, self.micro_batch

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"line {self.line}, cell {self.cell}"


def read_csv(text: str, name: str) -> tuple[tuple[Action, ...], ...]:
    """Return the list of actions of each line; empty cells and empty lines are ignored.

    Parameters
    ----------
    text : str
    name : str
        The name or path of the schedule, for messages.

    Raises
    ------
    ConfigError
        The text is no CSV, a cell is no entry of a schedule, or a transfer lacks its other end or is out of place;
        the error has all problems of a kind at once.
    """
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ConfigError(f"schedule {name!r} cannot be read: {error}") from error
    wrong: list[str] = []
    rows = [list(_entries(number, cells, wrong)) for number, cells in enumerate(lines, 1)]
    if not wrong:
        rows = list(_today(rows, wrong))
    found = wrong or [*_unpaired(rows), *_misplaced(rows)]
    if found:
        raise refusal(f"schedule {name!r} cannot be read:", first(found))
    return tuple(actions for row in rows if (actions := tuple(_actions(row))))


def _entries(line: int, cells: Iterable[str], wrong: list[str]) -> Iterator[CsvEntry]:
    """Yield the entries of a line; add a message to `wrong` for each cell that is none."""
    for number, cell in enumerate(cells, 1):
        overlap = _OVERLAP.fullmatch(cell.strip())
        for part in [cell] if overlap is None else overlap[1].split(";"):
            if not part.strip():
                continue
            entry = _entry(line, number, part, overlap is not None)
            if entry is None:
                wrong.append(
                    f"line {line}, cell {number}: got {part.strip()[:30]!r}, wanted {_wanted(overlap)}"
                )
            else:
                yield entry


def _wanted(overlap: object) -> str:
    kinds = f"chunk, one of {', '.join(KINDS)}, micro-batch, as in '2F0'"
    if overlap is not None:
        return f"{kinds}, inside (...;...)OVERLAP_F_B"
    return f"{kinds}, or torch's {', '.join((*_TRANSFERS, *_OF_WEIGHTS))} or (...;...)OVERLAP_F_B"


def _entry(line: int, number: int, text: str, overlaps: bool) -> CsvEntry | None:
    found = _CELL.fullmatch(text.strip())
    if found is None:
        return None
    chunk, word, micro_batch = found.groups()
    if (micro_batch is None and word not in _OF_WEIGHTS) or (overlaps and word not in _ACTIONS):
        return None
    return CsvEntry(
        line, number, int(chunk), _SPELLED.get(word, word), None if micro_batch is None else int(micro_batch)
    )


def _actions(row: Iterable[CsvEntry]) -> Iterator[Action]:
    for entry in row:
        if entry.word in KINDS and entry.micro_batch is not None:
            yield Action(entry.chunk, entry.word, entry.micro_batch)


def _today(rows: Iterable[Sequence[CsvEntry]], wrong: list[str]) -> Iterator[list[CsvEntry]]:
    """Yield the lines in today's notation: B, which may mean I, and BW become I and B."""
    rows = list(rows)
    entries = list(chain.from_iterable(rows))
    weights = {(entry.chunk, entry.micro_batch) for entry in entries if entry.word == WEIGHT_GRAD}
    # A file with I has whole backwards beside split ones: DualPipeV's do.
    old = bool(weights) and all(entry.word != INPUT_GRAD for entry in entries)
    meanings = {_WHOLE: BACKWARD} | ({BACKWARD: INPUT_GRAD} if old else {})
    for row in rows:
        for entry in row:
            if old and entry.word == BACKWARD and (entry.chunk, entry.micro_batch) not in weights:
                weight = entry._replace(word=WEIGHT_GRAD)
                wrong.append(
                    f"{entry.place}: {entry} is an input gradient, as the file has W and no I, and {weight} is missing;"
                    f" add it, or write {entry._replace(word=_WHOLE)} for the whole backward"
                )
        yield [entry._replace(word=meanings.get(entry.word, entry.word)) for entry in row]


# ---- what is left out --------------------------------------------------------------------------------------


def _unpaired(rows: Iterable[Iterable[CsvEntry]]) -> Iterator[str]:
    """Yield the transfers that are there twice, or of which only one end is there."""
    ends: dict[_Key, CsvEntry] = {}
    for entry in chain.from_iterable(rows):
        if entry.word not in _TRANSFERS:
            continue
        # Two SENDs of one value would leave a message that nothing receives.
        if entry.key in ends:
            yield f"{entry.place}: {entry} is there already, at {ends[entry.key].place}; remove one of them"
        ends[entry.key] = entry
    for entry in ends.values():
        other = _other_end(entry)
        if other.key in ends:
            continue
        if other.chunk < 0:
            yield f"{entry.place}: {entry} has no other end, since no chunk is before {entry.chunk}; remove it"
        elif entry.word.startswith(_RECEIVED):
            remedy = f"add {other} after the action of chunk {other.chunk} that makes it"
            yield f"{entry.place}: {entry} receives what no line sends; {remedy}, or remove {entry}"
        else:
            remedy = f"add {other} before the action of chunk {other.chunk} that reads it"
            yield f"{entry.place}: {entry} sends what no line receives; {remedy}, or remove {entry}"


def _other_end(entry: CsvEntry) -> CsvEntry:
    """Return the RECV of a SEND, or the SEND of a RECV: activations go one chunk up, gradients one down."""
    way, what = entry.word.split("_")
    step = 1 if (way == _SENT) == (what == FORWARD) else -1
    return entry._replace(chunk=entry.chunk + step, word=f"{_RECEIVED if way == _SENT else _SENT}_{what}")


def _misplaced(rows: Iterable[Sequence[CsvEntry]]) -> Iterator[str]:
    """Yield the entries that are on the line of another chunk, or on the wrong side of the action that they serve."""
    for row in rows:
        at = {entry.key: i for i, entry in enumerate(row)}
        last = {entry.chunk: i for i, entry in enumerate(row) if entry.word in RELEASING}
        chunks = {action.chunk for action in _actions(row)}
        for i, entry in enumerate(row):
            problem = ""
            if entry.word not in KINDS and entry.chunk not in chunks:
                problem = (
                    f"got {entry}, but the line has no action of chunk {entry.chunk}; move it to its line"
                )
            elif entry.word == _REDUCED and last.get(entry.chunk, -1) > i:
                problem = (
                    f"{entry} is before {row[last[entry.chunk]]}, whose gradient it lacks; move it behind"
                )
            elif entry.word in _TRANSFERS:
                problem = _wrong_side(row, at, i)
            if problem:
                yield f"{entry.place}: {problem}"


def _wrong_side(row: Sequence[CsvEntry], at: Mapping[_Key, int], i: int) -> str:
    """Return what is wrong with the place of a transfer beside the action that makes or reads its value, or nothing."""
    entry = row[i]
    # A gradient is of the input of its chunk: I or B makes it, and the I or B of the chunk below reads it.
    kinds = (FORWARD,) if entry.word.endswith(FORWARD) else (INPUT_GRAD, BACKWARD)
    serves = [entry._replace(word=kind) for kind in kinds]
    j = next((at[action.key] for action in serves if action.key in at), None)
    if j is None:
        wanted = " or ".join(map(str, serves))
        return f"{entry} has no action: the line has no {wanted}; add it, or remove the transfer"
    if entry.word.startswith(_SENT) and i < j:
        return f"{entry} is before {row[j]}, which makes what it sends; move it behind"
    if entry.word.startswith(_RECEIVED) and i > j:
        return f"{entry} is after {row[j]}, which reads what it receives; move it before"
    return ""
