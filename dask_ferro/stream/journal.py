"""The record of a run, from which a killed one resumes: a folder beside the sink.

    <sink>.ferro-progress/
        run.json              model, sources, settings and outputs
        parts-<run>/<k>/      the parts of output k, until it is complete: the parts that are there are done
    <sink>.ferro-lock         exists while a run writes to the sink
    <sink>                    appears when all parts are there: by a rename of a path, at an address by copies, with the
                              object that makes them an output last

A task of a run that was overwritten, or whose client was killed, may write long afterwards: it writes into the folder
of its own run, which is gone or belongs to the same work.  A run replaces only an output of `ff.run` that is as it was
when it was written; `made` and `replaces` are the stamps by which it knows them.
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

from dask_ferro.errors import ConfigError
from dask_ferro.lock import SUFFIX as LOCK
from dask_ferro.lock import held as held_paths
from dask_ferro.lock import record, refused
from dask_ferro.lower.prepared.remote import is_address
from dask_ferro.stream import files
from dask_ferro.stream.sinks import Layout, Sink

SUFFIX = ".ferro-progress"
_FILE = "run.json"
# Texts of an error are cut after so many letters: a remedy must not stand behind digests.
_SHOWN = 300


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
    dtype: str
    row_shape: tuple[int, ...]
    replaces: str = ""
    made: str = ""


@dataclass(frozen=True)
class Header:
    """The description of a run; headers that differ in what follows `run` describe the same work."""

    model: str
    sources: Mapping[str, str]
    rows: int
    batch: int
    settings: Mapping[str, Any]
    outputs: Mapping[str, Output]
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    publishes: bool = False
    is_finished: bool = False
    skipped: tuple[str, ...] = ()
    read: Mapping[str, list[str]] = field(default_factory=dict)


def differences(was: Header, now: Header) -> list[str]:
    """Return the differences between the work of two runs; dtypes and shapes follow from the rest."""
    old, new = _work_of(was), _work_of(now)
    pairs = {what: (old.get(what), new.get(what)) for what in old | new}
    return [f"{what} (was {_short(a)}, is {_short(b)})" for what, (a, b) in pairs.items() if a != b]


def _work_of(header: Header) -> dict[str, Any]:
    sources = {f"source of {name!r}": source for name, source in header.sources.items()}
    sinks = {f"sink of {name!r}": f"{o.sink} ({o.kind})" for name, o in header.outputs.items()}
    sizes = {"rows": header.rows, "batch": header.batch}
    return {"the model": header.model, **sources, **sizes, **header.settings, **sinks}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"


class Start(NamedTuple):
    """The state in which a run begins: its record, the sinks of its parts, and the chunks that are done."""

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
            outputs = {n: Output(*o)._replace(row_shape=tuple(o[3])) for n, o in found.pop("outputs").items()}
            return Header(**{**found, "skipped": tuple(found["skipped"])}, outputs=outputs)
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
        raise ConfigError(
            f"{self.folder!r} is the path of this run's record, but is not one: {why}; remove it"
        )

    def save(self, header: Header) -> Header:
        files.make_folder(self.folder)
        files.put(self._path(_FILE), json.dumps(asdict(header), indent=1).encode())
        return header

    def parts(self, run: str) -> str:
        return self._path(f"parts-{run}")

    def seen(self, start: Start) -> list[str]:
        """Return what workers have to see of a run that is not finished."""
        if start.header.is_finished:
            return []
        is_store = is_address(self.folder)
        return [self._path(_FILE)] if is_store else [sink.folder for sink in start.sinks]

    def path_of(self, output: Output) -> str:
        return files.joined(os.path.dirname(self.folder), output.sink)

    def sinks(self, header: Header, layouts: Sequence[Layout]) -> tuple[Sink, ...]:
        kinds = [header.outputs[layout.name].kind for layout in layouts]
        folders = [files.joined(self.parts(header.run), str(k)) for k in range(len(layouts))]
        return tuple(Sink(*one) for one in zip(kinds, folders, layouts, strict=True))

    def sweep(self, run: str) -> None:
        """Remove what killed and overwritten runs left, except the parts of one run."""
        for name in files.names_in(self.folder):
            if name not in (_FILE, f"parts-{run}"):
                files.remove(self._path(name))

    def _path(self, name: str) -> str:
        return files.joined(self.folder, name)

    def drop(self, header: Header) -> None:
        current = self.header()
        if current is not None and current.run == header.run:
            files.remove(self.parts(header.run))

    def is_made(self, header: Header, name: str) -> bool:
        output = header.outputs[name]
        return bool(output.made) and files.output_stamp(self.path_of(output)) == output.made

    # ---- the beginning of a run ---------------------------------------------------------------------------

    def check_same(self, was: Header, now: Header) -> None:
        if found := differences(was, now):
            raise ConfigError(
                f"{self.folder!r} is of another run: call ff.run with the earlier arguments to resume it, or pass"
                f" overwrite=True to start a new run. They differ in {'; '.join(found)}"
            )

    def anew(self, header: Header, layouts: Sequence[Layout]) -> Start:
        """Begin a run; what is at the places stays until the new outputs are complete."""
        was = self.header()
        outputs = {}
        for layout in layouts:
            output = header.outputs[layout.name]
            outputs[layout.name] = output._replace(
                dtype="" if layout.schema is not None else layout.dtype.str,
                row_shape=layout.row_shape,
                replaces=self._replaceable(output, was),
                made="",
            )
        plain = replace(header, outputs=outputs, publishes=False, is_finished=False, skipped=(), read={})
        header = self.save(plain)
        self.sweep(header.run)
        sinks = self.sinks(header, layouts)
        files.make_folder(self.parts(header.run))
        for sink in sinks:
            sink.prepare()
        return Start(header, sinks, frozenset())

    def _replaceable(self, output: Output, was: Header | None) -> str:
        """Return the stamp of an earlier run's output at a place, "" where the place is free."""
        path = self.path_of(output)
        lies = files.output_stamp(path)
        if not lies:
            return ""
        same = [o for o in was.outputs.values() if o[:2] == output[:2]] if was else []
        # A run that died while it published at an address leaves objects of two outputs.
        if any(lies in (o.made, o.replaces) or (is_address(path) and was and was.publishes) for o in same):
            return lies
        why = "it has changed since" if same else f"no record names it ({self.folder!r})"
        raise ConfigError(
            f"sink {path!r} is not, or not only, an output of ff.run: {why}. overwrite=True replaces nothing else:"
            " remove it yourself, or choose another path"
        )

    def again(self, header: Header, layouts: Sequence[Layout]) -> Start:
        """Resume a run; it begins anew where an output or its parts are missing."""
        places = [self.path_of(output) for output in header.outputs.values()]
        found = [files.output_stamp(path) for path in places]
        for path, lies, output in zip(places, found, header.outputs.values(), strict=True):
            if lies not in ("", output.replaces, output.made) and not (is_address(path) and header.publishes):
                raise self._foreign(path, header)
        published = [
            bool(o.made) and o.made == s for o, s in zip(header.outputs.values(), found, strict=True)
        ]
        chunks = layouts[0].chunks
        sinks = self.sinks(header, layouts)
        if header.is_finished and all(published):
            self.sweep("")
            return Start(header, sinks, frozenset(range(chunks.count)))
        there = [is_address(self.folder) or files.exists(sink.folder) for sink in sinks]
        if header.is_finished or not all(p or t for p, t in zip(published, there, strict=True)):
            return self.anew(replace(header, run=uuid.uuid4().hex[:12]), layouts)
        self.sweep(header.run)
        done = frozenset(range(chunks.count))
        for sink, is_out in zip(sinks, published, strict=True):
            if not is_out:
                sink.prepare()
                done &= sink.done()
        return Start(header, sinks, done)

    def _foreign(self, path: str, header: Header) -> ConfigError:
        if header.is_finished:
            return ConfigError(
                f"sink {path!r} changed since ff.run wrote it: restore it, or remove it yourself to have it computed"
                " again"
            )
        return ConfigError(
            f"sink {path!r} exists, and is not what was there when this run began; move it away and call ff.run as"
            " before, which resumes"
        )

    # ---- its end ------------------------------------------------------------------------------------------

    def publish(self, start: Start, skipped: Sequence[str], read: Mapping[str, list[str]]) -> Header:
        """Put the outputs together, and move them to their places."""
        header = self._current(start.header.run)
        header = replace(header, skipped=tuple(skipped), read=read)
        for sink in start.sinks:
            header = self._publish(sink, header)
        header = self.save(replace(header, is_finished=True, publishes=False))
        self.sweep("")
        return header

    def _current(self, run: str) -> Header:
        header = self.header()
        if header is None or header.run != run:
            raise ConfigError(
                f"{self.folder!r} is no longer the record of this run: another run began here meanwhile"
            )
        return header

    def _made(self, header: Header, name: str, stamp: str) -> Header:
        outputs = {**header.outputs, name: header.outputs[name]._replace(made=stamp)}
        return self.save(replace(header, outputs=outputs))

    def _publish(self, sink: Sink, header: Header) -> Header:
        """Put an output together at its place: by a rename, or at an address by copies in the same store."""
        name, is_store = sink.layout.name, is_address(self.folder)
        output = header.outputs[name]
        path = self.path_of(output)
        lies = files.output_stamp(path)
        whole, pieces = sink.whole()
        complete = files.joined(path, sink.mark) if is_store and pieces is None else path
        if output.made and lies == output.made and files.exists(complete):
            return header
        if not header.publishes and lies not in ("", output.replaces):
            raise self._foreign(path, header)
        if not is_store:
            if pieces is not None:
                files.put_joined(whole, pieces)
            header = self._made(header, name, files.output_stamp(whole))
            if lies:
                # It is removed with the parts; a run that dies before the next line finds them, and goes on.
                os.rename(path, f"{sink.folder}.old")
            if files.exists(path):
                raise self._foreign(path, header)
            os.rename(whole, path)
            return header
        # From here on a run that resumes knows that the place is its own.
        header = self.save(replace(header, publishes=True))
        if pieces is not None:
            files.put_joined(path, pieces)
            return self._made(header, name, files.output_stamp(path))
        # First, so that nobody takes what is left of the old output for a whole one.
        files.remove(complete)
        files.remove(path)
        names = [one for one in files.find(whole) if one not in files.MARKS]
        files.copy([files.joined(whole, n) for n in names], [files.joined(path, n) for n in names])
        header = self._made(header, name, files.output_stamp(path))
        files.put(
            complete, files.read(files.joined(whole, sink.mark)) if sink.mark != files.COMPLETE else b""
        )
        return header


# ---- locks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddressLock:
    """The lock of a sink at an address: an object that is created, with the process that has it."""

    sink: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def path(self) -> str:
        return files.resolved(self.sink + LOCK)

    def __enter__(self) -> Self:
        """Create the object, also in place of one of a process of this host that has ended."""
        content = json.dumps(record() | {"token": self.token}).encode()
        try:
            files.put_new(self.path, content)
        except FileExistsError:
            holder = self._holder()
            if holder.get("host") != socket.gethostname() or _is_alive(holder.get("pid", 0)):
                error = refused(self.sink, holder or None)
                raise ConfigError(f"{error}; if that process has ended, remove {self.path!r}") from None
            files.put(self.path, content)
            self.check()
        except OSError as error:
            raise ConfigError(
                f"sink {self.sink!r} cannot be written: {error.strerror or error}; choose another address"
            ) from error
        return self

    def check(self) -> None:
        """Raise `ConfigError` if the object was removed or replaced."""
        if self._holder().get("token") != self.token:
            raise ConfigError(
                f"sink {self.sink!r}: its lock {self.path!r} was removed or replaced while it was written; nothing of"
                " another run was touched"
            )

    def __exit__(self, *error: object) -> None:
        """Remove the object if it is still this process'."""
        # A store that is gone keeps it, and the next run on this host finds that its process ended.
        with suppress(OSError):
            if self._holder().get("token") == self.token:
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
def held(sinks: Sequence[str]) -> Iterator[list[Any]]:
    """Hold the locks of some sinks, paths or addresses, while the block runs; `check()` each before the end."""
    paths = [sink for sink in sinks if not is_address(sink)]
    with ExitStack() as stack:
        holds: list[Any] = list(stack.enter_context(held_paths(paths))) if paths else []
        holds += [stack.enter_context(AddressLock(sink)) for sink in sorted(set(sinks) - set(paths))]
        yield holds
