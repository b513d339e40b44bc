"""Which of xdist's processes runs a test file: the last of three begins with tests that wait for SLURM or workers.

Such tests hardly compute, so two cores suffice for them and two processes that do.  A file is run by one process, as
with `--dist loadfile`.  Each process takes over files of the others when its own are done.  Long files are the first
of their kind, since one that began last would run alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Prefixes of the paths of waiting files.
WAITING = (
    "tests/on_slurm/",
    "tests/browser/",
    "tests/test_settings_words.py",
    "tests/lower/ranks/test_cluster.py",
    "tests/elastic/",
    "tests/slurm/",
    "tests/scheduler/test_devices.py",
    "tests/scheduler/test_hung_worker.py",
    "tests/scheduler/test_other_workers.py",
    "tests/scheduler/test_silent.py",
)
# Prefixes of the paths of files that take over 15 seconds.
LONG = (
    "tests/batch_corpus/",
    "tests/commands/test_top.py",
    "tests/docs/test_blocks.py",
    "tests/lower/ranks/",
    "tests/on_slurm/test_elastic.py",
    "tests/scheduler/test_bundle",
    "tests/scheduler/test_other_workers.py",
    "tests/simulated/elastic/test_run.py",
    "tests/stream/",
    "tests/test_benchmarks.py",
    "tests/test_examples.py",
    "tests/train/test_cluster.py",
    "tests/train/test_digits.py",
)
PROCESSES = 3


def next_file(queue: Iterable[str], waits: bool) -> str | None:
    """Return the file that a process runs next, or None if it is done.

    Parameters
    ----------
    queue : iterable of str
        Files that are not assigned yet, in order.
    waits : bool
        Whether the process begins with waiting files.
    """
    files = sorted(queue, key=lambda file: not file.startswith(LONG))
    own = [file for file in files if file.startswith(WAITING) == waits]
    return next(iter(own or files), None)


class Lanes(LoadFileScheduling):
    """xdist's scheduling by file, with a process that begins with waiting files."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        chosen = next_file(self.workqueue, node.gateway.id == f"gw{PROCESSES - 1}")
        if chosen is None:
            node.shutdown()  # after what it still has
        else:
            self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)
