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
from functools import partial
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from dask_ferro.kernels.capability import HOST
from dask_ferro.kernels.extract import extract, weights_of
from dask_ferro.kernels.profile import ProfiledRun
from dask_ferro.kernels.watch import Watch, Watched

# A session with prepacked weights was measured at 1.6 x their size.
_PREPACK_FACTOR = 1.6
_WARNINGS_OFF = 3
# Folds `product * scale` into an attribute of the product, a float32: of doubles it spoils the eighth digit, and which
# products have their scale in the same piece depends on the cut.  Without it an encoder takes 1.5 % longer in float32.
_FOLDS_SCALES = "MatMulScaleFusion"


class SessionRun:
    """The nodes between `inputs` and `outputs` as one session.

    Parameters
    ----------
    threads : int
        Intra-op threads.
    prepack : bool
        Whether the session may keep rearranged copies of constant weights.
    exact : bool, optional
        Give the same bits wherever the model is cut; see `kept_apart`.
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
        exact: bool = False,
    ) -> None:
        piece = extract(model, nodes, inputs, outputs, opset=opset)
        self._content = piece.proto.SerializeToString()
        self._options = partial(session_options, piece.folder, threads, prepack)
        self._nodes = len(nodes)
        self._apart = kept_apart(nodes, exact=exact)
        self._session = self._built()
        self._run = self._session.run
        self._inputs = tuple(inputs)
        self._outputs = list(outputs)
        weights = sum(t.nbytes for t in weights_of(model, nodes).values())
        self.nbytes = int(weights * (_PREPACK_FACTOR if prepack else 0.0)) + len(self._content) * 5

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        return tuple(self._run(self._outputs, dict(zip(self._inputs, arrays, strict=True))))

    def watched(self, watch: Watch) -> Watched:
        """Return the same run on a second session, which ONNX Runtime profiles at first."""
        profiled = ProfiledRun(self._built, self._on, self._nodes)
        return Watched(watch.session(self._nodes, profiled))

    def _on(self, session: ort.InferenceSession | None, arrays: Sequence[Any]) -> tuple[Any, ...]:
        run = self._run if session is None else session.run
        return tuple(run(self._outputs, dict(zip(self._inputs, arrays, strict=True))))

    def _built(self, profile: str | None = None) -> ort.InferenceSession:
        options = self._options(profile)
        return ort.InferenceSession(self._content, options, providers=[HOST], disabled_optimizers=self._apart)


def kept_apart(nodes: Sequence[ir.Node], *, exact: bool) -> list[str]:
    """Return the optimizers of ONNX Runtime that a session on `nodes` must do without.

    Parameters
    ----------
    exact : bool
        Whether its bits may not depend on what else is in the session; of doubles they never do.
    """
    values = (v for node in nodes for v in (*node.inputs, *node.outputs) if v is not None)
    return [_FOLDS_SCALES] if exact or any(v.dtype is ir.DataType.DOUBLE for v in values) else []


def session_options(
    folder: str | None, threads: int, prepack: bool, profile: str | None
) -> ort.SessionOptions:
    """Return the options of a session on a piece whose weights lie under `folder`."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _WARNINGS_OFF
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    return options
