"""Recorded task graphs: what each task took, how large its result was, and what it read; one small file a graph.

A file has columns, a row for each task in Dask's order, by which inputs come before their readers.  Inputs are stored
as distances back.  Tasks of one group stay one group; tokens in names are left out.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph, TaskSpec

FOLDER = Path(__file__).resolve().parents[1] / "recorded"
_SUFFIX = ".json.gz"


def names() -> list[str]:
    """Return the names of the recorded graphs."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in FOLDER.glob(f"*{_SUFFIX}"))


def save(graph: TaskGraph, order: Mapping[Key, int], source: str, folder: Path = FOLDER) -> Path:
    """Write a graph with its tasks in that order; `source` says where it was recorded."""
    tasks = sorted(graph.tasks, key=lambda task: order[task.key])
    place = {task.key: number for number, task in enumerate(tasks)}
    groups = list(dict.fromkeys((task.group, task.prefix) for task in tasks))
    group = {name: number for number, (name, _) in enumerate(groups)}
    content = {
        "name": graph.name,
        "source": source,
        "prefixes": [prefix for _, prefix in groups],
        "group": [group[task.group] for task in tasks],
        "microseconds": [round(task.seconds * 1e6) for task in tasks],
        "nbytes": [task.nbytes for task in tasks],
        "back": [
            sorted(number - place[key] for key in task.dependencies) for number, task in enumerate(tasks)
        ],
    }
    path = folder / f"{graph.name}{_SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return path


def read(name: str, folder: Path = FOLDER) -> Mapping[str, Any]:
    """Return the content of a graph's file."""
    content: Mapping[str, Any] = json.loads(gzip.decompress((folder / f"{name}{_SUFFIX}").read_bytes()))
    return content


def graph_of(
    content: Mapping[str, Any], copies: int = 1, *, factor: float = 1.0, spread: float = 0.0, seed: int = 0
) -> tuple[TaskGraph, dict[Key, int]]:
    """Return a recorded graph, and Dask's order of its tasks.

    Parameters
    ----------
    content : mapping
        From `read`.
    copies : int
        How often the graph stands side by side, as in a program whose data is as many times larger: each group has
        the tasks of all copies, and the copies come one after the other in Dask's order.
    factor : float
        For the seconds and bytes of all tasks.
    spread : float
        Standard deviation of the logarithm of a factor, of mean 1, for each task's seconds; drawn from `seed`.
    """
    chance = random.Random(seed)
    prefixes = content["prefixes"]
    rows = list(
        zip(content["group"], content["microseconds"], content["nbytes"], content["back"], strict=True)
    )
    tasks: list[TaskSpec] = []
    for _ in range(copies):
        for number, microseconds, nbytes, back in rows:
            group, here = f"{prefixes[number]}-{number}", len(tasks)
            seconds = microseconds / 1e6 * factor
            if spread:
                seconds *= chance.lognormvariate(-(spread**2) / 2, spread)
            inputs = tuple(tasks[here - distance].key for distance in back)
            tasks.append(
                TaskSpec((group, here), prefixes[number], group, seconds, round(nbytes * factor), inputs)
            )
    return TaskGraph(content["name"], tuple(tasks)), {task.key: place for place, task in enumerate(tasks)}
