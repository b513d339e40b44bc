"""The execution of one SLURM command with a time limit.

Each command runs in an environment without the variables of a batch job, in its own session; a failure is reported
with SLURM's message.  A command that hangs is killed, with all its children.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dask_ferro.runtime.slurm import parsing

# A command answers within milliseconds, on a busy site within seconds.  `sbatch` itself gives up on a dead controller
# after 9 s; if it is killed, a possible submission has to be looked for.
_LIMIT, _LIMITS = 10.0, {"sbatch": 30.0}
# For a killed command to be reaped.
_REAPED = 2.0

# A cluster object that runs in a job would hand that job's shape on to its workers (SLURM_CPUS_PER_TASK, ...); a
# user's SQUEUE_STATES or SCANCEL_INTERACTIVE would hide jobs.
_OWN = re.compile(r"SLURM_(?!CONF$|CONF_|CLUSTERS$|JWT$)|SQUEUE_|SCANCEL_|SACCT_|SBATCH_ARRAY_INX$")


class Refused(Exception):
    """A command failed: its message, and whether that may pass ("transient", "limit", "permanent", "unknown")."""

    def __init__(self, words: str, kind: str) -> None:
        super().__init__(words)
        self.words, self.kind = words, kind


class NotInstalled(Refused):
    """A command is not installed on this machine."""


class Printed(NamedTuple):
    """The output and the exit status of a command."""

    status: int
    out: str
    err: str


async def run(*command: str, stdin: str = "", pass_fds: Sequence[int] = ()) -> str:
    """Run a command of SLURM and return its output.

    It has its own session, so that Ctrl-C in a terminal does not interrupt a submission.

    Raises
    ------
    Refused
        With SLURM's message, or after the command's time limit.
    """
    printed = await called(*command, stdin=stdin, pass_fds=pass_fds, env=environment())
    check(command[0], printed, parsing.refusal)
    return printed.out


def check(command: str, printed: Printed, refusal: Callable[[str], str]) -> None:
    """Raise `Refused` for a failed command, with its message, whose kind `refusal` determines."""
    if printed.status:
        text = printed.err or printed.out
        said = parsing.words(text) or f"{command} ended with status {printed.status}"
        raise Refused(said, refusal(text))


async def called(
    *command: str,
    stdin: str = "",
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> Printed:
    """Run a command of any batch system; return its output and status.

    Raises
    ------
    Refused
        If it cannot be started, or after its time limit.
    """
    limit = limit or _LIMITS.get(command[0], _LIMIT)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise NotInstalled(f"{command[0]} is not on the PATH of this machine", parsing.PERMANENT) from None
    except OSError as error:  # no process or memory is available for now
        raise Refused(f"{command[0]}: {error}", parsing.TRANSIENT) from None
    try:
        async with asyncio.timeout(limit):
            out, err = await process.communicate(stdin.encode())
    except TimeoutError:
        raise Refused(f"{command[0]} did not answer within {limit:g} s", parsing.TRANSIENT) from None
    finally:
        await _end(process)
    return Printed(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a running command and its session: children of a wrapper script would keep its output open."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _REAPED)


def environment() -> dict[str, str]:
    """Return the environment of SLURM's commands."""
    own = {name: value for name, value in os.environ.items() if not _OWN.match(name)}
    # By default the indices of a long array are cut to 64 characters, ending in "...".
    return own | {"SLURM_TIME_FORMAT": parsing.TIME_FORMAT, "SLURM_BITSTR_LEN": "0"}
