"""The timeline of an open page: the tasks since the last reading, in few enough rectangles to draw.

A dashboard makes the telemetry keep the newest tasks (`RECENT`), with which a page begins; an open page makes it keep
more, and continues reading where it stopped.  Tasks that are short for the page are merged: neighbours on a thread with
the same prefix become one block with their number.  The limit for short tasks follows the rate, so that a page draws
some hundred blocks a second whether the cluster finishes ten tasks in that time or ten thousand.
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

# Tasks recorded for an open page, and the most read at a time: 10 ms of the scheduler's loop.
RECORDED = 20_000
_READ = 4_000
# Tasks recorded while no page is open, as many as one reading has: 2 MB, and 1.3 us a task.
RECENT = _READ
# What a page begins with: the most blocks, and the seconds before the last one that its longest window shows.
_OPENING, _HISTORY = 2_000, 300.0
# The most blocks per reading, and the least and greatest limit in seconds below which tasks are merged.
_BLOCKS = 128
_SHORT, _LONG = 0.002, 1.0
# From this limit on, tasks of different prefixes are merged; and the least pause that stays visible.
_MIXED, _GAP = 0.02, 0.02
# The most lanes of a page, and the seconds between rearrangements of them, with which a page sends all of its blocks
# again: 50 ms of the scheduler's loop.
_LANES = 128
_STANDS = 3.0


class Block(NamedTuple):
    """A rectangle of the timeline.

    Attributes
    ----------
    kind : str
        "compute", "transfer" or "steal".
    prefix : str
        The prefix of its tasks.
    key : key
        The key of its first task.
    tasks : int
    worker, lane : str, int
        Address and thread.
    start, stop : float
    nbytes : int
    busy : float
        Seconds spent in tasks; less than its length if several tasks are merged.
    note : str
        The description of a bundle, or the source of bytes or of a task.
    flops : float
        Projected FLOP/s; 0 if unknown.
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
    """New blocks of a timeline.

    Attributes
    ----------
    blocks : tuple of Block
        At the first reading, those of the time before the page was opened.
    lanes : tuple of (address, label, threads)
        All workers as of some seconds ago, in the order of a page.
    unseen : int
        Workers beyond a page's room.
    dropped : int
        Total number of blocks that were too many to draw.
    shortest : float
        Seconds below which tasks are merged.
    end : float
        The end of the timeline: now, or a moment after the last task if nothing runs.
    """

    blocks: tuple[Block, ...]
    lanes: tuple[tuple[str, str, int], ...]
    unseen: int
    dropped: int
    shortest: float
    end: float


class Reel:
    """The timeline of one open page; close it with the page."""

    def __init__(self, scheduler: Scheduler, telemetry: Telemetry) -> None:
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._mark = Mark(_READ)
        self._short = _SHORT
        self._dropped = 0
        self._last = 0.0
        self._is_new = True
        self._standing: list[tuple[str, str, int]] = []
        self._stand_until = 0.0
        telemetry.record_for(self, RECORDED)

    def close(self) -> None:
        """Stop recording for this page.  Idempotent."""
        self._telemetry.stop_for(self)

    def news(self, now: float) -> News:
        """Return the blocks since the last call; at the first call, the newest blocks of the time before."""
        spans = self._telemetry.news(self._mark)
        blocks = [b for b in merged(spans, self._short) if b.lane < _LANES]
        self._last = max([self._last, *(b.stop for b in blocks)])
        blocks = self._history(blocks) if self._is_new else self._longest(blocks)
        self._is_new = False
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

    def _history(self, blocks: list[Block]) -> list[Block]:
        """Return the newest blocks, without those that no window of the page reaches."""
        within = (block for block in blocks if block.stop >= self._last - _HISTORY)
        return sorted(within, key=lambda b: b.stop)[-_OPENING:]

    def _longest(self, blocks: list[Block]) -> list[Block]:
        """Return the longest blocks, as many as are drawn at each update, and count the others."""
        self._follow(len(blocks))
        if len(blocks) <= _BLOCKS:
            return blocks
        self._dropped += len(blocks) - _BLOCKS
        return sorted(blocks, key=lambda b: b.start - b.stop)[:_BLOCKS]

    def _follow(self, count: int) -> None:
        """Adapt the limit for merging to the number of blocks."""
        if count > _BLOCKS:
            self._short = min(2 * self._short, _LONG)
        elif count < _BLOCKS // 8:
            self._short = max(self._short / 2, _SHORT)

    def _arranged(self) -> list[tuple[str, str, int]]:
        """Return the lanes, which are kept for a while however many workers come and go."""
        if not self._standing or monotonic() >= self._stand_until:
            found = [(a, label(a, ws), ws.nthreads) for a, ws in self._scheduler.workers.items()]
            self._standing = sorted(found, key=lambda lane: natural(lane[1]))
            self._stand_until = monotonic() + _STANDS
        return self._standing

    def _noted(self, block: Block) -> Block:
        """Add the description of a single task, if the scheduler still knows the task."""
        if block.kind != "compute" or block.tasks > 1:
            return block
        title, flops = bundle_of(self._scheduler, block.key)
        return block._replace(note=title, flops=flops / block.busy if block.busy > 0 else 0.0)


def bundle_of(scheduler: Scheduler, key: Hashable) -> tuple[str, float]:
    """Return the description of a task's bundle and its projected FLOPs; empty for other tasks."""
    task = scheduler.tasks.get(key)  # type: ignore[call-overload]
    arguments: Sequence[object] = getattr(task.run_spec, "args", ()) if task is not None else ()
    bundle = arguments[1] if len(arguments) > 1 else None
    # `lower` is not imported here, as a scheduler may never see a bundle.
    title = getattr(bundle, "title", "")
    return (title, float(getattr(bundle, "flops", 0.0))) if isinstance(title, str) else ("", 0.0)


def merged(spans: Iterable[Span], short: float) -> Iterator[Block]:
    """Yield a block for each span, with short neighbours of one kind on a lane merged.

    Neighbours of different prefixes stay separate unless the limit for short tasks is high: then there are too many
    of them, and the longest task gives the block its prefix.
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
