"""Make models self-contained: weights in other files become part of the model.

An imported model's weights stay in their file, mapped, and so do the weights of every graph that is written with
them. The reference is relative to a folder, so it is invalid in another file, and refers to something else after the
file that it names is overwritten.  Every function that writes a model calls this first.  Sizes are bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir

from dask_ferro.errors import InputError

# Key in `onnx_ir.Model.meta` of a model that this process created or checked; no file can set it.
CHECKED_KEY = "ferro.checked"
# A protobuf message ends at 2 GiB; beyond half of it weights are written to a separate file.
INLINE_BYTES = 1 << 30
_MESSAGE_BYTES = 2**31 - 1


def embed_weights(model: ir.Model) -> ir.Model:
    """Return the model, or a copy whose weights are tensors of its own: views of the mapped files, nothing is read."""
    values = model.graph.initializers.values()
    if not any(isinstance(value.const_value, ir.ExternalTensor) for value in values):
        return model
    own = model.clone()
    for value in own.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
    return own


def content(model: ir.Model) -> bytes:
    """Return a model's file, with all its weights; equal models give equal bytes.

    Raises
    ------
    InputError
        If the weights are larger than a protobuf message.
    """
    large = weight_bytes(model)
    if large >= _MESSAGE_BYTES:
        raise InputError(
            f"the graph's weights are {large} bytes, and one message ends at {_MESSAGE_BYTES}; write it with"
            " dask_ferro.tensor.save_onnx, which puts weights into a separate file, and run that with"
            " ff.from_onnx"
        )
    return bytes(ir.to_proto(embed_weights(model)).SerializeToString(deterministic=True))


def weight_bytes(model: ir.Model) -> int:
    """Return the size of all weights."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def write(model: ir.Model, path: str, where: str) -> None:
    """Write a model to a file, large weights into `path` + ".data"; raises errors as `publish` does."""
    with publish(path, where) as part:
        beside = f"{os.path.basename(part)}.data" if weight_bytes(model) >= INLINE_BYTES else None
        ir.save(embed_weights(model), part, external_data=beside)


@contextmanager
def publish(path: str, where: str) -> Iterator[str]:
    """Yield a name in a new folder, whose files are moved to the folder of `path` when they are complete.

    So a model may read the files that it replaces.

    Raises
    ------
    InputError
        If the folder of `path` does not exist.
    """
    folder, name = os.path.split(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise InputError(f"{where}: {path!r}: folder {folder!r} does not exist; create it first")
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as part:
        yield os.path.join(part, name)
        # Files that a model names are moved before the model, whose name is the shortest.
        for written in sorted(os.listdir(part), reverse=True):
            os.replace(os.path.join(part, written), os.path.join(folder, written))
