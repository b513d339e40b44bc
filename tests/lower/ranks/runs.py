"""Results of a model without a pipeline, and their comparison with those of a pipeline."""

from __future__ import annotations

import os
import random
import signal
import time
from math import inf

import distributed
import numpy as np
import onnx_ir as ir
import pytest

import dask_ferro as ff
from dask_ferro.flow import times
from dask_ferro.flow.member import share_of
from dask_ferro.flow.run import MEMBER, FlowRun
from dask_ferro.flow.worker import METRIC
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.optim import SGD, Adam
from dask_ferro.graph.tensor.tensor import input
from dask_ferro.lower.bundling.choice import CostFacts
from dask_ferro.lower.bundling.rewrite import rewrite_graph
from dask_ferro.lower.ranks.rank_assignment import Homes
from tests.waiting import until

M = 4  # micro-batches


class InnerTasks(distributed.WorkerPlugin):
    """Records the keys of the tasks that ran in flows on a worker process, in order."""

    name = "inner-tasks"

    def setup(self, worker):
        self.keys = []
        times.listen(lambda runs: self.keys.extend(run.key for run in runs))

    def teardown(self, worker):
        times.listen(None)


def inner_tasks(client, compute):
    """The keys that each worker ran in flows meanwhile, in order, by address; and the value."""
    client.register_plugin(InnerTasks())
    try:
        value = compute()
        return client.run(lambda dask_worker: dask_worker.plugins["inner-tasks"].keys), value
    finally:
        client.unregister_worker_plugin(InnerTasks.name)


def killed_in_a_flow(client, begin):
    """Kill a worker in the midst of what `begin` starts, a future, which is returned.

    The worker stands still from the start, so that it has work to do when it dies.
    """
    pids = client.run(os.getpid)
    victim = sorted(pids)[1]
    os.kill(pids[victim], signal.SIGSTOP)
    started = begin()
    until(lambda: started.done() or client.processing([victim])[victim], "a member on the worker", every=0.01)
    # The others go on, as far as they do without it.
    time.sleep(0.2)
    assert not started.done()
    os.kill(pids[victim], signal.SIGKILL)
    until(lambda: victim not in client.nthreads(), "the worker to be missed", every=0.01)
    return started


def take_part(count, dask_scheduler):
    """Return whether so many workers have told the scheduler where they listen."""
    told = [METRIC in ws.metrics for ws in dask_scheduler.workers.values()]
    return len(told) == count and all(told)


def shares_of(run, stages, ranks=1):
    """The shares of a run's members, one for each rank of each stage."""
    count = stages * ranks
    workers = tuple(f"w{number:02}" for number in range(count))
    homes = Homes(
        workers, dict(zip(workers, workers, strict=True)), workers, ranks, dict.fromkeys(workers, 1)
    )
    written = run.loss.tasks._write(homes)
    told = {}
    for layer in written.graph.layers.values():
        told |= {key: layer.annotations[MEMBER](key) for key in layer}
    wanted = {place.key for places in written.places.values() for place in places}
    facts = CostFacts(lambda key: None, lambda key: None, lambda key: None, count, inf, inf, members=count)
    made = rewrite_graph(written.graph.to_dict(), wanted, {MEMBER: told}, facts).graph
    found = filter(None, map(share_of, made.values()))
    return sorted(found, key=lambda share: share.member)


def actions_of(run):
    """The schedule's action that each task of a run is part of, and its rank."""
    write = run.arrays[next(iter(run.arrays))].tasks._write
    tasks, _ = write.func.__self__.tasks(*write.args)
    return {key: (action, tasks.home[key][0]) for key, action in tasks.action.items()}


def walked(shares, look, seed=0):
    """Run members in a random order; `look` gets each run and the number of its member after each task."""
    runs = [FlowRun([share.member]) for share in shares]
    for run, share in zip(runs, shares, strict=True):
        run.add(share, {})
    rng = random.Random(seed)
    while ready := [member for member, run in enumerate(runs) if run.is_ready]:
        member = rng.choice(ready)
        task = runs[member].take()
        result = task.call(runs[member].inputs_of(task))
        for reader in task.readers:
            runs[reader].receive(task.key, result)
        runs[member].finish(task, result)
        look(runs[member], member)
    assert all(run.is_done for run in runs)
    return runs


def check_activations(run, schedule, ranks=1, seed=0):
    """Assert that each member keeps as many forwards for their backwards as the table says, and nothing at the end."""
    shares, actions = shares_of(run, len(schedule.stages), ranks), actions_of(run)
    backwards = [
        {
            key
            for task in share.tasks
            if actions[task.key][0].kind != "F"
            for key in task.call.dependencies
            if actions[key][0].kind == "F"
        }
        for share in shares
    ]
    most = [0] * len(shares)

    def look(flow, member):
        stage = member // ranks
        there = {actions[key][0] for key in flow._values if key in backwards[member]}
        own = sum(schedule.stage_of[action.chunk] == stage for action in there)
        most[member] = max(most[member], own)

    runs = walked(shares, look, seed)
    peaks = [peak for peak in schedule.peaks for _ in range(ranks)]
    assert all(0 < found <= peak for found, peak in zip(most, peaks, strict=True)), (most, peaks)
    for flow, share in zip(runs, shares, strict=True):
        assert set(flow._values) == set(share.outputs)


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
    w, g = ([input(f"{kind}{i}", p.shape, p.dtype) for i, p in enumerate(named)] for kind in "wg")
    began = optimizer.init(w)
    kept = pytree.leaves(began)
    s = pytree.unflatten(began, [input(f"s{i}", x.shape, x.dtype) for i, x in enumerate(kept)])
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
