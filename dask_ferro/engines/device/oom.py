"""Out-of-memory errors of a device's libraries, not all of which raise MemoryError.

CuPy's own allocator raises it.  The libraries report failures of their own allocations by a status: cuBLAS allocates
its handle and workspace at a thread's first product, the driver loads a kernel at its first launch.
"""

from __future__ import annotations

# Packages whose errors are classified by their text; ONNX Runtime raises RuntimeError as well.
_PACKAGES = frozenset({"cupy", "cupyx", "cupy_backends", "onnxruntime"})
# Their out-of-memory messages.
_WORDS = (
    "STATUS_NOT_INITIALIZED",  # cuBLAS, cuDNN: no memory for a handle or a workspace
    "STATUS_ALLOC_FAILED",
    "ERROR_OUT_OF_MEMORY",  # the driver
    "cudaErrorMemoryAllocation",
    "out of memory",
    "ailed to allocate memory",  # ONNX Runtime
    "smaller than requested bytes",
    "bad_alloc",
    "bad allocation",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, means that memory ran out.

    >>> [is_out_of_memory(e) for e in (MemoryError(), RuntimeError("bad_alloc"), ValueError("bad_alloc"))]
    [True, True, False]
    """
    while error is not None:
        is_theirs = type(error) is RuntimeError or type(error).__module__.partition(".")[0] in _PACKAGES
        if isinstance(error, MemoryError) or (is_theirs and any(word in str(error) for word in _WORDS)):
            return True
        error = error.__cause__
    return False
