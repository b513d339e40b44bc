"""Plans: those that `ff.plan` proposes, beside each other, and a graph with the plan that `ff.apply` applied."""

from __future__ import annotations

from collections import Counter
from math import prod

from markupsafe import Markup

from dask_ferro.errors import ConfigError
from dask_ferro.graph.parallel.apply import Applied
from dask_ferro.graph.parallel.autoplan import Proposal, Proposals
from dask_ferro.graph.sharding.placements import Placement
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.views.notebook.card import CardTable, ValueCard, card_html, share_bar
from dask_ferro.views.notebook.svg import drawing, rect, words
from dask_ferro.views.terminal import duration, many, size

_ROWS = 20
# The ranks of a mesh that are drawn along each of its two last axes, and the size of one.
_RANKS, _RANK_W, _RANK_H = 8, 46, 22


def proposals(value: Proposals) -> str:
    """Return the card of proposed plans: a row for each with its seconds and bytes as bars, the fastest first."""
    try:
        best: Proposal | None = value.best
    except ConfigError:
        best = None
    facts = [
        ("plans", f"{len(value.rows):,}"),
        ("best", "none fits a worker's memory" if best is None else _shape(best)),
    ]
    if value.memory is not None:
        facts.append(("memory", f"{size(value.memory)} a worker"))
    longest = max((row.seconds for row in value.rows), default=0.0) or 1.0
    most = max((row.memory for row in value.rows), default=0.0) or 1.0
    rows = [_row(row, longest, most, is_best=row is best) for row in value.rows[:_ROWS]]
    columns = (
        "",
        "data × tensor × stages",
        "computing, exchanging, waiting",
        "parameters, gradients, state, activations",
        "step",
        "memory a worker",
        "micro-batches",
    )
    refused = [(f"{data} × {tensor}", why) for (data, tensor), why in value.refused.items()]
    tables = [
        CardTable("plans, the fastest first", columns, rows, left=4, number=len(value.rows), is_open=True),
        CardTable("refused", ("data × tensor", "reason"), refused, left=2),
    ]
    return card_html(ValueCard("Proposals", "", repr(value), facts, (), tables))


def _shape(row: Proposal) -> str:
    return f"{row.data} × {row.tensor} × {row.stages} on {many(row.workers, 'worker')}"


def _row(row: Proposal, longest: float, most: float, *, is_best: bool) -> tuple[str, ...]:
    named = (
        ("ff-0", row.computing, "computing"),
        ("ff-1", row.exchanging, "exchanging"),
        ("ff-other", row.waiting, "waiting"),
    )
    bar = share_bar([(kind, s / longest, f"{name} {duration(s)}") for kind, s, name in named])
    held = {kind: getattr(row, kind) for kind in ("parameters", "gradients", "state", "activations")}
    parts = [(f"ff-{i}", b / most, f"{kind} {size(b)}") for i, (kind, b) in enumerate(held.items())]
    shape = f"{row.data} × {row.tensor} × {row.stages}" + (", state split" if row.optimizer_state else "")
    told = duration(row.seconds), size(row.memory), str(row.micro_batches)
    return "★" if is_best else "", shape, bar, share_bar(parts), *told


def applied(value: Applied) -> str:
    """Return the card of a graph with a plan: the mesh, the regions, and the values that are placed."""
    facts = [
        ("graph", f"{len(value.model.graph):,} nodes"),
        ("plan", "none" if value.plan is None else value.plan.source),
        ("mesh", " × ".join(f"{axis} {n}" for axis, n in value.mesh.axes.items())),
        ("stages", f"{len(value.stages):,}" if value.stages else "none"),
        ("placed", f"{many(len(value.given), 'value')}, {many(len(value.regions), 'node')} in regions"),
    ]
    name, tables = str(value.model.graph.name or ""), [_regions(value), _given(value)]
    return card_html(ValueCard("Applied", name, repr(value), facts, [_ranks(value.mesh)], tables))


def _regions(value: Applied) -> CardTable:
    nodes = Counter(region.name for region in value.regions.values())
    by_name = {region.name: region for region in value.regions.values()}
    rows = []
    for name, region in list(by_name.items())[:_ROWS]:
        stage = "" if region.stage is None else str(region.stage)
        rows.append((name, stage, region.device or "", _workers(region.workers), f"{nodes[name]:,}"))
    columns = ("region", "stage", "device", "workers", "nodes")
    return CardTable("regions", columns, rows, left=4, number=len(by_name), is_open=True)


def _given(value: Applied) -> CardTable:
    axes, rows = list(value.mesh.axes), []
    for name, placed in list(value.given.items())[:_ROWS]:
        rows.append((name, *map(_placement, map(placed.get, axes))))
    columns = ("value", *axes)
    return CardTable("placed values", columns, rows, len(columns), len(value.given), is_open=True)


def _workers(workers: tuple[int, ...] | None) -> str:
    return "" if workers is None else ", ".join(map(str, workers))


def _placement(placed: Placement | None) -> str:
    return "" if placed is None else str(placed)


def _ranks(mesh: Mesh) -> tuple[str, Markup]:
    """Return the ranks of a mesh as a grid, its last axis from left to right."""
    sizes = list(mesh.axes.values())
    wide = sizes[-1] if sizes else 1
    high = prod(sizes[:-1])
    shapes: list[Markup] = []
    for row in range(min(high, _RANKS)):
        for column in range(min(wide, _RANKS)):
            x, y = column * (_RANK_W + 3), row * (_RANK_H + 3)
            shapes += [
                rect(x, y, _RANK_W, _RANK_H, "ff-0", opacity=0.3),
                words(x + _RANK_W / 2, y + 15, str(row * wide + column), anchor="middle"),
            ]
    more = "" if high <= _RANKS and wide <= _RANKS else f", of which {_RANKS} × {_RANKS} are drawn"
    label = f"{many(high * wide, 'rank')}: {' × '.join(mesh.axes)}{more}"
    return label, drawing(
        min(wide, _RANKS) * (_RANK_W + 3), min(high, _RANKS) * (_RANK_H + 3), shapes, label=label
    )
