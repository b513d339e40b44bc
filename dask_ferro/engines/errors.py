"""Translates engines' exceptions into dask_ferro's errors, which name the nodes, the engine's reason and a remedy.

ONNX Runtime raises fifteen exception types of its own, with source files and C++ signatures in their texts; onnx's
reference operators and numpy raise Python's exceptions.  Each becomes one of three errors: the engine lacks a feature
(`UnsupportedOp`), the arrays do not fit the model (`ConfigError`), or the nodes cannot be computed as the file defines
them (`ModelError`).  An out-of-memory error becomes a `MemoryError`, because callers make room and retry.  The engine's
exception is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnx_ir as ir

from dask_ferro.engines.device.oom import ran_out
from dask_ferro.errors import ConfigError, ModelError, UnsupportedOp
from dask_ferro.words import few

NAMES = {
    "onnxruntime": "ONNX Runtime",
    # For users this is the same package.
    "onnxruntime-device": "ONNX Runtime",
    "array": "the array table",
    "reference": "onnx's reference ops",
}
# The most nodes that an error names, because a bundle may have thousands.
_NAMED = 3
# The most characters of an engine's message, because some contain a whole graph.
_REASON = 400
_PREFIX = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
# "/onnxruntime_src/.../element_wise_ops.h:563 void onnxruntime::BroadcastIterator::Init(ptrdiff_t, ptrdiff_t) "
_SOURCE = re.compile(r"/\S+\.(?:cc|cpp|h):\d+ (?:[^()]{0,200}\([^()]{0,400}\)(?: const)? )?")
_WRONG_ARRAYS = re.compile(
    r"Unexpected input data type|Invalid rank for input|Got invalid dimensions for input"
)


@contextmanager
def loading(engine: str, nodes: str) -> Iterator[None]:
    """Explain errors of an engine that loads nodes, which `labels` names.

    Raises
    ------
    ModelError, UnsupportedOp
        The engine cannot load them.
    MemoryError
        There is not enough memory for it.
    """
    try:
        yield
    except Exception as error:
        told = explained(error, engine, nodes, "load")
        if told is not error:
            raise told from error
        raise


def labels(nodes: Sequence[ir.Node]) -> str:
    """Return the first nodes by name and operator, and the number of further nodes, as text."""
    first = few((f"{node.name!r} ({node.op_type})" for node in nodes[:_NAMED]), len(nodes))
    return f"node{'s' if len(nodes) > 1 else ''} {first}"


def explained(error: Exception, engine: str, nodes: str, doing: str) -> Exception:
    """Return dask_ferro's error for an engine's error; an error of dask_ferro unchanged.

    Parameters
    ----------
    error : Exception
    engine : str
        A key of `NAMES`.
    nodes : str
        Text from `labels`.
    doing : str
        "load" or "run".

    Examples
    --------
    >>> told = explained(IndexError("too many indices"), "reference", "node 'a' (Gather)", "run")
    >>> print(str(told).partition(";")[0])
    onnx's reference ops cannot run node 'a' (Gather):
      - IndexError: too many indices
    """
    if isinstance(error, (ModelError, UnsupportedOp, ConfigError)):
        return error
    # Classified by name and text, because ONNX Runtime's classes have no common base.
    reason = cleaned(error)
    headline = f"{NAMES.get(engine, engine)} cannot {doing} {nodes}"
    if ran_out(error):
        return MemoryError(
            f"{headline}: {reason}; run fewer rows at a time (batch=), or give the worker more memory"
        )
    if type(error).__name__ == "NotImplemented" or isinstance(error, NotImplementedError):
        return UnsupportedOp(headline, [f"{reason}; export the model with another operator or dtype there"])
    if _WRONG_ARRAYS.search(reason):
        return ConfigError(f"{headline}: {reason}; pass arrays of the model's dtypes and shapes")
    remedy = (
        "correct or remove these nodes, or export the model again"
        if doing == "load"
        else "the model's sizes and values do not fit these inputs; correct the model, or pass other inputs"
    )
    return ModelError(headline, [f"{reason}; {remedy}"])


def cleaned(error: BaseException) -> str:
    """Return an engine's message without source locations, C++ signatures and line breaks, cut to a readable length."""
    text = " ".join(_SOURCE.sub("", _PREFIX.sub("", str(error))).split())
    if not type(error).__module__.startswith("onnxruntime") and type(error) is not RuntimeError:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # Both ends are kept, because the reason may be at either.
    return text if len(text) <= _REASON else f"{text[: _REASON // 2]} ... {text[-_REASON // 2 :]}"
