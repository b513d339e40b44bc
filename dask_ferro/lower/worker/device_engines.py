"""Engine selection for a bundle on this worker's device, by declared support and projected seconds.

A plan names engines for the host, because the client does not know which worker will run a task; a worker with a
device selects engines again, from its own card, its own installation and the actual shapes.  One selection takes about
as long as one cost projection, so it is made once per bundle and shapes, and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from threading import Lock
from typing import Any

import onnx_ir as ir

from dask_ferro import config
from dask_ferro.engines.device.device import Device
from dask_ferro.engines.device_selection import device_engines, device_route
from dask_ferro.engines.executable import nodes_between
from dask_ferro.engines.onnxruntime.device_session import place_of, sizes_of, works
from dask_ferro.engines.onnxruntime.support import HOST
from dask_ferro.engines.selection import Engine
from dask_ferro.graph.cost.profiles import Card, array_profile, card, is_stacked, session_profile
from dask_ferro.graph.cost.roofline import CPU, node_cost, seconds
from dask_ferro.graph.ir.inference import ValueType, infer
from dask_ferro.graph.ir.nested import with_bodies
from dask_ferro.graph.ir.nodes import type_of, uses, value_bytes

Engines = tuple[tuple[Engine, int], ...]
# A session keeps its own copy of weights on the device, and times are estimates: it must be a tenth faster.
_MARGIN = 1.1
# Choices kept: one per bundle and combination of input shapes.
_KEPT = 512
_choices: dict[Hashable, Engines] = {}
_choices_lock = Lock()
# Time of reference ops relative to ONNX Runtime's: they run node by node, in Python where a kernel has a loop.
_REFERENCE = 30.0


def engines_on(
    device: Device,
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    arrays: Sequence[Any],
    *,
    row: Card | None = None,
) -> Engines:
    """Return the engines of a bundle on a device as runs: (engine, number of nodes) in topological order.

    Parameters
    ----------
    device : Device
    model : onnx_ir.Model
        Loaded and checked, so that some engine computes each node.
    inputs, outputs : sequence of str
        The names of the values that the bundle reads and makes.
    arrays : sequence of array
        The inputs' values; only their shapes are read.
    row : Card, optional
        The card's peak rates; by default those under the driver's name for it.
    """
    nodes = nodes_between(model, inputs, outputs)
    types = with_bodies(model, _types(model, inputs, arrays))
    provider = place_of(device).provider
    provider_here = provider if works(provider) else None
    row = row or card(card_name(device))
    profiles = {
        "array": array_profile(row, tf32=device.tf32),
        "onnxruntime-device": session_profile(row, tf32=device.tf32),
        "onnxruntime": CPU,
        "reference": CPU,
    }
    # Stacked products of the array engine do not round to TF32.
    stacked = profiles | {"array": array_profile(row)}
    weight = {"onnxruntime-device": _MARGIN, "reference": _REFERENCE}
    opsets = dict(model.opset_imports)

    def projected(node: ir.Node) -> dict[Engine, float]:
        cost = node_cost(node, types)
        of = stacked if is_stacked(node, types) else profiles
        return {
            engine: seconds(node, cost, of[engine], types=types) * weight.get(engine, 1.0)
            for engine in device_engines(node, opsets, provider_here, device.dtypes)
        }

    return device_route(
        [projected(node) for node in nodes], cut_bytes(nodes, inputs, outputs, types), bytes_per_s=row.host
    )


def chosen(
    device: Device,
    model: Callable[[], ir.Model],
    bundle: tuple[str, Sequence[str], Sequence[str]],
    arrays: Sequence[Any],
) -> Engines | None:
    """Return the engines of a bundle as `engines_on` selects them, once per combination of shapes.

    Parameters
    ----------
    device : Device
    model : callable
        Returns the loaded model; called where no selection is cached.
    bundle : tuple of str, sequence of str, sequence of str
        Digest of the model, and the names of the values that the bundle reads and makes.
    arrays : sequence of array

    Returns
    -------
    tuple of (engine, count), or None
        None: nothing to select, the array table computes all that it has; also without `device.optimizations`.
    """
    wanted = config.value("device.onnxruntime") if config.value("device.optimizations") else "never"
    provider = place_of(device).provider
    if wanted == "never" or (wanted == "auto" and provider == HOST) or not works(provider):
        return None
    shapes = tuple(tuple(getattr(a, "shape", ())) for a in arrays)
    key = (device.name, device.tf32, device.dtypes, provider, bundle, shapes)
    with _choices_lock:
        found = _choices.get(key)
    if found is not None:
        return found
    # Selection runs outside the lock: two threads may select the same engines twice, and none waits for another.
    found = engines_on(device, model(), bundle[1], bundle[2], arrays)
    with _choices_lock:
        if len(_choices) >= _KEPT:
            _choices.clear()
        _choices[key] = found
    return found


def card_name(device: Device) -> str:
    """Return the driver's name for a CUDA device, or the device's own name for any other."""
    kind, _, ordinal = device.name.partition(":")
    if kind != "cuda":
        return device.name
    import cupy

    name: bytes = cupy.cuda.runtime.getDeviceProperties(int(ordinal))["name"]
    return name.decode()


def cut_bytes(
    nodes: Sequence[ir.Node], inputs: Sequence[str], outputs: Sequence[str], types: Mapping[str, ValueType]
) -> list[float]:
    """Return the bytes of live values before each node and after the last: made earlier and read later; no weights."""
    values: dict[str, ir.Value] = {}
    born: dict[str, int] = dict.fromkeys(inputs, 0)
    dies: dict[str, int] = {}
    for position, node in enumerate(nodes):
        values |= {v.name: v for v in (*node.inputs, *node.outputs) if v is not None and v.name}
        born |= {v.name: position + 1 for v in node.outputs if v.name}
        dies |= dict.fromkeys(uses(node), position)
    dies |= dict.fromkeys(outputs, len(nodes))
    alive = [0.0] * (len(nodes) + 1)
    for name, first in born.items():
        if name in values:
            size = float(value_bytes(type_of(values[name], types)))
            for cut in range(first, dies.get(name, first - 1) + 1):
                alive[cut] += size
    return alive


def _types(model: ir.Model, inputs: Sequence[str], arrays: Sequence[Any]) -> dict[str, ValueType]:
    """Return the types of the model's values, with symbolic dimensions bound to the sizes of the bundle's inputs."""
    declared = infer(model)
    shapes = [declared[name].shape for name in inputs]
    sizes = sizes_of(shapes, [tuple(getattr(a, "shape", ())) for a in arrays])
    dims = chain.from_iterable(declared[v.name or ""].shape or () for v in model.graph.inputs)
    own = {dim for dim in dims if isinstance(dim, str)}
    bound = {name: size for name, size in sizes.items() if name in own}
    return infer(model, dims=bound) if bound else declared
