"""Run the tests that depend on Dask on the oldest, a middle and the newest releases that `pyproject.toml` allows.

    python -m tests.versions [oldest] [middle] [newest]     default: all three

Each has an environment of its own under `.venv-versions`, with another Python where the machine has one; it is made
again when its requirements have changed.  Pytest's output is passed through; at the end one line for each set has the
installed versions and the result.  The exit status is that of the first failure.  Only the standard library is
imported, since nothing is installed yet.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-versions"

# Extras that the library uses at run time, and further packages of the tests below, at their newest releases.
_EXTRAS = ("dashboard", "io", "slurm")
_FOR_TESTS = ("array-api-strict", "hypothesis", "prometheus-client", "psutil", "pytest", "pytest-timeout")
_TOLD = ("dask", "distributed", "dask-jobqueue", "onnx", "onnx-ir", "onnxruntime", "numpy", "bokeh")

# Tests of code that depends on Dask's private names, its collections or dask-jobqueue, of the dashboard, the command
# line, and ONNX Runtime's results.  Pure decisions do not depend on versions.
FAST = (
    "tests/scheduler/test_scheduling.py",
    "tests/scheduler/test_entry_points.py",
    "tests/scheduler/test_other_workers.py",
    "tests/scheduler/test_rules_of_tasks.py",
    "tests/scheduler/test_upstream.py",
    "tests/scheduler/test_worker_plugin.py",
    "tests/elastic/test_scheduler_rpc.py",
    "tests/elastic/test_controller.py",
    "tests/slurm/test_jobqueue_api.py",
    "tests/lower/test_portable.py",
    "tests/lower/model/test_collection.py",
    "tests/lower/model/test_outputs.py",
    "tests/lower/model/test_cluster.py::test_dask_arrays_in_and_out",
    "tests/stream/test_cluster.py::test_a_run_whose_client_was_closed_ends",
    "tests/views/test_pages.py",
    "tests/simulate/test_cli_simulate.py",
    "tests/engines/onnxruntime/test_special.py",
    "tests/engines/onnxruntime/test_session.py",
)
# As old as the middle Dask: its scheduler does not close by itself with Bokeh 3.10, with or without dask_ferro.
_BOKEH = "bokeh==3.8.2"


# Seconds for making an environment, and for installing into it.
_INSTALLING = 1800.0


class Releases(NamedTuple):
    """One set of releases: pip's constraints within our ranges, and the preferred Python version."""

    name: str
    python: str
    ranges: tuple[str, ...]
    pins: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """The result of the tests on one set of releases."""

    name: str
    versions: Mapping[str, str]
    status: int
    closing: str

    def __str__(self) -> str:
        told = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.name:<6} {'passed' if self.status == 0 else 'FAILED'}: {told}: {self.closing}"


def requirements(project: Mapping[str, Any]) -> list[str]:
    """Return the library's requirements at run time, as `pyproject.toml` has them."""
    extras = project["project"]["optional-dependencies"]
    return [*project["project"]["dependencies"], *(row for name in _EXTRAS for row in extras[name])]


def lower_bounds(rows: Sequence[str]) -> dict[str, str]:
    """Return the lowest version of each requirement by name.

    Raises
    ------
    ValueError
        If a requirement has no lower bound, so that its oldest release is unknown.
    """
    found = {}
    for row in rows:
        name, bound = re.match(r"([\w.-]+)", row), re.search(r">=([\w.]+)", row)
        if name is None or bound is None:
            raise ValueError(f"no lower bound in {row!r}; write name>=version")
        found[name[1]] = bound[1]
    return found


def releases(project: Mapping[str, Any], middle: str = "2025.12.0") -> tuple[Releases, ...]:
    """Return the three sets; `middle` has a middle release of Dask, and the newest of the rest except Bokeh."""
    ranges = tuple(requirements(project))
    oldest = tuple(f"{name}=={version}" for name, version in lower_bounds(ranges).items())
    return (
        Releases("oldest", "3.11", ranges, oldest),
        Releases("middle", "3.12", ranges, (f"dask=={middle}", f"distributed=={middle}", _BOKEH)),
        Releases("newest", "3.13", ranges),
    )


def interpreter(version: str) -> str:
    """Return the program of a Python version, or the running one if the machine does not have it."""
    found = shutil.which(f"python{version}")
    if found is not None:  # of pyenv, it may be a stub that refuses
        done = subprocess.run([found, "-c", "import venv"], capture_output=True, check=False, timeout=60)
        if done.returncode == 0:
            return found
    return sys.executable


def prepared(wanted: Releases) -> Path:
    """Return the Python of an environment with these releases, which is made unless it is up to date."""
    folder = FOLDER / wanted.name
    python, stamp = folder / "bin" / "python", folder / "installed"
    base = interpreter(wanted.python)
    rows = json.dumps([base, wanted.pins, wanted.ranges])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == rows:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([base, "-m", "venv", folder], check=True, timeout=_INSTALLING)
    pins = folder / "constraints"
    pins.write_text("\n".join(wanted.pins), encoding="utf-8")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    library = ["--editable", f"{ROOT}[{','.join(_EXTRAS)}]"]
    subprocess.run([*install, "--constraint", pins, *library, *_FOR_TESTS], check=True, timeout=_INSTALLING)
    stamp.write_text(rows, encoding="utf-8")
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the versions in an environment: of Python, and of the packages that matter."""
    program = (
        "import json, sys; from importlib.metadata import version;"
        "print(json.dumps({'Python': sys.version.split()[0], **{n: version(n) for n in sys.argv[1:]}}))"
    )
    done = subprocess.run(
        [python, "-c", program, *_TOLD], capture_output=True, text=True, check=True, timeout=300
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def run(wanted: Releases) -> Outcome:
    """Run the tests on one set of releases."""
    try:
        python = prepared(wanted)
    except subprocess.CalledProcessError as error:
        return Outcome(wanted.name, {}, error.returncode, f"not installed: {error}")
    command = [python, "-m", "pytest", "-q", "-m", "not soak", *FAST]
    status, lines = _passed_on(command)
    return Outcome(wanted.name, versions(python), status, lines[-1] if lines else "no output")


def _passed_on(command: Sequence[str | Path]) -> tuple[int, list[str]]:
    """Run a command, pass its output through, and return its exit status and its lines."""
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    return process.returncode, lines


def main(names: Sequence[str]) -> int:
    """Run the named sets, print their results, and return the first status of a failure, or 0."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = releases(project)
    unknown = set(names) - {row.name for row in known}
    if unknown:
        print(
            f"no such releases: {', '.join(sorted(unknown))}; there are oldest, middle, newest",
            file=sys.stderr,
        )
        return 2
    outcomes = [run(row) for row in known if row.name in names or not names]
    print(*outcomes, sep="\n")
    return next((o.status for o in outcomes if o.status), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
