"""The output of a batch job: its files, and their last lines.

SLURM names the files of a job in `scontrol show job`, with some of the patterns replaced; the others (`%J`, `%4j`)
are replaced here, as described in sbatch(1).  For a job that SLURM has forgotten, the script's header and the folder
of the submission are used.  Only the end of a file is read, within a time limit, as the shared file system may hang.
A file that cannot be read is described in the result, and never an error.  Sizes are bytes.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dask_ferro.runtime.slurm.parsing import element, option

# The lines that fit on a screen, and the bytes read for them: a chain of tracebacks has its cause at the beginning.
_LINES, _BYTES = 20, 16384
# What Python prints between an error and one that followed from it.
_FOLLOWED = ("The above exception was the direct cause", "During handling of the above exception")
# Characters of the last line, where there is room for only one line.
_BRIEF = 300
# Seconds for the answer of SLURM, and for the file.
_ASKED, _READ = 2.0, 2.0
_PATTERN = re.compile(r"%(\d*)([%AajJNuxnst])")
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

    def shown(self) -> str:
        """Return the lines, indented."""
        return "\n".join(f"    {line}" for line in self.lines)


async def last_output(ask: Callable[..., Awaitable[str]], job_id: str, script: str, job_name: str) -> Log:
    """Return the end of a job's error output, or of its other output.

    Parameters
    ----------
    ask : callable
        Runs one of SLURM's commands and returns its output; it may raise any exception.
    job_id : str
        In the form of `squeue`: "12", or "12_3" for an element of an array.
    script : str
        The submitted script.
    """
    try:
        async with asyncio.timeout(_ASKED):
            told = await ask("scontrol", "--oneliner", "show", "job", job_id)
    except Exception:  # noqa: BLE001 - SLURM forgets a job after minutes; the script tells as well
        told = ""
    files = files_of(told, job_id, script, job_name, os.getcwd())
    try:
        async with asyncio.timeout(_READ):
            return await asyncio.to_thread(_first_with_lines, files)
    except TimeoutError:
        return Log(files[0], trouble=f"could not be read within {_READ:g} s")


def files_of(told: str, job_id: str, script: str, job_name: str, folder: str) -> tuple[str, ...]:
    """Return the paths of a job's output, errors first; one path if both are the same.

    Parameters
    ----------
    told : str
        A line of ``scontrol --oneliner show job``; empty without an answer of SLURM.
    folder : str
        The folder of the submission, to which paths in the script are relative.
    """
    facts = _facts(told)
    array, index = element(job_id)
    replaced = {
        "j": facts.get("JobId") or ("" if "_" in job_id else array),
        "A": facts.get("ArrayJobId") or array,
        "a": facts.get("ArrayTaskId") or (str(index) if "_" in job_id else "4294967294"),
        "x": facts.get("JobName") or job_name,
        "u": (facts.get("UserId") or os.environ.get("USER", "")).partition("(")[0],
        "N": facts.get("BatchHost", ""),
        "n": "0",
        "t": "0",
        "s": "batch",
        "%": "%",
    }
    replaced["J"] = replaced["j"]
    default = "slurm-%A_%a.out" if "_" in job_id else "slurm-%j.out"
    out = facts.get("StdOut") or option(script, "o", "output") or default
    err = facts.get("StdErr") or option(script, "e", "error") or out
    paths = (expanded(path, replaced) for path in (err, out))
    where = facts.get("WorkDir") or option(script, "D", "chdir") or folder
    return tuple(dict.fromkeys(os.path.join(where, path) for path in paths))


def expanded(path: str, replaced: Mapping[str, str]) -> str:
    r"""Return a file's name with sbatch's patterns replaced; what is not known stays as it is.

    >>> expanded("w-%A_%a-%4j.out", {"A": "11", "a": "2", "j": "13"})
    'w-11_2-0013.out'
    >>> expanded("w-%N.out", {})
    'w-%N.out'
    """
    if "\\" in path:  # one backslash, and sbatch replaces nothing
        return path.replace("\\", "")

    def value(found: re.Match[str]) -> str:
        known = replaced.get(found[2], "")
        if not known:
            return found[0]
        width = min(int(found[1] or 0), 10)
        return known.zfill(width) if known.isdecimal() else known

    return _PATTERN.sub(value, path)


def end_of_file(path: str | Path, size: int) -> tuple[int, bytes]:
    """Return the size of a file, and at most `size` bytes of its end.  Raises `OSError`."""
    with Path(path).open("rb") as file:
        whole = file.seek(0, os.SEEK_END)
        file.seek(max(whole - size, 0))
        return whole, file.read(size)


def tail(path: str) -> Log:
    """Return the last lines of a file."""
    try:
        # Checked before opening, since opening a pipe would wait for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Log(path, trouble="is not a regular file")
        whole, read = end_of_file(path, _BYTES)
    except OSError as error:
        return Log(path, trouble=f"cannot be read: {error.strerror or error}")
    text = _ESCAPES.sub("", read.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n"))
    kept = [line.rstrip() for line in text.split("\n") if line.strip()]
    if whole > _BYTES and len(kept) > 1:
        kept = kept[1:]  # the first line may be incomplete
    return Log(path, tuple(kept[-_LINES:]), "" if kept else "is empty", _cause(kept))


def _cause(lines: list[str]) -> str:
    """Return the error from which the others of the last chain of tracebacks followed; empty: there is no chain."""
    cause = ""
    for before, line in pairwise(lines):
        if line.startswith("Traceback (") and not before.startswith(_FOLLOWED):
            cause = ""  # of an earlier chain
        elif line.startswith(_FOLLOWED):
            cause = cause or before
    return cause


def _first_with_lines(paths: tuple[str, ...]) -> Log:
    found = [tail(path) for path in paths]
    return next((log for log in found if log.lines), found[0])


def _facts(told: str) -> dict[str, str]:
    """Return the fields of a line of `scontrol` by name; values may contain spaces."""
    pairs = re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", told.partition("\n")[0])
    return {name: value for name, value in pairs if value not in ("", "(null)", "N/A")}
