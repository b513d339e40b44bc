"""What is done, in a folder beside the sink, so that a run that was killed goes on where it was.

    <sink>.ferro-progress/
        header.json           what the run is: model, sources, rows, batch, outputs
        <host>-<pid>-<n>.log  one for each process that writes: a line a chunk, after the chunk's rows
        finished              instead of the logs, when all chunks are done

No two processes append to one file, so there is nothing to lock, on any file system.  A line is one JSON
object, written by one call; one that was cut short does not parse, and its chunk is done again.  Every line
names the run that it belongs to: what an overwritten run's last tasks still have to say is not believed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, NamedTuple

from dask_ferro.errors import ConfigError

SUFFIX = ".ferro-progress"
_HEADER, _FINISHED, _LOG = "header.json", "finished", ".log"


class Output(NamedTuple):
    """One output as the journal knows it: `sink` is its path from the journal's folder."""

    kind: str
    sink: str
    dtype: str
    row_shape: tuple[int, ...]


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
    """

    model: str
    inputs: Mapping[str, str]
    rows: int
    batch: int
    outputs: Mapping[str, Output]
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_json(self) -> str:
        """Return the header as text."""
        return json.dumps(
            {**asdict(self), "outputs": {n: o._asdict() for n, o in self.outputs.items()}}, indent=1
        )

    @staticmethod
    def from_json(text: str) -> Header:
        """Return the header of a text.

        Raises
        ------
        ValueError
            When it is none.
        """
        try:
            read = json.loads(text)
            outputs = {
                name: Output(**{**entry, "row_shape": tuple(entry["row_shape"])})
                for name, entry in read.pop("outputs").items()
            }
            return Header(**read, outputs=outputs)
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
    for name in sorted({*was.outputs, *now.outputs}):
        sinks = [h.outputs[name][:2] if name in h.outputs else None for h in (was, now)]
        found += _difference(f"sink of {name!r}", *(s and f"{s[1]} ({s[0]})" for s in sinks))
    return found


def _difference(what: str, was: Any, now: Any) -> list[str]:
    return [] if was == now else [f"{what}: was {was}, is {now}"]


def line(run: str, number: int, rows: int, seconds: float) -> bytes:
    """Return the line for a chunk that is done."""
    record = {"run": run, "chunk": number, "rows": rows, "seconds": round(seconds, 6)}
    return json.dumps(record).encode() + b"\n"


def done_in(log: bytes, run: str) -> Iterator[int]:
    """Yield the chunks that a log has as done in a run; lines that are torn or of another run do not count.

    >>> list(done_in(line("a", 3, 10, 0.1) + line("b", 4, 10, 0.1) + line("a", 5, 10, 0.1)[:-9], "a"))
    [3]
    """
    for text in log.split(b"\n"):
        try:
            record = json.loads(text)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("run") == run and isinstance(record.get("chunk"), int):
            yield record["chunk"]


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
        except (ValueError, NotADirectoryError) as error:
            raise self._foreign(str(error)) from error

    def _foreign(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.folder!r} is where the journal of this run goes, and is none: {why}; remove it"
        )

    def begin(self, header: Header) -> None:
        """Make the journal of a new run; logs of another one are dropped."""
        os.makedirs(self.folder, exist_ok=True)
        for name in self._logs():
            os.unlink(self._path(name))
        if self.is_finished():
            os.unlink(self._path(_FINISHED))
        self._put(_HEADER, header.to_json())

    def done(self, run: str) -> frozenset[int]:
        """Return the chunks that are done in a run."""
        found: set[int] = set()
        for name in self._logs():
            with open(self._path(name), "rb") as file:
                found.update(done_in(file.read(), run))
        return frozenset(found)

    def is_current(self, run: str) -> bool:
        """Whether this is still the journal of a run, as this process sees it."""
        try:
            header = self.header()
        except ConfigError:
            return False
        return header is not None and header.run == run

    def record(self, text: bytes) -> None:
        """Append a line to this process' own log."""
        path = self._path(_writer(os.getpid()) + _LOG)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(handle, text)
        finally:
            os.close(handle)
        if written < len(text):
            raise OSError(f"only {written} of {len(text)} bytes went into {path!r}: is the disk full?")

    def finish(self) -> None:
        """Put a mark in place of the logs."""
        self._put(_FINISHED, "")
        for name in self._logs():
            os.unlink(self._path(name))

    def is_finished(self) -> bool:
        """Whether all chunks were done."""
        return os.path.exists(self._path(_FINISHED))

    def remove(self) -> None:
        """Remove the journal, if there is one.

        Raises
        ------
        ConfigError
            When the folder is no journal.
        """
        if os.path.lexists(self.folder):
            self.header()
            shutil.rmtree(self.folder)

    def _put(self, name: str, text: str) -> None:
        part = self._path(f".{name}.part")
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._path(name))

    def _logs(self) -> Iterable[str]:
        return sorted(n for n in os.listdir(self.folder) if n.endswith(_LOG))

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)


@cache
def _writer(pid: int) -> str:
    """Return a name that no other process has, on any host, nor a later one of the same pid."""
    return f"{socket.gethostname()}-{pid}-{uuid.uuid4().hex[:8]}"
