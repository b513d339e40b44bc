"""Array kernels: one table op -> function, written once on the array-API namespace of the arguments.

    supports(node, opset, dtypes)                             is it ours?   declared, never tried
    compile(nodes, inputs, outputs, opset=, weights=)         a bundle as straight-line Python; on_device=True: with
                                                              bookkeeping about shapes on the host; optimized=True:
                                                              elementwise chains and equal products as one call each
        .bind(xp)                                             attributes parsed, weights as arrays of `xp`
        (*arrays)                                             a tuple of arrays

`xp` is numpy (through array_api_compat), CuPy, or array_api_strict, on which the tests check that nothing
outside the standard is leaned on.
"""

from dask_ferro.engines.array.program import BoundProgram, Program, compile
from dask_ferro.engines.array.table import KERNELS, supports

__all__ = ["KERNELS", "BoundProgram", "Program", "compile", "supports"]
