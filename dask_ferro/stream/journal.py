"""The journal of a run: a record of done chunks in a folder beside the sink, from which a killed run resumes.

    <sink>.ferro-progress/
        header.json           the description of the run: model, sources, rows, batch, outputs
        <host>-<pid>-<n>.log  one for each writing process: a line per chunk, written after the chunk's rows
        finished              the lines of all logs, in place of the logs, when all chunks are done

No two processes append to one file, so a log needs no lock, on any file system; at an address, each line is an object
of its own.  A line is one JSON object with a
checksum, written by one call; a truncated or changed line does not count, and its chunk is computed again.  Every line
has the name of its run, so lines of an overwritten run's last tasks do not count either.  It also has a digest of the
bytes written to each sink, which `targets` compares with the files.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain
from typing import NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.lines import append, opened, sealed
from dask_ferro.lower.prepared.remote import is_address
from dask_ferro.stream.stores import addresses, files

SUFFIX = ".ferro-progress"
_HEADER, _FINISHED, _LOG = "header.json", "finished", ".log"


class Output(NamedTuple):
    """An output in the journal: `sink` is its path relative to the parent of the journal's folder.

    `replaces` is the stamp of an earlier run's output that this run may replace when it ends, or None.
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
    """The description of a run.  `run` is its name; headers that differ in it alone describe the same work.

    Attributes
    ----------
    model : str
        Digest of the model's content.
    inputs : mapping of str to str
        Fingerprints of the sources by model input.
    rows, batch : int
    outputs : mapping of str to Output
    batched : tuple of str
        The inputs that are split into chunks; the others are passed whole to each chunk.
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
            The text is not a header, or has changed since it was written.
        """
        read = opened(text.encode())
        if read is None:
            raise ValueError("its header has no valid checksum: it is damaged, or another program wrote it")
        try:
            outputs = {
                name: Output(**{**entry, "row_shape": tuple(entry["row_shape"])})
                for name, entry in read.pop("outputs").items()
            }
            return Header(**{**read, "batched": tuple(read["batched"])}, outputs=outputs)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not the header of a run: {error}") from error


def differences(was: Header, now: Header) -> list[str]:
    """Return the differences between the work of two runs; dtypes and shapes follow from the rest."""
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


def _difference(what: str, was: object, now: object) -> list[str]:
    return [] if was == now else [f"{what}: was {was}, is {now}"]


def line(
    run: str,
    number: int,
    rows: int,
    seconds: float,
    digests: Sequence[str] = (),
    read: Sequence[str] = (),
) -> bytes:
    """Return the line of a done chunk.

    `digests` are those of the bytes written to each sink, `read` those of the rows of each source whose fingerprint
    does not depend on its content.
    """
    return sealed(
        {
            "run": run,
            "chunk": number,
            "rows": rows,
            # Microseconds, because further digits are noise and a run may have many lines.
            "seconds": round(seconds, 6),
            "digests": list(digests),
            "read": list(read),
        }
    )


class ChunkNote(NamedTuple):
    """A chunk that a line records as done, with the digests of the bytes written and read, and the line itself."""

    chunk: int
    digests: tuple[str, ...]
    read: tuple[str, ...]
    text: bytes


def notes_in(log: bytes, run: str) -> Iterator[ChunkNote]:
    """Yield the chunks that a log records as done in a run; truncated, changed and foreign lines do not count.

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
    """The journal's folder: the client creates and finishes it, workers append lines."""

    folder: str

    def header(self) -> Header | None:
        """Return the header, or None when there is no journal.

        Raises
        ------
        ConfigError
            The folder is not a journal.
        """
        try:
            return Header.from_json(files.read(self._path(_HEADER)).decode())
        except FileNotFoundError:
            # Desktops and file systems leave hidden files (.DS_Store, .nfs0001), which do not matter.
            if files.is_folder(self.folder) and any(n[0] != "." for n in files.names_in(self.folder)):
                raise self._foreign("it has no header") from None
            return None
        except (ValueError, NotADirectoryError, IsADirectoryError) as error:
            raise self._foreign(str(error)) from error

    def _foreign(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.folder!r} is the path of this run's journal, but is not a journal: {why}; remove it"
        )

    def begin(self, header: Header) -> None:
        """Create the journal of a new run; notes of another run are dropped.

        The header is replaced first, by one rename: if the process is killed before it, the other run is unchanged;
        after it, remaining lines have the name of another run.
        """
        files.make_folder(self.folder)
        files.put(self._path(_HEADER), header.to_json().encode())
        files.remove_files([self._path(name) for name in self._logs()])

    def notes(self, run: str) -> list[ChunkNote]:
        """Return the notes of a run in all logs."""
        # A log that was removed after it was listed, by a process that finishes or overwrites the run, has no notes.
        logs = files.read_all([self._path(name) for name in self._logs()])
        return list(chain.from_iterable(notes_in(log, run) for log in logs))

    def done(self, run: str) -> frozenset[int]:
        """Return the chunks that are recorded as done in a run."""
        return frozenset(note.chunk for note in self.notes(run))

    def is_current(self, run: str) -> bool:
        """Whether this is still the journal of a run, as far as this process can read it."""
        try:
            header = self.header()
        except ConfigError:
            return False
        return header is not None and header.run == run

    def record(self, text: bytes) -> None:
        """Append a line to this process' own log; after a truncated line, on a new line.

        At an address each line is an object, since nothing can be appended to one.
        """
        if is_address(self.folder):
            files.put(self._path(f"{_writer(os.getpid())}-{uuid.uuid4().hex[:8]}{_LOG}"), text)
        else:
            append(self._path(_writer(os.getpid()) + _LOG), text)

    def finish(self, run: str) -> None:
        """Replace the logs with one file of all lines."""
        # A dict keeps the order, and each line once.
        lines = {note.text: None for note in self.notes(run)}
        files.put(self._path(_FINISHED), sealed({"run": run, "finished": True}) + b"".join(lines))
        self.drop_logs()

    def drop_logs(self) -> None:
        """Remove the logs, whose lines a finished journal has."""
        files.remove_files([self._path(name) for name in self._logs() if name != _FINISHED])

    def reopen(self) -> None:
        """Turn the lines of a finished run, whose output is to be repaired, back into a log."""
        # No writer has this name, so nothing is appended to these lines.
        files.move(self._path(_FINISHED), self._path(f"reopened-{uuid.uuid4().hex[:8]}{_LOG}"))

    def is_finished(self, run: str) -> bool:
        """Whether all chunks of a run are done and its output is published."""
        try:
            with files.opened(self._path(_FINISHED)) as file:
                # The first line is enough; the other lines are those of the chunks.
                first = opened(file.readline())
        except FileNotFoundError:
            return False
        return first is not None and first.get("run") == run

    def _logs(self) -> Iterable[str]:
        return sorted(n for n in files.names_in(self.folder) if n.endswith(_LOG) or n == _FINISHED)

    def _path(self, name: str) -> str:
        return addresses.joined(self.folder, name)


# By process number, because a forked process needs a log of its own.
@cache
def _writer(pid: int) -> str:
    """Return a name that is unique to this process, on all hosts and for later processes with the same number."""
    return f"{socket.gethostname()}-{pid}-{uuid.uuid4().hex[:8]}"
