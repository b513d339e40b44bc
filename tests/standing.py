"""`dask ferro cluster` as a process, started as a shell does, with waits for its output."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import until

PROGRAM = Path(sys.executable).parent / "dask-ferro"


class Command:
    """A running command.

    Parameters
    ----------
    folder : Path
        Its working directory, in which its output is kept.
    *arguments : object
        Arguments of ``dask ferro cluster``.
    **options
        Options of `subprocess.Popen`.
    """

    def __init__(self, folder: Path, *arguments: object, **options: Any) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("w") as out, self._err.open("w") as err:
            words = [str(PROGRAM), "cluster", *map(str, arguments)]
            self.process = subprocess.Popen(words, stdout=out, stderr=err, cwd=folder, **options)

    @property
    def stdout(self) -> str:
        """Its standard output so far."""
        return self._out.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        """Its standard error so far."""
        return self._err.read_text(encoding="utf-8")

    def says(self, pattern: str, seconds: float = 30.0) -> re.Match[str]:
        """Wait until its output matches a pattern; return the match."""

        def said() -> re.Match[str] | None:
            over = self.process.poll() is not None
            found = re.search(pattern, self.stdout)
            assert found or not over, f"it ended: {self.stdout}{self.stderr}"
            return found

        found = until(
            said, f"{pattern!r} to be printed", seconds=seconds, seen=lambda: self.stdout + self.stderr
        )
        assert found is not None
        return found

    def ends(self, signal: int | None = None, seconds: float = 40.0) -> int:
        """Send a signal, if any, and return the exit status."""
        if signal is not None:
            self.process.send_signal(signal)
        return self.process.wait(seconds)


@contextmanager
def command(folder: Path, *arguments: object, **options: Any) -> Iterator[Command]:
    """Start the command, and end it when the block ends."""
    running = Command(folder, *arguments, **options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(40)
