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


def workload(help: str) -> Callable[[F], F]:
    """Return the option --workload, the name of a built-in graph."""
    return click.option("--workload", metavar="NAME", help=help)


def parameters(help: str) -> Callable[[F], F]:
    """Return the option --param, for parameters of a built-in graph."""
    return click.option("--param", "params", type=_parameter, multiple=True, metavar="NAME=NUMBER", help=help)


def _parameter(text: str) -> tuple[str, int | float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number) if set(number) & set(".e") else int(number)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form NAME=NUMBER") from None


def policies(help: str) -> Callable[[F], F]:
    """Return the option --policy, a comma-separated list of policies."""
    return click.option(
        "--policy",
        "policies",
        type=_policies,
        default="informed,last-victim,none,stock",
        show_default=True,
        metavar="NAME,...",
        help=help,
    )


def _policies(text: str) -> tuple[str, ...]:
    # Imported late: `dask --help` loads every command, and should not become slower for ours.
    from dask_ferro.simulate.engine import POLICIES

    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if name not in POLICIES]:
        raise click.BadParameter(
            f"no policy {', '.join(map(repr, wrong))}; wanted some of {', '.join(POLICIES)}"
        )
    return tuple(dict.fromkeys(names))
