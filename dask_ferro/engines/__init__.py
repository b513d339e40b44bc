"""Engines, which compute a bundle on given arrays; they know ONNX nodes, and nothing of Dask.

`selection` assigns an engine to each node ahead of time, `executable` runs the engines of one bundle in order,
`device_executable` compiles a bundle for a GPU, `device.residency` manages the arrays there; `cache` keeps executables.
The engines are `onnxruntime` (a whole run of nodes as one session), `array` (node by node on the array-API namespace of
the arguments) and `reference` (the onnx package's own operators).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeAlias

# An array of any namespace: numpy's, CuPy's, array_api_strict's, an emulated device's.  They share a standard but no
# class, and the standard (https://data-apis.org/array-api) publishes no types that a type checker reads.
Array: TypeAlias = Any
# The array API's functions for one kind of array: `array_api_compat.numpy`, `array_api_compat.cupy`.
Namespace: TypeAlias = ModuleType

# Takes arrays; returns an array, or a tuple of arrays.
Kernel: TypeAlias = Callable[..., Array]
# A hook around operators: takes an engine, an operator's type, a node's name, and the function that computes them, or a
# session of several operators; returns the function to call in its place.
OpHook: TypeAlias = Callable[[str, str, str, Kernel], Kernel]
# "onnxruntime-device" is a session on the device of the values; `device_executable.device_route` chooses it.
Engine = Literal["onnxruntime", "array", "reference", "onnxruntime-device"]
