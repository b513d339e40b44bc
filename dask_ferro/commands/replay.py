"""`dask ferro replay`: simulate a recorded run under other policies, or repeat the decisions of recorded events.

Every `dask` command imports this module, so it imports only click.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Command

if TYPE_CHECKING:
    from dask_ferro.policy.recording.replay import Difference, Moves, Replayed
    from dask_ferro.policy.recording.values import Json


# How many differing decisions are shown, and how many characters of a line.
_SHOWN, _WIDE = 20, 2000
_FILE = click.Path(exists=True, dir_okay=False)


def _set(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Json]:
    """Return parameters of stealing by name."""
    from dask_ferro import config
    from dask_ferro.policy.stealing.informed import StealingParameters

    pairs = [value.partition("=") for value in values]
    if wrong := [value for value, (_, equals, _) in zip(values, pairs, strict=True) if not equals]:
        raise click.BadParameter(f"{wrong[0]!r} is not of the form NAME=NUMBER", ctx, param)
    given = {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}
    defaults = StealingParameters()
    config.refuse_unknown("--set", given, [one.name for one in fields(defaults)])
    try:
        return {name: type(getattr(defaults, name))(value) for name, value in given.items()}
    except ValueError as error:
        raise click.BadParameter(f"{error}; wanted seconds or another number", ctx, param) from None


@click.command(cls=Command)
@click.argument("recorded", metavar="[RUN.ferrotrace]", type=_FILE, required=False)
@click.option("--events", type=_FILE, metavar="FILE", help="Recorded events, instead of a recorded run.")
@arguments.policies(
    "Policies to simulate; stock-none is stock Dask without stealing. With --events: one policy to compare."
)
@click.option(
    "--set",
    "parameters",
    callback=_set,
    multiple=True,
    metavar="NAME=NUMBER",
    help="With --events: a parameter of stealing for the compared policy, such as threshold=0.02.",
)
@arguments.seed
@arguments.as_json
@arguments.debug
@click.pass_context
def replay(
    ctx: click.Context,
    recorded: str | None,
    events: str | None,
    policies: tuple[str, ...],
    parameters: dict[str, Json],
    seed: int,
    as_json: bool,
    debug: bool,
) -> None:
    """Simulate a recorded run under other policies, and compare.

    The virtual workers are those of the recording.

    \b
    dask ferro run --workload imbalanced --workers 8 --trace run.ferrotrace
    dask ferro replay run.ferrotrace --policy informed,stock

    With --events, repeat the decisions on a scheduler's recorded events (`ferro.scheduler.record: FILE`, or
    `ff.trace(client, events=True)`), and report the first decision that differs; the exit status is then 1.

    \b
    dask ferro replay --events run.events
    dask ferro replay --events run.events --policy last-victim --set threshold=0.02
    """
    if bool(recorded) == bool(events):
        raise click.UsageError("give either RUN.ferrotrace or --events FILE")
    if events:
        # The default policies are for runs; recorded events name their own policy.
        is_asked = ctx.get_parameter_source("policies") is not click.core.ParameterSource.DEFAULT
        _decide_again(events, policies if is_asked else (), parameters, as_json)
    elif parameters:
        raise click.UsageError("--set goes with --events")
    else:
        _run_again(str(recorded), policies, seed, as_json)


def _run_again(recorded: str, policies: tuple[str, ...], seed: int, as_json: bool) -> None:
    from dask_ferro.runtime.plugin.settings import Settings
    from dask_ferro.simulate.replay import replay as replayed
    from dask_ferro.trace import Trace
    from dask_ferro.views.simulation import show_comparison
    from dask_ferro.views.terminal import console

    trace = Trace.load(recorded)
    rules = Settings.configured().rules
    # With the user's own settings, as `ff.install` would use them here.
    found = replayed(trace, policies, name=Path(recorded).name, rules=rules, seed=seed)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
        return
    show_comparison(console(), found, title="recorded, and simulated")
    if again := trace.ran_again:
        click.echo(
            f"the recording has {again:,} repeated computations; the simulation runs each task once, so the recorded"
            " run did more work than the simulated ones",
            err=True,
        )
    if dropped := trace.counts.get("dropped"):
        click.echo(f"the recording is incomplete: it dropped its first {dropped:,.0f} tasks", err=True)


def _decide_again(path: str, policies: tuple[str, ...], parameters: dict[str, Json], as_json: bool) -> None:
    from dask_ferro.policy.recording.replay import replay as replayed
    from dask_ferro.policy.stealing.policies import POLICIES

    if len(policies) > 1:
        raise click.UsageError(f"--policy: got {len(policies)} policies, wanted one with --events")
    policy = policies[0] if policies else None
    # Stock Dask's policies have no scheduling core that could decide on recorded events.
    if policy not in (None, *POLICIES):
        raise click.BadParameter(
            f"got {policy!r}, wanted one of {', '.join(POLICIES)}", param_hint="--policy"
        )
    # Bytes that are no text are replaced, and then refused as not being a recording.
    with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
        found = replayed(lines, path, policy=policy, parameters=parameters)
    if as_json:
        click.echo(json.dumps(_as_dict(found)))
    else:
        _show(found, is_beside=policy is not None or bool(parameters))
    if found.difference is not None:
        # Errors, such as a file that is no recording, end with 2.
        raise click.exceptions.Exit(1)


def _as_dict(found: Replayed) -> dict[str, Json]:
    difference = found.difference
    others = [decision for decision in found.decisions if decision.recorded != decision.other]
    return {
        "policy": found.policy,
        "events": found.events,
        "instructions": found.instructions,
        "same": difference is None,
        "difference": None
        if difference is None
        else {**difference._asdict(), "event": str(difference.event)},
        "cut": found.cut,
        "ended": found.ended,
        "steps": len(found.decisions),
        "other_steps": [
            {"at": one.at, "recorded": str(one.recorded), "other": str(one.other)} for one in others
        ],
    }


def _show(found: Replayed, is_beside: bool) -> None:
    click.echo(f"{found.events:,} events under {found.policy}, {found.instructions:,} instructions")
    if found.cut:
        click.echo("the last line is incomplete and was ignored", err=True)
    if found.ended:
        click.echo(f"the recording stopped early: {found.ended}", err=True)
    if found.difference is not None:
        _show_difference(found.difference)
        return
    click.echo("all decisions are the same")
    if is_beside:
        others = [decision for decision in found.decisions if decision.recorded != decision.other]
        click.echo(f"{len(found.decisions):,} steps moved tasks, {len(others):,} of them differ")
        for decision in others[:_SHOWN]:
            click.echo(
                f"  at {decision.at:.6f}: {_moves(decision.recorded)}; the other: {_moves(decision.other)}"
            )


def _moves(moves: Moves) -> str:
    told = ", ".join(f"{key} from {victim} to {thief}" for key, victim, thief in moves) or "none"
    return told if len(told) <= _WIDE else f"{told[:_WIDE]} ..."


def _show_difference(found: Difference) -> None:
    click.echo(f"event {found.number:,}, at {found.at:.6f}: {found.event}"[:_WIDE])
    click.echo(f"  recorded: {found.recorded}"[:_WIDE])
    click.echo(f"  now:      {found.now}"[:_WIDE])
