"""`dask ferro simulate` and `dask ferro replay`: task graphs and recorded runs under several policies.

`replay` also decides again on decisions that a scheduler recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from dask_ferro.commands.arguments import AT_LEAST_ONE, FILE, as_json, policies, seed
from dask_ferro.commands.faults import Command
from dask_ferro.policy.stealing import decision
from dask_ferro.scheduler.settings import Settings
from dask_ferro.simulate import compare
from dask_ferro.simulate.cluster import VirtualCluster
from dask_ferro.trace import Trace
from dask_ferro.views.terminal import console, print_facts, table
from dask_ferro.words import duration, size

# How many characters of a list of moves are shown.
_WIDE = 2000
_COLUMNS = ("policy", "makespan", "over lower bound", "utilization", "confirmed", "refused", "stale", "moved")


@click.command(cls=Command)
@click.option(
    "--graph", type=FILE, required=True, help="A recorded run (.ferrotrace) or a WfCommons file (.json)."
)
@click.option("--workers", type=AT_LEAST_ONE, default=8, show_default=True, help="Virtual workers.")
@click.option("--threads", type=AT_LEAST_ONE, default=1, show_default=True, help="Threads of each.")
@policies
@click.option(
    "--bundles", is_flag=True, help="Compare with the graph in bundles, as ff.bundle_tasks makes them."
)
@seed
@as_json
def simulate(
    graph: str, workers: int, threads: int, policies: tuple[str, ...], bundles: bool, seed: int, as_json: bool
) -> None:
    """Simulate a task graph under several policies, and compare.

    \b
    dask ferro simulate --graph run.ferrotrace --workers 64
    dask ferro simulate --graph workflow.json --workers 1000 --policy informed,none
    """
    # With the user's own settings, as `ff.install` would use them here.
    cluster, rules = VirtualCluster.local(workers, threads), Settings.configured().rules
    tasks = compare.read_graph(graph)
    _show(
        compare.compare(tasks, cluster, policies, rules=rules, seed=seed, bundles=bundles),
        "simulated",
        as_json,
    )


@click.command(cls=Command)
@click.argument("path", metavar="FILE", type=FILE)
@policies
@seed
@as_json
@click.pass_context
def replay(ctx: click.Context, path: str, policies: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Simulate a recorded run under other policies, and compare.

    The virtual workers are those of the recording.

    \b
    dask ferro replay run.ferrotrace --policy informed,none

    From a file of decisions, which a scheduler writes for `ferro.scheduler.record`, each decision is made again by its
    own policy and parameters, and the first that differs is reported; the exit status is then 1, as `git bisect run`
    expects it.

    \b
    dask ferro replay run.decisions
    """
    # Bytes that are no text are replaced, and then refused as not being a recording.
    with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
        if lines.read(len(decision.BEGINS)) != decision.BEGINS:
            _run_again(path, policies, seed, as_json)
            return
        if ctx.get_parameter_source("policies") is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError("--policy is for a recorded run; a recorded decision has its own policy")
        lines.seek(0)
        _show_same(decision.replay(lines, path), as_json)


def _run_again(path: str, policies: tuple[str, ...], seed: int, as_json: bool) -> None:
    trace, rules = Trace.load(path), Settings.configured().rules
    found = compare.replay(trace, policies, name=Path(path).name, rules=rules, seed=seed)
    _show(found, "recorded, and simulated", as_json)
    if as_json:
        return
    computed = [span.key for span in trace.of("compute")]
    if again := len(computed) - len(set(computed)):
        click.echo(
            f"the recording has {again:,} repeated computations; the simulation runs each task once, so the recorded"
            " run did more work than the simulated ones",
            err=True,
        )
    if dropped := trace.counts.get("dropped"):
        click.echo(f"the recording is incomplete: it dropped its first {dropped:,.0f} tasks", err=True)


def _show_same(same: decision.ReplayResult, as_json: bool) -> None:
    difference = same.difference
    if as_json:
        first = None if difference is None else difference._asdict()
        click.echo(json.dumps({**same._asdict(), "difference": first}))
    else:
        click.echo(f"{same.decisions:,} decisions and their {same.moves:,} moves are the same")
        if difference is not None:
            click.echo(f"line {difference.line:,}, at {difference.at:.6f}, differs")
            click.echo(f"  recorded: {difference.recorded}"[:_WIDE])
            click.echo(f"  now:      {difference.now}"[:_WIDE])
    if difference is not None:
        # Errors, such as a file that is no recording, end with 2.
        raise click.exceptions.Exit(1)


def _show(found: compare.Comparison, title: str, as_json: bool) -> None:
    """Print the makespan of a graph under each policy, and its steals."""
    if as_json:
        click.echo(json.dumps(found.as_dict()))
        return
    cluster = f"{found.workers} virtual workers, {found.threads} threads"
    bound = duration(found.lower_bound)
    out = console()
    print_facts(
        out, {"graph": f"{found.graph}, {found.tasks} tasks", "cluster": cluster, "lower bound": bound}
    )
    rows = [
        (
            row.policy,
            duration(row.makespan),
            f"{row.over_lower_bound:.3f}",
            f"{100 * row.utilization:.1f} %",
            *map(str, (row.confirmed, row.refused, row.stale)),
            size(row.bytes_moved),
        )
        for row in found.rows
    ]
    table(out, title, _COLUMNS, rows)
