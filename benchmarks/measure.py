"""The measurement of all benchmarks: contenders take turns in rounds, and the record has the environment.

A noisy machine changes from minute to minute, so contenders run A B C, B C A, ... and a ratio is taken inside
one round before the median over rounds.  Seconds are wall-clock; a rate is units of work per second.  Medians
come with their spread (lowest and highest).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = ("dask-ferro", "dask", "distributed", "numpy", "onnx", "onnx-ir", "onnxruntime", "joblib", "ray")


@dataclass(frozen=True)
class Summary:
    """Median, lowest and highest of some numbers, and their count."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Summary:
        return cls(median(numbers), min(numbers), max(numbers), len(numbers))


def in_turn(
    contenders: Mapping[str, Callable[..., Any]],
    rounds: int,
    *,
    warm_up: bool = True,
    prepare: Callable[[], tuple[Any, ...]] = tuple,
    check: Callable[[str, Any], None] = lambda name, result: None,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, list[float]]:
    """Return the seconds of every contender in each round; those of one round have the same index.

    Parameters
    ----------
    contenders : mapping
        Functions by name; a result is dropped before the next function starts.
    rounds : int
        How often each runs; each round starts with the next contender.
    warm_up : bool
        Whether to run each once before, unmeasured, for imports, sessions and connections.
    prepare : callable
        Returns the arguments of a function, outside the measured time, before every run.
    check : callable
        ``check(name, result)``, outside the measured time, after every run.
    note : callable
        Called with a line of text after each measurement, to show progress.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1 if warm_up else 0, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            arguments = prepare()
            gc.collect()  # of the last contender's garbage, outside this one's time
            start = time.perf_counter()
            result = contenders[name](*arguments)
            elapsed = time.perf_counter() - start
            check(name, result)
            del result, arguments
            if number >= 0:
                seconds[name].append(elapsed)
            note(f"{'warm-up' if number < 0 else f'round {number + 1}'}: {name} {elapsed:.3f} s")
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]], reference: str) -> dict[str, list[float]]:
    """Return the speed of each contender over that of `reference` in the same round."""
    return {
        name: [base / own for base, own in zip(seconds[reference], times, strict=True)]
        for name, times in seconds.items()
    }


def provenance(**settings: Any) -> dict[str, Any]:
    """Return the environment of the measurement: commit, versions, host, time, settings."""
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | {p: v for p in PACKAGES if (v := _version(p))},
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings,
    }


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=_plain) + "\n", encoding="utf-8")


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """Print a table: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()

    print(f"\n{title}", line(columns), line(["-" * width for width in widths]), sep="\n")
    for row in rows:
        print(line(row))
    for note in notes:
        print(f"({note})")


def options(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=_at_least_one, default=rounds, help=f"measured rounds ({rounds})")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, one round, to check that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to this file")
    parser.add_argument("--quiet", action="store_true", help="print only the tables")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _plain(value: object) -> Any:
    if isinstance(value, Summary):
        return asdict(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"no JSON for {type(value).__name__}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Return the repository's commit, with "+" if the tree differs from it; "unknown" outside of a repository."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
