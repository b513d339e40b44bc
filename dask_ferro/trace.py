"""The trace of a run, measured or simulated: which task ran where and when; and its file format.

A trace records and does not evaluate; `account` derives figures from it.  Times are seconds from the trace's start,
sizes are bytes.  Tasks carry enough to simulate the same graph again on a virtual cluster.

    {"ferrotrace": 1, "workers": {...}, "counts": {...}, "span": [columns], "task": [columns], "rows": [n, m]}
    ["span", "compute", "inc-1", "inc", "tcp://...", 0, 0.0, 0.1, 8, ""]     n lines
    ["task", "inc-1", "inc", "inc", 0.1, 8, [], 0]                           m lines

The first line has the number of rows; a file with fewer was cut short and is refused.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from dask_ferro.drawings.registry import in_notebook
from dask_ferro.errors import ConfigError

_VERSION = 1
_GZIP = b"\x1f\x8b"
# 31 years: simulating a longer task would never end.
MOST_SECONDS = 1e9
# Starts and stops may be seconds since 1970: this is the year 33,000.
_MOST_TIME = 1e12
# Sizes are held as signed 64-bit integers in all other modules.
MOST_BYTES = 1 << 63
_MOST_THREADS = 1 << 20
# Traces compress 10 to 30 times; small files compress more, so up to 64 MiB is always accepted.
_MOST_RATIO, _LEAST_UNPACKED = 100, 64 << 20

# What the duration of a task is, wherever one is shown.
DURATION = (
    "A task's duration is the wall time of its call on its thread, as its worker measured it. Transfers of inputs and"
    " reads of spilled ones come before it; the first bundle of a model in a process opens the model within it."
)

Key = Hashable
# Converts one cell of a line; raises ValueError or TypeError for a wrong value.
_Reader = Callable[[Any], Any]


class Span(NamedTuple):
    """An interval of time on one worker: a computation, a transfer, a steal or an op.

    Attributes
    ----------
    kind : str
        "compute", "transfer", "steal" (from the request to the task's start on the thief), or "op": a part of
        a computation, recorded only on request.
    key, prefix : str, or tuple of str and ints; str
        Of the task that ran, was stolen, or whose input was fetched; the prefix of an op is its type.
    worker, lane : str, int
        Address or virtual name, and the thread there, from 0; the receiver's (transfer), the thief's (steal).
    start, stop : float
        Seconds since the trace's start.
    nbytes : int
        Size of the result (compute, op) or of the transfer.
    source : str
        The sender (transfer), the victim (steal), or "engine/node" (op).
    region, placement : str
        Those of an op's node, if the graph has them; for other kinds, see `About` of their task.
    """

    kind: str
    key: Key
    prefix: str
    worker: str
    lane: int
    start: float
    stop: float
    nbytes: int = 0
    source: str = ""
    region: str = ""
    placement: str = ""

    @property
    def seconds(self) -> float:
        """Its duration; `DURATION` says what that of a task includes."""
        return self.stop - self.start

    def microseconds(self, zero: float) -> tuple[int, int]:
        """Return its start after `zero` and its duration in whole microseconds, as all files of a run have them.

        The stop is rounded, and not the duration: spans that touch, or lie within each other, still do.

        >>> Span("compute", "a", "a", "w", 0, 1.0000004, 1.0000016).microseconds(1.0)
        (0, 2)
        """
        start = round((self.start - zero) * 1e6)
        return start, max(round((self.stop - zero) * 1e6) - start, 0)


# The Dask annotation that holds a task's `About`, as a plain tuple.
ABOUT = "ferro_about"


class About(NamedTuple):
    """Which part of the model a task computes: region, placement, pipeline stage and micro-batch.

    Attributes
    ----------
    region : str
        The signals (`ff.signal`) that its nodes were written under.
    placement : str
        The placement of its outputs on the mesh, such as "S(0),R"; "" if there is none.
    stage, micro_batch : int or None
        None outside of a pipeline.
    """

    region: str = ""
    placement: str = ""
    stage: int | None = None
    micro_batch: int | None = None


class TracedTask(NamedTuple):
    """A task with its cost and dependencies.

    Attributes
    ----------
    key, prefix, group : str, or tuple of str and ints; str; str
        As Dask has them: `TaskPrefix` learns durations, `TaskGroup` is the finer grouping.
    seconds, nbytes : float, int
        Its duration, and the size of its result.
    dependencies : tuple of keys
        Some may be missing from the trace: data from before it, or tasks that a bounded recorder dropped.
    order : int or None
        Its rank by priority, the first to run lowest; None if it was not recorded.
    about : About
    """

    key: Key
    prefix: str
    group: str
    seconds: float
    nbytes: int = 0
    dependencies: tuple[Key, ...] = ()
    order: int | None = None
    about: About = About()


@dataclass(frozen=True, repr=False)
class Trace:
    """A run, measured or simulated.

    Attributes
    ----------
    spans : tuple of Span
    tasks : tuple of TracedTask
        Each key once, in the order of their first completion, so each comes after its dependencies.
    workers : mapping of str to int
        Threads by address.
    counts : mapping of str to float
        Counters of stealing: "requests", "confirmed", "refused", "stale", "bytes_moved", "seconds_worked" (in stolen
        tasks), ...
    """

    spans: tuple[Span, ...] = ()
    tasks: tuple[TracedTask, ...] = ()
    workers: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"<Trace: {len(self.tasks):,} tasks on {len(self.workers):,} workers, {self.makespan:.3g} s,"
            f" {self.utilization:.0%} utilization>"
        )

    def _repr_html_(self) -> str:
        return in_notebook("trace", self)

    @property
    def makespan(self) -> float:
        """Seconds from the first span's start to the last one's stop; 0 for an empty trace."""
        if not self.spans:
            return 0.0
        return max(s.stop for s in self.spans) - min(s.start for s in self.spans)

    @property
    def busy(self) -> Mapping[str, float]:
        """Seconds of computation by worker, idle workers included."""
        seconds = dict.fromkeys(self.workers, 0.0)
        for span in self.of("compute"):
            seconds[span.worker] = seconds.get(span.worker, 0.0) + span.seconds
        return seconds

    @property
    def busy_seconds(self) -> float:
        """Seconds of computation on all workers."""
        return sum(self.busy.values())

    @property
    def utilization(self) -> float:
        """Computation as a share of the threads' time, 0 to 1; 0 for an empty trace."""
        available = self.makespan * sum(self.workers.values())
        return self.busy_seconds / available if available else 0.0

    @property
    def ran_again(self) -> int:
        """The number of repeated computations: of a graph that was run again, or of results that were lost."""
        keys = [span.key for span in self.of("compute")]
        return len(keys) - len(set(keys))

    def of(self, kind: str) -> Iterator[Span]:
        """Yield the spans of a kind."""
        return (span for span in self.spans if span.kind == kind)

    def summary(self) -> dict[str, float]:
        """Return the run's figures by name: counts, seconds, bytes and shares."""
        transfers = list(self.of("transfer"))
        return {
            **self.counts,
            "tasks": len(self.tasks),
            "workers": len(self.workers),
            "threads": sum(self.workers.values()),
            "makespan": self.makespan,
            "busy_seconds": self.busy_seconds,
            "utilization": self.utilization,
            "transfers": len(transfers),
            "transfer_seconds": sum(s.seconds for s in transfers),
            "transfer_bytes": sum(s.nbytes for s in transfers),
            "steals": sum(1 for _ in self.of("steal")),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON lines; compressed where the name ends in ".gz".

        The file is written atomically, and equal traces give equal files.  The usual suffixes are ".ferrotrace" and
        ".ferrotrace.gz".

        Raises
        ------
        ConfigError
            For a key of a type that Dask does not allow, or a path that cannot be written.
        """
        write_whole(path, "".join(line + "\n" for line in _lines(self)).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Return the trace that `save` wrote, compressed or not.

        Raises
        ------
        ConfigError
            For a file that cannot be read, is not a trace, has another version, or was cut short.
        """
        where = f"trace {str(path)!r}"
        lines = io.StringIO(_text(Path(path), where))
        head = _header(lines.readline(), where)
        found: dict[type, list[Any]] = {Span: [], TracedTask: []}
        for number, line in enumerate(lines, start=2):
            try:
                row = _row(json.loads(line))
            except (ValueError, TypeError, RecursionError, OverflowError) as error:
                got = f"{where}, line {number}: got {line[:60]!r}"
                raise ConfigError(f"{got}, wanted a span or a task ({error})") from None
            found[type(row)].append(row)
        rows = [len(found[Span]), len(found[TracedTask])]
        if rows != head["rows"]:
            raise ConfigError(f"{where}: got {rows} spans and tasks, wanted {head['rows']}: cut short?")
        _check_order(found[TracedTask], where)
        return cls(tuple(found[Span]), tuple(found[TracedTask]), head["workers"], head["counts"])


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically; compressed, reproducibly, if its name ends in ".gz".

    Raises
    ------
    ConfigError
        For a path that cannot be written.
    """
    target = Path(path)
    if target.suffix == ".gz":
        # No time in the gzip header, so that equal traces give equal files.
        content = gzip.compress(content, compresslevel=6, mtime=0)
    # In the same folder, as a rename is atomic only within a file system; hidden, so that no glob pattern matches it.
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"trace {str(target)!r}: cannot be written ({error})") from error


def _lines(trace: Trace) -> Iterator[str]:
    head = {
        "ferrotrace": _VERSION,
        "workers": dict(trace.workers),
        "counts": dict(trace.counts),
        "span": Span._fields,
        "task": TracedTask._fields,
        "rows": [len(trace.spans), len(trace.tasks)],
    }
    yield json.dumps(head)
    for s in trace.spans:
        yield json.dumps(["span", s.kind, _plain(s.key), *s[2:]])
    for t in trace.tasks:
        about = None if t.about == About() else list(t.about)
        needs = [_plain(d) for d in t.dependencies]
        yield json.dumps(["task", _plain(t.key), *t[1:5], needs, t.order, about])


def _plain(key: Key) -> Any:
    """Return a key in JSON's types: a tuple becomes a list (a list is no key), bytes become an object."""
    if type(key) is tuple:
        return [_plain(part) for part in key]
    if type(key) is bytes:
        return {"bytes": key.hex()}
    if type(key) in (str, int, float):
        return key
    raise ConfigError(f"trace: key {key!r} of type {type(key).__name__}, wanted one of Dask's types of keys")


def _key(plain: Any) -> Any:
    if isinstance(plain, list):
        return _keys(plain)
    if isinstance(plain, dict) and set(plain) == {"bytes"}:
        return bytes.fromhex(plain["bytes"])
    return _checked(plain, type(plain) in (str, int, float) and plain == plain, "a key")


def _keys(plain: Any) -> tuple[Key, ...]:
    return tuple(_key(part) for part in _checked(plain, type(plain) is list, "keys"))


def _checked(value: Any, ok: bool, wanted: str) -> Any:
    if not ok:
        raise ValueError(f"got {value!r}, wanted {wanted}")
    return value


def is_time(value: Any) -> bool:
    """Return whether a value is a plausible number of seconds: finite, and at most 1e12 either way.

    >>> is_time(1.5), is_time(float("nan")), is_time(1e300), is_time(10**400)
    (True, False, False, False)
    """
    return type(value) in (int, float) and -_MOST_TIME <= value <= _MOST_TIME


def _reader(fits: Callable[[Any], bool], wanted: str) -> _Reader:
    return lambda value: _checked(value, fits(value), wanted)


_string = _reader(lambda v: type(v) is str, "a text")
_count = _reader(lambda v: type(v) is int and 0 <= v < MOST_BYTES, "a count below 2^63")
_threads = _reader(lambda v: type(v) is int and 0 <= v <= _MOST_THREADS, "a number of threads")
_time = _reader(is_time, "a finite number of seconds")
_seconds = _reader(lambda v: is_time(v) and v <= MOST_SECONDS, f"at most {MOST_SECONDS:g} seconds")
_number = _reader(lambda v: type(v) in (int, float) and -1e300 < v < 1e300, "a finite number")
_place = _reader(lambda v: v is None or (type(v) is int and abs(v) < MOST_BYTES), "a place or null")
_SPAN: tuple[_Reader, ...] = (
    *(_string, _key, _string, _string, _count, _time, _time, _count, _string),
    *(_string, _string),
)


def _about(value: Any) -> About:
    if value is None:
        return About()
    region, placement, stage, micro_batch = _checked(value, type(value) is list, "a list or null")
    return About(_string(region), _string(placement), _place(stage), _place(micro_batch))


_TASK: tuple[_Reader, ...] = (_key, _string, _string, _seconds, _count, _keys, _place, _about)
# Cells per line of older files: before spans had a region, and before tasks had an order and `about`.
_SPANS_BEFORE, _TASKS_BEFORE = (9,), (6, 7)


def _row(row: Any) -> Span | TracedTask:
    """Return the span or task of one line; raise ValueError or TypeError for anything else."""
    name, *cells = row
    if name == "span":
        return Span(*_read(_SPAN, cells, _SPANS_BEFORE))
    if name == "task":
        return TracedTask(*_read(_TASK, cells, _TASKS_BEFORE))
    raise ValueError(f"got {name!r}")


def _read(readers: tuple[_Reader, ...], cells: list[Any], before: tuple[int, ...]) -> list[Any]:
    """Return the parsed cells of a line; lines of older files have fewer."""
    is_old = len(cells) in before
    return [read(cell) for read, cell in zip(readers, cells, strict=not is_old)]


def _text(path: Path, where: str) -> str:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = _unpacked(content, where)
        return content.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot be read ({error})") from error


def _unpacked(content: bytes, where: str) -> bytes:
    """Return the content of a gzip file; refuse one that would unpack to far more than a trace can."""
    most = max(_LEAST_UNPACKED, _MOST_RATIO * len(content))
    with gzip.open(io.BytesIO(content)) as file:
        # One byte more than is allowed proves the excess; the whole content might not fit into memory.
        unpacked = file.read(most + 1)
    if len(unpacked) > most:
        raise ConfigError(
            f"{where}: its {len(content)} bytes unpack to more than {most}, which no trace does; the file is damaged or"
            " hostile"
        )
    return unpacked


def _check_order(tasks: Iterable[TracedTask], where: str) -> None:
    """Raise `ConfigError` if a key occurs twice, or the dependencies have a cycle."""
    # The simulator would never finish a graph with a cycle.
    waits: dict[Key, tuple[Key, ...]] = {}
    for task in tasks:
        if task.key in waits:
            raise ConfigError(f"{where}: task {task.key!r} occurs twice, wanted each once; record it again")
        waits[task.key] = task.dependencies
    try:
        TopologicalSorter(
            {key: list(filter(waits.__contains__, after)) for key, after in waits.items()}
        ).prepare()
    except CycleError as error:
        circle = " -> ".join(map(repr, error.args[1][:6]))
        raise ConfigError(
            f"{where}: dependencies have a cycle: {circle}; wanted an acyclic graph; record it again"
        ) from None


def check_times(trace: Trace) -> None:
    """Raise `ConfigError` for a span or a task whose time is NaN, infinite or beyond `_MOST_TIME`."""
    for span in trace.spans:
        if not (is_time(span.start) and is_time(span.stop)):
            raise ConfigError(
                f"trace: span {span.key!r} ({span.kind}) is from {span.start} to {span.stop}, wanted finite seconds;"
                " its recorder has no usable clock"
            )
    for task in trace.tasks:
        if not is_time(task.seconds):
            raise ConfigError(f"trace: task {task.key!r} has {task.seconds} seconds, wanted a finite number")


def _header(line: str, where: str) -> dict[str, Any]:
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict) or head.get("ferrotrace") != _VERSION:
        raise ConfigError(f"{where}: got {line[:60]!r}, wanted a trace of version {_VERSION}")
    try:
        workers = {str(name): _threads(threads) for name, threads in head["workers"].items()}
        counts = {str(name): _number(value) for name, value in head["counts"].items()}
        return {"workers": workers, "counts": counts, "rows": list(head["rows"])}
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: its first line is damaged ({error!r})") from None
