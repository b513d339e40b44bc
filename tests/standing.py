"""`dask ferro cluster` as a shell starts it: a process whose lines can be waited for."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).parent / "dask-ferro"


class Command:
    """A running command.

    Parameters
    ----------
    folder : Path
        Where it is started, and what it prints is kept.
    *arguments : object
        Of ``dask ferro cluster``.
    **options
        Of `subprocess.Popen`.
    """

    def __init__(self, folder: Path, *arguments: object, **options: Any) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("w") as out, self._err.open("w") as err:
            words = [str(PROGRAM), "cluster", *map(str, arguments)]
            self.process = subprocess.Popen(words, stdout=out, stderr=err, cwd=folder, **options)

    @property
    def stdout(self) -> str:
        """What it has printed."""
        return self._out.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        """What it has printed there."""
        return self._err.read_text(encoding="utf-8")

    def says(self, pattern: str, seconds: float = 30.0) -> re.Match[str]:
        """Wait until it has printed something; return the match."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            over = self.process.poll() is not None
            if found := re.search(pattern, self.stdout):
                return found
            assert not over, f"it ended: {self.stdout}{self.stderr}"
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} not within {seconds:g} s: {self.stdout}{self.stderr}")

    def ends(self, signal: int | None = None, seconds: float = 40.0) -> int:
        """Send a signal, if any, and return the exit status."""
        if signal is not None:
            self.process.send_signal(signal)
        return self.process.wait(seconds)


@contextmanager
def command(folder: Path, *arguments: object, **options: Any) -> Iterator[Command]:
    """Start the command, and end it with the block."""
    running = Command(folder, *arguments, **options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(40)
