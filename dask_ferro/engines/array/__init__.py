"""Array kernels: a table of one function per operator, written once on the array-API namespace of the arguments.

    supports(node, opset, dtypes)                                      whether the table declares a node
    Program(nodes, inputs, outputs, opset=, weights=, xp=, upload=)    a bundle: attributes parsed, weights as arrays
        (*arrays)                                                      a tuple of arrays

`xp` is numpy (through array_api_compat), CuPy, or array_api_strict, with which the tests check that the kernels use
nothing outside the standard.
"""

from dask_ferro.engines.array.program import Program
from dask_ferro.engines.array.table import KERNELS, supports

__all__ = ["KERNELS", "Program", "supports"]
