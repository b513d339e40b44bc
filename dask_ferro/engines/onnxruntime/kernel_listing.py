"""Prints the kernels that ONNX Runtime declares for a provider in a library, as JSON; see `selection.registry`.

    python dask_ferro/engines/onnxruntime/kernel_listing.py CUDAExecutionProvider libonnxruntime_providers_cuda.so

In a process of its own, because ONNX Runtime declares these kernels only while the library is registered as a plugin.
A plugin would take the sessions of the whole process, also a user's own; and once it is unregistered again, all later
sessions of the process run on the CPU without a word (ONNX Runtime 1.31.1).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(provider: str, library: str) -> None:
    import onnxruntime as ort
    from onnxruntime.capi.onnxruntime_pybind11_state import get_registered_ep_kernel_defs

    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    ort.register_execution_provider_library(provider, str(Path(ort.__file__).parent / "capi" / library))
    kernels = get_registered_ep_kernel_defs(provider)
    rows = [(k.domain, k.op_name, *k.version_range, dict(k.type_constraints)) for k in kernels]
    # A library may print to the standard output as well, so the answer is the last line.
    print("\n" + json.dumps(rows), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
