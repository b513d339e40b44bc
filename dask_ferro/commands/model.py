"""`dask ferro benchmark` and `dask ferro inspect`: run a model and compare with projections; show what is in a
model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dask_ferro.commands.arguments import AT_LEAST_ONE, FILE, as_json, check_folder
from dask_ferro.commands.faults import Command, wants_debug
from dask_ferro.graph.bundling.plan import Bundle, Plan
from dask_ferro.graph.bundling.summary import OpRow
from dask_ferro.local.array_files import check_writable
from dask_ferro.local.model_run import RunRequest, Trial, trial
from dask_ferro.lower.model.inventory import Inventory, inventory
from dask_ferro.views.progress import bar
from dask_ferro.views.terminal import console, print_facts, table
from dask_ferro.words import at_most, count, duration, many, share, size

# A model at "op" granularity may have thousands of bundles; the costliest show where the time goes.
_BUNDLES_SHOWN = 20
_WORKERS_SHOWN = 32
_VALUES_SHOWN = 8
# The columns of `_costs`.
_COSTS = ("nodes", "FLOP", "bytes", "seconds", "share")


# ---- arguments ---------------------------------------------------------------------------------------------


def _granularity(value: str) -> str | float:
    if value in ("auto", "op", "model"):
        return value
    with suppress(ValueError):
        if 0.0 < float(value) < float("inf"):
            return float(value)
    raise click.BadParameter(f"{value!r} is neither auto, op, model nor a positive number of seconds")


def _parameter(text: str) -> tuple[str, int | float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number) if set(number) & set(".e") else int(number)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form NAME=NUMBER") from None


def _array_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".npy", ".npz"):
        raise click.BadParameter(f"{str(path)!r} ends in neither .npy nor .npz")
    return path


_granularities = click.option(
    "--granularity",
    type=_granularity,
    default="auto",
    show_default=True,
    metavar="auto|op|model|SECONDS",
    help="How large a piece of the model one task computes.",
)


@click.command(cls=Command)
@click.argument("model", type=FILE, required=False)
@click.option("--workload", metavar="NAME", help="A built-in graph in place of MODEL, such as imbalanced.")
@click.option(
    "--param", "params", type=_parameter, multiple=True, metavar="NAME=NUMBER", help="Of the graph."
)
@click.option(
    "--input",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_array_file,
    help="Inputs: .npz by name, or .npy.",
)
@click.option(
    "--output",
    "sink",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=lambda *given: _array_file(*given) and check_folder(*given),
    help="Where to write the outputs.",
)
@click.option("--workers", type=AT_LEAST_ONE, help="Worker processes to start  [default: one per core]")
@click.option("--threads", type=AT_LEAST_ONE, help="Threads of each  [default: 1]")
@click.option(
    "--batch",
    type=AT_LEAST_ONE,
    help="Rows per task  [default: a chunk per thread, where rows are independent]",
)
@click.option("--rows", type=AT_LEAST_ONE, help="Rows of synthetic input, where there is no --input.")
@click.option("--scheduler", metavar="ADDRESS", help="Use a running cluster instead of starting one.")
@_granularities
@click.option("--dashboard/--no-dashboard", default=False, help="Serve Dask's dashboard; needs bokeh.")
@click.option("--repeat", type=AT_LEAST_ONE, default=1, show_default=True, help="How often to run it.")
@click.option(
    "--trace",
    metavar="FILE",
    help="Record the last run: .ferrotrace (for replay) or .json (for Perfetto).",
)
@as_json
def benchmark(as_json: bool, **options: Any) -> None:
    """Run a MODEL or a built-in graph, and compare with projections.

    \b
    dask ferro benchmark mlp.onnx --input x.npy --output y.npy --workers 4
    dask ferro benchmark --workload imbalanced --workers 8 --trace run.json
    """
    _check_run(options)
    # Before the run, which may take hours.
    if options["sink"]:
        check_writable(options["sink"])
    # On stderr: with --json, stdout has the one object and nothing else.
    remarks = console(sys.stderr)
    # Dask's own log is shown with --debug only.
    done = trial(RunRequest(**options, quiet=not wants_debug()), tell=remarks.print, watching=bar)
    if as_json:
        click.echo(json.dumps(done.as_dict()))
    else:
        show_trial(console(), done)


def _check_run(options: dict[str, Any]) -> None:
    def flags_of(*names: str) -> list[str]:
        flags = {"source": "--input", "params": "--param"}
        return [flags.get(n, f"--{n}") for n in names if options[n] not in (None, (), False)]

    if bool(options["model"]) == bool(options["workload"]):
        raise click.UsageError("give either a MODEL or --workload NAME")
    if options["workload"] and (extra := flags_of("source", "rows", "batch")):
        raise click.UsageError(
            f"{', '.join(extra)} goes with a MODEL: a built-in graph has its inputs, see --param"
        )
    if options["model"] and flags_of("params"):
        raise click.UsageError("--param goes with --workload")
    if options["scheduler"] and (extra := flags_of("workers", "threads", "dashboard")):
        raise click.UsageError(f"{', '.join(extra)} is for a cluster to start, not for --scheduler")
    if options["source"] and options["rows"]:
        raise click.UsageError("--rows is for synthetic inputs, not for --input")


@click.command(cls=Command)
@click.argument("model", type=FILE)
@click.option("--batch", type=AT_LEAST_ONE, help="Rows to project the costs for  [default: 1]")
@click.option(
    "--workers", type=AT_LEAST_ONE, help="Workers of one thread to cut for  [default: one per core]"
)
@_granularities
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


def show_trial(out: Console, trial: Trial) -> None:
    """Print which worker ran how much, and the measured and projected seconds."""
    place = trial.cluster
    cluster = f"{len(place.workers)} workers, {place.slots} threads, scheduler {place.scheduler}"
    head = {
        "model": f"{trial.model} ({trial.digest[:12]})",
        "inputs": f"{_join_values(trial.inputs)}  ({trial.source})",
        "outputs": _join_values([f"{n}: {d}{list(s)}" for n, (d, s) in trial.outputs.items()]),
        "tasks": _tasks(trial),
        "cluster": f"{cluster}, dashboard {place.dashboard}" if place.dashboard else cluster,
    }
    print_facts(out, head)
    total = sum(row.seconds for row in trial.ops)
    title = "ops, as projected" + (f"; the model runs {trial.runs} times" if trial.runs > 1 else "")
    ops = [(row.op, *_costs(row, trial.runs, total)) for row in trial.ops]
    table(out, title, ("op", *_COSTS), ops)
    busiest = sorted(trial.workers, key=lambda s: -s.busy)
    workers = [(s.address, str(s.tasks), duration(s.busy), share(s.busy, trial.seconds[-1])) for s in busiest]
    title = "where it ran" + _cut(len(busiest), _WORKERS_SHOWN, "busiest workers")
    table(out, title, ("worker", "tasks", "busy", "of the run"), workers[:_WORKERS_SHOWN])
    out.print()
    print_facts(out, _times(trial))


def _join_values(texts: Iterable[object]) -> str:
    return "; ".join(at_most(_VALUES_SHOWN, map(str, texts), before="and ")) or "none"


def _tasks(trial: Trial) -> str:
    nodes = sum(row.nodes for row in trial.ops)
    text = f"{nodes} ops in {many(trial.bundles, 'bundle')}"
    if trial.rows is None:
        return text
    if trial.batch is None:
        return f"{text}; {trial.rows} rows in one chunk"
    return f"{text}; {trial.rows} rows in {trial.chunks} chunks of {min(trial.batch, trial.rows)}"


def _times(trial: Trial) -> dict[str, str]:
    cold = f" (the first, cold: {duration(trial.seconds[0])})" if len(trial.seconds) > 1 else " (cold)"
    times = {
        "measured": duration(trial.median) + cold,
        "projected": f"{duration(trial.projected_seconds)}, measured is {trial.median / trial.projected_seconds:.2f} x",
        "bound": f"{duration(trial.bound_seconds)} = max(work / threads, critical path), kernels alone",
        "ops/s": count(trial.ops_per_s),
    }
    if trial.rows_per_s is not None:
        times["rows/s"] = count(trial.rows_per_s)
    return times | ({"written": trial.output} if trial.output else {})


def _costs(row: OpRow, runs: int, total: float) -> tuple[str, ...]:
    flops, nbytes, seconds = count(row.flops * runs), size(row.bytes * runs), duration(row.seconds * runs)
    return str(row.nodes), flops, nbytes, seconds, share(row.seconds, total)


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
    title = f"{nodes} ops, costs projected for {many(inventory.rows, 'row')}"
    ops = [(row.op, *_engines(inventory, row), *_costs(row, 1, total)) for row in inventory.ops]
    table(out, title, ("op", "engine", "could also", *_COSTS), ops, left=3)
    if inventory.plan is not None:
        _show_bundles(out, inventory, inventory.plan)
    if inventory.problems:
        out.print()
        out.print(many(len(inventory.problems), "problem"), style="bold")
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
    title = many(len(plan.bundles), "bundle") + _cut(len(plan.bundles), _BUNDLES_SHOWN, "costliest")
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


def _cut(number: int, shown: int, what: str) -> str:
    return f", the {shown} {what} of {number}" if number > shown else ""
