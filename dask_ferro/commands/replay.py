"""`dask ferro replay RUN.ferrotrace`: what other policies would have made of a recorded run.

Click alone is imported here: `cli` gathers the commands whenever `dask` is called.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from dask_ferro.commands.faults import Command


def _policies(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Names with commas between them, each once."""
    from dask_ferro.simulate.engine import POLICIES

    names = [name.strip() for name in value.split(",")]
    if wrong := [name for name in names if name not in POLICIES]:
        raise click.BadParameter(
            f"no policy {', '.join(map(repr, wrong))}; wanted some of {', '.join(POLICIES)}", ctx, param
        )
    return tuple(dict.fromkeys(names))


@click.command(cls=Command)
@click.argument("recorded", metavar="RUN.ferrotrace", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--policy",
    "policies",
    callback=_policies,
    default="informed,last-victim,none,stock",
    show_default=True,
    metavar="NAME,...",
    help="Policies to try; stock-none is stock Dask without stealing.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of ties and random victims."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def replay(recorded: str, policies: tuple[str, ...], seed: int, as_json: bool, debug: bool) -> None:
    """Run a recorded run again on virtual workers like its own, under other policies, and compare.

    \b
    dask ferro run --dag imbalanced --workers 8 --trace run.ferrotrace
    dask ferro replay run.ferrotrace --policy informed,stock
    """
    from dask_ferro.runtime.plugin.settings import Settings
    from dask_ferro.simulate.replay import replay as replayed
    from dask_ferro.trace import Trace
    from dask_ferro.views.simulation import show_comparison
    from dask_ferro.views.terminal import console

    trace = Trace.load(recorded)
    rules = Settings.configured().rules
    # By the user's own settings: what is compared is what `ff.install` would do here.
    found = replayed(trace, policies, name=Path(recorded).name, rules=rules, seed=seed)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
        return
    show_comparison(console(), found, title="recorded, and simulated")
    if again := trace.ran_again:
        click.echo(
            f"{again:,} runs of the recording were of tasks that had run already, and the policies run each once:"
            " what was recorded is more work than what was simulated",
            err=True,
        )
    if dropped := trace.counts.get("dropped"):
        click.echo(
            f"the recording dropped {dropped:,.0f} tasks before these: it is not the whole run", err=True
        )
