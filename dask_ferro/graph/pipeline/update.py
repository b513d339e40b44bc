"""Write an optimizer's step: as a model of its own, or in one model with the loss and its gradients.

    update_graph   parameters, gradients, state -> new parameters and state      after all micro-batches, in stages
    whole_step     batch, parameters, state -> loss, new parameters and state    if there is one of both

The output for an input `w` is `next w`.  All other tensors that the step reads, such as a rate that changes from step
to step, are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.pipeline.stages import LOSS, StageModel, input_names
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Path, Tree
from dask_ferro.graph.tensor.tensor import Tensor, input

# Arrays by the name of their input.
Values = dict[str, Any]

_NEXT_PREFIX = "next "


class UpdateGraph(NamedTuple):
    """An optimizer's step as a model; None: the model of loss and gradients has the step's nodes.

    `params`, `grads` and `state` are names of inputs, in the order of their trees; without a model, gradients are
    values inside the other one.  `form` is the tree of the state with a leaf for each entry, `start` has the state
    before the first step, and `bound` the values of other inputs that have one, by name.

    `owners` has the parameter that each entry of the state belongs to: it has the same shape, and the entry's keys
    end with its keys, as in `{"mean": <a tree like the parameters>}`; None for an entry without a parameter, such as
    a count of steps.
    """

    model: ir.Model | None
    params: tuple[str, ...]
    grads: tuple[str, ...]
    state: tuple[str, ...]
    form: Tree
    start: Values
    bound: Values
    owners: Mapping[str, str | None]

    @property
    def carry(self) -> tuple[str, ...]:
        """The inputs that a step has from the previous step: parameters and state."""
        return (*self.params, *self.state)


def next_name(name: str) -> str:
    """Return the name of the output with the next value of an input."""
    return f"{_NEXT_PREFIX}{name}"


def name_before(name: str) -> str:
    """Return the name of the input for an output with its next value."""
    return name.removeprefix(_NEXT_PREFIX)


def update_graph(
    optimizer: Optimizer, params: Tree, names: Sequence[str], grads: Sequence[str]
) -> UpdateGraph:
    """Return an optimizer's step as a model, given the names of parameters and gradients in the order of the tree.

    Raises `InputError` if a parameter is passed twice, or an argument has the name of another input.
    """
    leaves = pytree.leaves(params)
    inputs = [
        input(name, leaf.shape, leaf.dtype) for name, leaf in zip((*names, *grads), 2 * leaves, strict=True)
    ]
    w, g = (pytree.unflatten(params, part) for part in (inputs[: len(leaves)], inputs[len(leaves) :]))
    update, outputs, entries = _step_outputs(optimizer, params, w, g, names, grads)
    model, bound = build(outputs, [*inputs, *entries], name="update")
    return update._replace(model=model, bound=bound)


def whole_step(
    outputs: Mapping[str, Tensor], params: Tree, optimizer: Optimizer
) -> tuple[StageModel, UpdateGraph]:
    """Return a training step as one model, of loss, metrics, new parameters and state."""
    leaves = pytree.leaves(params, "parallel")
    # The same names as in the model of the step, whose first inputs they are.
    names = input_names(build(outputs, leaves).model, leaves)
    slopes = grad(outputs[LOSS], leaves)
    # Users cannot have this name: such an argument would be renamed.
    grads = tuple(f"gradient {i}" for i in range(len(leaves)))
    update, ends, entries = _step_outputs(
        optimizer, params, params, pytree.unflatten(params, slopes), names, grads
    )
    model, bound = build(
        {**outputs, **ends},
        [*leaves, *entries],
        name="step",
        names=dict(zip(grads, slopes, strict=True)),
    )
    return StageModel(model, bound, names, ()), update


def _step_outputs(
    optimizer: Optimizer,
    params: Tree,
    w: Tree,
    g: Tree,
    names: Sequence[str],
    grads: Sequence[str],
) -> tuple[UpdateGraph, dict[str, Tensor], list[Tensor]]:
    """Return the step of parameters `w` with gradients `g` (without a model), its outputs, its state's arguments."""
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise InputError(f"parallelize: optimizer: parameter {twice} occurs twice; pass it once")
    initial = optimizer.init(params)
    leaves = pytree.leaves(initial, "optimizer's state")
    state = tuple(f"optimizer.{i}" for i in range(len(leaves)))
    entries = [input(name, leaf.shape, leaf.dtype) for name, leaf in zip(state, leaves, strict=True)]
    new_params, new_state = optimizer.step(w, g, pytree.unflatten(initial, entries))
    # In the order of the state, whatever the order in which the optimizer returns it.
    ordered = pytree.map_leaves(lambda _, now: now, initial, new_state) if leaves else {}
    ends = pytree.leaves(new_params) + pytree.leaves(ordered)
    outputs = {next_name(name): end for name, end in zip((*names, *state), ends, strict=True)}
    places = {path: (name, leaf) for name, (path, leaf) in zip(names, pytree.paths(params), strict=True)}
    owners = {
        name: _owner(path, entry, places)
        for name, (path, entry) in zip(state, pytree.paths(initial), strict=True)
    }
    start = build(dict(zip(state, leaves, strict=True)), leaves).bound.values() if leaves else ()
    form = pytree.map_leaves(lambda _: 0, initial) if leaves else {}
    update = UpdateGraph(
        None, tuple(names), tuple(grads), state, form, dict(zip(state, start, strict=True)), {}, owners
    )
    return update, outputs, entries


def _owner(path: Path, entry: Tensor, places: Mapping[Path, tuple[str, Tensor]]) -> str | None:
    ends = (places.get(path[i:]) for i in range(len(path) + 1))
    return next((end[0] for end in ends if end is not None and end[1].shape == entry.shape), None)
