"""Arguments that several commands take.  Every `dask` command imports this module, so it imports only click."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
debug = click.option("--debug", is_flag=True, help="Show the traceback of an error.")
scheduler = click.option("--scheduler", metavar="ADDRESS", help="Address of a running cluster's scheduler.")
scheduler_file = click.option(
    "--scheduler-file", metavar="FILE", help="The file that `dask ferro cluster --scheduler-file` wrote."
)
seed = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Random seed, for ties and random victims.",
)


def policies(help: str) -> Callable[[F], F]:
    """Return the option --policy, a comma-separated list of policies."""
    return click.option(
        "--policy",
        "policies",
        type=_policies,
        default="informed,last-victim,none",
        show_default=True,
        metavar="NAME,...",
        help=help,
    )


def _policies(text: str) -> tuple[str, ...]:
    # Imported late: `dask --help` loads every command, and should not become slower for ours.
    from dask_ferro.policy.stealing.policies import POLICIES

    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if name not in POLICIES]:
        raise click.BadParameter(
            f"no policy {', '.join(map(repr, wrong))}; wanted some of {', '.join(POLICIES)}"
        )
    return tuple(dict.fromkeys(names))
