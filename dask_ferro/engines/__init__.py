"""Engines, which compute a bundle on arrays that they are handed; they know ONNX nodes, and nothing of Dask.

`selection` says ahead of time which engine computes which node, `executable` strings the engines of one bundle
together, `device_executable` compiles them for a GPU, `device.residency` keeps what lies there; `cache` keeps
executables.  The engines:
`onnxruntime` (a whole run of nodes as one session), `array` (node by node on the array-API namespace of the
arguments), `reference` (the onnx package's own ops).
"""

from types import ModuleType
from typing import Any, TypeAlias

# An array of whichever namespace: numpy's, CuPy's, array_api_strict's, a stand-in's.  They share a standard and no
# class, and the standard's types (https://data-apis.org/array-api) are no package that a checker reads.
Array: TypeAlias = Any
# The array API's functions for one kind of array: `array_api_compat.numpy`, `array_api_compat.cupy`.
Namespace: TypeAlias = ModuleType
