"""An optimizer's step as a separate model, from parameters, gradients and state to new parameters and state.

The output for an input `w` is `next w`.  All other tensors that the step reads, such as a rate that changes from step
to step, are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Path, Tree
from dask_ferro.graph.tensor.tensor import Tensor, argument

# Arrays by the name of their input.
Values = dict[str, Any]

_NEXT = "next "


class UpdateGraph(NamedTuple):
    """An optimizer's step.

    Attributes
    ----------
    model : onnx_ir.Model
    params, grads, state : tuple of str
        Names of inputs, in the order of their trees.
    form : tree of int
        The tree of the state, with positions in `state`.
    start : dict
        The state before the first step, by name.
    bound : dict
        The values of other inputs that have one, by name.
    owners : dict of str to str or None
        The parameter that each entry of the state belongs to: the one of its shape whose keys its own keys end with, as
        in `{"mean": <a tree like the parameters>}`; None for an entry without one, such as a count of steps.
    """

    model: ir.Model
    params: tuple[str, ...]
    grads: tuple[str, ...]
    state: tuple[str, ...]
    form: Tree
    start: Values
    bound: Values
    owners: Mapping[str, str | None]

    @property
    def stateful(self) -> frozenset[str]:
        """The parameters that entries of the state belong to."""
        return frozenset(name for name in self.owners.values() if name is not None)


def after(name: str) -> str:
    """Return the name of the output with the next value of an input."""
    return f"{_NEXT}{name}"


def before(name: str) -> str:
    """Return the name of the input for an output with its next value."""
    return name.removeprefix(_NEXT)


def update_graph(
    optimizer: Optimizer, params: Tree, names: Sequence[str], grads: Sequence[str]
) -> UpdateGraph:
    """Return an optimizer's step as a model.

    Parameters
    ----------
    params : tree of Tensor
    names, grads : sequence of str
        The names of the parameters and of their gradients, in the order of the tree.

    Raises
    ------
    ConfigError
        A parameter that is given twice, or an argument with the name of a parameter, gradient or state.
    """
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise ConfigError(f"parallel: optimizer: parameter {twice} is given twice; give it once")
    began = optimizer.init(params)
    kept = pytree.leaves(began, "optimizer's state")
    state = tuple(f"optimizer.{i}" for i in range(len(kept)))
    given = {
        name: argument(name, leaf.shape, leaf.dtype)
        for name, leaf in zip((*names, *grads, *state), (*(2 * pytree.leaves(params)), *kept), strict=True)
    }

    def tree(like: Tree, of: Sequence[str]) -> Tree:
        return pytree.like(like, [given[name] for name in of])

    moved, then = optimizer.step(tree(params, names), tree(params, grads), tree(began, state))
    ends = pytree.leaves(moved)
    ends += pytree.leaves(pytree.mapped(lambda _, now: now, began, then)) if kept else []
    outputs = {after(name): end for name, end in zip((*names, *state), ends, strict=True)}
    model, bound = build(outputs, list(given.values()), name="update")
    places = {path: (name, leaf) for name, (path, leaf) in zip(names, pytree.paths(params), strict=True)}
    start = build(dict(zip(state, kept, strict=True)), kept).bound if kept else {}
    return UpdateGraph(
        model,
        tuple(names),
        tuple(grads),
        state,
        pytree.like(began, range(len(kept))) if kept else {},
        dict(zip(state, start.values(), strict=True)),
        bound,
        {
            name: _owner(path, entry, places)
            for name, (path, entry) in zip(state, pytree.paths(began), strict=True)
        },
    )


def _owner(path: Path, entry: Tensor, places: Mapping[Path, tuple[str, Tensor]]) -> str | None:
    ends = (places.get(path[i:]) for i in range(len(path) + 1))
    return next((found[0] for found in ends if found is not None and found[1].shape == entry.shape), None)
