"""Write a run of nodes as the model of one session, with ONNX Runtime's optimizers that it must not use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import onnx_ir as ir

from dask_ferro.engines.onnxruntime.faster_nodes import SLOW, faster
from dask_ferro.engines.onnxruntime.session import SessionModel, SessionRun, SessionSettings
from dask_ferro.engines.subgraph import extract
from dask_ferro.graph.ir.nodes import bodies, type_of, value_bytes
from dask_ferro.graph.ir.regions import REMAT_KEY

# Folds `product * scale` into a float32 attribute of the product.  For doubles this changes the eighth digit, and
# whether a product has its scale in the same bundle depends on the cut.  Without it an encoder takes 1.5 % longer in
# float32.
_FOLDS_SCALES = "MatMulScaleFusion"
_MERGES = "CommonSubexpressionElimination"
# Mistakes the padding of a convolution's computed kernel for the padding of its image, and refuses the graph.
_PADS = "Pad_Fusion"
# Makes convolutions with constant kernels faster.  If all kernels are computed, as in training, it moves only pools
# to another layout and back: 0.95 of the CPU time of two convolutions' step without it.
_BLOCKS = "NchwcTransformer"


def session_of(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    settings: SessionSettings,
) -> SessionRun:
    """Return the nodes between `inputs` and `outputs` as a session."""
    return SessionRun(write_session(model, nodes, inputs, outputs, opset, exact=settings.exact), settings)


def write_session(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    *,
    exact: bool,
) -> SessionModel:
    """Return the nodes between `inputs` and `outputs` as a session loads them; `exact`: see `disabled_optimizers`."""
    piece = extract(model, nodes, inputs, outputs, opset=opset, shares=True)
    if not SLOW.isdisjoint(node.op_type for node in nodes):
        found = faster(nodes, piece.proto.graph.node, opset)
        del piece.proto.graph.node[:]
        piece.proto.graph.node.extend(found)
    return SessionModel(
        piece.proto.SerializeToString(),
        piece.folder,
        tuple(inputs),
        tuple(outputs),
        tuple(disabled_optimizers(nodes, exact=exact)),
        piece.shared,
        sum(tensor.nbytes for tensor in piece.weights.values()),
        constant_bytes(nodes, piece.weights),
    )


def constant_bytes(nodes: Iterable[ir.Node], weights: Iterable[str]) -> int:
    """Return the bytes of the values that depend on no input, which ONNX Runtime computes when it builds a session.

    The onnx package's light models build their weights like this, 490 MB from a file of 4 kB.
    """
    known, total = set(weights), 0
    for node in nodes:
        if not bodies(node) and all(v.name in known for v in node.inputs if v is not None and v.name):
            known.update(v.name for v in node.outputs if v.name)
            total += sum(value_bytes(type_of(v, {})) for v in node.outputs if v.name)
    return total


def disabled_optimizers(nodes: Sequence[ir.Node], *, exact: bool) -> list[str]:
    """Return the optimizers of ONNX Runtime that a session on `nodes` must not use.

    Parameters
    ----------
    exact : bool
        Whether the bits of results must not depend on the other nodes of the session; for doubles they never do.
    """
    values = chain.from_iterable((*node.inputs, *node.outputs) for node in nodes)
    has_doubles = any(v is not None and v.dtype is ir.DataType.DOUBLE for v in values)
    # ONNX Runtime would take a node that is computed again for a copy of the first one, and keep that one's result.
    repeats = any(REMAT_KEY in node.metadata_props for node in nodes)
    # Second derivatives of convolutions have such names.
    kernels = [node.inputs[1] for node in nodes if node.op_type == "Conv"]
    computed = [kernel is not None and kernel.const_value is None for kernel in kernels]
    apart = {
        _FOLDS_SCALES: exact or has_doubles,
        _MERGES: repeats,
        _PADS: any(computed),
        # In that layout a window's mean is summed in another order.
        _BLOCKS: bool(computed) and all(computed) and not exact,
    }
    return [name for name, is_apart in apart.items() if is_apart]
