"""One hostile model file in a child of the zygote: refused clearly, or equal to ONNX Runtime.

Where ONNX Runtime says that it has no kernel for an operator's dtype, or does not know the opset yet, the numbers are
to be those of `onnx.reference`; a file that it refuses for any other reason is to be refused by us.
"""

from __future__ import annotations

import re
import resource
import warnings
from typing import Any

import dask
import numpy as np
import onnx

import dask_ferro as ff
from dask_ferro.lower.signature import synthetic

# Traces of an engine's own words that no user should have to read.
_RAW = re.compile(r"onnxruntime_src|ONNXRuntimeError|Traceback")
# What ONNX Runtime says of what it lacks; all else that it says is of the file.
_LACKS = re.compile(r"NOT_IMPLEMENTED|is under development and support for this is limited")
LIMITS = {"ferro.limits.value-bytes": "64MiB", "ferro.limits.run": "2s", "scheduler": "sync"}


def verdict(path: str) -> str:
    """Return "refused", "equal", "equal to the reference", or what is wrong with how the file ended."""
    with dask.config.set(LIMITS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = ff.from_onnx(path)
            given = synthetic(model._opened.signature, 3)
            found = model(given).compute()
        except (ff.ModelError, ff.UnsupportedOpError, ff.InputError, MemoryError) as error:
            said = str(error)
            return f"raw words: {said}" if _RAW.search(said) or not said else "refused"
        except Exception as error:  # noqa: BLE001 - what it is, is what is asked
            return f"raw {type(error).__name__}: {error}"
    return _compared(path, given, found)


def _compared(path: str, given: dict[str, Any], found: Any) -> str:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        wanted = session.run(None, given)
    except Exception as error:  # noqa: BLE001 - of many kinds, and judged by what it says
        if not _LACKS.search(str(error)):
            return f"answered, and ONNX Runtime refuses: {error}"
        return _against(_by_reference(path, given), found, "equal to the reference")
    return _against(wanted, found, "equal")


def _by_reference(path: str, given: dict[str, Any]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    results: list[Any] = ReferenceEvaluator(onnx.load_model(path)).run(None, given)
    return results


def _against(wanted: list[Any], found: Any, equal: str) -> str:
    results = found if isinstance(found, dict) else {"": found}
    same = all(_same(ours, theirs) for ours, theirs in zip(results.values(), wanted, strict=True))
    return equal if same else f"not equal: {results} against {wanted}"


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if ours.dtype.kind in "fc":
        return bool(np.allclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True))
    return bool(np.array_equal(ours, theirs))


def loaded(path: str) -> str:
    """Return "loaded" or "refused": what is asked is whether it comes to an end."""
    from dask_ferro.graph.model.load import load

    try:
        load(path)
    except (ff.ModelError, ff.UnsupportedOpError):
        return "refused"
    return "loaded"


def loaded_in(path: str) -> tuple[str, int]:
    """Return as `loaded` does, and the most bytes of memory that the process has held."""
    return loaded(path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
