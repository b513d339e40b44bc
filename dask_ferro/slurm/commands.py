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
from collections.abc import Sequence

from dask_ferro.slurm import parsing

# A command answers within milliseconds, on a busy site within seconds.  `sbatch` itself gives up on a dead controller
# after 9 s; if it is killed, a possible submission has to be looked for.
_LIMIT, _LIMITS = 10.0, {"sbatch": 30.0}
# For a killed command to be reaped.
_REAP_TIMEOUT = 2.0

# A cluster object that runs in a job would hand that job's shape on to its workers (SLURM_CPUS_PER_TASK, ...); a
# user's SQUEUE_STATES or SCANCEL_INTERACTIVE would hide jobs.
_COMMAND_VARIABLES = re.compile(r"SLURM_(?!CONF$|CONF_|CLUSTERS$|JWT$)|SQUEUE_|SCANCEL_|SBATCH_ARRAY_INX$")


class RefusedError(Exception):
    """A command failed: its message, and whether that may pass ("transient", "limit", "permanent", "unknown")."""

    def __init__(self, words: str, kind: str) -> None:
        super().__init__(words)
        self.words, self.kind = words, kind


async def run(*command: str, stdin: str = "", pass_fds: Sequence[int] = ()) -> str:
    """Run a command of SLURM and return its output.

    It has its own session, so that Ctrl-C in a terminal does not interrupt a submission.

    Raises
    ------
    Refused
        With SLURM's message, if the command cannot be started, or after its time limit.
    """
    limit = _LIMITS.get(command[0], _LIMIT)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise RefusedError(f"{command[0]} is not on the PATH of this machine", parsing.PERMANENT) from None
    except OSError as error:  # no process or memory is available for now
        raise RefusedError(f"{command[0]}: {error}", parsing.TRANSIENT) from None
    try:
        async with asyncio.timeout(limit):
            printed = await process.communicate(stdin.encode())
    except TimeoutError:
        raise RefusedError(f"{command[0]} did not answer within {limit:g} s", parsing.TRANSIENT) from None
    finally:
        await _end(process)
    out, err = (text.decode(errors="replace") for text in printed)
    if process.returncode:
        message = parsing.words(err or out) or f"{command[0]} ended with status {process.returncode}"
        raise RefusedError(message, parsing.refusal(err or out))
    return out


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a running command and its session: children of a wrapper script would keep its output open."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _REAP_TIMEOUT)


def environment() -> dict[str, str]:
    """Return the environment of SLURM's commands."""
    own = {name: value for name, value in os.environ.items() if not _COMMAND_VARIABLES.match(name)}
    # By default the indices of a long array are cut to 64 characters, ending in "...".
    return own | {"SLURM_TIME_FORMAT": parsing.TIME_FORMAT, "SLURM_BITSTR_LEN": "0"}
