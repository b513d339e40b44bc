"""The output of `dask ferro config`: a table of options and keywords, or the page docs/options.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import fill, indent
from typing import Any

import yaml
from rich.console import Console

from dask_ferro.config import Row
from dask_ferro.options import Option
from dask_ferro.origins import DEFAULT, SECTION
from dask_ferro.runtime.jobs.job_config import JobConfig
from dask_ferro.runtime.jobs.keywords import ClusterKeywords, PoolKeywords, keywords_of
from dask_ferro.runtime.slurm.job_lifecycle import Patience
from dask_ferro.sections import OPTIONS
from dask_ferro.views.terminal import table

_COLUMNS = ("option", "value", "unit", "default", "from")
# Columns of a paragraph: longer lines are hard to read.
_PROSE = 102
_HEAD = """# Options

All options of dask_ferro, with their defaults. They are the section `ferro` of Dask's configuration: set one in a YAML
file in `~/.config/dask`, by an environment variable (`DASK_FERRO__CACHE__BYTES=4GiB`), or in a block by
`dask.config.set({"ferro.cache.bytes": "4GiB"})`. Durations and sizes are numbers of the unit, or text such as `5ms` and
`64KiB`. An unknown key is an error. `dask ferro config` prints the current values, and where each was set.
The keywords of `ff.SLURMCluster` follow; their values are written the same way, and
`dask ferro config cluster --config FILE` prints those of a job configuration.

This page is printed by `dask ferro config --markdown`.
"""


_CALLED = """
# Keywords of ff.SLURMCluster

These come in addition to dask-jobqueue's own. Pass them in the call, or write them in a job configuration with a hyphen
for each underscore.
"""
_KEYWORDS = {"the cluster": ClusterKeywords, "a pool, in `pools`": PoolKeywords, "`patience`": Patience}


def keyword_rows(job: JobConfig | None = None) -> list[Row]:
    """Return the keywords of a cluster with the values of a job configuration; without one, their defaults.

    Keywords that a program passes in a call are not known here.
    """
    given: Mapping[str, Any] = job.keywords if job else {}
    origin = str(job.path) if job else ""
    found = [*_keyword_rows("cluster", ClusterKeywords, given, origin)]
    found += _keyword_rows("cluster.patience", Patience, given.get("patience", {}), origin)
    for name, own in given.get("pools", {} if job else {"NAME": {}}).items():
        # Keywords that a pool does not set are the cluster's.
        found += _keyword_rows(f"cluster.pools.{name}", PoolKeywords, {**given, **own}, origin)
    return found


def of_job(rows: Iterable[Row], job: JobConfig) -> list[Row]:
    """Return options with the values that a job configuration sets for its own cluster."""
    given = {f"{SECTION}.elastic.{name.replace('_', '-')}": value for name, value in job.elastic.items()}
    given |= job.settings
    return [
        row._replace(value=given[row.key], origin=str(job.path)) if row.key in given else row for row in rows
    ]


def _keyword_rows(path: str, kind: type, given: Mapping[str, Any], origin: str) -> Iterator[Row]:
    for name, option in keywords_of(kind).items():
        # Mappings are listed entry by entry, by `keyword_rows`.
        if option.kind != "mapping":
            value, where = (given[name], origin) if name in given else (option.default, DEFAULT)
            yield Row(f"{path}.{name}", value, option.unit, option.default, where, option.help)


def show_options(out: Console, title: str, rows: Sequence[Row], explain: bool = False) -> None:
    """Print a table of options by their full names; with `explain`, a paragraph for each with its help text."""
    if not explain:
        cells = [(row.key, written(row.value), row.unit, written(row.default), row.origin) for row in rows]
        table(out, title, _COLUMNS, cells, left=len(_COLUMNS))
        return
    for row in rows:
        out.print(f"{row.key}: {written(row.value)}", style="bold")
        is_default = row.origin == DEFAULT
        told = "the default" if is_default else f"default {written(row.default)}; from {row.origin}"
        out.print(f"  {row.unit}; {told}", style="dim", soft_wrap=True)
        out.print(indent(fill(row.help, min(out.width, _PROSE) - 2), "  "), soft_wrap=True)


def written(value: Any) -> str:
    """Return a value in YAML.

    >>> written(None), written(True), written("5ms"), written(0.5), written(object)
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
        sections.setdefault(key.rpartition(".")[0], {})[key] = option
    configured = (
        _section(f"{SECTION}{'.' * bool(name)}{name}", options) for name, options in sections.items()
    )
    called = (_section(title, keywords_of(kind)) for title, kind in _KEYWORDS.items())
    return _HEAD + "".join(configured) + _CALLED + "".join(called)


def _section(title: str, options: dict[str, Option]) -> str:
    lines = [
        f"\n## {title}\n",
        "| option | default | unit | what it does |",
        "|---|---|---|---|",
    ]
    for key, option in options.items():
        last = key.rpartition(".")[2]
        lines.append(
            f"| `{last}` | `{written(option.default)}` | {option.unit} | {option.help.replace('|', '&#124;')} |"
        )
    return "\n".join(lines) + "\n"
