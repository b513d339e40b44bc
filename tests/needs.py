"""What tests need that pip does not install: where it is looked for, what installs it, and what a skip says.

A test says ``@pytest.mark.needs("dot")``; a fixture calls `require`.  Without it they are skipped, by name.  Where all
is meant to be installed (FERRO_SKIPS=none, as continuous integration sets it) a skip is a failure, but for `gpu` tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

# Daemons live in sbin, which is not on every PATH.
_SBIN = "/usr/sbin:/sbin"
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SLURM = ("slurmctld", "slurmd", "sbatch", "munged")


class Need(NamedTuple):
    """One need: whether it is met here, and what meets it, for a person."""

    met: Callable[[], bool]
    by: str


def program(name: str) -> str | None:
    """Return the path of a program, None if there is none."""
    return shutil.which(name) or shutil.which(name, path=_SBIN)


def chromium() -> str | None:
    """Return the path of the system's Chromium, None if there is none."""
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
    "/proc": Need(lambda: os.path.exists("/proc/self/smaps_rollup"), "Linux 4.14 or newer"),
}


@cache
def is_met(need: str) -> bool:
    """Whether this machine has what `need` names, a key of `NEEDS`."""
    return NEEDS[need].met()


def require(*needs: str) -> None:
    """Skip the test that runs unless the machine has all of `needs`."""
    for need in needs:
        if not is_met(need):
            pytest.skip(f"needs {need}, which this machine has not; brought by {NEEDS[need].by}")


def forbids_skips() -> bool:
    """Whether a skip is a failure."""
    return os.environ.get("FERRO_SKIPS") == "none"
