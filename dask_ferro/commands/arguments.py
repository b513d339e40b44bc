"""Arguments that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dask_ferro.policy.stealing.policies import POLICIES

AT_LEAST_ONE = click.IntRange(min=1)
FILE = click.Path(exists=True, dir_okay=False, readable=True)

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
seed = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Random seed, for ties and random victims.",
)


def running_cluster(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select a running cluster, for `observe.top.where`."""
    text = "The file that `dask ferro cluster --scheduler-file` wrote."
    command = click.option("--scheduler-file", metavar="FILE", help=text)(command)
    text = "Address of a running cluster's scheduler  [default: DASK_SCHEDULER_ADDRESS]."
    return click.option("--scheduler", metavar="ADDRESS", help=text)(command)


def check_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse an output file whose folder does not exist, before a run that may take hours."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"folder {str(path.parent)!r} does not exist")
    return path


def _policies(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if name not in POLICIES]:
        raise click.BadParameter(
            f"no policy {', '.join(map(repr, wrong))}; wanted some of {', '.join(POLICIES)}"
        )
    return tuple(dict.fromkeys(names))


policies = click.option(
    "--policy",
    "policies",
    type=_policies,
    default="informed,last-victim,none",
    show_default=True,
    metavar="NAME,...",
    help="Policies to simulate.",
)
