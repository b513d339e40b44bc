"""A run of nodes as one ONNX Runtime session on the CPU.

The session gets a cut-out model whose weights are external data: those of the opened model in memory or, of large
models, memory-mapped from the user's own file, so that processes of one host share those pages.  With prepacking (the
default) matrix products are faster, and each session holds its own packed copy.  A session is thread-safe and releases
the GIL, so that the threads of a worker share one, with `threads` = cores / worker threads (more oversubscribes: 0.77 x
measured).  ONNX Runtime's global thread pool is no way out for many small sessions: it makes every other session of the
process fail, a user's own included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

import onnx_ir as ir
import onnxruntime as ort

from dask_ferro.engines import Array
from dask_ferro.engines.hooks import OpHook, Watched
from dask_ferro.engines.onnxruntime.folded import Constants, constants
from dask_ferro.engines.onnxruntime.host_memory import in_use, share_arena
from dask_ferro.engines.onnxruntime.profile import ProfiledRun
from dask_ferro.engines.onnxruntime.support import HOST
from dask_ferro.engines.subgraph import extract
from dask_ferro.engines.time_limit import current, stopped_by

# A session with prepacked weights was measured at 1.6 x their size.
_PREPACK_FACTOR = 1.6
# A session on one tiny op keeps 64 kB, by RSS.
_SESSION_BYTES = 64 * 2**10
# ONNX Runtime's severity of errors: its warnings do not reach a worker's log.
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
        piece = extract(model, nodes, inputs, outputs, opset=opset, shares=True)
        self._content = piece.proto.SerializeToString()
        # The session reads them where they are: they have to live as long.
        self._shared = piece.shared
        self._options = partial(session_options, piece.folder, threads, prepack)
        self._nodes = len(nodes)
        self._apart = kept_apart(nodes, exact=exact)
        weights = {name: tensor.nbytes for name, tensor in piece.weights.items()}
        kept = constants(nodes, weights, outputs)
        # Only where it is needed: it takes 25 us, as long as the calls of five sessions.
        before = in_use() if kept.unknown else 0
        self._session = self._built()
        grown = in_use() - before if kept.unknown else 0
        self._run = self._session.run
        self._inputs = tuple(inputs)
        self._outputs = list(outputs)
        held = sum(array.nbytes for array in self._shared.values())
        self.nbytes = len(self._content) * 5 + held + _kept_bytes(kept, weights, prepack, grown)

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        return self._on(None, arrays)

    def watched(self, watch: OpHook) -> Watched:
        """Return the same run on a second session, which ONNX Runtime profiles at first."""
        profiled = ProfiledRun(self._built, self._on, self._nodes)
        return Watched(watch.session(self._nodes, profiled))

    def _on(self, session: ort.InferenceSession | None, arrays: Sequence[Array]) -> tuple[Array, ...]:
        run, feeds = (
            self._run if session is None else session.run,
            dict(zip(self._inputs, arrays, strict=True)),
        )
        # The usual case, for which no options of a run are made.
        if current() is None:
            return tuple(run(self._outputs, feeds))
        options = ort.RunOptions()
        return stopped_by(
            lambda: setattr(options, "terminate", True), lambda: tuple(run(self._outputs, feeds, options))
        )

    def _built(self, profile: str | None = None) -> ort.InferenceSession:
        options = self._options(profile)
        share_arena(options)
        if self._shared:
            values = [ort.OrtValue.ortvalue_from_numpy(array) for array in self._shared.values()]
            options.add_external_initializers(list(self._shared), values)
        return ort.InferenceSession(self._content, options, providers=[HOST], disabled_optimizers=self._apart)


def _kept_bytes(kept: Constants, weights: Mapping[str, int], prepack: bool, grown: int) -> int:
    """Return the bytes that a session keeps beside its content, by its graph.

    Where the graph does not tell the size of a constant that is made at build, what the process grew by meanwhile
    counts, if that is more: other threads may make it too much, and too much costs another build at most.
    """
    mapped = sum(weights[name] for name in kept.weights)
    by_graph = _SESSION_BYTES + kept.nbytes + int(mapped * (_PREPACK_FACTOR if prepack else 0.0))
    return max(by_graph, grown) if kept.unknown else by_graph


def kept_apart(nodes: Sequence[ir.Node], *, exact: bool) -> list[str]:
    """Return the optimizers of ONNX Runtime that a session on `nodes` must do without.

    Parameters
    ----------
    exact : bool
        Whether its bits may not depend on what else is in the session; of doubles they never do.
    """
    values = chain.from_iterable((*node.inputs, *node.outputs) for node in nodes)
    has_doubles = any(v is not None and v.dtype is ir.DataType.DOUBLE for v in values)
    return [_FOLDS_SCALES] if exact or has_doubles else []


def session_options(
    folder: str | None, threads: int, prepack: bool, profile: str | None
) -> ort.SessionOptions:
    """Return the options of a session on a piece whose weights lie under `folder`."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # Nodes run one after the other: parallel are the worker's threads, and those inside a node.
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
