"""Run a command and print the peak memory of its processes, together and of the largest, with the tests running then.

    python -m tests.peak make test
    python -m tests.peak python -m pytest -q tests/suite

Together is the sum of PSS over the whole tree (a page that two share counts once), alone is RSS.  The exit status is
the command's, or 3 where it was 0 and a bound did not hold (FERRO_PEAK_TOTAL and FERRO_PEAK_EACH, in MiB).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# The folder in which each test process writes its running test (tests/conftest.py).
FOLDER = "FERRO_PEAK_FOLDER"
_EVERY_S = 0.5
_TOTAL_MIB, _EACH_MIB = 6 * 1024, 1536
_OVER = 3


class Held(NamedTuple):
    """The memory of one process in bytes, and its command."""

    pss: int
    rss: int
    title: str


def children(pids: Iterable[int]) -> list[int]:
    """Return `pids` and all their descendants."""
    by_parent: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
        by_parent.setdefault(parent, []).append(int(folder.name))
    found, front = [], list(pids)
    while front:
        found.append(pid := front.pop())
        front += by_parent.get(pid, [])
    return found


def held(pid: int) -> Held | None:
    """Return the memory of a process, or None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return Held(sizes.get("Pss", 0), sizes.get("Rss", 0), title[:100])


class Peak:
    """The peak of all processes together, and of one process."""

    def __init__(self) -> None:
        self.total = 0
        self.at_total: list[Held] = []
        self.tests: list[str] = []
        self.each: dict[int, tuple[Held, str]] = {}

    def look(self, root: int, folder: Path) -> None:
        """Sample the processes below `root`."""
        seen = {pid: found for pid in children([root]) if (found := held(pid)) is not None}
        running = {int(f.name): f.read_text() for f in folder.iterdir() if f.name.isdigit()}
        tests = [running[pid] for pid in seen if pid in running]
        for pid, found in seen.items():
            if pid not in self.each or found.rss > self.each[pid][0].rss:
                self.each[pid] = found, running.get(pid, ", ".join(tests))
        total = sum(found.pss for found in seen.values())
        if total > self.total:
            self.total, self.tests = total, tests
            self.at_total = sorted(seen.values(), reverse=True)

    def report(self) -> str:
        """Return the peaks as lines of text."""
        lines = [
            f"peak of all processes together: {self.total / 2**20:,.0f} MiB (PSS), while {self.tests} ran"
        ]
        lines += [f"  {found.pss / 2**20:8,.0f}  {found.title}" for found in self.at_total[:6]]
        lines.append("largest processes, each at its own peak (RSS):")
        largest = sorted(self.each.values(), key=lambda one: -one[0].rss)[:6]
        lines += [f"  {found.rss / 2**20:8,.0f}  {found.title} | {test}" for found, test in largest]
        return "\n".join(lines)

    @property
    def largest(self) -> int:
        """The RSS of the largest process."""
        return max((found.rss for found, _ in self.each.values()), default=0)


def main(command: list[str]) -> int:
    """Run a command, print its peaks, and return the exit status."""
    peak = Peak()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, env=os.environ | {FOLDER: folder})
        while process.poll() is None:
            peak.look(process.pid, Path(folder))
            time.sleep(_EVERY_S)
    print(peak.report())
    total = int(os.environ.get("FERRO_PEAK_TOTAL", _TOTAL_MIB)) * 2**20
    each = int(os.environ.get("FERRO_PEAK_EACH", _EACH_MIB)) * 2**20
    over = peak.total > total or peak.largest > each
    return process.returncode or (_OVER if over else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
