"""Programs that tests need and pip does not install: how they are found, how to install them, and the text of a skip.

A test has the mark ``@pytest.mark.needs("dot")``; a fixture calls `require`.  If the program is missing, the test is
skipped with its name.  With FERRO_SKIPS=none, as in continuous integration, a skip is a failure, except for `gpu`
tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

# Daemons are in sbin, which is not on every PATH.
_SBIN = "/usr/sbin:/sbin"
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SLURM = ("slurmctld", "slurmd", "sbatch", "munged")


class Need(NamedTuple):
    """One need: the check whether this machine meets it, and how to install it."""

    met: Callable[[], bool]
    by: str


def program(name: str) -> str | None:
    """Return the path of a program, or None if it is not installed."""
    return shutil.which(name) or shutil.which(name, path=_SBIN)


def chromium() -> str | None:
    """Return the path of the system's Chromium, or None if it is not installed."""
    return next((found for name in _CHROMIUM if (found := program(name))), None)


def _may_unshare() -> bool:
    if program("unshare") is None:
        return False
    return (
        subprocess.run(
            ["unshare", "--mount", "true"], capture_output=True, check=False, timeout=20
        ).returncode
        == 0
    )


def _programs(*names: str) -> Callable[[], bool]:
    return lambda: all(program(name) is not None for name in names)


NEEDS = {
    "dot": Need(_programs("dot"), "Debian's package graphviz"),
    "chromium": Need(lambda: chromium() is not None, "Debian's package chromium"),
    "slurm": Need(_programs(*_SLURM), "Debian's packages slurmctld, slurmd, slurm-client and munge"),
    "git": Need(_programs("git"), "Debian's package git, and a clone"),
    "make": Need(_programs("make"), "Debian's package make"),
    "c++": Need(_programs("c++"), "Debian's package g++"),
    "mount namespaces": Need(_may_unshare, "root, or the right to unshare mounts"),
}


@cache
def is_met(need: str) -> bool:
    """Return whether this machine meets a need, a key of `NEEDS`."""
    return NEEDS[need].met()


def require(*needs: str) -> None:
    """Skip the running test unless the machine meets all needs."""
    for need in needs:
        if not is_met(need):
            pytest.skip(f"needs {need}, which this machine has not; brought by {NEEDS[need].by}")


def forbids_skips() -> bool:
    """Return whether a skip is a failure."""
    return os.environ.get("FERRO_SKIPS") == "none"
