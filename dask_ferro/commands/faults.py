"""How a command ends: one status for each kind of fault, and one message.

0; 1 for what failed (a model, an op, a task), with the message; 2 for bad arguments, input files or configuration,
with one line; 128 and its number after a signal: 130 after Ctrl-C.  Reports go to standard output, the rest to standard
error.
Click alone is imported here: every `dask` command imports this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from dask_ferro.commands.early import over


@contextmanager
def one_status_per_fault(debug: bool = False) -> Iterator[None]:
    """Turn exceptions into one message and the status that says who has to act."""
    from dask_ferro.errors import ConfigError

    try:
        yield
    except click.UsageError as error:
        # The help that was asked for by no arguments at all, which click prints.
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            raise
        leave(
            2, f"{error.ctx.command_path if error.ctx else 'dask ferro'}: {error.format_message()}", line=True
        )
    except KeyboardInterrupt:
        leave(130, "interrupted")
    except (click.exceptions.Exit, click.ClickException, click.Abort):
        raise
    except ConfigError as error:
        leave(2, f"dask ferro: {error}", line=True, debug=debug)
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever a task raised ends here
        # Our own errors say what happened and where; of others the kind tells more than the message.
        told = type(error).__module__.startswith("dask_ferro")
        leave(1, f"dask ferro: {error if told else f'{type(error).__name__}: {error}'}", debug=debug)


def leave(status: int, message: str, *, line: bool = False, debug: bool = False) -> None:
    """Print why, and end the command with a status.

    Parameters
    ----------
    line : bool
        Whether the message is made one line.
    debug : bool
        Whether the traceback of the present error comes before it.
    """
    if debug:
        import traceback

        traceback.print_exc()
    click.echo(" ".join(message.split()) if line else message, err=True)
    raise click.exceptions.Exit(status)


class Command(click.Command):
    """A command whose faults follow the rules above, whichever program calls it."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with one_status_per_fault():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        from dask_ferro.runtime.local.sigint import kept

        with one_status_per_fault(debug=bool(ctx.params.get("debug"))), kept():
            # A group's imports are over when it has found its command.
            if not isinstance(self, click.Group):
                over()
            return super().invoke(ctx)


class Group(Command, click.Group):
    """A group of such commands."""

    command_class = Command
