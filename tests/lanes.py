"""Which process of pytest-xdist runs which file: the last of three has those that wait for SLURM and for workers.

Such tests hardly compute, so two cores bear them beside two processes that do.  Each file is one process's, as with
`--dist loadfile`; what waits is helped with at the end, and does not help: it would import all that the others have.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Folders and files, by how their names begin.
WAITING = (
    "tests/slurm/",
    "tests/browser/",
    "tests/sites/",
    "tests/test_settings_words.py",
    "tests/upstream_pains/",
    "tests/lower/test_crash_notes.py",
    "tests/lower/test_pipeline_cluster.py",
    "tests/runtime/elastic/",
    "tests/runtime/jobs/",
    "tests/runtime/plugin/test_devices.py",
    "tests/runtime/plugin/test_hung_worker.py",
    "tests/runtime/plugin/test_silent.py",
    "tests/runtime/pools/",
    "tests/runtime/slurm/",
)
PROCESSES = 3


def next_file(queue: Iterable[str], waits: bool) -> str | None:
    """Return the file that a process runs next; None: it has done its part.

    Parameters
    ----------
    queue : iterable of str
        Files that no process has, in order.
    waits : bool
        Whether it is the process for files that wait.
    """
    files = list(queue)
    own = [file for file in files if file.startswith(WAITING) == waits]
    return next(iter(own if waits else own or files), None)


class Lanes(LoadFileScheduling):
    """xdist's scheduling by file, with a process for files that wait."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        chosen = next_file(self.workqueue, node.gateway.id == f"gw{PROCESSES - 1}")
        if chosen is None:
            node.shutdown()  # after what it still has
        else:
            self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)
