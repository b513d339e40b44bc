"""Checks of declared types, by themselves and against the weights.

Problems are sentences that name the value.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto

from dask_ferro.graph.ir import tensor_data


def initialized_input_problems(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield where an input's type differs from the initializer of its name, which is its value (IR version 3)."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for info in graph.input:
        tensor = stored.get(info.name)
        declared = info.type.tensor_type
        if tensor is None or not info.type.HasField("tensor_type"):
            continue
        dims = [d.dim_value if d.HasField("dim_value") else None for d in declared.shape.dim]
        fits = not declared.HasField("shape") or (
            len(dims) == len(tensor.dims)
            and all(d in (None, t) for d, t in zip(dims, tensor.dims, strict=True))
        )
        if not fits or declared.elem_type not in (TensorProto.UNDEFINED, tensor.data_type):
            yield (
                f"input {info.name!r} is declared {_declared(declared)} and its initializer is "
                f"{_dtype(tensor.data_type)}{list(tensor.dims)}; make them equal"
            )


def _declared(tensor: onnx.TypeProto.Tensor) -> str:
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim]
    return f"{_dtype(tensor.elem_type)}{dims}"


def _dtype(number: int) -> str:
    return (
        str(TensorProto.DataType.Name(number)).lower() if tensor_data.is_known(number) else f"dtype {number}"
    )


def type_problems(info: onnx.ValueInfoProto, what: str) -> Iterator[str]:
    """Yield the problems of the declared type of `info`; an input's type must be complete."""
    if what == "input" and info.type.WhichOneof("value") is None:
        yield f"input {info.name!r} has no type; declare its dtype"
    for type_ in _tensor_types(info.type):
        kind = type_.WhichOneof("value")
        if kind is None:
            yield f"{what} {info.name!r} has a type that does not say of what it is made; declare all of it"
            return
        tensor = getattr(type_, kind)
        number = tensor.elem_type
        if not tensor_data.is_known(number) and (number or what == "input"):
            known = f"onnx {onnx.__version__}"
            yield f"{what} {info.name!r} has dtype number {number}, which {known} does not know"
        for i, dim in enumerate(tensor.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value < 0:
                yield (
                    f"{what} {info.name!r} has the size {dim.dim_value} in dimension {i}; "
                    "name a dimension of any size instead (dim_param), or leave it out"
                )


def _tensor_types(type_: onnx.TypeProto) -> Iterator[onnx.TypeProto]:
    """Yield the tensor types within a declared type; an empty one stands for a missing one."""
    kind = type_.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        yield type_
    elif kind == "map_type":
        yield from _inner(type_.map_type.value_type)
    # Opaque types belong to other domains, which know what is in them.
    elif kind is not None and kind != "opaque_type":
        yield from _inner(getattr(type_, kind).elem_type)


def _inner(type_: onnx.TypeProto) -> Iterator[onnx.TypeProto]:
    if type_.WhichOneof("value") is None:
        yield type_
    else:
        yield from _tensor_types(type_)
