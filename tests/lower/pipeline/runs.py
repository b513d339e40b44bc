"""Results of a model without a pipeline, and their comparison with those of a pipeline."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import dask_ferro as ff
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.optim import SGD, Adam
from dask_ferro.graph.tensor.tensor import argument

M = 4  # micro-batches


def keeps(result):
    """Whether a segment's result holds anything that only its own rank reads."""
    return any(value is not None and i not in result.sent for i, value in enumerate(result))


def whole_model(outputs):
    """The outputs as one model in this process."""
    model, bound = build(outputs)
    graph = ff.from_onnx(ir.to_proto(model), granularity="model")
    return lambda feeds: graph(bound | feeds).compute(scheduler="sync")


def flat(tree):
    """The leaves of a tree, in order."""
    if isinstance(tree, list | tuple | dict):
        return [x for part in (tree.values() if isinstance(tree, dict) else tree) for x in flat(part)]
    return [tree]


def alike(found, wanted):
    for got, value in zip(flat(found), flat(wanted), strict=True):
        np.testing.assert_array_equal(got, value)


def same(result, wanted):
    loss, grads = result
    np.testing.assert_array_equal(loss, wanted[0])
    flat = [array for part in leaves(grads) for array in part]
    assert len(flat) == len(wanted[1])
    for got, value in zip(flat, wanted[1], strict=True):
        np.testing.assert_array_equal(got, value)


def leaves(part):
    if isinstance(part, np.ndarray):
        return [[part]]
    return [found for p in (part.values() if isinstance(part, dict) else part) for found in leaves(p)]


def trained(net, optimizer, batches):
    """Loss, parameters and state after each batch, without a pipeline."""
    named = pytree.leaves(net.params)
    model, bound = build(
        {"loss": net.loss, **{f"g{i}": g for i, g in enumerate(grad(net.loss, named))}}, named
    )
    names = list(bound)
    run = ff.from_onnx(ir.to_proto(model), granularity="model")
    w, g = ([argument(f"{kind}{i}", p.shape, p.dtype) for i, p in enumerate(named)] for kind in "wg")
    began = optimizer.init(w)
    kept = pytree.leaves(began)
    s = pytree.like(began, [argument(f"s{i}", x.shape, x.dtype) for i, x in enumerate(kept)])
    after, then = optimizer.step(w, g, s)
    ends = {
        **{f"w{i}": x for i, x in enumerate(after)},
        **{f"s{i}": x for i, x in enumerate(pytree.leaves(then))},
    }
    update = ff.from_onnx(
        ir.to_proto(build({f"next {n}": x for n, x in ends.items()}).model), granularity="model"
    )
    now = {f"w{i}": bound[n] for i, n in enumerate(names)}
    now |= {f"s{i}": np.zeros(x.shape, x.dtype) for i, x in enumerate(kept)}
    for batch in batches:
        weights = {n: now[f"w{i}"] for i, n in enumerate(names)}
        total = {}
        for part in range(M):
            rows = {n: np.split(a, M)[part] for n, a in batch.items()}
            found = run(weights | rows).compute(scheduler="sync")
            total = {n: total[n] + v for n, v in found.items()} if total else found
        mean = {n: v / M for n, v in total.items()}
        loss = mean.pop("loss")
        now = {n.removeprefix("next "): v for n, v in update(now | mean).compute(scheduler="sync").items()}
        yield loss, [now[f"w{i}"] for i in range(len(names))], [now[f"s{i}"] for i in range(len(kept))]


OPTIMIZERS = [
    pytest.param(SGD(0.1), id="SGD"),
    pytest.param(SGD(0.1, momentum=0.9), id="momentum"),
    pytest.param(Adam(0.01), id="Adam"),
]


def equal(step, wanted):
    loss, params, state = wanted
    assert step.loss == loss
    for parts, found in ((step.params, params), (step.state, state)):
        for [got], value in zip(leaves(parts), found, strict=True):
            np.testing.assert_array_equal(got, value)


def workers_of(client):
    """The addresses of a cluster's workers, in the order of their names."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    return sorted(known, key=lambda address: known[address]["name"])
