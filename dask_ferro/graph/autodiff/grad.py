"""Reverse-mode gradients: from tensors, the tensors of their derivatives.

    loss = f(x, w)            forward nodes, as written
    grad(loss, w)             backward nodes: more of the same, in the region of the node they belong to

The nodes are walked from the last to the first.  The rule of a node's op writes the gradients of its inputs, and
gradients of one tensor are added in that order, so the same calls give the same graph and the same bits.  Each input
has a node of its own: activation and weight gradients can be scheduled separately.  Nothing is written for gradients
that are not requested.

An op is in one of three tables:
- `RULES`: op -> rules, one an input, the last for all that follow (None if an input has no gradient, like axes);
- `EXPANSIONS`: op -> the same in simpler ops, which are differentiated;
- `FLAT`: ops whose gradient is 0 almost everywhere, or whose result is not floating point: they stop it. An op in
  none of them has no gradient here; a request for one is an `UnsupportedOpError` that names op and node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from dask_ferro.errors import InputError, UnsupportedOpError
from dask_ferro.graph.autodiff.rule import GradientRequest, Row, Rule
from dask_ferro.graph.autodiff.rules import elementwise, layout, linear, reductions
from dask_ferro.graph.autodiff.rules.expansions import EXPANSIONS
from dask_ferro.graph.ir import regions
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.dims import format_shape
from dask_ferro.graph.tensor.emit import reachable_nodes
from dask_ferro.graph.tensor.manipulation import ones_like, zeros_like
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Node, Tensor

_TABLES = (elementwise, reductions, layout, linear)
RULES: Mapping[str, Row] = {op: row for rules in _TABLES for op, row in rules.TABLE.items()}
FLAT = frozenset({"Ceil", "EyeLike", "Floor", "Hardmax", "Round", "Sign"})

Key = tuple[int, int]


def grad(loss: Tensor, params: Tree) -> Tree:
    """Return the gradient of `loss` with respect to each of `params`, in the same form.

    Parameters
    ----------
    loss : Tensor
        A floating point scalar.
    params : Tensor, or lists, tuples and dicts of Tensor
        Arguments, constants or computed tensors. One that `loss` does not depend on has a gradient of zeros.

    Raises
    ------
    InputError
        If the loss is not a scalar Tensor, or the loss or a parameter is not floating point.
    UnsupportedOpError
        If an op on the way has no gradient; the message names it and its node.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> w = ft.input("w", (3,))
    >>> ft.grad((w * w).sum(), {"w": w})
    {'w': <Tensor Add: float32(3,)>}
    """
    if not isinstance(loss, Tensor):
        remedy = "the tensor that it returns: grad(fn(w), w)" if callable(loss) else "a Tensor"
        raise InputError(f"grad: loss: got a {type(loss).__name__}, wanted {remedy}")
    if loss.ndim:
        raise InputError(f"grad: a loss is a scalar, got {format_shape(loss.shape)}; take its mean or sum")
    leaves = pytree.leaves(params, "grad")
    for tensor in (loss, *leaves):
        if not tensor.is_floating:
            raise InputError(f"grad: {tensor!r} is not floating point, so it has no gradient")
    with regions.set_region(regions.current_region()._replace(phase=regions.BACKWARD)):
        seed = ones_like(loss)
    gradients = _pull_back([(loss, seed)], leaves)
    return pytree.unflatten(
        params, [zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)]
    )


def value_and_grad(loss: Tensor, params: Tree) -> tuple[Tensor, Tree]:
    """Return the loss, and `grad(loss, params)`.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> w = ft.input("w", (3,))
    >>> ft.value_and_grad((w * w).sum(), w)
    (<Tensor ReduceSum: float32()>, <Tensor Add: float32(3,)>)
    """
    return loss, grad(loss, params)


def _pull_back(
    seeds: Sequence[tuple[Tensor, Tensor]], sources: Sequence[Tensor], ends: Set[Key] = frozenset()
) -> list[Tensor | None]:
    """Return the gradient of each source from the gradients of outputs; None without a path.

    No gradient passes through one of `ends` to another tensor.
    """
    nodes = reachable_nodes([y for y, _ in seeds])
    # Nodes off every path from a source get no gradient nodes at all.
    moving = _dependents(nodes, {x.key for x in sources}, ends)
    grads: dict[Key, Tensor] = {}
    for y, seed in seeds:
        if y.key in moving:
            _add(grads, y.key, seed)
    # The order of creation is topological, so all gradients of a node are complete when the walk reaches it.
    for node in reversed(nodes):
        keys = _outputs(node)
        if any(key in grads and key not in ends for key in keys):
            with regions.set_region(node.region._replace(phase=regions.BACKWARD)):
                _differentiate(node, tuple(grads.get(key) for key in keys), moving, grads)
    return [grads.get(x.key) for x in sources]


def _outputs(node: Node) -> list[Key]:
    return [(node.number, i) for i in range(len(node.types))]


def _dependents(nodes: Iterable[Node], sources: Set[Key], ends: Set[Key]) -> set[Key]:
    """Return the tensors that depend on a source."""
    moving = set(sources)
    for node in nodes:
        keys = _outputs(node)
        is_flat = node.is_stop or (not node.domain and node.op_type in FLAT)
        if not is_flat and ends.isdisjoint(keys) and any(_is_moving(x, moving) for x in node.inputs):
            moving.update(keys)
    return moving


def _is_moving(x: Tensor | None, moving: Set[Key]) -> bool:
    return x is not None and x.is_floating and x.key in moving


def _differentiate(
    node: Node, gradients: tuple[Tensor | None, ...], moving: Set[Key], grads: dict[Key, Tensor]
) -> None:
    indices = [i for i, x in enumerate(node.inputs) if _is_moving(x, moving)]
    call = GradientRequest(node, gradients, 0)
    if not node.domain and node.op_type in EXPANSIONS:
        _expand(call, {call.input(i).key: call.input(i) for i in indices}, grads)
    else:
        terms = [_find_rule(node, i)(replace(call, index=i)) for i in indices]
        for i, g in zip(indices, terms, strict=True):
            _add(grads, call.input(i).key, g)


def _expand(call: GradientRequest, inputs: Mapping[Key, Tensor], grads: dict[Key, Tensor]) -> None:
    """Add the gradients of a composite op's inputs."""
    expanded = EXPANSIONS[call.node.op_type](call)
    outputs = expanded if isinstance(expanded, tuple) else (expanded,)
    if any(g is not None for g in call.grads[len(outputs) :]):
        raise call.unsupported(f"only its first {len(outputs)} outputs have one")
    seeds = [(y, g) for y, g in zip(outputs, call.grads, strict=False) if g is not None]
    for key, g in zip(inputs, _pull_back(seeds, list(inputs.values()), inputs.keys()), strict=True):
        if g is not None:
            _add(grads, key, g)


def _add(grads: dict[Key, Tensor], key: Key, g: Tensor) -> None:
    grads[key] = grads[key] + g if key in grads else g


def _find_rule(node: Node, index: int) -> Rule:
    row = RULES.get(node.op_type) if not node.domain else None
    rule = row[min(index, len(row) - 1)] if row else None
    if rule is not None:
        return rule
    where = f"node {node.name!r} ({node.op_type})" if node.name else f"op {node.op_type}"
    lacks = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    problem = f"it has none with respect to its input {index}" if row else f"{lacks} has none"
    remedy = "write it with other ops, or keep parameters out of it"
    raise UnsupportedOpError("no gradient", [f"{where}: {problem}; {remedy}"])
