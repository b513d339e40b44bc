"""The built-in graphs: ten ONNX models of known size, for measurements and comparisons of schedules.

There are two families.  *Sleep* graphs consist of `ai.dask_ferro::Sleep`, which waits and copies its input, float32
[256]: it uses no CPU, so N workers on one core show the schedule itself, and a lower bound of the makespan is known
(`lower_bound`).  The others consist of real kernels: MatMul, Relu, LayerNormalization.

Every node is a compute op; sources are the graph's inputs (id 0), and nodes are numbered from 1.  Weights are drawn
from a seed by integer arithmetic and one rounding, so a seed gives the same bytes on every machine.  Layers share one
weight per role (as in ALBERT): xlarge-transformer takes 5 MB instead of 168 to send, and as long to compute.  Values
stay finite at any depth: weights have variance 1 / fan-in, and layers end in a layer norm.  Durations are seconds.

Examples
--------
>>> import dask_ferro as ff
>>> len(ff.workloads.build("wide", branches=3, length=2).graph.node)
6
>>> ff.workloads.lower_bound("imbalanced", workers=4)
0.25
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.model.own_models import made_here

# Floats in the value that a Sleep op copies: 1 KiB, small compared with a task's own cost.
SLEEP_ITEMS = 256
OPSET, IR_VERSION = 21, 10
# Pixels of an image in the 64-channel stage of ResNet.
PIXELS = 56 * 56

Params = Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Workload:
    """A row of the table of built-in graphs.

    Attributes
    ----------
    description : str
        One line for a list of choices.
    make : callable
        ``make(name, **params) -> onnx.ModelProto``.
    defaults : mapping
        Parameter name to default value; an int stands for an int, a float for a float.
    compute_ops : int
        Number of nodes with the default parameters.
    sleeps : bool
        Whether all nodes are Sleep ops, so that `lower_bound` is defined.
    """

    description: str
    make: Callable[..., onnx.ModelProto]
    defaults: Params
    compute_ops: int
    sleeps: bool = False


# ---- real kernels ------------------------------------------------------------------------------------------


def _weight(rng: np.random.Generator, name: str, rows: int, columns: int) -> onnx.TensorProto:
    """Return uniform weights of mean 0 and variance 1 / rows (the fan-in)."""
    bound = math.sqrt(3.0 / rows)
    array = (rng.random((rows, columns), dtype=np.float32) * 2 - 1) * np.float32(bound)
    return numpy_helper.from_array(array, name)


def _mixer_layer(layer: int, x: str, y: str) -> list[onnx.NodeProto]:
    """Return the twelve nodes of a layer: attention with relu instead of softmax, and a feed-forward part.

    q, k and v are parallel.  Keys and values are projected along the sequence (Linformer, arXiv:2006.04768), so both
    are d x d for any sequence, no Transpose is needed, and each of the seven matmuls costs 2 seq d^2 FLOPs.
    """
    p = f"layer_{layer}/"

    def node(op: str, name: str, *inputs: str, out: str | None = None) -> onnx.NodeProto:
        return helper.make_node(op, list(inputs), [out or p + name], name=p + name)

    return [
        node("LayerNormalization", "norm_in", x, "ln_scale", "ln_bias"),
        node("MatMul", "q", p + "norm_in", "w_q"),
        node("MatMul", "k", "w_k", p + "norm_in"),
        node("MatMul", "v", "w_v", p + "norm_in"),
        node("MatMul", "scores", p + "q", p + "k"),
        node("Relu", "attention", p + "scores"),
        node("MatMul", "mixed", p + "attention", p + "v"),
        node("LayerNormalization", "norm_mixed", p + "mixed", "ln_scale", "ln_bias"),
        node("MatMul", "up", p + "norm_mixed", "w_up"),
        node("Relu", "active", p + "up"),
        node("MatMul", "down", p + "active", "w_down"),
        node("LayerNormalization", "norm_out", p + "down", "ln_scale", "ln_bias", out=y),
    ]


def _norm_weights(d: int) -> list[onnx.TensorProto]:
    return [
        numpy_helper.from_array(np.ones(d, np.float32), "ln_scale"),
        numpy_helper.from_array(np.zeros(d, np.float32), "ln_bias"),
    ]


def _transformer(name: str, *, layers: int = 1, seq: int | None = None, d: int, seed: int) -> onnx.ModelProto:
    rng, seq = np.random.default_rng(seed), seq or d
    shapes = {"w_q": (d, d), "w_k": (d, seq), "w_v": (d, seq), "w_up": (d, d), "w_down": (d, d)}
    weights = [_weight(rng, role, *shape) for role, shape in shapes.items()]
    values = ["x", *(f"hidden_{i}" for i in range(1, layers)), "y"]
    nodes: list[onnx.NodeProto] = []
    for i in range(layers):
        nodes += _mixer_layer(i, values[i], values[i + 1])
    return _model(name, nodes, {"x": (seq, d)}, {"y": (seq, d)}, weights + _norm_weights(d))


def _matmuls(name: str, *, chains: int = 1, length: int, m: int, seed: int) -> onnx.ModelProto:
    # One input per chain: chains with the same input and weight are common subexpressions, which engines merge.
    ids = range(chains)
    x = ["x"] if chains == 1 else [f"x_{i}" for i in ids]
    y = ["y"] if chains == 1 else [f"y_{i}" for i in ids]
    nodes = []
    for i in ids:
        values = [x[i], *(f"chain_{i}/v_{k}" for k in range(1, length)), y[i]]
        nodes += [
            helper.make_node("MatMul", [values[k], "w"], [values[k + 1]], name=f"chain_{i}/matmul_{k}")
            for k in range(length)
        ]
    weight = _weight(np.random.default_rng(seed), "w", m, m)
    return _model(name, nodes, dict.fromkeys(x, (m, m)), dict.fromkeys(y, (m, m)), [weight])


def _resnet(name: str, *, channels: int, seed: int) -> onnx.ModelProto:
    """Return a bottleneck block, as matrix products over the channels of every pixel."""
    rng = np.random.default_rng(seed)
    c = channels
    nodes = [
        helper.make_node("MatMul", ["x", "w_reduce"], ["reduced"], name="reduce"),
        helper.make_node("Relu", ["reduced"], ["active"], name="relu"),
        helper.make_node("MatMul", ["active", "w_mix"], ["mixed"], name="mix"),
        helper.make_node("LayerNormalization", ["mixed", "ln_scale", "ln_bias"], ["normal"], name="norm"),
        helper.make_node("MatMul", ["normal", "w_expand"], ["y"], name="expand"),
    ]
    weights = [_weight(rng, role, c, c) for role in ("w_reduce", "w_mix", "w_expand")]
    return _model(name, nodes, {"x": (PIXELS, c)}, {"y": (PIXELS, c)}, weights + _norm_weights(c))


# ---- sleep ops ---------------------------------------------------------------------------------------------


def _sleep_chains(name: str, chains: Iterable[tuple[str, Sequence[float]]]) -> onnx.ModelProto:
    """Return chains of (name, seconds of each op) that all read the one input, with one output each."""
    nodes, outputs = [], []
    for chain, seconds in chains:
        value = "x"
        for k, s in enumerate(seconds):
            op = chain if len(seconds) == 1 else f"{chain}/op_{k}"
            end = f"{op}:y"
            nodes.append(
                helper.make_node("Sleep", [value], [end], name=op, domain=OWN_DOMAIN, seconds=float(s))
            )
            value = end
        outputs.append(value)
    shape = (SLEEP_ITEMS,)
    return _model(name, nodes, {"x": shape}, dict.fromkeys(outputs, shape))


def _wide(
    name: str, *, branches: int, length: int, skew: float, slow_s: float, fast_s: float
) -> onnx.ModelProto:
    # Rounded half up: Python's round(2.5) is 2.
    slow = math.floor(branches * skew + 0.5)
    chains = [(f"slow_{i}", [slow_s] * length) for i in range(slow)]
    chains += [(f"fast_{i}", [fast_s] * length) for i in range(slow, branches)]
    return _sleep_chains(name, chains)


def _imbalanced(name: str, *, long: int, short: int, long_s: float, short_s: float) -> onnx.ModelProto:
    """Return ops of unequal length; their names end in the id, and the long ones have ids 1 to `long`."""
    ops = [(f"long_{i}", [long_s]) for i in range(1, long + 1)]
    ops += [(f"short_{i}", [short_s]) for i in range(long + 1, long + short + 1)]
    return _sleep_chains(name, ops)


# ---- the table ---------------------------------------------------------------------------------------------


def _sleeps(branches: int, length: int, skew: float) -> Params:
    return {"branches": branches, "length": length, "skew": skew, "slow_s": 0.005, "fast_s": 0.001}


def _layers(layers: int, d: int) -> Params:
    return {"layers": layers, "d": d, "seed": 0}


_LONG_AND_SHORT = {"long": 4, "short": 200, "long_s": 0.2, "short_s": 0.001}

_ROWS = {
    "transformer": Workload(
        "one layer: 7 matmuls, 2 relus, 3 layer norms", _transformer, {"seq": 64, "d": 256, "seed": 0}, 12
    ),
    "large-transformer": Workload("8 layers in a chain, all d x d", _transformer, _layers(8, 256), 96),
    "xlarge-transformer": Workload("32 layers in a chain, all d x d", _transformer, _layers(32, 512), 384),
    "wide": Workload("8 chains of 5 sleeps, 1/4 of them slow", _wide, _sleeps(8, 5, 0.25), 40, True),
    "large-wide": Workload("32 chains of 10 sleeps, half slow", _wide, _sleeps(32, 10, 0.5), 320, True),
    "xlarge-wide": Workload("1280 sleeps, 4 of them slow", _wide, _sleeps(1280, 1, 0.003), 1280, True),
    "imbalanced": Workload("4 sleeps of 200 ms, 200 of 1 ms", _imbalanced, _LONG_AND_SHORT, 204, True),
    "matmul-chain": Workload("50 matmuls in a row", _matmuls, {"length": 50, "m": 512, "seed": 0}, 50),
    "matmul-parallel": Workload(
        "32 chains of 4 matmuls, one weight", _matmuls, {"chains": 32, "length": 4, "m": 512, "seed": 0}, 128
    ),
    "resnet": Workload("one bottleneck block as matmuls", _resnet, {"channels": 64, "seed": 0}, 5),
}
WORKLOADS: Mapping[str, Workload] = MappingProxyType(_ROWS)
NAMES: tuple[str, ...] = tuple(WORKLOADS)


def build(name: str, **params: int | float) -> onnx.ModelProto:
    """Return one of the built-in graphs, as a model that passes `onnx.checker`.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    **params : int or float
        Values in place of ``WORKLOADS[name].defaults``: sizes of at least 1, ``skew`` (the share of slow branches)
        from 0 to 1, ``*_s`` in seconds.

    Returns
    -------
    onnx.ModelProto
        The same bytes for the same arguments, on every machine. Its nodes are in a topological order.

    Raises
    ------
    ConfigError
        For a name or a parameter that does not exist, or a value out of range; it lists the choices.

    Examples
    --------
    >>> len(build("wide", branches=3, length=2).graph.node)
    6
    """
    workload = _lookup(name)
    return workload.make(name, **_checked(name, workload.defaults, params))


def lower_bound(name: str, workers: int, **params: int | float) -> float:
    """Return a lower bound of a sleep graph's makespan: max(work / workers, critical path).

    Parameters
    ----------
    name : str
        A workload of Sleep ops.
    workers : int
        The number of ops that can run at a time, at least 1.
    **params : int or float
        As for `build`.

    Returns
    -------
    float
        Seconds, without any overhead.

    Raises
    ------
    ConfigError
        As `build`; and a workload of real kernels, whose seconds depend on the machine.

    Examples
    --------
    >>> lower_bound("imbalanced", 4)
    0.25
    """
    if not _lookup(name).sleeps:
        choices = ", ".join(n for n, w in WORKLOADS.items() if w.sleeps)
        raise ConfigError(
            f"no lower bound for {name!r}: its ops take as long as the machine needs; one of {choices}"
        )
    workers = _integer("workers", workers, least=1)
    work, path = work_and_path(build(name, **params))
    return max(work / workers, path)


def work_and_path(model: onnx.ModelProto) -> tuple[float, float]:
    """Return the seconds of all Sleep nodes, and of those on the critical path; other nodes count as 0."""
    finish: dict[str, float] = {}
    seconds_of_all = []
    for node in model.graph.node:
        given = next((a.f for a in node.attribute if a.name == "seconds"), 0.0)
        # Attributes are float32: 0.2 is stored as 0.2000000030.
        seconds = float(str(np.float32(given)))
        start = max((finish.get(x, 0.0) for x in node.input), default=0.0)
        finish.update(dict.fromkeys(node.output, start + seconds))
        seconds_of_all.append(seconds)
    return math.fsum(seconds_of_all), max(finish.values(), default=0.0)


def tiny(n: int = 1280, width: int = 4, seed: int = 0) -> onnx.ModelProto:
    """Return a graph that measures overhead alone: a source, and `n` two-input ops on 256 floats in `width` lanes.

    The next op of a lane reads the lane's last value, and that of a random other lane (Max, Min) or, one time in
    four, the source (Add, Sub).  So values are whole multiples of the source, n / width at most: they neither
    overflow nor vanish, and all engines that follow IEEE 754 give the same bits.

    Parameters
    ----------
    n : int
        Number of ops without the source, at least 1.
    width : int
        Number of lanes, and of ops that are ready at a time; each lane has an output ``y_<lane>``.
    seed : int
        The seed of the random choices.

    Returns
    -------
    onnx.ModelProto
        With ``n + 1`` nodes; the first is the source, ``Neg(x)``.
    """
    n, width = _integer("n", n, least=1), _integer("width", width, least=1)
    rng = np.random.default_rng(_integer("seed", seed, least=0))
    width = min(width, n)
    before = after = ["source"] * width
    nodes = [helper.make_node("Neg", ["x"], ["source"], name="source")]
    for i in range(n):
        layer, lane = divmod(i, width)
        if lane == 0:
            before, after = after, list(after)
        other = before[(lane + int(rng.integers(1, width))) % width] if width > 1 else "source"
        mixes = rng.random() < 0.75 and other != "source"
        op = (("Max", "Min") if mixes else ("Add", "Sub"))[(lane + layer) % 2]
        after[lane] = f"y_{lane}" if i + width >= n else f"v_{i + 1}"
        inputs = [before[lane], other if mixes else "source"]
        nodes.append(helper.make_node(op, inputs, [after[lane]], name=f"op_{i + 1}"))
    shape = (SLEEP_ITEMS,)
    return _model("tiny", nodes, {"x": shape}, dict.fromkeys(after, shape))


# ---- checks and assembly -----------------------------------------------------------------------------------


def _lookup(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ConfigError(f"no built-in graph {name!r}; choose one of {', '.join(NAMES)}")
    return WORKLOADS[name]


def _checked(name: str, defaults: Params, given: Params) -> dict[str, int | float]:
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        choices = ", ".join(f"{k}={v}" for k, v in defaults.items())
        raise ConfigError(f"{name} has no parameter {', '.join(map(repr, unknown))}; it has {choices}")
    return {k: _value(k, given.get(k, default), default) for k, default in defaults.items()}


def _value(key: str, value: int | float, default: int | float) -> int | float:
    if isinstance(default, int):
        return _integer(key, value, least=0 if key in ("seed", "short") else 1)
    # A sleep of over an hour is taken for a typing error.
    most = 1.0 if key == "skew" else 3600.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= most:
        raise ConfigError(f"{key} must be a number from 0 to {most:g}, got {value!r}")
    return number


def _integer(key: str, value: int | float, *, least: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{key} must be a whole number, got {value!r}") from None
    if number < least:
        raise ConfigError(f"{key} must be at least {least}, got {value!r}")
    return number


def _model(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, ...]],
    outputs: Mapping[str, tuple[int, ...]],
    weights: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    def typed(value: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(value, TensorProto.FLOAT, shape)

    sleeps = [n for n in nodes if n.domain == OWN_DOMAIN]
    graph = helper.make_graph(
        nodes,
        name,
        [typed(value, shape) for value, shape in inputs.items()],
        [typed(value, shape) for value, shape in outputs.items()],
        weights,
        # ONNX's tools cannot infer the type of our own op, so it is declared.
        value_info=[typed(n.output[0], (SLEEP_ITEMS,)) for n in sleeps if n.output[0] not in outputs],
    )
    opsets = [helper.make_opsetid("", OPSET), *([helper.make_opsetid(OWN_DOMAIN, 1)] if sleeps else [])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="dask_ferro")
    return made_here(model) if sleeps else model
