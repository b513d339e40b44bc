"""Exit statuses of the commands: one status for each kind of error, with one message.

0: success.  1: a model, an op or a task failed.  2: bad arguments, input files or configuration; the message is one
line.  128 plus the signal's number after a signal: 130 after Ctrl-C.  Reports go to standard output, messages to
standard error.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from dask_ferro.errors import InputError

# Where a context, and those of the commands below it, keep whether --debug was given.
_DEBUG = "dask_ferro.debug"


@contextmanager
def one_status_per_fault(ctx: click.Context | None = None) -> Iterator[None]:
    """Turn an exception of the block into one message and its exit status."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "dask ferro"
        exit_with(2, " ".join(f"{path}: {error.format_message()}".split()))
    except KeyboardInterrupt:
        # Also while the command still imports, when nothing has been started that would have to be stopped.
        exit_with(130, "interrupted")
    except (click.exceptions.Exit, click.ClickException, click.Abort):
        # Click prints these itself, and a group above must not count them as errors of its own: a command that has
        # left with a status arrives here again.
        raise
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever a task raised ends here
        # Only on request: the message has the reason, which a traceback in a job's log would hide.
        if ctx is not None and ctx.meta.get(_DEBUG):
            traceback.print_exc()
        if isinstance(error, InputError):
            exit_with(2, " ".join(f"dask ferro: {error}".split()))
        # Our own messages say what happened and where; other exceptions need their type to be understood.
        is_ours = type(error).__module__.startswith("dask_ferro")
        exit_with(1, f"dask ferro: {error if is_ours else f'{type(error).__name__}: {error}'}")


def exit_with(status: int, message: str) -> None:
    """Print a message to standard error, and end the command with a status."""
    click.echo(message, err=True)
    raise click.exceptions.Exit(status)


def _remember(ctx: click.Context, param: click.Parameter, is_on: bool) -> None:
    ctx.meta[_DEBUG] = is_on or ctx.meta.get(_DEBUG)


class Command(click.Command):
    """A click command with the exit statuses above, also when `dask` calls it, and the option --debug."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text = "Show the traceback of an error."
        debug = click.Option(["--debug"], is_flag=True, expose_value=False, callback=_remember, help=text)
        self.params.append(debug)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with one_status_per_fault():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with one_status_per_fault(ctx):
            return super().invoke(ctx)
