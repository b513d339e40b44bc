"""A run of nodes as one ONNX Runtime session on the CPU.

The session gets a cut-out model whose weights are external data, memory-mapped from the user's own file: with
prepacking off, processes of one host share those pages; with it on (the default) matrix products are faster,
and each session holds its own packed copy.  A session is thread-safe and releases the GIL, so that the threads
of a worker share one, with `threads` = cores / worker threads (more oversubscribes: 0.77 x measured).  ONNX
Runtime's global thread pool is no way out for many small sessions: it makes every other session of the process
fail, a user's own included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from dask_ferro.kernels.extract import extract, weights_of

# A session with prepacked weights was measured at 1.6 x their size.
_PREPACK_FACTOR = 1.6
_WARNINGS_OFF = 3


class SessionRun:
    """The nodes between `inputs` and `outputs` as one session.

    Parameters
    ----------
    threads : int
        Intra-op threads.
    prepack : bool
        Whether the session may keep rearranged copies of constant weights.
    """

    def __init__(
        self,
        model: ir.Model,
        nodes: Sequence[ir.Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
        *,
        threads: int,
        prepack: bool,
    ) -> None:
        piece = extract(model, nodes, inputs, outputs, opset=opset)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _WARNINGS_OFF
        if piece.folder is not None:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", piece.folder
            )
        if not prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")
        self._session = ort.InferenceSession(
            piece.proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._run = self._session.run
        self._inputs = tuple(inputs)
        self._outputs = list(outputs)
        weights = sum(t.nbytes for t in weights_of(model, nodes).values())
        self.nbytes = int(weights * (_PREPACK_FACTOR if prepack else 0.0)) + piece.proto.ByteSize() * 4

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        return tuple(self._run(self._outputs, dict(zip(self._inputs, arrays, strict=True))))
