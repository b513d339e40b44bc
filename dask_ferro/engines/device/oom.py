"""Out-of-memory errors of a device's libraries, not all of which raise MemoryError.

CuPy's own allocator does.  What its libraries allocate for themselves is told by their status: cuBLAS makes its handle
and workspace at a thread's first product, the driver loads a kernel at its first launch.
"""

from __future__ import annotations

# Packages whose errors tell by their text.
_PACKAGES = frozenset({"cupy", "cupyx", "cupy_backends"})
# Their words for memory that ran out.
_WORDS = (
    "STATUS_NOT_INITIALIZED",  # cuBLAS: no memory for a handle
    "STATUS_ALLOC_FAILED",
    "ERROR_OUT_OF_MEMORY",  # the driver
    "cudaErrorMemoryAllocation",
)


def ran_out(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, means that memory ran out.

    >>> ran_out(MemoryError()), ran_out(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    (True, False)
    """
    while error is not None:
        told = type(error).__module__.partition(".")[0] in _PACKAGES and any(w in str(error) for w in _WORDS)
        if told or isinstance(error, MemoryError):
            return True
        error = error.__cause__
    return False
