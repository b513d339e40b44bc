"""ONNX models and tensor graphs as Dask graphs.

Each public name is imported at its first use: `import dask_ferro` itself loads neither dask, onnx nor numpy, so a
scheduler, a worker plugin or the command line imports only the modules that it uses.

>>> import dask_ferro as ff
>>> model = ff.from_onnx("mlp.onnx")      # doctest: +SKIP
>>> y = model(x)                          # doctest: +SKIP
>>> y.compute()                           # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_ferro.elastic.controller import Elastic
    from dask_ferro.errors import ConfigError, ModelError, UnsupportedOp
    from dask_ferro.graph import workloads
    from dask_ferro.graph.autodiff.grad import grad, value_and_grad
    from dask_ferro.graph.ir.regions import signal
    from dask_ferro.graph.parallel.apply import apply
    from dask_ferro.graph.parallel.autoplan import plan
    from dask_ferro.graph.pipeline.named import schedule
    from dask_ferro.graph.pipeline.schedule import Schedule
    from dask_ferro.graph.sharding.placements import Partial, Replicate, Shard
    from dask_ferro.graph.sharding.redistribute import Mesh
    from dask_ferro.graph.tensor import nn, optim
    from dask_ferro.graph.tensor.emit import save_onnx, to_model
    from dask_ferro.graph.tensor.namespace import *  # noqa: F403
    from dask_ferro.instructions import tape
    from dask_ferro.local.local_cluster import LocalCluster
    from dask_ferro.lower.model.collection import ModelGraph, from_onnx
    from dask_ferro.lower.ranks.parallel import parallel
    from dask_ferro.lower.ranks.sharded import gather
    from dask_ferro.lower.ranks.spmd import Ranks
    from dask_ferro.lower.tensor import Tensor, TensorModel, load
    from dask_ferro.observe.check import check
    from dask_ferro.observe.tracing import trace
    from dask_ferro.scheduler.annotations import Prefer, Require
    from dask_ferro.scheduler.bundled import bundled
    from dask_ferro.scheduler.install import install, uninstall
    from dask_ferro.slurm.cluster import SLURMCluster
    from dask_ferro.stream import run
    from dask_ferro.train.fit import fit
    from dask_ferro.train.rates import CosineRate
    from dask_ferro.train.update import LossScale
    from dask_ferro.views.progress import progress

__version__: str

# Public names by the module that defines them.
_MODULES = {
    "errors": ("ConfigError", "ModelError", "UnsupportedOp"),
    "graph.parallel.apply": ("apply",),
    "graph.autodiff.grad": ("grad", "value_and_grad"),
    "graph.sharding.placements": ("Partial", "Replicate", "Shard"),
    "graph.parallel.autoplan": ("plan",),
    "graph.sharding.redistribute": ("Mesh",),
    "graph.pipeline.named": ("schedule",),
    "graph.pipeline.schedule": ("Schedule",),
    "graph.ir.regions": ("signal",),
    "graph.tensor.emit": ("save_onnx", "to_model"),
    "instructions": ("tape",),
    "lower.model.collection": ("ModelGraph", "from_onnx"),
    "lower.ranks.parallel": ("parallel",),
    "lower.ranks.sharded": ("gather",),
    "lower.ranks.spmd": ("Ranks",),
    "lower.tensor": ("Tensor", "TensorModel", "load"),
    "scheduler.bundled": ("bundled",),
    "observe.check": ("check",),
    "elastic.controller": ("Elastic",),
    "local.local_cluster": ("LocalCluster",),
    "scheduler.annotations": ("Prefer", "Require"),
    "scheduler.install": ("install", "uninstall"),
    "slurm.cluster": ("SLURMCluster",),
    "observe.tracing": ("trace",),
    "stream": ("run",),
    "train.fit": ("fit",),
    "train.rates": ("CosineRate",),
    "train.update": ("LossScale",),
    "views.progress": ("progress",),
}
# name -> (module, attribute); None is the module itself
_PUBLIC: dict[str, tuple[str, str | None]] = {}
for _module, _names in _MODULES.items():
    _PUBLIC |= {name: (f"dask_ferro.{_module}", name) for name in _names}
_PUBLIC |= {name: (f"dask_ferro.graph.tensor.{name}", None) for name in ("nn", "optim")}
_PUBLIC["workloads"] = ("dask_ferro.graph.workloads", None)

# Functions of lazy tensors, by their names in the array-API standard.
_ARRAY_API = (
    "abs", "acos", "acosh", "add", "all", "any", "arange", "argmax", "argmin", "argsort", "argument", "asarray",
    "asin", "asinh", "astype", "atan", "atan2", "atanh", "bitwise_and", "bitwise_invert", "bitwise_left_shift",
    "bitwise_or", "bitwise_right_shift", "bitwise_xor", "broadcast_arrays", "broadcast_shapes", "broadcast_to",
    "can_cast", "ceil", "clip", "concat", "copysign", "cos", "cosh", "count_nonzero", "cumulative_prod",
    "cumulative_sum", "diff", "divide", "equal", "erf", "exp", "expand_dims", "expm1", "eye", "finfo", "flip",
    "floor", "floor_divide", "full", "full_like", "greater", "greater_equal", "hypot", "iinfo", "isdtype",
    "isfinite", "isin", "isinf", "isnan", "less", "less_equal", "linspace", "log", "log10", "log1p", "log2",
    "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "matmul", "matrix_transpose", "max",
    "maximum", "mean", "meshgrid", "min", "minimum", "moveaxis", "multiply", "negative", "not_equal", "ones",
    "ones_like", "permute_dims", "positive", "pow", "prod", "reciprocal", "remainder", "repeat", "reshape",
    "result_type", "roll", "round", "searchsorted", "sign", "signbit", "sin", "sinh", "sort", "split", "sqrt",
    "square", "squeeze", "stack", "std", "subtract", "sum", "take", "take_along_axis", "tan", "tanh", "tensordot",
    "tile", "tril", "triu", "trunc", "unstack", "var", "vecdot", "where", "zeros", "zeros_like",
)  # fmt: skip
_PUBLIC |= {name: ("dask_ferro.graph.tensor.namespace", name) for name in _ARRAY_API}

__all__ = [
    "from_onnx", "load", "run", "install", "uninstall", "check", "bundled", "progress", "trace", "tape", "ModelGraph",
    "LocalCluster", "SLURMCluster", "Elastic", "Tensor", "TensorModel", "nn", "optim",
    "grad", "value_and_grad", "signal", "save_onnx", "to_model", "apply", "plan", "Ranks", "gather", "parallel",
    "fit", "LossScale", "CosineRate", "schedule", "Schedule", "Mesh", "Replicate", "Shard", "Partial",
    "Prefer", "Require", "workloads", "ConfigError", "ModelError", "UnsupportedOp", "__version__",
    *_ARRAY_API,
]  # fmt: skip


# Python makes a module an attribute of its package when it is first loaded.  `trace.py` is loaded here (6 ms, for its
# imports from the standard library) and the attribute is removed, so that it never hides the function `ff.trace`.
import_module("dask_ferro.trace")
globals().pop("trace", None)


def _loaded(name: str, module: str) -> Any:
    """Import a module; where an optional dependency is missing, raise an error that names the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "dask_jobqueue":
            # What else is missing is no extra, but a fault of the installation.
            raise
        from dask_ferro.errors import ConfigError

        raise ConfigError(
            f"ff.{name} needs dask-jobqueue, which is not installed: pip install 'dask_ferro[slurm]'"
        ) from None


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("dask-ferro")
    elif name in _PUBLIC:
        module, attribute = _PUBLIC[name]
        if name in _ARRAY_API or name in ("nn", "optim", "fit"):
            # This import gives tensors their `compute`, which the result of any of these functions needs.
            import_module("dask_ferro.lower.tensor")
        value = _loaded(name, module)
        if attribute is not None:
            value = getattr(value, attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
