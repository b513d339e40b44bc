"""The checks of `gpu.py`: bounds on its figures, pytest's `gpu` tests, and a description of the GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ALONE, RESIDENT, DASK, COPIES = "library alone", "resident", "dask tasks", "copies at every op"
# Of 2048 x 2048 float32.
_SIDE, _DTYPE = 2048, "float32"
_LEAST_OF_LIBRARY, _LEAST_OF_COPIES = 0.85, 4.0
_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "onnxruntime-gpu", "torch", "dask-cuda")


def judged(results: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether the medians of the products meet their two bounds, by claim; empty if they were not run."""
    rows = [r for r in results.get("products", ()) if (r["side"], r["dtype"]) == (_SIDE, _DTYPE)]
    if not rows:
        return {}
    contenders = rows[0]["contenders"]
    rates = {name: c["ops_per_s"].median for name, c in contenders.items()}
    resident = next(rate for name, rate in rates.items() if name.startswith(RESIDENT))
    return {
        f"dask tasks reach {_LEAST_OF_LIBRARY} of the library": contenders[DASK]["of_library"].median
        >= _LEAST_OF_LIBRARY,
        f"resident is {_LEAST_OF_COPIES:g} times as fast as copies": resident
        >= _LEAST_OF_COPIES * rates[COPIES],
    }


def tests() -> dict[str, Any]:
    """Run the tests marked `gpu`; return whether they pass (see `verdict`), and pytest's summary."""
    root = Path(__file__).resolve().parents[1]
    # The other modules are not loaded, as they need packages and programs that a machine with a GPU may lack.
    modules = [
        str(path.relative_to(root))
        for path in sorted(root.glob("tests/**/test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider", *modules],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    account = done.stdout.splitlines()
    is_installed = _version("onnxruntime-gpu") is not None
    return {"passed": done.returncode == 0 and verdict(account, is_installed), "told": account[-60:]}


def verdict(account: Sequence[str], onnxruntime_gpu: bool) -> bool:
    """Return whether tests ran, and none was skipped because of a package that is installed.

    Parameters
    ----------
    account : sequence of str
        Lines of pytest's summary, with the reasons of skips.
    onnxruntime_gpu : bool
        Whether the package is installed: if so, its provider has to work, or that engine was not tested.
    """
    ran = bool(account) and re.search(r"\d+ passed", account[-1]) is not None
    skipped = [line for line in account if line.startswith("SKIPPED")]
    missing = ("GPU that", *(("CUDA provider that works",) if onnxruntime_gpu else ()))
    return ran and not any(what in line for line in skipped for what in missing)


def described(device: Any) -> dict[str, Any]:
    """Return a description of the device: its name and memory, the driver, and the versions of packages."""
    found: dict[str, Any] = {
        "name": card_name(device),
        "memory": device.memory()._asdict(),
        "tf32": device.tf32,
    }
    if device.name.startswith("cuda:"):
        from cupy.cuda import runtime

        found |= {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}
    return found | {"packages": {name: v for name in _PACKAGES if (v := _version(name))}}


def card_name(device: Any) -> str:
    """Return the driver's name for a CUDA device, or the device's own name for any other."""
    kind, _, ordinal = device.name.partition(":")
    if kind != "cuda":
        return str(device.name)
    from cupy.cuda import runtime

    name: bytes = runtime.getDeviceProperties(int(ordinal))["name"]
    return name.decode()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
