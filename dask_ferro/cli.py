"""The command line: `dask ferro inspect`, `simulate`, `replay`, `cluster`, `check`, `top` and others.

Every command calls functions that Python code can call as well.  Every `dask` command imports this module, so it
imports only click; a command's module is imported when it is called.  `commands.faults` has the exit statuses.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from typing import Any

import click

from dask_ferro.commands.faults import Command

# The commands by the module of `dask_ferro.commands` that has them.
_MODULES = {
    "check": ("check",),
    "cluster": ("cluster",),
    "jobs": ("jobs", "pools"),
    "model": ("inspect",),
    "replay": ("simulate", "replay"),
    "top": ("top",),
}


class _Commands(Command, click.Group):
    """The commands, each imported when it is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(chain.from_iterable(_MODULES.values()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = next((module for module, names in _MODULES.items() if cmd_name in names), None)
        if module is None:
            return None
        found: Any = import_module(f"dask_ferro.commands.{module}")
        command: click.Command = getattr(found, cmd_name)
        return command


@click.group(name="ferro", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dask-ferro", prog_name="dask ferro")
def main() -> None:
    """ONNX models and tensor graphs on a Dask cluster."""
