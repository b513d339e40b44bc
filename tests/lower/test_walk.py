"""The way of a first compute down through `lower`: nearly every file is entered once."""

from __future__ import annotations

import sys

from tests.programs import ran

# Files that are entered more than once, and how often: vocabulary that several steps read (signature, keys, layer),
# what a caller calls twice (the collection: to bind it, and to compute it), and what a task asks of its process.
AGAIN = {
    "lower/signature.py": 5,
    "lower/worker/task.py": 3,
    "lower/model/collection.py": 2,
    "lower/inputs/keys.py": 2,
    "lower/layer.py": 2,
    "lower/limits.py": 2,
    "lower/worker/threads.py": 2,
}


def test_the_way_down_enters_each_file_of_lower_once_but_for_a_few():
    """In a process of its own, whose caches are empty."""
    lines = ran([sys.executable, "-m", "tests.walk"]).stdout.splitlines()
    found = [line.split() for line in lines[lines.index("entered more than once:") + 1 :]]
    entered = {row[1]: int(row[0]) for row in found if len(row) == 2 and row[1].startswith("lower/")}
    assert {file: times for file, times in entered.items() if times > AGAIN.get(file, 1)} == {}
