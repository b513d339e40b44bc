"""`dask ferro replay`: simulate a recorded run under other policies, or decide again on recorded decisions.

Every `dask` command imports this module, so it imports only click.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Command

# How many characters of a list of moves are shown.
_WIDE = 2000


@click.command(cls=Command)
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@arguments.policies("Policies to simulate.")
@arguments.seed
@arguments.as_json
@arguments.debug
@click.pass_context
def replay(
    ctx: click.Context, path: str, policies: tuple[str, ...], seed: int, as_json: bool, debug: bool
) -> None:
    """Simulate a recorded run under other policies, and compare.

    The virtual workers are those of the recording.

    \b
    dask ferro run --workload imbalanced --workers 8 --trace run.ferrotrace
    dask ferro replay run.ferrotrace --policy informed,none

    From a file of decisions, which a scheduler writes for `ferro.scheduler.record`, each decision is made again by its
    own policy and parameters, and the first that differs is reported; the exit status is then 1, as `git bisect run`
    expects it.

    \b
    dask ferro replay run.decisions
    """
    from dask_ferro.policy.stealing.decision import BEGINS

    # Bytes that are no text are replaced, and then refused as not being a recording.
    with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
        if lines.read(len(BEGINS)) != BEGINS:
            _run_again(path, policies, seed, as_json)
            return
    if ctx.get_parameter_source("policies") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--policy is for a recorded run; a recorded decision has its own policy")
    _decide_again(path, as_json)


def _run_again(path: str, policies: tuple[str, ...], seed: int, as_json: bool) -> None:
    from dask_ferro.runtime.plugin.settings import Settings
    from dask_ferro.simulate.compare import replay as replayed
    from dask_ferro.trace import Trace
    from dask_ferro.views.simulation import show_comparison
    from dask_ferro.views.terminal import console

    trace = Trace.load(path)
    rules = Settings.configured().rules
    # With the user's own settings, as `ff.install` would use them here.
    compared = replayed(trace, policies, name=Path(path).name, rules=rules, seed=seed)
    if as_json:
        click.echo(json.dumps(compared.as_dict()))
        return
    show_comparison(console(), compared, title="recorded, and simulated")
    if again := trace.ran_again:
        click.echo(
            f"the recording has {again:,} repeated computations; the simulation runs each task once, so the recorded"
            " run did more work than the simulated ones",
            err=True,
        )
    if dropped := trace.counts.get("dropped"):
        click.echo(f"the recording is incomplete: it dropped its first {dropped:,.0f} tasks", err=True)


def _decide_again(path: str, as_json: bool) -> None:
    from dask_ferro.policy.stealing.decision import replay as replayed

    with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
        same = replayed(lines, path)
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
