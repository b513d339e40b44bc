"""Out-of-memory errors of a device's libraries, not all of which raise MemoryError.

CuPy's own allocator raises it.  The libraries report failures of their own allocations by a status: cuBLAS allocates
its handle and workspace at a thread's first product, the driver loads a kernel at its first launch.
"""

from __future__ import annotations

# Packages whose errors are classified by their text.
_PACKAGES = frozenset({"cupy", "cupyx", "cupy_backends"})
# Their out-of-memory messages.
_WORDS = (
    "STATUS_NOT_INITIALIZED",  # cuBLAS: no memory for a handle
    "STATUS_ALLOC_FAILED",
    "ERROR_OUT_OF_MEMORY",  # the driver
    "cudaErrorMemoryAllocation",
)


def ran_out(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, means that memory ran out.

    >>> ran_out(MemoryError()), ran_out(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    (True, False)
    """
    while error is not None:
        told = type(error).__module__.partition(".")[0] in _PACKAGES and any(w in str(error) for w in _WORDS)
        if told or isinstance(error, MemoryError):
            return True
        error = error.__cause__
    return False
