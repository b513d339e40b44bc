"""`dask ferro config`: a table of options, or the page docs/options.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
import yaml

from dask_ferro import config as configuration
from dask_ferro.commands.arguments import as_json
from dask_ferro.commands.faults import Command, exit_with
from dask_ferro.config import SECTION
from dask_ferro.errors import ConfigError, did_you_mean
from dask_ferro.options import OPTIONS, Option, options_of
from dask_ferro.slurm.job_lifecycle import Patience
from dask_ferro.slurm.keywords import ClusterKeywords, PoolKeywords
from dask_ferro.views.terminal import show_wide, table

_COLUMNS = ("option", "value", "unit", "default")
_HEAD = """# Options

All options of dask_ferro, with their defaults. They are the section `ferro` of Dask's configuration: set one in a YAML
file in `~/.config/dask`, by an environment variable (`DASK_FERRO__CACHE__BYTES=4GiB`), or in a block by
`dask.config.set({"ferro.cache.bytes": "4GiB"})`. Durations and sizes are numbers of the unit, or text such as `5ms` and
`64KiB`. An unknown key is an error. `dask ferro config` prints the current values.

This page is printed by `dask ferro config --markdown`.
"""
_CALLED = """
# Keywords of ff.SLURMCluster

These come in addition to dask-jobqueue's own. Pass them in the call, or write them next to dask-jobqueue's in the
section `jobqueue.slurm` of Dask's configuration (or the one that `config_name` names), with a hyphen for each
underscore.
"""
_KEYWORDS = {
    "the cluster": ClusterKeywords,
    "a pool, in `pools`": PoolKeywords,
    "a name, in `timeouts`": Patience,
}


@click.command(cls=Command)
@click.argument("prefix", default="")
@click.option("--changed", is_flag=True, help="Show only options that differ from their defaults.")
@as_json
@click.option("--markdown", is_flag=True, help="Print the page docs/options.md: the defaults, explained.")
def config(prefix: str, changed: bool, as_json: bool, markdown: bool) -> None:
    """Print all options with values, units and defaults.

    These are the section `ferro` of Dask's configuration.  PREFIX is the beginning of a key, such as scheduler or
    elastic.failures.  Wrong keys and values are listed after the table; the exit status is then 2.

    \b
    dask ferro config scheduler
    DASK_FERRO__CACHE__BYTES=4GiB dask ferro config --changed
    """
    # Without the current values, and so without what is wrong with them.
    if markdown:
        click.echo(page(), nl=False)
        return
    plain = prefix.removeprefix(f"{SECTION}.").replace("_", "-")
    values = {key: configuration.get(key) for key in OPTIONS if key.startswith(plain)}
    if not values:
        close = did_you_mean(plain, [*OPTIONS, *(key.partition(".")[0] for key in OPTIONS)])
        raise ConfigError(f"no option begins with {prefix!r}{close}; `dask ferro config` prints all of them")
    if changed:
        values = {key: value for key, value in values.items() if value != OPTIONS[key].default}
    wrong = configuration.problems()
    if as_json:
        rows = [
            {"key": f"{SECTION}.{key}", "value": value, "default": OPTIONS[key].default}
            | {"unit": OPTIONS[key].unit, "help": OPTIONS[key].help, "variable": configuration.variable(key)}
            for key, value in values.items()
        ]
        click.echo(json.dumps({"options": rows, "problems": wrong}, default=str))
    elif values:
        cells = [
            (f"{SECTION}.{key}", to_yaml(value), OPTIONS[key].unit, to_yaml(OPTIONS[key].default))
            for key, value in values.items()
        ]
        show_wide(lambda out: table(out, "options", _COLUMNS, cells, left=len(_COLUMNS)))
    # Last, so that an error in one section does not hide the values of the others.
    if wrong:
        exit_with(2, "\n".join(f"dask ferro: configuration {clause}" for clause in wrong))


def to_yaml(value: Any) -> str:
    """Return a value in YAML.

    >>> to_yaml(None), to_yaml(True), to_yaml("5ms"), to_yaml(0.5), to_yaml(object)
    ('null', 'true', '5ms', '0.5', "<class 'object'>")
    """
    try:
        return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n...\n").strip()
    except yaml.YAMLError:
        # An object of another type, which a program has set.
        return repr(value)


def page() -> str:
    """Return all options as a page of Markdown, a table for each section."""
    sections: dict[str, dict[str, Option]] = {}
    for key, option in OPTIONS.items():
        section, _, name = f"{SECTION}.{key}".rpartition(".")
        sections.setdefault(section, {})[name] = option
    keywords = {title: options_of(kind) for title, kind in _KEYWORDS.items()}
    return (
        _HEAD + "".join(map(_section, sections.items())) + _CALLED + "".join(map(_section, keywords.items()))
    )


def _section(part: tuple[str, Mapping[str, Option]]) -> str:
    title, options = part
    lines = [
        f"\n## {title}\n",
        "| option | default | unit | what it does |",
        "|---|---|---|---|",
    ]
    for name, option in options.items():
        lines.append(
            f"| `{name}` | `{to_yaml(option.default)}` | {option.unit} | {option.help.replace('|', '&#124;')} |"
        )
    return "\n".join(lines) + "\n"
