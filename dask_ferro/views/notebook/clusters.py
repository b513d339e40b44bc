"""Clusters: workers as boxes with their threads, and of batch jobs the state of each pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from dask_ferro.runtime.jobs.cluster_repr import Known, in_rows
from dask_ferro.views.notebook.card import CardTable, ValueCard, card_html
from dask_ferro.views.notebook.svg import boxes, drawing, rect
from dask_ferro.views.terminal import many, size

# Workers that are drawn, threads of each in a line, and such lines; the size of a thread, and of the drawing.
_WORKERS, _THREADS, _LINES, _THREAD, _WIDE = 60, 8, 3, 8, 460
_ROWS = 20


class _ShownWorker(NamedTuple):
    """A worker as a cluster's card shows it; memory is in bytes, 0 for no limit."""

    name: str
    address: str
    threads: int
    memory: int


def cluster(value: tuple[Any, Known | None, str]) -> str:
    """Return the card of a cluster: addresses, workers, and of batch jobs what is known of its pools.

    Parameters
    ----------
    value : (distributed.deploy.Cluster, Known or None, str)
        The cluster, the facts of its jobs, and Dask's own HTML.
    """
    found, known, of_dask = value
    workers = list(_workers(getattr(found, "scheduler_info", None) or {}))
    memory = sum(one.memory for one in workers)
    facts = [
        ("scheduler", _address(found)),
        ("dashboard", _link(str(getattr(found, "dashboard_link", "") or ""))),
        ("workers", f"{many(len(workers), 'worker')}, {many(sum(w.threads for w in workers), 'thread')}"),
        ("memory", size(memory) if memory else "no limit"),
        *(in_rows(known) if known is not None else ()),
    ]
    rows = [
        (w.name, w.address, str(w.threads), size(w.memory) if w.memory else "no limit")
        for w in workers[:_ROWS]
    ]
    table = CardTable("workers", ("name", "address", "threads", "memory"), rows, left=2, number=len(workers))
    figures = [_boxed(workers)] if workers else []
    card = ValueCard(type(found).__name__, str(found.name), repr(found), facts, figures, [table])
    # Dask's template escapes nothing; its values are addresses and the names of this user's own cluster.
    return card_html(card._replace(details=Markup(of_dask)))


def _address(found: Any) -> str:
    try:
        return str(found.scheduler_address)
    except (AttributeError, ValueError):
        return "not started"


def _link(address: str) -> str:
    if not address.startswith(("http://", "https://", "/")):
        return address or "none"
    return Markup('<a href="{0}" target="_blank" rel="noopener">{0}</a>').format(address)


def _workers(info: Mapping[str, Any]) -> Iterator[_ShownWorker]:
    for address, row in info.get("workers", {}).items():
        name, threads = str(row.get("name", address)), int(row.get("nthreads", 0))
        yield _ShownWorker(name, str(address), threads, int(row.get("memory_limit") or 0))


def _boxed(workers: Sequence[_ShownWorker]) -> tuple[str, Markup]:
    """Return each worker as a box with a square for each thread, in lines as wide as the drawing."""
    shapes: list[Markup] = []
    squares: list[tuple[float, float, float, float]] = []
    x = y = high = 0.0
    for worker in workers[:_WORKERS]:
        count = min(worker.threads, _LINES * _THREADS)
        rows = max(1, -(-count // _THREADS))
        wide, tall = min(max(count, 2), _THREADS) * (_THREAD + 2) + 6, rows * (_THREAD + 2) + 6
        if x + wide > _WIDE and x:
            x, y, high = 0.0, y + high + 6, 0.0
        shapes.append(rect(x, y, wide, tall, "ff-track", title=f"{worker.name}, {worker.address}"))
        squares += [
            (x + 4 + i % _THREADS * (_THREAD + 2), y + 4 + i // _THREADS * (_THREAD + 2), _THREAD, _THREAD)
            for i in range(count)
        ]
        x, high = x + wide + 6, max(high, tall)
    label = "workers with their threads"
    if len(workers) > _WORKERS:
        label += f"; {_WORKERS} of {len(workers):,} are drawn"
    return label, drawing(_WIDE, y + high, [*shapes, boxes("ff-0", squares, opacity=0.7)], label=label)
