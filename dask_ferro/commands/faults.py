"""Exit statuses of the commands: one status for each kind of error, with one message.

0: success.  1: a model, an op or a task failed.  2: bad arguments, input files or configuration; the message is one
line.  128 plus the signal's number after a signal: 130 after Ctrl-C.  Reports go to standard output, messages to
standard error.

Every `dask` command imports this module, so it imports only click.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click


@contextmanager
def one_status_per_fault(debug: bool = False) -> Iterator[None]:
    """Turn an exception of the block into one message and its exit status."""
    from dask_ferro.errors import ConfigError

    try:
        yield
    except click.UsageError as error:
        # Without any arguments, click prints the help.
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            raise
        leave(
            2, f"{error.ctx.command_path if error.ctx else 'dask ferro'}: {error.format_message()}", line=True
        )
    except KeyboardInterrupt:
        # Also while the command still imports, when nothing has been started that would have to be stopped.
        leave(130, "interrupted")
    except (click.exceptions.Exit, click.ClickException, click.Abort):
        # Click prints these itself, and a group above must not count them as errors of its own: a command that has
        # left with a status arrives here again.
        raise
    except ConfigError as error:
        leave(2, f"dask ferro: {error}", line=True, debug=debug)
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever a task raised ends here
        # Our own messages say what happened and where; other exceptions need their type to be understood.
        told = type(error).__module__.startswith("dask_ferro")
        leave(1, f"dask ferro: {error if told else f'{type(error).__name__}: {error}'}", debug=debug)


def leave(status: int, message: str, *, line: bool = False, debug: bool = False) -> None:
    """Print a message to standard error, and end the command with a status.

    Parameters
    ----------
    line : bool
        Whether the message is joined to one line.
    debug : bool
        Whether to print the traceback of the current exception first.
    """
    # Only on request: the message has the reason, which a traceback in a job's log would hide.
    if debug:
        import traceback

        traceback.print_exc()
    click.echo(" ".join(message.split()) if line else message, err=True)
    raise click.exceptions.Exit(status)


def _wants_traceback(ctx: click.Context) -> bool:
    """Return whether --debug was given to a command, or to the group before it."""
    return bool(ctx.params.get("debug")) or (ctx.parent is not None and _wants_traceback(ctx.parent))


class Command(click.Command):
    """A click command with the exit statuses above, also when `dask` calls it."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with one_status_per_fault():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        from dask_ferro.runtime.local.sigint import kept

        with one_status_per_fault(debug=_wants_traceback(ctx)), kept():
            return super().invoke(ctx)


class Group(Command, click.Group):
    """A group of such commands."""

    command_class = Command
