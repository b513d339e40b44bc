"""What `dask ferro config` prints: a row for each option; and the page of all of them, docs/options.md."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill, indent
from typing import Any

import yaml
from rich.console import Console

from dask_ferro.config import Row
from dask_ferro.options import Option
from dask_ferro.origins import DEFAULT, SECTION
from dask_ferro.runtime.jobs.keywords import ClusterKeywords, PoolKeywords, keywords_of
from dask_ferro.runtime.slurm.job_lifecycle import Patience
from dask_ferro.sections import OPTIONS
from dask_ferro.views.terminal import table

_COLUMNS = ("option", "value", "unit", "default", "from")
_HEAD = """# Options

All options of dask_ferro, with their defaults. They are a section of Dask's configuration: set one in a YAML file of
`~/.config/dask`, by an environment variable (`DASK_FERRO__CACHE__BYTES=4GiB`), or for a while by
`dask.config.set({"ferro.cache.bytes": "4GiB"})`. Durations and sizes are numbers of the unit, or text such as `5ms` and
`64KiB`. A key that is not here is an error. `dask ferro config` prints the values that hold, and where each was set.
Below stand the keywords of `ff.SLURMCluster`, which are read the same way.

This page is printed by `dask ferro config --markdown`.
"""


_CALLED = """
# Keywords of ff.SLURMCluster

Beside dask-jobqueue's own. They are given in the call; or, with a hyphen for each underscore, in a job configuration.
`ff.PBSCluster` and `ff.BatchCluster` have them too, but for `journal` and `keep`.
"""
_KEYWORDS = {"the cluster": ClusterKeywords, "a pool, in `pools`": PoolKeywords, "`patience`": Patience}


def show_options(out: Console, rows: Sequence[Row], explain: bool = False) -> None:
    """Print a table of options; with `explain`, each with what it does."""
    if not explain:
        cells = [
            (f"{SECTION}.{row.key}", written(row.value), row.unit, written(row.default), row.origin)
            for row in rows
        ]
        table(out, "options", _COLUMNS, cells, left=len(_COLUMNS))
        return
    for row in rows:
        out.print(f"{SECTION}.{row.key}: {written(row.value)}", style="bold")
        is_default = row.origin == DEFAULT
        told = "the default" if is_default else f"default {written(row.default)}; from {row.origin}"
        out.print(f"  {row.unit}; {told}", style="dim", soft_wrap=True)
        out.print(indent(fill(row.help, 100), "  "), soft_wrap=True)


def written(value: Any) -> str:
    """Return a value as it is written in YAML.

    >>> written(None), written(True), written("5ms"), written(0.5), written(object)
    ('null', 'true', '5ms', '0.5', "<class 'object'>")
    """
    try:
        return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n...\n").strip()
    except yaml.YAMLError:  # an object that a program has set
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
