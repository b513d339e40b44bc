"""ONNX models and tensor graphs as Dask graphs.

The public names, each imported when it is first asked for: `import dask_ferro` itself loads neither dask,
onnx nor numpy, so that a scheduler, a worker plugin or a command line pays only for what it uses.

>>> import dask_ferro as ff
>>> model = ff.from_onnx("mlp.onnx")      # doctest: +SKIP
>>> y = model(x)                          # doctest: +SKIP
>>> y.compute()                           # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_ferro.commands.progress import progress
    from dask_ferro.errors import ConfigError, ModelError, UnsupportedOp
    from dask_ferro.graph import workloads
    from dask_ferro.lower import ModelGraph, from_onnx
    from dask_ferro.runtime.elastic import Elastic
    from dask_ferro.runtime.install import install, uninstall
    from dask_ferro.runtime.local import LocalCluster
    from dask_ferro.runtime.slurm import SLURMCluster
    from dask_ferro.runtime.tracing import trace
    from dask_ferro.stream import run

__version__: str

# name -> (module, attribute); None is the module itself
_PUBLIC: dict[str, tuple[str, str | None]] = {
    "ConfigError": ("dask_ferro.errors", "ConfigError"),
    "Elastic": ("dask_ferro.runtime.elastic", "Elastic"),
    "LocalCluster": ("dask_ferro.runtime.local", "LocalCluster"),
    "ModelError": ("dask_ferro.errors", "ModelError"),
    "ModelGraph": ("dask_ferro.lower", "ModelGraph"),
    "SLURMCluster": ("dask_ferro.runtime.slurm", "SLURMCluster"),
    "UnsupportedOp": ("dask_ferro.errors", "UnsupportedOp"),
    "from_onnx": ("dask_ferro.lower", "from_onnx"),
    "install": ("dask_ferro.runtime.install", "install"),
    "progress": ("dask_ferro.commands.progress", "progress"),
    "run": ("dask_ferro.stream", "run"),
    "trace": ("dask_ferro.runtime.tracing", "trace"),
    "uninstall": ("dask_ferro.runtime.install", "uninstall"),
    "workloads": ("dask_ferro.graph.workloads", None),
}

__all__ = [  # noqa: RUF022 - by kind
    "from_onnx",
    "run",
    "install",
    "uninstall",
    "progress",
    "trace",
    "ModelGraph",
    "LocalCluster",
    "SLURMCluster",
    "Elastic",
    "workloads",
    "ConfigError",
    "ModelError",
    "UnsupportedOp",
    "__version__",
]


# Python makes a module an attribute of its package when it is first loaded.  `trace.py` is loaded here, 6 ms of the
# standard library, and its name given up, so that it never takes the place of the function `ff.trace`.
import_module("dask_ferro.trace")
globals().pop("trace", None)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("dask-ferro")
    elif name in _PUBLIC:
        module, attribute = _PUBLIC[name]
        value = import_module(module)
        if attribute is not None:
            value = getattr(value, attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
