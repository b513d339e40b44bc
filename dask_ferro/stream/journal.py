"""The record of a run, from which a killed one resumes: a folder beside the sink.

    <sink>.ferro-progress/
        run.json              model, sources, settings and outputs
        parts-<run>/<k>/      the parts of output k, until it is complete: the parts that are there are done
    <sink>.ferro-lock         exists while a run writes to the sink
    <sink>                    appears when all parts are there: by a rename of a path, at an address by copies, with the
                              object that makes them an output last

A task of a run that was overwritten, or whose client was killed, may write long afterwards: it writes into the folder
of its own run, which is gone or belongs to the same work.  A run replaces only an output of `ff.predict_files` that
is as it was when it was written; `made` and `replaces` are the stamps by which it knows them.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

from dask_ferro.errors import InputError
from dask_ferro.lock import SUFFIX as LOCK
from dask_ferro.lock import held_error, record
from dask_ferro.lock import hold_locks as held_paths
from dask_ferro.lower.preparation.remote import is_address
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.sinks import Sink, finished_chunks

SUFFIX = ".ferro-progress"
_FILE = "run.json"
# Texts of an error are cut after so many letters: a remedy must not stand behind digests.
_MAX_LENGTH = 300


class SinkPath(NamedTuple):
    """The format and the real, absolute path, or the address, of an output, or of a table of several."""

    kind: str
    path: str
    outputs: tuple[str, ...]

    @property
    def is_table(self) -> bool:
        return self.kind in ("parquet", "csv")


class Output(NamedTuple):
    """An output in the record.

    `sink` is its path below the folder of the record's folder, `replaces` the stamp of what it may replace, and `made`
    its own stamp, once it is put together.
    """

    kind: str
    sink: str
    replaces: str = ""
    made: str = ""


@dataclass(frozen=True)
class Header:
    """The description of a run: its work, by which runs are told apart, and how far it is."""

    work: Mapping[str, Any]
    outputs: Mapping[str, Output]
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    publishes: bool = False
    is_finished: bool = False
    skipped: Sequence[str] = ()
    read: Mapping[str, list[str]] = field(default_factory=dict)


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH // 2]}...{text[-_MAX_LENGTH // 2 :]}"


class Start(NamedTuple):
    """The state in which a run begins: its record, the sinks that are not complete, and the chunks that are done."""

    header: Header
    sinks: tuple[Sink, ...]
    done: frozenset[int]


@dataclass(frozen=True)
class Journal:
    """The folder of the record, which the client writes."""

    folder: str

    def header(self) -> Header | None:
        try:
            found = json.loads(files.read(self._path(_FILE)))
            return Header(**found | {"outputs": {n: Output(*o) for n, o in found["outputs"].items()}})
        except FileNotFoundError:
            # Desktops and file systems leave hidden files (.DS_Store, .nfs0001), which do not matter.
            if not any(name[0] != "." for name in files.names_in(self.folder)):
                return None
            why = "it has no run.json"
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            NotADirectoryError,
            IsADirectoryError,
        ) as error:
            why = str(error)
        raise InputError(
            f"{self.folder!r} is the path of this run's record, but is not one: {why}; remove it"
        )

    def save(self, header: Header) -> Header:
        files.make_folder(self.folder)
        files.put(self._path(_FILE), json.dumps(asdict(header), indent=1).encode())
        return header

    def parts(self, run: str) -> str:
        return self._path(f"parts-{run}")

    def seen(self, start: Start) -> list[str]:
        """Return what workers have to see of a run."""
        return [self._path(_FILE)] if is_address(self.folder) else [sink.folder for sink in start.sinks]

    def placed(self, sinks: Sequence[Sink], run: str) -> list[Sink]:
        """Return sinks with the folders of a run's parts."""
        return [replace(sink, folder=files.join(self.parts(run), str(k))) for k, sink in enumerate(sinks)]

    def _path_of(self, output: Output) -> str:
        return files.join(os.path.dirname(self.folder), output.sink)

    def _path(self, name: str) -> str:
        return files.join(self.folder, name)

    def _sweep(self, run: str) -> None:
        """Remove what killed and overwritten runs left, except the parts of one run."""
        for name in files.names_in(self.folder):
            if name not in (_FILE, f"parts-{run}"):
                files.remove(self._path(name))

    # ---- the beginning of a run ---------------------------------------------------------------------------

    def check_same(self, was: Header, now: Header) -> None:
        """Raise `InputError` for other work than that of the run before."""
        pairs = {what: (was.work.get(what), now.work.get(what)) for what in {**was.work, **now.work}}
        found = [f"{what} (was {_shorten(a)}, is {_shorten(b)})" for what, (a, b) in pairs.items() if a != b]
        if found:
            raise InputError(
                f"{self.folder!r} is of another run: call ff.predict_files with the earlier arguments to resume it,"
                f" or pass"
                f" overwrite=True to start a new run. They differ in {'; '.join(found)}"
            )

    def anew(self, header: Header, was: Header | None, sinks: Sequence[Sink]) -> Start:
        """Begin a run; what is at the places stays until the new outputs are complete."""
        outputs = {n: o._replace(replaces=self._replaceable(o, was)) for n, o in header.outputs.items()}
        header = self.save(replace(header, outputs=outputs))
        self._sweep(header.run)
        return self._prepared(header, self.placed(sinks, header.run), sinks[0].chunks)

    def _replaceable(self, output: Output, was: Header | None) -> str:
        """Return the stamp of an earlier run's output at a place, "" where the place is free."""
        path = self._path_of(output)
        lies = files.output_stamp(path)
        if not lies:
            return ""
        same = [o for o in was.outputs.values() if o[:2] == output[:2]] if was else []
        # A run that died while it published at an address leaves objects of two outputs.
        if any(lies in (o.made, o.replaces) or (is_address(path) and was and was.publishes) for o in same):
            return lies
        why = "it has changed since" if same else f"no record names it ({self.folder!r})"
        raise InputError(
            f"sink {path!r} is not, or not only, an output of ff.predict_files: {why}. overwrite=True replaces"
            f" nothing else:"
            " remove it yourself, or choose another path"
        )

    def again(self, header: Header, was: Header, sinks: Sequence[Sink]) -> Start:
        """Resume a run; it begins anew where an output or its parts are missing."""
        left = [sink for sink in self.placed(sinks, was.run) if not self._is_complete(sink, was)]
        if was.is_finished and not left:
            self._sweep("")
            return Start(was, (), frozenset(range(sinks[0].chunks.count)))
        if was.is_finished or not all(is_address(self.folder) or files.exists(s.folder) for s in left):
            return self.anew(header, was, sinks)
        self._sweep(was.run)
        return self._prepared(was, left, sinks[0].chunks)

    def _is_complete(self, sink: Sink, header: Header) -> bool:
        """Return whether an output is at its place; raises `InputError` where something else is."""
        output = header.outputs[sink.name]
        path, is_store = self._path_of(output), is_address(self.folder)
        lies = files.output_stamp(path)
        if lies not in ("", output.replaces, output.made) and not (is_store and header.publishes):
            raise self._foreign(path, header)
        has_mark = not (is_store and sink.mark) or files.exists(files.join(path, sink.mark))
        return bool(output.made) and lies == output.made and has_mark

    def _prepared(self, header: Header, sinks: Sequence[Sink], chunks: Chunks) -> Start:
        files.make_folder(self.parts(header.run))
        for sink in sinks:
            sink.prepare()
        return Start(header, tuple(sinks), finished_chunks(sinks, chunks))

    def _foreign(self, path: str, header: Header) -> InputError:
        if header.is_finished:
            return InputError(
                f"sink {path!r} changed since ff.predict_files wrote it: restore it, or remove it yourself to have"
                f" it computed"
                " again"
            )
        return InputError(
            f"sink {path!r} exists, and is not what was there when this run began; move it away and call"
            f" ff.predict_files as"
            " before, which resumes"
        )

    # ---- its end ------------------------------------------------------------------------------------------

    def publish(self, start: Start, skipped: Sequence[str], read: Mapping[str, list[str]]) -> Header:
        """Put the outputs together, and move them to their places."""
        header = replace(start.header, skipped=skipped, read=read)
        for sink in start.sinks:
            header = self._publish(sink, header)
        header = self.save(replace(header, is_finished=True, publishes=False))
        self._sweep("")
        return header

    def _made(self, header: Header, name: str, stamp: str) -> Header:
        outputs = {**header.outputs, name: header.outputs[name]._replace(made=stamp)}
        return self.save(replace(header, outputs=outputs))

    def _publish(self, sink: Sink, header: Header) -> Header:
        """Put an output together at its place: by a rename, or at an address by copies in the same store."""
        name, is_store = sink.name, is_address(self.folder)
        path = self._path_of(header.outputs[name])
        whole, pieces = sink.whole()
        if pieces is not None and not is_store:
            files.put_joined(whole, pieces)
        lies = files.output_stamp(path)
        if not header.publishes and lies not in ("", header.outputs[name].replaces):
            raise self._foreign(path, header)
        if not is_store:
            header = self._made(header, name, files.output_stamp(whole))
            if lies:
                # It is removed with the parts; a run that dies before the next line finds them, and goes on.
                os.rename(path, f"{sink.folder}.old")
            os.rename(whole, path)
            return header
        # From here on a run that resumes knows that the place is its own.
        header = self.save(replace(header, publishes=True))
        if pieces is not None:
            files.put_joined(path, pieces)
            return self._made(header, name, files.output_stamp(path))
        # First, so that nobody takes what is left of the old output for a whole one.
        files.remove(files.join(path, sink.mark))
        files.remove(path)
        names = [one for one in files.find(whole) if one not in files.MARKS]
        files.copy([files.join(whole, n) for n in names], [files.join(path, n) for n in names])
        header = self._made(header, name, files.output_stamp(path))
        mark = b"" if sink.mark == files.COMPLETE else files.read(files.join(whole, sink.mark))
        files.put(files.join(path, sink.mark), mark)
        return header


# ---- locks ----------------------------------------------------------------------------------------------------


class AddressLock:
    """The lock of a sink at an address: an object that is created, with the process that has it."""

    def __init__(self, sink: str) -> None:
        self.sink, self.path = sink, files.resolve(sink + LOCK)
        self._record = record() | {"token": uuid.uuid4().hex}

    def __enter__(self) -> Self:
        """Create the object, also in place of one of a process of this host that has ended."""
        content = json.dumps(self._record).encode()
        try:
            files.put_new(self.path, content)
        except FileExistsError:
            holder = self._holder()
            if holder.get("host") != socket.gethostname() or _is_alive(holder.get("pid", 0)):
                error = held_error(self.sink, holder or None)
                raise InputError(f"{error}; if that process has ended, remove {self.path!r}") from None
            files.put(self.path, content)
            self.check()
        except OSError as error:
            raise InputError(
                f"sink {self.sink!r} cannot be written: {error.strerror or error}; choose another address"
            ) from error
        return self

    def check(self) -> None:
        """Raise `InputError` if the object was removed or replaced."""
        if self._holder() != self._record:
            raise InputError(
                f"sink {self.sink!r}: its lock {self.path!r} was removed or replaced while it was written; nothing of"
                " another run was touched"
            )

    def __exit__(self, *error: object) -> None:
        """Remove the object if it is still this process'."""
        # A store that is gone keeps it, and the next run on this host finds that its process ended.
        with suppress(OSError):
            if self._holder() == self._record:
                files.remove(self.path)

    def _holder(self) -> dict[str, Any]:
        """Return what the object says of the process that has it; nothing where there is none."""
        try:
            holder = json.loads(files.read(self.path))
        except (FileNotFoundError, ValueError):
            return {}
        return holder if isinstance(holder, dict) else {}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


@contextmanager
def hold_sinks(sinks: Sequence[str]) -> Iterator[list[Any]]:
    """Hold the locks of some sinks, paths or addresses, while the block runs; `check()` each before the end."""
    paths = [sink for sink in sinks if not is_address(sink)]
    with ExitStack() as stack:
        holds: list[Any] = list(stack.enter_context(held_paths(paths)))
        holds += [stack.enter_context(AddressLock(sink)) for sink in sorted(set(sinks) - set(paths))]
        yield holds
