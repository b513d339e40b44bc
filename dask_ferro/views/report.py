"""The output of `dask ferro run` and `dask ferro import`: tables of a model run, and of a model's inventory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from dask_ferro.graph.bundling.plan import Bundle
from dask_ferro.graph.bundling.summary import OpRow
from dask_ferro.lower.model.inventory import Inventory
from dask_ferro.runtime.local.model_run import Trial
from dask_ferro.views.terminal import facts, table
from dask_ferro.words import at_most, count, duration, many, share, size

# A model at "op" granularity may have thousands of bundles; the costliest show where the time goes.
_BUNDLES_SHOWN = 20
_WORKERS_SHOWN = 32
_VALUES_SHOWN = 8


def show_trial(out: Console, trial: Trial) -> None:
    """Print which worker ran how much, and the measured and projected seconds."""
    facts(
        out,
        [
            ("model", f"{trial.model} ({trial.digest[:12]})"),
            ("inputs", f"{_listed(trial.inputs)}  ({trial.source})"),
            ("outputs", _listed([f"{n}: {d}{list(s)}" for n, (d, s) in trial.outputs.items()])),
            ("tasks", _tasks(trial)),
            ("cluster", _cluster(trial)),
        ],
    )
    _show_ops(out, trial)
    busiest = sorted(trial.workers, key=lambda s: -s.busy)
    table(
        out,
        "where it ran" + _cut(len(busiest), _WORKERS_SHOWN, "busiest workers"),
        ("worker", "tasks", "busy", "of the run"),
        [(s.address, str(s.tasks), duration(s.busy), share(s.busy, trial.seconds[-1])) for s in busiest][
            :_WORKERS_SHOWN
        ],
    )
    out.print()
    facts(out, _times(trial))


def _listed(texts: Iterable[object]) -> str:
    return "; ".join(at_most(_VALUES_SHOWN, map(str, texts), before="and ")) or "none"


def _tasks(trial: Trial) -> str:
    nodes = sum(row.nodes for row in trial.ops)
    text = f"{nodes} ops in {many(trial.bundles, 'bundle')}"
    if trial.rows is None:
        return text
    if trial.batch is None:
        return f"{text}; {trial.rows} rows in one chunk"
    return f"{text}; {trial.rows} rows in {trial.chunks} chunks of {min(trial.batch, trial.rows)}"


def _cluster(trial: Trial) -> str:
    place = trial.cluster
    text = f"{len(place.workers)} workers, {place.slots} threads, scheduler {place.scheduler}"
    return f"{text}, dashboard {place.dashboard}" if place.dashboard else text


def _times(trial: Trial) -> list[tuple[str, str]]:
    cold = f" (the first, cold: {duration(trial.seconds[0])})" if len(trial.seconds) > 1 else " (cold)"
    lines = [
        ("measured", duration(trial.median) + cold),
        (
            "projected",
            f"{duration(trial.projected_seconds)}, measured is {trial.median / trial.projected_seconds:.2f} x",
        ),
        ("bound", f"{duration(trial.bound_seconds)} = max(work / threads, critical path), kernels alone"),
        ("ops/s", count(trial.ops_per_s)),
    ]
    if trial.rows_per_s is not None:
        lines.append(("rows/s", count(trial.rows_per_s)))
    if trial.output:
        lines.append(("written", trial.output))
    return lines


def _show_ops(out: Console, trial: Trial) -> None:
    runs, total = trial.runs, sum(row.seconds for row in trial.ops)
    table(
        out,
        "ops, as projected" + (f"; the model runs {runs} times" if runs > 1 else ""),
        ("op", "nodes", "FLOP", "bytes", "seconds", "share"),
        [(row.op, *_costs(row, runs, total)) for row in trial.ops],
    )


def _costs(row: OpRow, runs: int, total: float) -> tuple[str, ...]:
    flops, nbytes, seconds = count(row.flops * runs), size(row.bytes * runs), duration(row.seconds * runs)
    return str(row.nodes), flops, nbytes, seconds, share(row.seconds, total)


def show_inventory(out: Console, inventory: Inventory) -> None:
    """Print a model's inputs, outputs, weights, operators, bundles and problems."""
    facts(
        out,
        [
            ("model", f"{inventory.name} ({inventory.digest[:12]}), opset {inventory.opset}"),
            ("weights", f"{size(inventory.weight_bytes)}, {_held(inventory.mapped)}"),
            ("inputs", _listed(inventory.inputs)),
            ("outputs", _listed(inventory.outputs)),
        ],
    )
    total = sum(row.seconds for row in inventory.ops)
    table(
        out,
        f"{sum(row.nodes for row in inventory.ops)} ops, costs projected for {many(inventory.rows, 'row')}",
        ("op", "engine", "could also", "nodes", "FLOP", "bytes", "seconds", "share"),
        [
            (
                row.op,
                _engines(inventory.engines[row.op], row.nodes),
                _others(inventory.able[row.op], inventory.engines[row.op]),
                *_costs(row, 1, total),
            )
            for row in inventory.ops
        ],
        left=3,
    )
    _show_bundles(out, inventory)
    if inventory.problems:
        out.print()
        out.print(many(len(inventory.problems), "problem"), style="bold")
        for problem in inventory.problems:
            out.print(f"  - {problem}", soft_wrap=True)


def _engines(engines: Mapping[str, int], nodes: int) -> str:
    if len(engines) == 1:
        return next(iter(engines))
    return ", ".join(f"{name} {n} of {nodes}" for name, n in sorted(engines.items()))


def _others(able: Mapping[str, int], chosen: Mapping[str, int]) -> str:
    return ", ".join(sorted(set(able) - set(chosen))) or "-"


def _held(mapped: Sequence[str]) -> str:
    """Return how the weights are held: read into memory, or mapped from which files."""
    if not mapped:
        return "read into memory"
    files = _listed([Path(path).name for path in mapped])
    return f"mapped from {files}: do not modify them while the model is used"


def _show_bundles(out: Console, inventory: Inventory) -> None:
    if inventory.plan is None:
        return
    bundles = inventory.plan.bundles
    costliest = sorted(enumerate(bundles), key=lambda pair: (-pair[1].seconds, pair[0]))[:_BUNDLES_SHOWN]
    table(
        out,
        many(len(bundles), "bundle") + _cut(len(bundles), _BUNDLES_SHOWN, "costliest"),
        ("bundle", "contents", "nodes", "FLOP", "bytes", "seconds"),
        [_bundle(number, bundle) for number, bundle in costliest],
        left=2,
    )
    out.print()
    facts(
        out,
        [
            ("projected", f"{duration(inventory.plan.makespan)} with a task's overheads"),
            ("work", f"{duration(inventory.bound.work)} on one thread"),
            ("critical path", duration(inventory.bound.path)),
        ],
    )


def _bundle(number: int, bundle: Bundle) -> tuple[str, ...]:
    kinds = ", ".join(f"{n} {op}" for op, n in bundle.ops.most_common(4))
    contents = kinds + (", ..." if len(bundle.ops) > 4 else "")
    costs = count(bundle.flops), size(bundle.bytes), duration(bundle.seconds)
    return str(number), contents, str(len(bundle.nodes)), *costs


def _cut(number: int, shown: int, what: str) -> str:
    return f", the {shown} {what} of {number}" if number > shown else ""
