"""A run of nodes as one ONNX Runtime session on the CPU.

The session gets an extracted model whose weights are external data: the loaded model's arrays in memory or, for large
models, the user's own memory-mapped file, whose pages all processes of a host share.  With prepacking (the default)
matrix products are faster, but each session keeps its own packed copy.  A session is thread-safe and releases the GIL,
so the threads of a worker share one, with `threads` = cores / worker threads (more oversubscribes: 0.77 x measured).
ONNX Runtime's global thread pool is no alternative for many small sessions: it makes every other session of the process
fail, also a user's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from threading import Timer
from typing import NamedTuple

import onnx_ir as ir
import onnxruntime as ort

from dask_ferro.engines import Array
from dask_ferro.engines.onnxruntime.faster_nodes import faster
from dask_ferro.engines.onnxruntime.host_memory import share_arena
from dask_ferro.engines.onnxruntime.support import HOST, RAISED_ALONE
from dask_ferro.engines.subgraph import extract
from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.nodes import bodies, type_of, value_bytes
from dask_ferro.graph.ir.regions import REMAT_KEY

# A session with prepacked weights takes 1.6 x their size (measured).
_PREPACK_FACTOR = 1.6
# A session on one tiny operator takes 64 kB of RSS.
_SESSION_BYTES = 64 * 2**10
# Folds `product * scale` into a float32 attribute of the product.  For doubles this changes the eighth digit, and
# whether a product has its scale in the same bundle depends on the cut.  Without it an encoder takes 1.5 % longer in
# float32.
_FOLDS_SCALES = "MatMulScaleFusion"
_MERGES = "CommonSubexpressionElimination"
# Takes the padding of a computed kernel of a convolution for that of its image, and refuses the graph.
_PADS = "Pad_Fusion"


class SessionSettings(NamedTuple):
    """What a session on the host depends on beside its nodes.

    Attributes
    ----------
    threads : int
        Intra-op threads.
    prepack : bool
        Whether the session may keep rearranged copies of constant weights.
    exact : bool
        Whether results have the same bits wherever the model is cut; see `kept_apart`.
    limit : float or None
        Seconds that a run may take; it is stopped at the next node, also inside the body of a Loop.
    """

    threads: int = 1
    prepack: bool = True
    exact: bool = False
    limit: float | None = None


DEFAULTS = SessionSettings()


class SessionRun:
    """The nodes between `inputs` and `outputs` as one session."""

    def __init__(
        self,
        model: ir.Model,
        nodes: Sequence[ir.Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
        settings: SessionSettings,
    ) -> None:
        piece = extract(model, nodes, inputs, outputs, opset=opset, shares=True)
        found = faster(nodes, piece.proto.graph.node, opset)
        del piece.proto.graph.node[:]
        piece.proto.graph.node.extend(found)
        self._content = piece.proto.SerializeToString()
        # The session reads these arrays in place, so they have to live as long.
        self._shared = piece.shared
        self._apart = kept_apart(nodes, exact=settings.exact)
        weights = {name: tensor.nbytes for name, tensor in piece.weights.items()}
        self._session = self._built(session_options(piece.folder, settings))
        self._run = self._session.run
        self._inputs = tuple(inputs)
        self._outputs = list(outputs)
        self._limit = settings.limit
        held = sum(array.nbytes for array in self._shared.values())
        packed = int(sum(weights.values()) * (_PREPACK_FACTOR if settings.prepack else 0.0))
        self.nbytes = len(self._content) * 5 + held + _SESSION_BYTES + packed + made_bytes(nodes, weights)

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        run, feeds = self._run, dict(zip(self._inputs, arrays, strict=True))
        # The usual case needs no options of a run.
        if self._limit is None:
            return tuple(run(self._outputs, feeds))
        options = ort.RunOptions()
        timer = Timer(self._limit, setattr, (options, "terminate", True))
        # A daemon, so that a process can end before the limit.
        timer.daemon = True
        timer.start()
        try:
            return tuple(run(self._outputs, feeds, options))
        except Exception as error:
            if not options.terminate:
                raise
            raise ConfigError(
                f"stopped after {self._limit:g} s, the limit of one bundle (ferro.limits.run); raise it if the model is"
                " expected to take longer"
            ) from error
        finally:
            timer.cancel()

    def _built(self, options: ort.SessionOptions) -> ort.InferenceSession:
        share_arena(options)
        if self._shared:
            values = [ort.OrtValue.ortvalue_from_numpy(array) for array in self._shared.values()]
            options.add_external_initializers(list(self._shared), values)
        return ort.InferenceSession(self._content, options, providers=[HOST], disabled_optimizers=self._apart)


def made_bytes(nodes: Iterable[ir.Node], weights: Iterable[str]) -> int:
    """Return the bytes of the values that depend on no input, which ONNX Runtime computes when it builds a session.

    The onnx package's light models make their weights so, 490 MB from a file of 4 kB.
    """
    known, total = set(weights), 0
    for node in nodes:
        if not bodies(node) and all(v.name in known for v in node.inputs if v is not None and v.name):
            known.update(v.name for v in node.outputs if v.name)
            total += sum(value_bytes(type_of(v, {})) for v in node.outputs if v.name)
    return total


def kept_apart(nodes: Sequence[ir.Node], *, exact: bool) -> list[str]:
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
    # As in second derivatives of convolutions.
    kernels = (node.inputs[1] for node in nodes if node.op_type == "Conv")
    makes_kernels = any(kernel is not None and kernel.const_value is None for kernel in kernels)
    apart = {_FOLDS_SCALES: exact or has_doubles, _MERGES: repeats, _PADS: makes_kernels}
    return [name for name, is_apart in apart.items() if is_apart]


def session_options(folder: str | None, settings: SessionSettings) -> ort.SessionOptions:
    """Return the options of a session on a model with its weights under `folder`."""
    options = ort.SessionOptions()
    options.log_severity_level = RAISED_ALONE
    options.intra_op_num_threads = settings.threads
    # Nodes run one after the other; the worker's threads and the threads inside a node are parallel.
    options.inter_op_num_threads = 1
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    if not settings.prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options
