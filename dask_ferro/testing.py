"""The built-in graphs: ten ONNX models of known size, for measurements and comparisons of schedules.

There are two families of graphs.  *Sleep* graphs consist of `ai.dask_ferro::Sleep`, which waits and copies its input,
float32 [256]: it uses no CPU, so N workers on one core show the schedule itself, and a lower bound of the makespan is
known (`lower_bound`).  The others consist of real kernels: MatMul, Relu, LayerNormalization.

Every node is a compute op; sources are the graph's inputs (id 0), and nodes are numbered from 1.  Weights are drawn
from a seed by integer arithmetic and one rounding, so a seed gives the same bytes on every machine.  Layers share one
weight per role (as in ALBERT): xlarge-transformer has 5 MB instead of 168 MB to send.  Values
stay finite at any depth: weights have variance 1 / fan-in, and layers end in a layer norm.  Durations are seconds.

Examples
--------
>>> import dask_ferro as ff
>>> len(ff.testing.build("wide", branches=3, length=2).graph.node)
6
>>> ff.testing.lower_bound("imbalanced", workers=4)
0.25
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import Outputs, to_model
from dask_ferro.graph.tensor.tensor import Node, Tensor, asarray, input

# Floats in the value that a Sleep op copies: 1 KiB, small compared with a task's own cost.
SLEEP_ITEMS = 256
# Pixels of an image in the 64-channel stage of ResNet.
PIXELS = 56 * 56

Params = Mapping[str, int | float]


class Workload(NamedTuple):
    """A built-in graph: ``make(**params)`` returns its outputs; the defaults are ints and floats.

    `sleeps` is true if all nodes are Sleep ops, so that `lower_bound` is defined.
    """

    make: Callable[..., Outputs]
    defaults: Params
    sleeps: bool = False


# ---- real kernels ------------------------------------------------------------------------------------------


def _weight(rng: np.random.Generator, name: str, rows: int, columns: int) -> Tensor:
    """Return uniform weights of mean 0 and variance 1 / rows (the fan-in)."""
    bound = math.sqrt(3.0 / rows)
    return asarray((rng.random((rows, columns), dtype=np.float32) * 2 - 1) * np.float32(bound), name=name)


def _norm(d: int) -> Callable[[Tensor], Tensor]:
    scale, bias = (
        asarray(np.ones(d, np.float32), name="ln_scale"),
        asarray(np.zeros(d, np.float32), name="ln_bias"),
    )
    return lambda x: nn.layer_norm(x, (d,), scale, bias)


def _transformer(*, layers: int = 1, seq: int | None = None, d: int, seed: int) -> Outputs:
    """Return layers of twelve nodes: attention with relu instead of softmax, and a feed-forward part.

    q, k and v are parallel.  Keys and values are projected along the sequence (Linformer, arXiv:2006.04768), so both
    are d x d for any sequence, no Transpose is needed, and each of the seven matmuls costs 2 seq d^2 FLOPs.
    """
    rng, seq = np.random.default_rng(seed), seq or d
    shapes = {"w_q": (d, d), "w_k": (d, seq), "w_v": (d, seq), "w_up": (d, d), "w_down": (d, d)}
    w_q, w_k, w_v, w_up, w_down = (_weight(rng, role, *shape) for role, shape in shapes.items())
    x, norm = input("x", (seq, d)), _norm(d)
    for _ in range(layers):
        read = norm(x)
        mixed = nn.relu((read @ w_q) @ (w_k @ read)) @ (w_v @ read)
        x = norm(nn.relu(norm(mixed) @ w_up) @ w_down)
    return {"y": x}


def _matmuls(*, chains: int = 1, length: int, m: int, seed: int) -> Outputs:
    # One input per chain: chains with the same input and weight are common subexpressions, which engines merge.
    weight = _weight(np.random.default_rng(seed), "w", m, m)
    ends = {}
    for suffix in [""] if chains == 1 else [f"_{i}" for i in range(chains)]:
        value = input(f"x{suffix}", (m, m))
        for _ in range(length):
            value = value @ weight
        ends[f"y{suffix}"] = value
    return ends


def _resnet(*, channels: int, seed: int) -> Outputs:
    """Return a bottleneck block, as matrix products over the channels of every pixel."""
    rng, x, norm = np.random.default_rng(seed), input("x", (PIXELS, channels)), _norm(channels)
    reduce, mix, expand = (
        _weight(rng, role, channels, channels) for role in ("w_reduce", "w_mix", "w_expand")
    )
    return {"y": norm(nn.relu(x @ reduce) @ mix) @ expand}


# ---- sleep ops ---------------------------------------------------------------------------------------------


def _sleep_chains(chains: Iterable[tuple[str, Sequence[float]]]) -> Outputs:
    """Return chains of (name, seconds of each op) that all read the one input, with one output each."""
    x, ends = input("x", (SLEEP_ITEMS,)), {}
    for chain, seconds in chains:
        names = [chain] if len(seconds) == 1 else [f"{chain}/op_{k}" for k in range(len(seconds))]
        value = x
        for name, s in zip(names, seconds, strict=True):
            node = Node("Sleep", (value,), (x.type,), {"seconds": float(s)}, OWN_DOMAIN, opset=1, name=name)
            value = Tensor(node, 0, x.type)
        ends[f"{names[-1]}:y"] = value
    return ends


def _wide_graph(*, branches: int, length: int, skew: float, slow_s: float, fast_s: float) -> Outputs:
    # Rounded half up: Python's round(2.5) is 2.
    slow = math.floor(branches * skew + 0.5)
    chains = [(f"slow_{i}", [slow_s] * length) for i in range(slow)]
    chains += [(f"fast_{i}", [fast_s] * length) for i in range(slow, branches)]
    return _sleep_chains(chains)


def _imbalanced_graph(*, long: int, short: int, long_s: float, short_s: float) -> Outputs:
    """Return ops of unequal length; their names end in the id, and the long ones have ids 1 to `long`."""
    ops = [(f"long_{i}", [long_s]) for i in range(1, long + 1)]
    ops += [(f"short_{i}", [short_s]) for i in range(long + 1, long + short + 1)]
    return _sleep_chains(ops)


# ---- the table ---------------------------------------------------------------------------------------------


def _sleeps(branches: int, length: int, skew: float) -> Params:
    return {"branches": branches, "length": length, "skew": skew, "slow_s": 0.005, "fast_s": 0.001}


def _layers(layers: int, d: int) -> Params:
    return {"layers": layers, "d": d, "seed": 0}


WORKLOADS: Mapping[str, Workload] = {
    # Layers in a chain: 12 nodes each.
    "transformer": Workload(_transformer, {"seq": 64, "d": 256, "seed": 0}),
    "large-transformer": Workload(_transformer, _layers(8, 256)),
    "xlarge-transformer": Workload(_transformer, _layers(32, 512)),
    # 40, 320 and 1280 sleeps.
    "wide": Workload(_wide_graph, _sleeps(8, 5, 0.25), sleeps=True),
    "large-wide": Workload(_wide_graph, _sleeps(32, 10, 0.5), sleeps=True),
    "xlarge-wide": Workload(_wide_graph, _sleeps(1280, 1, 0.003), sleeps=True),
    "imbalanced": Workload(
        _imbalanced_graph, {"long": 4, "short": 200, "long_s": 0.2, "short_s": 0.001}, sleeps=True
    ),
    "matmul-chain": Workload(_matmuls, {"length": 50, "m": 512, "seed": 0}),
    "matmul-parallel": Workload(_matmuls, {"chains": 32, "length": 4, "m": 512, "seed": 0}),
    "resnet": Workload(_resnet, {"channels": 64, "seed": 0}),
}
NAMES: tuple[str, ...] = tuple(WORKLOADS)


def build(name: str, **params: int | float) -> onnx.ModelProto:
    """Return one of the built-in graphs, as a model that passes `onnx.checker`.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    **params : int or float
        Values that replace ``WORKLOADS[name].defaults``: sizes of at least 1, ``skew`` (the share of slow branches)
        from 0 to 1, ``*_s`` in seconds.

    Returns
    -------
    onnx.ModelProto
        The same bytes for the same arguments, on every machine. Its nodes are in a topological order.

    Raises
    ------
    InputError
        If a name or a parameter does not exist, or a value is out of range; the message lists the choices.

    Examples
    --------
    >>> len(build("wide", branches=3, length=2).graph.node)
    6
    """
    workload = _lookup(name)
    outputs = workload.make(**_check_params(name, workload.defaults, params))
    return ir.to_proto(to_model(outputs, name=name))


def lower_bound(name: str, workers: int, **params: int | float) -> float:
    """Return a lower bound of a sleep graph's makespan: max(work / workers, critical path).

    Parameters
    ----------
    name : str
        A workload of Sleep ops.
    workers : int
        The number of ops that can run at a time, at least 1.
    **params : int or float
        The same parameters as in `build`.

    Returns
    -------
    float
        Seconds, without any overhead.

    Raises
    ------
    InputError
        If `build` raises it, or the graph consists of real kernels, whose seconds depend on the machine.

    Examples
    --------
    >>> lower_bound("imbalanced", 4)
    0.25
    """
    if not _lookup(name).sleeps:
        choices = ", ".join(n for n, w in WORKLOADS.items() if w.sleeps)
        raise InputError(
            f"no lower bound for {name!r}: its ops take as long as the machine needs; one of {choices}"
        )
    _check_integer("workers", workers, least=1)
    finish: dict[str, float] = {}
    seconds_of_all = []
    for node in build(name, **params).graph.node:
        # Attributes are float32: 0.2 is stored as 0.2000000030.
        seconds = float(str(np.float32(node.attribute[0].f)))
        start = max((finish.get(x, 0.0) for x in node.input), default=0.0)
        finish.update(dict.fromkeys(node.output, start + seconds))
        seconds_of_all.append(seconds)
    return max(math.fsum(seconds_of_all) / workers, *finish.values())


# ---- checks -----------------------------------------------------------------------------------------------


def _lookup(name: str) -> Workload:
    if name not in WORKLOADS:
        raise InputError(f"no built-in graph {name!r}; choose one of {', '.join(NAMES)}")
    return WORKLOADS[name]


def _check_params(name: str, defaults: Params, given: Params) -> Params:
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        choices = ", ".join(f"{k}={v}" for k, v in defaults.items())
        raise InputError(f"{name} has no parameter {', '.join(map(repr, unknown))}; it has {choices}")
    for key, value in given.items():
        if isinstance(defaults[key], int):
            _check_integer(key, value, least=0 if key in ("seed", "short") else 1)
            continue
        # A sleep of over an hour is treated as a typing error.
        most = 1.0 if key == "skew" else 3600.0
        if not (isinstance(value, Real) and 0.0 <= value <= most):
            raise InputError(f"{key} must be a number from 0 to {most:g}, got {value!r}")
    return {**defaults, **given}


def _check_integer(key: str, value: int | float, *, least: int) -> None:
    if not (isinstance(value, Integral) and value >= least):
        raise InputError(f"{key} must be a whole number of at least {least}, got {value!r}")
