"""Checks of one tensor's data against its dtype and dimensions.

Problems are sentences about "it"; the caller puts the tensor's place before them.
Knows ONNX's storage rules (IR specification, "TensorProto"): which of the typed fields holds which dtype, how
types of less than a byte are packed.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import onnx
import onnx_ir as ir

from dask_ferro.graph.ir.dtypes import COMPLEX
from dask_ferro.graph.ir.inference_limits import MOST_DIMS

T = onnx.TensorProto

_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")

# Elements; beyond this a signed 64-bit count of bits overflows somewhere below us.
_MOST_ELEMENTS = 1 << 56


def size(data_type: int, count: int) -> int:
    """Return the bytes of `count` packed elements; 0 for strings."""
    if data_type == T.STRING:
        return 0
    return (count * int(ir.DataType(data_type).bitwidth) + 7) // 8


def is_known(data_type: int) -> bool:
    """Return whether `data_type` is a dtype that a tensor may have."""
    return data_type != T.UNDEFINED and data_type in ir.DataType.__members__.values()


def problems(tensor: onnx.TensorProto) -> Iterator[str]:
    """Yield the problems of the tensor itself; external data is not looked at."""
    if not is_known(tensor.data_type):
        yield f"its dtype is number {tensor.data_type}, which ONNX {onnx.__version__} does not know"
        return
    if any(dim < 0 for dim in tensor.dims):
        yield f"its dimensions {list(tensor.dims)[:8]} are negative; a stored tensor has its real sizes"
        return
    # Before they are multiplied: the product of 80,000 sizes takes 12 s.
    if len(tensor.dims) > MOST_DIMS:
        yield f"it has {len(tensor.dims)} dimensions; engines compute at most {MOST_DIMS}"
        return
    # In Python's integers: a product of four sizes from a file may wrap around to 0 in 64 bits.
    if (count := prod(tensor.dims)) > _MOST_ELEMENTS:
        yield f"its dimensions {list(tensor.dims)[:8]} are {_about(count)} elements, more than any machine holds"
        return
    if tensor.HasField("segment"):
        yield "it is stored in segments, which no ONNX runtime reads; store it whole"
    filled = [name for name in _DATA_FIELDS if len(getattr(tensor, name))]
    raw = tensor.HasField("raw_data")
    if tensor.data_location == T.EXTERNAL:
        if filled or tensor.raw_data:
            yield "it has data of its own beside external data; keep one of the two"
    elif raw and tensor.raw_data:
        yield from _raw_problems(tensor, filled, count)
    else:
        yield from _typed_problems(tensor, filled, count)


def _raw_problems(tensor: onnx.TensorProto, filled: list[str], count: int) -> Iterator[str]:
    if filled:
        yield f"it has raw_data and {filled[0]}; keep one of the two"
    if tensor.data_type == T.STRING:
        yield "strings cannot be stored as raw_data; use string_data"
        return
    got, wanted = len(tensor.raw_data), size(tensor.data_type, count)
    if got != wanted:
        yield f"its raw_data has {got} bytes, and {_describe(tensor)} needs {wanted}"


def _typed_problems(tensor: onnx.TensorProto, filled: list[str], count: int) -> Iterator[str]:
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    bits = 8 if tensor.data_type == T.STRING else int(ir.DataType(tensor.data_type).bitwidth)
    # A complex number has two entries; types of less than a byte are packed like bytes.
    entries = 2 * count if tensor.data_type in COMPLEX else count
    wanted = size(tensor.data_type, count) if bits < 8 else entries
    if wrong := [name for name in filled if name != field]:
        yield f"its data is in {wrong[0]}, and {_describe(tensor)} is stored in {field} or raw_data"
        return
    got = len(getattr(tensor, field))
    # Some writers store types of 6 bits one to an entry.
    if got != wanted and not (bits == 6 and got == count):
        yield f"its {field} has {got} entries, and {_describe(tensor)} needs {wanted}"
    elif tensor.data_type == T.STRING:
        yield from _text_problems(tensor)


def _text_problems(tensor: onnx.TensorProto) -> Iterator[str]:
    for i, text in enumerate(tensor.string_data):
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            yield f"its string {i} is not UTF-8: {text[:20]!r}"
            return


def _about(number: int) -> str:
    # Python refuses to print a larger one as a float.
    return f"{number:.3g}" if number < 1e300 else "over 1e300"


def _describe(tensor: onnx.TensorProto) -> str:
    dims = ", ".join(map(str, tensor.dims))
    return f"{ir.DataType(tensor.data_type).name.lower()}[{dims}]"


def sparse_problems(sparse: onnx.SparseTensorProto, value_bytes: int) -> Iterator[str]:
    """Yield the problems of a sparse tensor, which may take at most `value_bytes` when dense."""
    for part, tensor in (("values", sparse.values), ("indices", sparse.indices)):
        if tensor.data_location == T.EXTERNAL:
            yield f"the {part} of a sparse tensor are external; store them in the model"
            return
        for problem in problems(tensor):
            yield f"{part} of a sparse tensor: {problem}"
            return
    if sparse.indices.data_type != T.INT64:
        yield f"indices of a sparse tensor are {ir.DataType(sparse.indices.data_type).name}; wanted INT64"
        return
    if len(sparse.dims) > MOST_DIMS:
        yield f"a sparse tensor has {len(sparse.dims)} dimensions; engines compute at most {MOST_DIMS}"
        return
    # Before any product of them: two negative sizes are a positive number of elements.
    if any(dim < 0 for dim in sparse.dims):
        yield f"the dimensions {list(sparse.dims)[:8]} of a sparse tensor are negative"
        return
    dense = size(sparse.values.data_type, prod(sparse.dims))
    if dense > value_bytes:
        yield (
            f"a sparse tensor of dimensions {list(sparse.dims)[:8]} takes {_about(dense)} bytes when dense, "
            f"and {value_bytes} are allowed (Limits.value_bytes)"
        )
        return
    yield from _index_problems(sparse)


def _index_problems(sparse: onnx.SparseTensorProto) -> Iterator[str]:
    count, rank = prod(sparse.values.dims), len(sparse.dims)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    if indices.shape not in ((count,), (count, rank)):
        yield f"indices of a sparse tensor have shape {indices.shape}; wanted ({count},) or ({count}, {rank})"
        return
    # One index of an element, or one of each axis.
    limits = np.array([prod(sparse.dims)] if indices.ndim == 1 else list(sparse.dims), np.int64)
    if count and ((indices < 0).any() or (indices >= limits).any()):
        yield f"indices of a sparse tensor lie outside its dimensions {list(sparse.dims)[:8]}"
