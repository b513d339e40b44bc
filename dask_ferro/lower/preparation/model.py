"""Open models, check them, and store them at a path for workers; each has the values that all calls share.

A model comes from a file, an address, bytes or a `ModelProto`, or another process had it open.  Types, costs and
plans are computed once for each shape of the inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import onnx
import onnx_ir as ir

from dask_ferro.engines import Engine
from dask_ferro.engines.cache import Cache
from dask_ferro.engines.selection import Support, check_support
from dask_ferro.errors import InputError
from dask_ferro.graph.batch_independence import dependence
from dask_ferro.graph.bundling.plan import Granularity, Plan, plan
from dask_ferro.graph.cost.roofline import ModelCost, model_cost
from dask_ferro.graph.ir.inference import Inference, ValueType
from dask_ferro.graph.model.load import LoadedModel, load_built
from dask_ferro.graph.ops.states import Finding
from dask_ferro.lower.client import slots
from dask_ferro.lower.preparation.remote import fetch_model, is_address
from dask_ferro.lower.preparation.store import spool
from dask_ferro.lower.signature import Signature, shape_of, signature, with_batch
from dask_ferro.lower.worker.models import bundle_session, limits, load_once, remember
from dask_ferro.lower.worker.models import open_model as opened_model
from dask_ferro.lower.worker.sessions import MAX_MODELS, ModelRef

# Seconds below which a model is one bundle on any cluster: two tasks and a hop cost more than half of that.
_WORTH_CUTTING_S = 0.02
# Rows are followed in batches of these sizes: a prime is hardly the size of something else, and never both are.
_FOLLOWED_ROWS = (251, 509)
# Values stored for each model: a few for each combination of the inputs' shapes; users have few combinations.
_MAX_VALUES = 256
_T = TypeVar("_T")


def open_model(source: Any, *, outputs: object = None) -> PreparedModel:
    """Return a model that is loaded, checked, and stored at a path for workers; raises as `from_onnx` does.

    An `onnx_ir.Model` that this process created is not checked again.  `outputs` are the names of the outputs to keep.
    """
    source, name = read_source(source)
    if isinstance(source, (str, os.PathLike)):
        loaded = load_once(source, outputs)
        assert loaded.path is not None
        return _prepare(*remember(loaded, loaded.path), name)
    if isinstance(source, ir.Model):
        loaded = load_built(source, limits())
        return _prepare(*remember(loaded, spool(loaded.content or b"")), loaded.model.graph.name or "model")
    # Loaded first, so that a model that is refused is never written to the store.
    loaded = load_once(source, outputs)
    is_message = isinstance(source, onnx.ModelProto)
    content = bytes(source.SerializeToString(deterministic=True) if is_message else source)
    path = spool(content)
    # The caller's object may still change.  The model is not loaded again if it was read from these very bytes and is
    # too small to be mapped.
    if len(content) <= limits().mapped_above and loaded.content == content:
        loaded = replace(loaded, path=os.path.realpath(path))
    else:
        loaded = load_once(path, loaded.outputs or None)
    return _prepare(*remember(loaded, path), name or loaded.model.graph.name or "model")


def read_source(source: Any) -> tuple[Any, str]:
    """Return a caller's model, read from its address if it has one, and the name of its file; "": no file."""
    if isinstance(source, str) and is_address(source):
        return fetch_model(source), PurePosixPath(source.partition("?")[0]).stem
    return source, Path(source).stem if isinstance(source, (str, os.PathLike)) else ""


def with_defaults_replaced(model: PreparedModel, names: frozenset[str]) -> PreparedModel:
    """Return the model of a call that replaces the defaults of these names with inputs.

    A default is an initializer that is also an input (since IR version 4; before, each initializer had to be an input).
    """

    def make() -> PreparedModel:
        proto = onnx.load(model.ref.path, load_external_data=False)
        weights = [tensor for tensor in proto.graph.initializer if tensor.name not in names]
        defaults = {tensor.name for tensor in proto.graph.initializer} & {i.name for i in proto.graph.input}
        # An unknown name, which the check of names refuses.
        if proto.ir_version < 4 or not names <= defaults:
            return model
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in weights):
            raise InputError(
                f"model {model.name!r}: {', '.join(sorted(names))} replaces a default, which takes a model"
                " of one file, and this one has external data; store the weights in the model's file"
            )
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(weights)
        made = open_model(proto, outputs=model.ref.outputs or None)
        return replace(made, name=model.name).with_batch(model.signature.carried)

    return model.kept(("replaced", names), make)


def reopen(ref: ModelRef, content: bytes | None, name: str) -> PreparedModel:
    """Return a model that another process had open, opened once in this one.

    `content` is the file's content, if the file is removed with the process that wrote it.

    Raises
    ------
    InputError
        If this process does not see the file, or the file has been replaced since.
    """
    if content is not None:
        ref = ref._replace(path=spool(content))
    return _prepare(ref, opened_model(ref), name)


# The models that this process has prepared, for the calls of a model that is opened again.
_models: Cache[PreparedModel] = Cache(MAX_MODELS, size=None)


def _prepare(ref: ModelRef, loaded: LoadedModel, name: str) -> PreparedModel:
    """Return a model that this process has open with its signature and engines."""

    def build() -> PreparedModel:
        inference = Inference(loaded.model, is_inferred=loaded.is_inferred)
        found = check_support(loaded.model, f"cannot run model {name!r}")
        return PreparedModel(loaded, name, ref, inference, signature(loaded.model, inference.types()), found)

    return _models.get((ref, name), build, lambda prepared: prepared.loaded is loaded)


# ---- what calls share --------------------------------------------------------------------------------------


class SizedModel(NamedTuple):
    """Value types at certain input shapes, costs of the nodes, and the model's projected seconds on one thread."""

    types: Mapping[str, ValueType]
    cost: ModelCost
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class PreparedModel:
    """A loaded model with its signature and the engines of its nodes; `open_model` makes it."""

    loaded: LoadedModel
    name: str
    # Its path for workers, and its digest.
    ref: ModelRef
    inference: Inference
    signature: Signature
    # The engines of each node.
    support: Sequence[Support]
    # Types, costs, plans and row dependence by the shapes of the inputs, and views of other inputs that are cut.
    _by_shape: dict[Hashable, Any] = field(default_factory=dict)

    def sized(self, arrays: Mapping[str, Any], rows: int | None) -> SizedModel:
        """Return types and seconds when the inputs have the shapes of `arrays`, with `rows` rows."""

        def make() -> SizedModel:
            types, outputs = self.types(arrays, rows), self.signature.outputs
            has_sizes = any(spec.shape and isinstance(spec.shape[0], int) for spec in outputs)
            # Converters declare a size on axis 0 of outputs whose batch is open, in error.
            if has_sizes and not isinstance(self.signature.batch, int):
                inferred = self.types(arrays, rows, trusts_declared=False)
                shapes = {s.name: inferred[s.name].shape for s in outputs}
                types |= {
                    n: inferred[n] for n, shape in shapes.items() if shape is not None and None not in shape
                }
            cost = model_cost(self.loaded.model, types)
            return SizedModel(types, cost, sum(cost.seconds))

        return self.kept(("sized", _shapes(arrays), rows), make)

    def types(
        self, arrays: Mapping[str, Any], rows: int | None, *, trusts_declared: bool = True
    ) -> dict[str, ValueType]:
        """Return the value types when the inputs have the shapes of `arrays`, with `rows` on the batch axis."""
        sig, shapes = self.signature, dict[str, Sequence[int]]()
        for spec in sig.inputs:
            shape = shape_of(arrays.get(spec.name))
            if shape is None or spec.kind != "tensor":
                continue
            if spec.name in sig.carried:
                shape = (sig.fixed_rows or rows or shape[0], *shape[1:])
            # Dask's unknown sizes are nan.
            if all(d == d for d in shape):
                shapes[spec.name] = tuple(int(d) for d in shape)
        return self.inference.types(shapes=shapes, trusts_declared=trusts_declared)

    def row_dependence(self, arrays: Mapping[str, Any]) -> Mapping[str, Finding]:
        """Return the outputs whose rows may depend on each other, with the reasons.

        A model with a fixed batch size has none: it computes that many rows, and nothing is known about other numbers.
        """
        sig = self.signature
        if isinstance(sig.batch, int) or not any(sig.carries):
            return {}
        if held := sig.held_elsewhere:
            return {s.name: Finding(True, held) for s in sig.outputs}

        def make() -> Mapping[str, Finding]:
            found: dict[str, Finding] = {}
            probes = [(rows, self.types(arrays, rows, trusts_declared=False)) for rows in _FOLLOWED_ROWS]
            for (rows, types), (_, others) in zip(probes, reversed(probes), strict=True):
                for name, one in dependence(self.loaded.model, types, others, sig.carried, rows).items():
                    if name not in found or (one.sure and not found[name].sure):
                        found[name] = one
            return found

        # Without the rows: the answer is the same for any number of them.
        shapes = ((n, s[1:] if s and n in sig.carried else s) for n, s in _shapes(arrays))
        return self.kept(("dependence", *shapes), make)

    def with_batch(self, names: Collection[str]) -> PreparedModel:
        """Return this model with the batch on axis 0 of these inputs."""
        sig = with_batch(self.signature, names)
        if sig.carries == self.signature.carries:
            return self
        return self.kept(("batch", sig.carries), lambda: replace(self, signature=sig, _by_shape={}))

    def plan(
        self,
        arrays: Mapping[str, Any],
        rows: int | None,
        chunks: int,
        granularity: Granularity,
    ) -> Plan:
        """Return the plan of one chunk; chunks run side by side, so each has its share of the threads."""
        sized = self.sized(arrays, rows)
        shared = granularity == "auto" and sized.seconds > _WORTH_CUTTING_S
        # The number of workers is requested only if cutting may pay off: a cluster answers after a round trip.
        workers = max(1, ceil(slots() / chunks)) if shared else 1
        return self.kept(
            ("plan", _shapes(arrays), rows, granularity, workers),
            lambda: plan(
                self.loaded.model, sized.types, granularity=granularity, workers=workers, cost=sized.cost
            ),
        )

    def sessions(
        self, bundles: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[Engine, int], ...]], ...]
    ) -> tuple[bytes | None, ...]:
        """Return bundles for processes that have not loaded the model; None for one that has to load it.

        A bundle is given as (inputs, outputs, engines).
        """
        return self.kept(
            ("sessions", bundles),
            lambda: tuple(bundle_session(self.loaded, *bundle) for bundle in bundles),
        )

    def kept(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the value that is stored under a key; `make` computes it the first time."""
        kept = self._by_shape
        if key not in kept:
            made = make()
            if len(kept) >= _MAX_VALUES:
                del kept[next(iter(kept))]
            kept[key] = made
        return kept[key]  # type: ignore[no-any-return]


def _shapes(arrays: Mapping[str, Any]) -> tuple[tuple[str, tuple[Any, ...] | None], ...]:
    return tuple((name, shape_of(array)) for name, array in arrays.items())
