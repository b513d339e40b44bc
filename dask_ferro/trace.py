"""The trace of a run, measured or simulated: which task ran where and when; and its file format.

Times are seconds from the trace's start, sizes are bytes.  Tasks carry enough to simulate the same graph again on a
virtual cluster.

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
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dask_ferro import lines
from dask_ferro.errors import InputError

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
        Those of an op's node, if the graph has them; for other kinds, see `ModelPart` of their task.
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
        """Return its start after `zero` and its duration in whole microseconds.

        The stop is rounded, and not the duration: spans that touch, or lie within each other, still do.

        >>> Span("compute", "a", "a", "w", 0, 1.0000004, 1.0000016).microseconds(1.0)
        (0, 2)
        """
        start = round((self.start - zero) * 1e6)
        return start, max(round((self.stop - zero) * 1e6) - start, 0)


# The Dask annotation that holds a task's `ModelPart`, as a plain tuple.
PART_ANNOTATION = "ferro_about"


class ModelPart(NamedTuple):
    """Which part of the model a task computes: region, placement, pipeline stage and micro-batch.

    Attributes
    ----------
    region : str
        The regions (`ft.region`) in which its nodes were written.
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
        Some may be missing from the trace: data from before it, or tasks that the log's full ring dropped.
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
    about: ModelPart = ModelPart()


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
    def critical_path(self) -> float:
        """Seconds of the chain of tasks with the most, each task counted once."""
        ends: dict[Key, float] = {}
        for task in self.tasks:
            # Inputs that were computed before the recording began are not in the trace.
            before = max((ends.get(key, 0.0) for key in task.dependencies), default=0.0)
            ends[task.key] = before + task.seconds
        return max(ends.values(), default=0.0)

    @property
    def lower_bound(self) -> float:
        """Seconds that no schedule on these threads can beat: the larger of the critical path and work / threads."""
        threads = sum(self.workers.values())
        return max(self.critical_path, self.busy_seconds / threads if threads else 0.0)

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
            "critical_path": self.critical_path,
            "lower_bound": self.lower_bound,
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
        InputError
            For a key of a type that Dask does not allow, or a path that cannot be written.
        """
        write_whole(path, "".join(line + "\n" for line in _lines(self)).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Return the trace that `save` wrote, compressed or not.

        Raises
        ------
        InputError
            For a file that cannot be read, is not a trace, has another version, or was cut short.
        """
        where = f"trace {str(path)!r}"
        text = io.StringIO(_text(Path(path), where))
        head = _header(text.readline(), where)
        found: dict[type, list[Any]] = {Span: [], TracedTask: []}
        for number, line in enumerate(text, start=2):
            try:
                row = _row(line)
            except (ValueError, TypeError, RecursionError, OverflowError) as error:
                got = f"{where}, line {number}: got {line[:60]!r}"
                raise InputError(f"{got}, wanted a span or a task ({error})") from None
            found[type(row)].append(row)
        rows = [len(found[Span]), len(found[TracedTask])]
        if rows != head["rows"]:
            raise InputError(f"{where}: got {rows} spans and tasks, wanted {head['rows']}: cut short?")
        twice = [key for key, number in Counter(task.key for task in found[TracedTask]).items() if number > 1]
        if twice:
            raise InputError(f"{where}: task {twice[0]!r} occurs twice, wanted each once; record it again")
        return cls(tuple(found[Span]), tuple(found[TracedTask]), head["workers"], head["counts"])


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically; compressed, reproducibly, if its name ends in ".gz".

    Raises
    ------
    InputError
        For a path that cannot be written.
    """
    target = Path(path)
    if target.suffix == ".gz":
        # No time in the gzip header, so that equal traces give equal files.
        content = gzip.compress(content, compresslevel=6, mtime=0)
    try:
        lines.put(os.fspath(path), content)
    except OSError as error:
        raise InputError(f"trace {str(target)!r}: cannot be written ({error})") from error


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
        yield json.dumps(["span", s.kind, _to_json(s.key), *s[2:]])
    for t in trace.tasks:
        about = None if t.about == ModelPart() else list(t.about)
        needs = [_to_json(d) for d in t.dependencies]
        yield json.dumps(["task", _to_json(t.key), *t[1:5], needs, t.order, about])


def _to_json(key: Key) -> Any:
    """Return a key in JSON's types: a tuple becomes a list (a list is no key), bytes become an object."""
    if type(key) is tuple:
        return [_to_json(part) for part in key]
    if type(key) is bytes:
        return {"bytes": key.hex()}
    if type(key) in (str, int, float):
        return key
    raise InputError(f"trace: key {key!r} of type {type(key).__name__}, wanted one of Dask's types of keys")


def _key(plain: Any) -> Any:
    if type(plain) is list:
        return tuple(map(_key, plain))
    if type(plain) is dict and set(plain) == {"bytes"}:
        return bytes.fromhex(plain["bytes"])
    if type(plain) not in (str, int, float) or plain != plain:
        raise ValueError(f"got {plain!r}, wanted a key")
    return plain


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_BYTES


def _is_place(value: object) -> bool:
    return value is None or (type(value) is int and abs(value) < MOST_BYTES)


def _is_time(value: object, most: float = _MOST_TIME) -> bool:
    return type(value) in (int, float) and -most <= value <= most  # type: ignore[operator]


# What a field has to be, by its name in `Span`, `TracedTask` and `ModelPart`; keys are checked as they are read.
_FIELD_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("kind", "prefix", "group", "worker", "source", "region", "placement"),
        (lambda value: type(value) is str, "a text"),
    ),
    **dict.fromkeys(("lane", "nbytes"), (_is_count, "a count below 2^63")),
    **dict.fromkeys(("start", "stop"), (_is_time, "a finite number of seconds")),
    **dict.fromkeys(("order", "stage", "micro_batch"), (_is_place, "a place or null")),
    "seconds": (lambda value: _is_time(value, MOST_SECONDS), f"at most {MOST_SECONDS:g} seconds"),
}


def _row(line: str) -> Span | TracedTask:
    """Return the span or task of one line; raise ValueError or TypeError for anything else."""
    name, *cells = json.loads(line)
    kind: Any = {"span": Span, "task": TracedTask}.get(name)
    if kind is None:
        raise ValueError(f"got {name!r}")
    row = dict(zip(kind._fields, cells, strict=True))
    row["key"] = _key(row["key"])
    if kind is TracedTask:
        if type(row["dependencies"]) is not list:
            raise ValueError(f"got {row['dependencies']!r}, wanted keys")
        row["dependencies"] = _key(row["dependencies"])
        row["about"] = _check_record(ModelPart(*row["about"] or ()))
    record: Span | TracedTask = _check_record(kind(**row))
    return record


def _check_record(record: Any) -> Any:
    for name, value in zip(record._fields, record, strict=True):
        fits, wanted = _FIELD_CHECKS.get(name, (None, ""))
        if fits is not None and not fits(value):
            raise ValueError(f"{name}: got {value!r}, wanted {wanted}")
    return record


def _text(path: Path, where: str) -> str:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            most = max(_LEAST_UNPACKED, _MOST_RATIO * len(content))
            with gzip.open(io.BytesIO(content)) as file:
                # One byte more than is allowed proves the excess; the whole content might not fit into memory.
                unpacked = file.read(most + 1)
            if len(unpacked) > most:
                raise InputError(
                    f"{where}: {len(content)} bytes unpack to more than {most}; a trace does not"
                )
            content = unpacked
        return content.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{where}: cannot be read ({error})") from error


def _header(line: str, where: str) -> dict[str, Any]:
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict) or head.get("ferrotrace") != _VERSION:
        raise InputError(f"{where}: got {line[:60]!r}, wanted a trace of version {_VERSION}")
    try:
        threads, counts = head["workers"].values(), head["counts"].values()
        if not all(type(n) is int and 0 <= n <= _MOST_THREADS for n in threads):
            raise ValueError("a number of threads is none")
        if not all(_is_time(value, 1e300) for value in counts):
            raise ValueError("a count is no finite number")
        return {**head, "rows": list(head["rows"])}
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{where}: its first line is damaged ({error!r})") from None
