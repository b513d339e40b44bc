"""The command line: `dask ferro run | import | simulate | replay | cluster | check | pools | jobs | top | config`.

Every command calls functions that Python code can call as well.  Every `dask` command imports this module, so it
imports only click; a command imports the rest when it runs.  `commands.faults` has the exit statuses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.check import check
from dask_ferro.commands.config import config as config_
from dask_ferro.commands.faults import Group, leave
from dask_ferro.commands.jobs import jobs
from dask_ferro.commands.pools import pools
from dask_ferro.commands.replay import replay
from dask_ferro.commands.top import top

ARRAY_FILES = (".npy", ".npz")


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
    if path is not None and path.suffix not in ARRAY_FILES:
        raise click.BadParameter(f"{str(path)!r} ends in neither {' nor '.join(ARRAY_FILES)}")
    return path


def _in_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse an output file whose folder does not exist, before a run that may take hours."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"folder {str(path.parent)!r} does not exist")
    return path


_AT_LEAST_ONE = click.IntRange(min=1)
_MODEL = click.Path(exists=True, dir_okay=False, readable=True)
_WRITTEN = click.Path(dir_okay=False, writable=True, path_type=Path)
_granularities = click.option(
    "--granularity",
    type=_granularity,
    default="auto",
    show_default=True,
    metavar="auto|op|model|SECONDS",
    help="How large a piece of the model one task computes.",
)


@click.group(name="ferro", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dask-ferro", prog_name="dask ferro")
def main() -> None:
    """ONNX models and tensor graphs on a Dask cluster."""


@main.command()
@click.argument("model", type=_MODEL, required=False)
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
    callback=lambda *given: _array_file(*given) and _in_folder(*given),
    help="Where to write the outputs.",
)
@click.option("--workers", type=_AT_LEAST_ONE, help="Worker processes to start  [default: one per core]")
@click.option("--threads", type=_AT_LEAST_ONE, help="Threads of each  [default: 1]")
@click.option(
    "--batch",
    type=_AT_LEAST_ONE,
    help="Rows per task  [default: a chunk per thread, where rows are independent]",
)
@click.option("--rows", type=_AT_LEAST_ONE, help="Rows of synthetic input, where there is no --input.")
@click.option("--scheduler", metavar="ADDRESS", help="Use a running cluster instead of starting one.")
@_granularities
@click.option("--dashboard/--no-dashboard", default=False, help="Serve Dask's dashboard; needs bokeh.")
@click.option("--repeat", type=_AT_LEAST_ONE, default=1, show_default=True, help="How often to run it.")
@click.option(
    "--trace",
    metavar="FILE",
    help="Record the last run: .ferrotrace (for replay) or .json (for Perfetto).",
)
@arguments.as_json
@arguments.debug
def run(**options: Any) -> None:
    """Run a MODEL or a built-in graph, and compare with projections.

    \b
    dask ferro run mlp.onnx --input x.npy --output y.npy --workers 4
    dask ferro run --workload imbalanced --workers 8 --trace run.json
    """
    # Before the imports, which take a second: a wrong call is reported at once.
    _check_run(options)
    from dask_ferro.runtime.local.array_files import check_writable
    from dask_ferro.runtime.local.model_run import RunRequest, trial
    from dask_ferro.views.progress import bar
    from dask_ferro.views.report import show_trial
    from dask_ferro.views.terminal import console

    as_json, debug = options.pop("as_json"), options.pop("debug")
    # Before the run, which may take hours.
    if options["sink"]:
        check_writable(options["sink"])
    # On stderr: with --json, stdout has the one object and nothing else.
    remarks = console(sys.stderr)
    # Dask's own log is shown with --debug only.
    done = trial(RunRequest(**options, quiet=not debug), tell=remarks.print, watching=bar)
    if as_json:
        click.echo(json.dumps(done.as_dict()))
    else:
        show_trial(console(), done)


def _check_run(options: dict[str, Any]) -> None:
    def given(*names: str) -> list[str]:
        flags = {"source": "--input", "params": "--param"}
        return [flags.get(n, f"--{n}") for n in names if options[n] not in (None, (), False)]

    if bool(options["model"]) == bool(options["workload"]):
        raise click.UsageError("give either a MODEL or --workload NAME")
    if options["workload"] and (extra := given("source", "rows", "batch")):
        raise click.UsageError(
            f"{', '.join(extra)} goes with a MODEL: a built-in graph has its inputs, see --param"
        )
    if options["model"] and given("params"):
        raise click.UsageError("--param goes with --workload")
    if options["scheduler"] and (extra := given("workers", "threads", "dashboard")):
        raise click.UsageError(f"{', '.join(extra)} is for a cluster to start, not for --scheduler")
    if options["source"] and options["rows"]:
        raise click.UsageError("--rows is for synthetic inputs, not for --input")


@main.command(name="import")
@click.argument("model", type=_MODEL)
@click.option("--batch", type=_AT_LEAST_ONE, help="Rows to project the costs for  [default: 1]")
@click.option(
    "--workers", type=_AT_LEAST_ONE, help="Workers of one thread to cut for  [default: one per core]"
)
@_granularities
@arguments.as_json
@arguments.debug
def import_(
    model: str, batch: int | None, workers: int | None, granularity: Any, as_json: bool, debug: bool
) -> None:
    """Show a MODEL's inputs, operators, engines, costs and problems.

    Costs are projected.  The exit status is 1 if the model has problems; all of them are listed.
    """
    from dask_ferro.lower.model.inventory import inventory
    from dask_ferro.views.report import show_inventory
    from dask_ferro.views.terminal import console

    found = inventory(model, batch=batch, workers=workers, granularity=granularity)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        show_inventory(console(), found)
    # After the whole report, so that one run shows all problems.
    if found.problems:
        raise click.exceptions.Exit(1)


@main.command()
@click.option(
    "--graph", type=_MODEL, required=True, help="A recorded run (.ferrotrace) or a WfCommons file (.json)."
)
@click.option("--workers", type=_AT_LEAST_ONE, default=8, show_default=True, help="Virtual workers.")
@click.option("--threads", type=_AT_LEAST_ONE, default=1, show_default=True, help="Threads of each.")
@arguments.policies("Policies to compare.")
@click.option("--bundles", is_flag=True, help="Compare with the graph in bundles, as ff.bundled makes them.")
@arguments.seed
@arguments.as_json
@arguments.debug
def simulate(
    graph: str,
    workers: int,
    threads: int,
    policies: tuple[str, ...],
    bundles: bool,
    seed: int,
    as_json: bool,
    debug: bool,
) -> None:
    """Simulate a task graph under several policies, and compare.

    \b
    dask ferro simulate --graph run.ferrotrace --workers 64
    dask ferro simulate --graph workflow.json --workers 1000 --policy informed,none
    """
    from dask_ferro.runtime.plugin.settings import Settings
    from dask_ferro.simulate import compare
    from dask_ferro.simulate.cluster import VirtualCluster
    from dask_ferro.views.simulation import show_comparison
    from dask_ferro.views.terminal import console

    # With the user's own settings, as `ff.install` would use them here.
    cluster, rules = VirtualCluster.local(workers, threads), Settings.configured().rules
    recorded = compare.recorded(graph)
    found = compare.compare(recorded, cluster, policies, rules=rules, seed=seed, bundles=bundles)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        show_comparison(console(), found)


@main.command()
@click.option(
    "--config",
    "source",
    metavar="NAME|FILE",
    help="A shipped job configuration, or a file of Dask's configuration  [default: ~/.config/dask].",
)
@click.option(
    "--config-name",
    default="slurm",
    show_default=True,
    metavar="SECTION",
    help="The section of `jobqueue` that describes the jobs.",
)
@click.option("--minimum", type=click.IntRange(min=0), help="Workers, at least.")
@click.option("--maximum", type=_AT_LEAST_ONE, help="Workers, at most.")
@click.option("--name", help="Name of the cluster and of its jobs in the queue.")
@click.option(
    "--scheduler-file",
    type=_WRITTEN,
    callback=_in_folder,
    help="Where to write the scheduler's address while it runs.",
)
@click.option("--dry-run", is_flag=True, help="Print the job script and start nothing.")
@arguments.debug
def cluster(
    source: str | None,
    config_name: str,
    minimum: int | None,
    maximum: int | None,
    name: str | None,
    scheduler_file: Path | None,
    dry_run: bool,
    debug: bool,
) -> None:
    """Start a cluster on a batch system that scales with the work.

    It prints the scheduler's address and a line for each change.  Ctrl-C ends it and its jobs.

    \b
    dask ferro cluster --config slurm-gpu --minimum 0 --maximum 16
    dask ferro cluster --config ./mine.yaml --dry-run
    """
    from dask_ferro.runtime.elastic.options import bounds_of
    from dask_ferro.runtime.jobs.job_config import use
    from dask_ferro.runtime.local.foreground import scripts

    if source is not None:
        use(source)
    if dry_run:
        _print_scripts(scripts(config_name=config_name))
        return
    from dask_ferro.runtime.local.foreground import stand
    from dask_ferro.views.terminal import console, facts

    def started(cluster: Any) -> None:
        rows = (
            ("scheduler", cluster.scheduler_address),
            ("dashboard", cluster.dashboard_link or "none"),
            ("workers", f"{bounds['minimum']:g} to {bounds['maximum']:g}"),
        )
        facts(console(), rows)

    # One name for both: workers are found in the queue by the name that Dask shows.
    named = {} if name is None else {"name": name, "job_name": name}
    bounds = bounds_of(minimum, maximum)
    stopped_by = stand(bounds, started, click.echo, scheduler_file, config_name=config_name, **named)
    if stopped_by is None:
        # Not an error: a client asked for it.
        click.echo("a client shut the cluster down", err=True)
    else:
        leave(128 + stopped_by, f"stopped by {stopped_by.name}")


def _print_scripts(scripts: Mapping[str, str]) -> None:
    for pool, script in scripts.items():
        click.echo((f"# ---- pool {pool}\n" if len(scripts) > 1 else "") + script)


for _command in (check, pools, jobs, replay, top, config_):
    main.add_command(_command)
