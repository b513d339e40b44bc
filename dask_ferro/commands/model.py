"""`dask ferro inspect`: what is in a model, with projected costs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dask_ferro.commands.arguments import AT_LEAST_ONE, FILE, as_json
from dask_ferro.commands.faults import Command
from dask_ferro.graph.bundling.plan import Bundle, Plan
from dask_ferro.graph.bundling.summary import OpRow
from dask_ferro.lower.model.inventory import Inventory, inventory
from dask_ferro.views.terminal import console, print_facts, table
from dask_ferro.words import count, duration, limit_texts, pluralize, share, size

# A model at "op" granularity may have thousands of bundles; the costliest show where the time goes.
_BUNDLES_SHOWN = 20
_VALUES_SHOWN = 8
# The columns of `_costs`.
_COSTS = ("nodes", "FLOP", "bytes", "seconds", "share")


def _granularity(value: str) -> str | float:
    if value in ("auto", "op", "model"):
        return value
    with suppress(ValueError):
        if 0.0 < float(value) < float("inf"):
            return float(value)
    raise click.BadParameter(f"{value!r} is neither auto, op, model nor a positive number of seconds")


@click.command(cls=Command)
@click.argument("model", type=FILE)
@click.option("--batch", type=AT_LEAST_ONE, help="Rows to project the costs for  [default: 1]")
@click.option(
    "--workers", type=AT_LEAST_ONE, help="Workers of one thread to cut for  [default: one per core]"
)
@click.option(
    "--granularity",
    type=_granularity,
    default="auto",
    show_default=True,
    metavar="auto|op|model|SECONDS",
    help="How large a piece of the model one task computes.",
)
@as_json
def inspect(model: str, batch: int | None, workers: int | None, granularity: Any, as_json: bool) -> None:
    """Show a MODEL's inputs, operators, engines, costs and problems.

    Costs are projected.  The exit status is 1 if the model has problems; all of them are listed.
    """
    found = inventory(model, batch=batch, workers=workers, granularity=granularity)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        show_inventory(console(), found)
    # After the whole report, so that one run shows all problems.
    if found.problems:
        raise click.exceptions.Exit(1)


# ---- tables ------------------------------------------------------------------------------------------------


def _join_values(texts: Iterable[object]) -> str:
    return "; ".join(limit_texts(_VALUES_SHOWN, map(str, texts), before="and ")) or "none"


def _costs(row: OpRow, total: float) -> tuple[str, ...]:
    costs = count(row.flops), size(row.bytes), duration(row.seconds)
    return str(row.nodes), *costs, share(row.seconds, total)


def show_inventory(out: Console, inventory: Inventory) -> None:
    """Print a model's inputs, outputs, weights, operators, bundles and problems."""
    head = {
        "model": f"{inventory.name} ({inventory.digest[:12]}), opset {inventory.opset}",
        "weights": f"{size(inventory.weight_bytes)}, {_weights_text(inventory.mapped)}",
        "inputs": _join_values(inventory.inputs),
        "outputs": _join_values(inventory.outputs),
    }
    print_facts(out, head)
    total = sum(row.seconds for row in inventory.ops)
    nodes = sum(row.nodes for row in inventory.ops)
    title = f"{nodes} ops, costs projected for {pluralize(inventory.rows, 'row')}"
    ops = [(row.op, *_engines(inventory, row), *_costs(row, total)) for row in inventory.ops]
    table(out, title, ("op", "engine", "could also", *_COSTS), ops, left=3)
    if inventory.plan is not None:
        _show_bundles(out, inventory, inventory.plan)
    if inventory.problems:
        out.print()
        out.print(pluralize(len(inventory.problems), "problem"), style="bold")
        for problem in inventory.problems:
            out.print(f"  - {problem}", soft_wrap=True)


def _engines(inventory: Inventory, row: OpRow) -> tuple[str, str]:
    """Return which engines compute an operator, and which others could."""
    chosen = inventory.engines[row.op]
    parts = [f"{name} {n} of {row.nodes}" for name, n in sorted(chosen.items())]
    others = ", ".join(sorted(set(inventory.able[row.op]) - set(chosen))) or "-"
    return ", ".join(parts if len(chosen) > 1 else chosen), others


def _weights_text(mapped: Sequence[str]) -> str:
    """Return how the weights are held: read into memory, or mapped from which files."""
    if not mapped:
        return "read into memory"
    files = _join_values([Path(path).name for path in mapped])
    return f"mapped from {files}: do not modify them while the model is used"


def _show_bundles(out: Console, inventory: Inventory, plan: Plan) -> None:
    costliest = sorted(enumerate(plan.bundles), key=lambda pair: (-pair[1].seconds, pair[0]))[:_BUNDLES_SHOWN]
    title = pluralize(number := len(plan.bundles), "bundle")
    if number > _BUNDLES_SHOWN:
        title += f", the {_BUNDLES_SHOWN} costliest of {number}"
    rows = [_bundle(number, bundle) for number, bundle in costliest]
    table(out, title, ("bundle", "contents", *_COSTS[:-1]), rows, left=2)
    out.print()
    times = {
        "projected": f"{duration(plan.makespan)} with a task's overheads",
        "work": f"{duration(inventory.bound.work)} on one thread",
        "critical path": duration(inventory.bound.path),
    }
    print_facts(out, times)


def _bundle(number: int, bundle: Bundle) -> tuple[str, ...]:
    kinds = ", ".join(f"{n} {op}" for op, n in bundle.ops.most_common(4))
    contents = kinds + (", ..." if len(bundle.ops) > 4 else "")
    costs = count(bundle.flops), size(bundle.bytes), duration(bundle.seconds)
    return str(number), contents, str(len(bundle.nodes)), *costs
