"""The timeline of an open page: what ran since the last look, few enough rectangles to draw.

A page that is open has the telemetry record, and reads on from where it was.  Tasks that are short against the page
are drawn together: neighbours on a thread, of one prefix, become one block that says how many they were.  How short
is short follows the rate, so that a page draws some hundred blocks a second whether the cluster ends ten tasks in
that time or ten thousand.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.metrics import monotonic

from dask_ferro.runtime.telemetry.dashboard_state import label, natural
from dask_ferro.runtime.telemetry.mark import Mark
from dask_ferro.runtime.telemetry.recorder import Telemetry
from dask_ferro.trace import Key, Span

# Tasks that an open page has recorded, and how many it reads at one look: 10 ms of the scheduler's loop.
RECORDED = 20_000
_READ = 4_000
# Blocks of one look, and the seconds under which tasks are drawn together: the least, and the most.
_BLOCKS = 128
_SHORT, _LONG = 0.002, 1.0
# From here on tasks of several prefixes are drawn together; and a pause that stays to be seen.
_MIXED, _GAP = 0.02, 0.02
# Lanes that a page has room for, and the seconds from one arrangement of them to the next: a page sends all of its
# blocks anew then, 50 ms of the scheduler's loop.
_LANES = 128
_STANDS = 3.0


class Block(NamedTuple):
    """A rectangle of the timeline.

    Attributes
    ----------
    kind : str
        "compute", "transfer" or "steal".
    prefix : str
        Of its tasks.
    key : key
        Of the first of them.
    tasks : int
    worker, lane : str, int
        Address and thread.
    start, stop : float
    nbytes : int
    busy : float
        Seconds of it that were spent; less than its length where several are drawn together.
    note : str
        What a bundle computes, or whom bytes or a task came from.
    flops : float
        A second, projected; 0 where nobody knows.
    """

    kind: str
    prefix: str
    key: Key
    tasks: int
    worker: str
    lane: int
    start: float
    stop: float
    nbytes: int
    busy: float
    note: str = ""
    flops: float = 0.0


class News(NamedTuple):
    """What is new on a timeline.

    Attributes
    ----------
    blocks : tuple of Block
    lanes : tuple of (address, label, threads)
        All workers of some seconds ago, in the order of a page.
    unseen : int
        Workers that a page has no room for.
    dropped : int
        Blocks that were too many to be drawn, ever.
    shortest : float
        Seconds under which tasks are drawn together.
    end : float
        Where the timeline ends: now, or a moment after the last task when nothing runs.
    """

    blocks: tuple[Block, ...]
    lanes: tuple[tuple[str, str, int], ...]
    unseen: int
    dropped: int
    shortest: float
    end: float


class Reel:
    """What one open page has seen; close it when the page is closed."""

    def __init__(self, scheduler: Scheduler, telemetry: Telemetry) -> None:
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._mark = Mark(_READ)
        self._short = _SHORT
        self._dropped = 0
        self._last = 0.0
        self._standing: list[tuple[str, str, int]] = []
        self._stand_until = 0.0
        telemetry.record_for(self, RECORDED)

    def close(self) -> None:
        """Let the telemetry record no more for this page.  Idempotent."""
        self._telemetry.stop_for(self)

    def news(self, now: float) -> News:
        """Return what is new since the last call."""
        spans = self._telemetry.news(self._mark)
        blocks = [b for b in merged(spans, self._short) if b.lane < _LANES]
        self._last = max([self._last, *(b.stop for b in blocks)])
        self._follow(len(blocks))
        if len(blocks) > _BLOCKS:
            self._dropped += len(blocks) - _BLOCKS
            blocks = sorted(blocks, key=lambda b: b.start - b.stop)[:_BLOCKS]
        lanes = self._arranged()
        shown = lanes[:_LANES]
        runs = any(ws.processing for ws in self._scheduler.workers.values())
        return News(
            tuple(self._noted(b) for b in blocks),
            tuple(shown),
            len(lanes) - len(shown),
            self._dropped,
            self._short,
            now if runs or not self._last else self._last + 0.5,
        )

    def _follow(self, count: int) -> None:
        """Draw together what is a little longer, or shorter, next time."""
        if count > _BLOCKS:
            self._short = min(2 * self._short, _LONG)
        elif count < _BLOCKS // 8:
            self._short = max(self._short / 2, _SHORT)

    def _arranged(self) -> list[tuple[str, str, int]]:
        """The lanes, which stand for a while however many workers come and go."""
        if not self._standing or monotonic() >= self._stand_until:
            found = [(a, label(a, ws), ws.nthreads) for a, ws in self._scheduler.workers.items()]
            self._standing = sorted(found, key=lambda lane: natural(lane[1]))
            self._stand_until = monotonic() + _STANDS
        return self._standing

    def _noted(self, block: Block) -> Block:
        """Say what a single task computes, where the scheduler still knows the task."""
        if block.kind != "compute" or block.tasks > 1:
            return block
        title, flops = bundle_of(self._scheduler, block.key)
        return block._replace(note=title, flops=flops / block.busy if block.busy > 0 else 0.0)


def bundle_of(scheduler: Scheduler, key: Hashable) -> tuple[str, float]:
    """Return what a task's bundle computes, in words, and its projected FLOPs; nothing of other tasks."""
    task = scheduler.tasks.get(key)  # type: ignore[call-overload]
    arguments: Sequence[object] = getattr(task.run_spec, "args", ()) if task is not None else ()
    bundle = arguments[1] if len(arguments) > 1 else None
    # `lower` is not imported for it: a scheduler may hold no bundle ever.
    title = getattr(bundle, "title", "")
    return (title, float(getattr(bundle, "flops", 0.0))) if isinstance(title, str) else ("", 0.0)


def merged(spans: Iterable[Span], short: float) -> Iterator[Block]:
    """Yield a block a span, and one for neighbours on a lane, of one kind, that are short.

    Neighbours of other prefixes stay apart, unless what counts as short is long: then there are too many of them, and
    the longest gives the block its prefix.
    """
    mixed = short >= _MIXED
    pending: dict[tuple[str, int, str], list[Any]] = {}
    for kind, key, prefix, worker, lane, start, stop, nbytes, source, _, _ in spans:
        seconds = stop - start
        if seconds >= short:
            yield Block(kind, prefix, key, 1, worker, lane, start, stop, nbytes, seconds, source)
            continue
        place = worker, lane, kind
        last = pending.get(place)
        if (
            last is not None
            and (mixed or last[1] == prefix)
            and -short <= start - last[7] <= min(short, _GAP)
        ):
            last[3] += 1
            last[7] = stop if stop > last[7] else last[7]
            last[8] += nbytes
            last[9] += seconds
            if seconds > last[11]:
                last[1], last[11] = prefix, seconds
            continue
        if last is not None:
            yield Block._make((*last[:11], 0.0))
        pending[place] = [
            kind, prefix, key, 1, worker, lane, start, stop, nbytes, seconds, source, seconds,
        ]  # fmt: skip
    for last in pending.values():
        yield Block._make((*last[:11], 0.0))
