"""The output of batch jobs: their files, by the header of the script, and the ends of these.

In the name of a file sbatch replaces patterns such as `%j`; those whose value is not known here match any text.  Only
the end of a file is read, as jobs may print much.  A file that cannot be read is described in the result, and never an
error.  Sizes are bytes.
"""

from __future__ import annotations

import asyncio
import glob
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dask_ferro.slurm.job_lifecycle import BatchJob
from dask_ferro.slurm.parsing import element, option

# The lines that fit on a screen, and the bytes read for them: a chain of tracebacks has its cause at the beginning.
_LINES, _BYTES = 20, 16384
# What Python prints between an error and one that followed from it.
_CHAIN_LINES = ("The above exception was the direct cause", "During handling of the above exception")
# Characters of the last line, where there is room for only one line.
_BRIEF = 300
# Seconds for a file, since a shared file system may hang.
_READ_TIMEOUT = 2.0
_PATTERN = re.compile(r"%(\d*)([A-Za-z%])")
# A log may contain terminal control characters: colours, carriage returns of progress bars.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class Log(NamedTuple):
    """The end of a job's output.

    Attributes
    ----------
    path : str
        Path of the file.
    lines : tuple of str
    trouble : str
        Why there are no lines; empty if there are some.
    cause : str
        The first error of the last traceback, from which its others followed; empty: the last line is what happened.
    """

    path: str
    lines: tuple[str, ...] = ()
    trouble: str = ""
    cause: str = ""

    def brief(self) -> str:
        """Return the path and the line that says what happened, on one line.

        >>> Log("/w-1.err", ("a", "b")).brief()
        "its log /w-1.err ends with 'b'"
        """
        end = f"ends with {self.lines[-1][:_BRIEF]!r}" if self.lines else self.trouble
        return f"its log {self.path} {f'has the error {self.cause[:_BRIEF]!r}' if self.cause else end}"

    def indented(self) -> str:
        """Return the lines, indented."""
        return "\n".join(f"    {line}" for line in self.lines)


async def last_output(header: str, job_name: str, job: BatchJob) -> Log:
    """Return the end of a job's error output, or of its other output."""
    patterns = patterns_of(header, job_name, job)
    try:
        async with asyncio.timeout(_READ_TIMEOUT):
            return await asyncio.to_thread(_first_with_lines, patterns)
    except TimeoutError:
        return Log(patterns[0], trouble=f"could not be read within {_READ_TIMEOUT:g} s")


def patterns_of(header: str, job_name: str, job: BatchJob) -> list[str]:
    """Return patterns of `glob` for the output of a job; errors first, and one if both are the same.

    Parameters
    ----------
    header : str
        The script's lines with options; their paths are relative to this process's folder, or the script's own.
    """
    array, index = element(job.job_id)
    is_array = "_" in job.job_id
    number = job.number or ("" if is_array else array)
    known = {"x": job_name, "u": os.environ.get("USER", ""), "%": "%", "A": array, "j": number, "J": number}
    known["a"] = str(index) if is_array else "4294967294"
    default = "slurm-%A_%a.out" if is_array else "slurm-%j.out"

    def value(found: re.Match[str]) -> str:
        text = known.get(found[2], "")
        return (text.zfill(int(found[1] or 0)) if text.isdecimal() else text) or "*"

    out = option(header, "o", "output") or default
    err = option(header, "e", "error") or out
    folder = option(header, "D", "chdir") or os.getcwd()
    paths = [os.path.join(folder, path) for path in (err, out)]
    return list(dict.fromkeys(_PATTERN.sub(value, glob.escape(path)) for path in paths))


def tail(path: str) -> Log:
    """Return the last lines of a file."""
    try:
        with Path(path).open("rb") as file:
            whole = file.seek(0, os.SEEK_END)
            file.seek(max(whole - _BYTES, 0))
            read = file.read(_BYTES)
    except OSError as error:
        return Log(path, trouble=f"cannot be read: {error.strerror or error}")
    text = _ESCAPES.sub("", read.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n"))
    lines = [line.rstrip() for line in text.split("\n") if line.strip()]
    if whole > _BYTES and len(lines) > 1:
        lines = lines[1:]  # the first line may be incomplete
    return Log(path, tuple(lines[-_LINES:]), "" if lines else "is empty", _cause(lines))


def _modification_time(path: str) -> float:
    """Return when a regular file was last written; -1: there is no such file."""
    try:
        return os.stat(path).st_mtime if os.path.isfile(path) else -1.0
    except OSError:
        return -1.0


def _first_with_lines(patterns: list[str]) -> Log:
    """Return the newest file of the first pattern that has lines."""
    logs = []
    for pattern in patterns:
        files = [path for path in glob.glob(pattern) if os.path.isfile(path)]
        logs.append(
            tail(max(files, key=_modification_time)) if files else Log(pattern, trouble="does not exist")
        )
    return next((log for log in logs if log.lines), logs[0])


def _cause(lines: list[str]) -> str:
    """Return the error from which the others of the last chain of tracebacks followed; empty: there is no chain."""
    cause = ""
    for before, line in pairwise(lines):
        if line.startswith("Traceback (") and not before.startswith(_CHAIN_LINES):
            cause = ""  # of an earlier chain
        elif line.startswith(_CHAIN_LINES):
            cause = cause or before
    return cause
