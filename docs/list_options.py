"""Print the page docs/options.md: all options, by section.

python docs/list_options.py > docs/options.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from dask_ferro.config import SECTION
from dask_ferro.options import OPTIONS, Option, options_of
from dask_ferro.slurm.job_lifecycle import Patience
from dask_ferro.slurm.keywords import ClusterKeywords, PoolKeywords

_HEAD = """# Options

All options of dask_ferro, with their defaults. They are the section `ferro` of Dask's configuration: set one in a YAML
file in `~/.config/dask`, by an environment variable (`DASK_FERRO__CACHE__BYTES=4GiB`), or in a block by
`dask.config.set({"ferro.cache.bytes": "4GiB"})`. Durations and sizes are numbers of the unit, or text such as `5ms` and
`64KiB`. An unknown key is an error. `dask config get ferro` prints what is set, if anything is.
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


def to_yaml(value: Any) -> str:
    """Return a value in YAML."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n...\n").strip()


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


if __name__ == "__main__":
    print(page(), end="")
