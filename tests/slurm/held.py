"""What `tests/test_killed.py` kills: a run of pytest that holds a SLURM. Not collected by itself."""

from pathlib import Path
from time import sleep


def test_slurm_is_held(slurm: Path) -> None:
    print("held", flush=True)
    sleep(60)
