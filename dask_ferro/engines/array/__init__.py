"""Array kernels: a table of one function per operator, written once on the array-API namespace of the arguments.

    supports(node, opset, dtypes)                             whether the table declares a node
    compile(nodes, inputs, outputs, opset=, weights=)         a bundle as a program; on_device=True:
                                                              shape computations stay on the host
        .bind(xp)                                             attributes parsed, weights as arrays of `xp`
        (*arrays)                                             a tuple of arrays

`xp` is numpy (through array_api_compat), CuPy, or array_api_strict, with which the tests check that the kernels use
nothing outside the standard.
"""

from dask_ferro.engines.array.program import BoundProgram, Program, compile
from dask_ferro.engines.array.table import KERNELS, supports

__all__ = ["KERNELS", "BoundProgram", "Program", "compile", "supports"]
