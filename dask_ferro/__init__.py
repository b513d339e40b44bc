"""ONNX models and tensor graphs as Dask graphs.

`dask_ferro.tensor` has lazy tensors, their functions, layers and optimizers, `dask_ferro.parallel` meshes, placements
and schedules, and `dask_ferro.testing` graphs of known size.  Each public name is imported at its first use: `import
dask_ferro` itself loads neither dask, onnx nor numpy, so a scheduler, a worker plugin or the command line imports
only the modules that it uses.

>>> import dask_ferro as ff
>>> model = ff.from_onnx("mlp.onnx")      # doctest: +SKIP
>>> y = model(x)                          # doctest: +SKIP
>>> y.compute()                           # doctest: +SKIP
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_ferro import parallel as parallel
    from dask_ferro import tensor as tensor
    from dask_ferro import testing as testing
    from dask_ferro.elastic.controller import Elastic
    from dask_ferro.errors import ConfigError, InputError, ModelError, UnsupportedOpError
    from dask_ferro.graph.parallel.apply import apply_plan
    from dask_ferro.graph.parallel.autoplan import propose_plans
    from dask_ferro.instructions import list_instructions
    from dask_ferro.local.local_cluster import LocalCluster
    from dask_ferro.lower.model.collection import Model, from_onnx
    from dask_ferro.lower.ranks.parallel import parallelize
    from dask_ferro.lower.tensor import TrainableModel, load_trainable
    from dask_ferro.observe.check import check_cluster
    from dask_ferro.observe.tracing import profile
    from dask_ferro.scheduler.annotations import prefer_device, require_device
    from dask_ferro.scheduler.bundling import bundle_tasks
    from dask_ferro.scheduler.install import install, uninstall
    from dask_ferro.slurm.cluster import SLURMCluster
    from dask_ferro.stream import predict_files
    from dask_ferro.train.fit import fit
    from dask_ferro.train.rates import CosineDecay
    from dask_ferro.train.update import LossScaler

__version__: str

# Public names by the module that defines them.
_MODULES = {
    "lower.model.collection": ("Model", "from_onnx"),
    "stream": ("predict_files",),
    "lower.tensor": ("TrainableModel", "load_trainable"),
    "train.fit": ("fit",),
    "train.update": ("LossScaler",),
    "train.rates": ("CosineDecay",),
    "lower.ranks.parallel": ("parallelize",),
    "graph.parallel.apply": ("apply_plan",),
    "graph.parallel.autoplan": ("propose_plans",),
    "scheduler.install": ("install", "uninstall"),
    "scheduler.bundling": ("bundle_tasks",),
    "scheduler.annotations": ("prefer_device", "require_device"),
    "observe.check": ("check_cluster",),
    "observe.tracing": ("profile",),
    "instructions": ("list_instructions",),
    "local.local_cluster": ("LocalCluster",),
    "slurm.cluster": ("SLURMCluster",),
    "elastic.controller": ("Elastic",),
    "errors": ("ConfigError", "InputError", "ModelError", "UnsupportedOpError"),
}
_PUBLIC = {name: f"dask_ferro.{module}" for module, names in _MODULES.items() for name in names}
_NAMESPACES = ("tensor", "parallel", "testing")

__all__ = [
    "from_onnx", "Model", "predict_files", "load_trainable", "TrainableModel", "fit", "LossScaler", "CosineDecay",
    "parallelize", "apply_plan", "propose_plans", "install", "uninstall", "bundle_tasks", "prefer_device",
    "require_device", "check_cluster", "profile", "list_instructions", "LocalCluster", "SLURMCluster",
    "Elastic", "InputError", "ConfigError", "ModelError", "UnsupportedOpError",
    *_NAMESPACES, "__version__",
]  # fmt: skip


# Python makes a module an attribute of its package when it is first loaded.  `trace.py` is loaded here (6 ms, for its
# imports from the standard library) and the attribute is removed, so that it never hides the function `ff.profile`.
import_module("dask_ferro.trace")
globals().pop("trace", None)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("dask-ferro")
    elif name in _NAMESPACES:
        value = import_module(f"dask_ferro.{name}")
    elif name in _PUBLIC:
        if name == "fit":
            # This import gives tensors their `compute`, which a loss may call.
            import_module("dask_ferro.lower.tensor")
        value = getattr(import_module(_PUBLIC[name]), name)
    else:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
