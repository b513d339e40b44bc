"""What is done, in a folder beside the sink, so that a run that was killed goes on where it was.

    <sink>.ferro-progress/
        header.json           what the run is: model, sources, rows, batch, outputs
        <host>-<pid>-<n>.log  one for each process that writes: a line a chunk, after the chunk's rows
        finished              instead of the logs, when all chunks are done: their lines

No two processes append to one file, so a log needs no lock, on any file system.  A line is one JSON object with a
checksum, written by one call; a line that was cut short or changed does not count, and its chunk is done again.
Every line names its run, so lines of an overwritten run's last tasks do not count either; and it has a digest of
what each sink was given, which `parts` compares with what lies there.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.lines import append, opened, put, sealed

SUFFIX = ".ferro-progress"
_HEADER, _FINISHED, _LOG = "header.json", "finished", ".log"


class Output(NamedTuple):
    """One output as the journal knows it: `sink` is its path from the journal's folder.

    `replaces` is the stamp of an earlier output of ours that this run may replace when it ends, or None.
    """

    kind: str
    sink: str
    dtype: str
    row_shape: tuple[int, ...]
    replaces: str | None = None


def new_run() -> str:
    """Return a name for a run: 32 hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Header:
    """What a run is.  `run` names this one; two headers are of the same work if the rest is equal.

    Attributes
    ----------
    model : str
        Digest of its content.
    inputs : mapping of str to str
        Fingerprints of the sources by model input.
    rows, batch : int
    outputs : mapping of str to Output
    batched : tuple of str
        The inputs of which each chunk has its rows; the others go whole to each.
    """

    model: str
    inputs: Mapping[str, str]
    rows: int
    batch: int
    outputs: Mapping[str, Output]
    run: str = field(default_factory=new_run)
    batched: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the header as text, with a checksum."""
        outputs = {n: o._asdict() for n, o in self.outputs.items()}
        return sealed({**asdict(self), "outputs": outputs}).decode()

    @staticmethod
    def from_json(text: str) -> Header:
        """Return the header of a text.

        Raises
        ------
        ValueError
            When the text is no header, or has changed since it was written.
        """
        read = opened(text.encode())
        if read is None:
            raise ValueError("its header has no checksum of ours, or a wrong one: it is damaged or foreign")
        try:
            outputs = {
                name: Output(**{**entry, "row_shape": tuple(entry["row_shape"])})
                for name, entry in read.pop("outputs").items()
            }
            return Header(**{**read, "batched": tuple(read["batched"])}, outputs=outputs)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no header of a run: {error}") from error


def differences(was: Header, now: Header) -> list[str]:
    """Return what differs between the work of two runs; dtypes and shapes follow from the rest."""
    found = []
    if was.model != now.model:
        found.append(f"the model: was {was.model[:12]}, is {now.model[:12]}")
    for name in sorted({*was.inputs, *now.inputs}):
        found += _difference(f"source of {name!r}", was.inputs.get(name), now.inputs.get(name))
    found += _difference("rows", was.rows, now.rows)
    found += _difference("batch", was.batch, now.batch)
    found += _difference("batched", was.batched, now.batched)
    for name in sorted({*was.outputs, *now.outputs}):
        sinks = [h.outputs[name][:2] if name in h.outputs else None for h in (was, now)]
        found += _difference(f"sink of {name!r}", *(s and f"{s[1]} ({s[0]})" for s in sinks))
    return found


def _difference(what: str, was: Any, now: Any) -> list[str]:
    return [] if was == now else [f"{what}: was {was}, is {now}"]


def line(
    run: str,
    number: int,
    rows: int,
    seconds: float,
    digests: Sequence[str] = (),
    read: Sequence[str] = (),
) -> bytes:
    """Return the line for a chunk that is done.

    `digests` are those of what each sink was given, `read` those of the rows of each source whose fingerprint does not
    tell its content.
    """
    return sealed(
        {
            "run": run,
            "chunk": number,
            "rows": rows,
            "seconds": round(seconds, 6),
            "digests": list(digests),
            "read": list(read),
        }
    )


class ChunkNote(NamedTuple):
    """A chunk that a line has as done, with the digests of what was written and read, and the line itself."""

    chunk: int
    digests: tuple[str, ...]
    read: tuple[str, ...]
    text: bytes


def notes_in(log: bytes, run: str) -> Iterator[ChunkNote]:
    """Yield what a log has as done in a run; lines that are torn, changed or of another run do not count.

    >>> log = line("a", 3, 10, 0.1) + line("b", 4, 10, 0.1) + line("a", 5, 10, 0.1)[:-9]
    >>> [note.chunk for note in notes_in(log, "a")]
    [3]
    """
    for text in log.split(b"\n"):
        record = opened(text)
        if record is not None and record.get("run") == run and "chunk" in record:
            yield ChunkNote(record["chunk"], tuple(record["digests"]), tuple(record["read"]), text + b"\n")


@dataclass(frozen=True)
class Journal:
    """The folder; the client begins and finishes it, workers record in it."""

    folder: str

    def header(self) -> Header | None:
        """Return the header, or None when there is no journal.

        Raises
        ------
        ConfigError
            When the folder is something else.
        """
        try:
            with open(self._path(_HEADER), encoding="utf-8") as file:
                return Header.from_json(file.read())
        except FileNotFoundError:
            if os.path.isdir(self.folder) and any(n[0] != "." for n in os.listdir(self.folder)):
                raise self._foreign("it has no header") from None
            return None
        except (ValueError, NotADirectoryError, IsADirectoryError) as error:
            raise self._foreign(str(error)) from error

    def _foreign(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.folder!r} is where the journal of this run goes, and is none: {why}; remove it"
        )

    def begin(self, header: Header) -> None:
        """Make the journal of a new run; what was noted of another one is dropped.

        The header is put in place first, by one rename: killed before it, the other run is as it was; killed after
        it, lines that are left name another run.
        """
        os.makedirs(self.folder, exist_ok=True)
        self._put(_HEADER, header.to_json().encode())
        for name in self._logs():
            os.unlink(self._path(name))

    def notes(self, run: str) -> list[ChunkNote]:
        """Return what is done in a run, by all logs."""
        found: list[ChunkNote] = []
        for name in self._logs():
            try:
                with open(self._path(name), "rb") as file:
                    found += notes_in(file.read(), run)
            except FileNotFoundError:  # a run that was overwritten ends just now
                continue
        return found

    def done(self, run: str) -> frozenset[int]:
        """Return the chunks that are noted as done in a run."""
        return frozenset(note.chunk for note in self.notes(run))

    def is_current(self, run: str) -> bool:
        """Whether this is still the journal of a run, as this process sees it."""
        try:
            header = self.header()
        except ConfigError:
            return False
        return header is not None and header.run == run

    def record(self, text: bytes) -> None:
        """Append a line to this process' own log; behind a line that was cut short, it begins a new one."""
        append(self._path(_writer(os.getpid()) + _LOG), text)

    def finish(self, run: str) -> None:
        """Put one file of all lines in place of the logs."""
        lines = {note.text: None for note in self.notes(run)}
        self._put(_FINISHED, sealed({"run": run, "finished": True}) + b"".join(lines))
        self.drop_logs()

    def drop_logs(self) -> None:
        """Remove the logs, of which a finished journal has all."""
        for name in self._logs():
            if name != _FINISHED:
                os.unlink(self._path(name))

    def reopen(self) -> None:
        """Make a log of the lines of a finished run, whose output is to be mended."""
        os.rename(self._path(_FINISHED), self._path(f"reopened-{uuid.uuid4().hex[:8]}{_LOG}"))

    def is_finished(self, run: str) -> bool:
        """Whether all chunks of a run were done and its output is in place."""
        try:
            with open(self._path(_FINISHED), "rb") as file:
                first = opened(file.readline())
        except FileNotFoundError:
            return False
        return first is not None and first.get("run") == run

    def _put(self, name: str, text: bytes) -> None:
        put(self._path(name), text)

    def _logs(self) -> Iterable[str]:
        return sorted(n for n in os.listdir(self.folder) if n.endswith(_LOG) or n == _FINISHED)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)


@cache
def _writer(pid: int) -> str:
    """Return a name that no other process has, on any host, nor a later one of the same pid."""
    return f"{socket.gethostname()}-{pid}-{uuid.uuid4().hex[:8]}"
