"""An optimizer's state that a plan splits further than its parameters: its parts, collectives, bytes and numbers."""

from __future__ import annotations

from collections import Counter
from itertools import product

import dask
import numpy as np
import pytest
from distributed import futures_of, wait

import dask_ferro.tensor as ft
from dask_ferro.graph.parallel.autoplan import propose_plans as proposals
from dask_ferro.graph.sharding.redistribute import COLLECTIVES, price
from dask_ferro.graph.tensor.optim import SGD, Adam, AdamW
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.sharded_array import CallOutputs
from dask_ferro.policy.estimates import SAME_HOST
from dask_ferro.train.update import ENDS, ROWS, BatchUpdate
from tests.each import every
from tests.lower.ranks.runs import alike, flat
from tests.waiting import WHOLE_S

DATA = {"mesh": {"data": 2}, "inputs": {"x": 0}}
TENSOR = {"mesh": {"tensor": 2}, "inputs": {"w0": {"tensor": 1}, "b0": {"tensor": 0}, "w1": {"tensor": 0}}}
GRID = {"mesh": {"data": 2, "tensor": 2}, "inputs": {"x": {"data": 0}, **TENSOR["inputs"]}}
OVER_DATA = {"mesh": {"data": 2}, "inputs": {"x": 0, "w0": 0, "w1": 0}}
STAGES = {**DATA, "first": {"stage": 0}, "last": {"stage": 1}}
SPLIT = {"optimizer_state": {"data": 0}}
STATES = {
    "no state": SGD(0.1),
    "velocities": SGD(0.1, momentum=0.9),
    "moments and a count": AdamW(0.01, weight_decay=0.1),
    "sums of several batches": BatchUpdate(Adam(0.01), accumulates=True),
}
# Entries of each that are not counts, for one parameter.
ENTRIES = dict(zip(STATES, (0, 1, 2, 3), strict=True))
SETTINGS = {ENDS: np.bool_(True), ROWS: np.float32(8)}


def training(dtype="f4"):
    """A loss of two layers, its parameters, and a batch; two ranks do not divide the bias of 7."""
    rng = np.random.default_rng(0)
    shapes = {"w0": (16, 16), "b0": (16,), "w1": (16, 7), "b1": (7,)}
    params = {n: asarray(rng.standard_normal(s).astype(dtype) / 2, name=n) for n, s in shapes.items()}
    with ft.region("first"):
        h = ft.nn.relu(input("x", ("N", 16), dtype) @ params["w0"] + params["b0"])
    with ft.region("last"):
        y = h @ params["w1"] + params["b1"]
    return (y * y).mean(), params, {"x": rng.standard_normal((8, 16)).astype(dtype)}


def stepping(plan, optimizer, dtype="f4", **options):
    loss, params, batch = training(dtype)
    step = parallelize(loss, plan, params, optimizer=optimizer, batch_inputs=["x"], **options)
    return step, {**batch, **{name: value for name, value in SETTINGS.items() if name in step.inputs}}


def steps(step, given, count):
    """The result of several steps on one batch, in this process."""
    now = {}
    for _ in range(count):
        result = step(given, **now).compute(scheduler="sync")
        now = {"params": result.params, "state": result.state}
    return result


def of_first_rank(arrays):
    """The parts of arrays on rank 0."""
    held = dask.get(
        dict(CallOutputs({str(i): one for i, one in enumerate(arrays)}).__dask_graph__()),
        [array.keys[0] for array in arrays],
    )
    items = [array.items[0] for array in arrays]
    return [value if item < 0 else value[item] for value, item in zip(held, items, strict=True)]


def collectives(*graphs):
    """The kind of each collective of graphs, and the bytes that its ranks send together."""
    found = []
    for node in (node for graph in filter(None, graphs) for node in graph.spmd.model.graph):
        if node.op_type in COLLECTIVES:
            whole = (node.outputs if node.op_type == "AllGather" else node.inputs)[0]
            nbytes = whole.dtype.itemsize * np.prod(whole.shape.numpy(), initial=1)
            ranks = len(node.inputs)
            found.append((node.op_type, ranks * price(node.op_type, nbytes, ranks, SAME_HOST).bytes))
    return found


# ---- parts -------------------------------------------------------------------------------------------------


WHOLE = [(16, 16), (16,), (16, 7), (7,)]
ROWS_OF_TWO = [(8, 16), (8,), (8, 7), (7,)]
COLUMNS = [(16, 8), (8,), (8, 7), (7,)]


PARTS = {
    "data": (DATA, WHOLE, WHOLE),
    "data, split": (DATA | SPLIT, WHOLE, ROWS_OF_TWO),
    "tensor, split already": (TENSOR | {"optimizer_state": {"tensor": 0}}, COLUMNS, COLUMNS),
    "data x tensor, split": (GRID | SPLIT, COLUMNS, [(8, 8), (8,), (8, 7), (7,)]),
    "weights over data, split": (OVER_DATA | SPLIT, [(8, 16), (16,), (8, 7), (7,)], ROWS_OF_TWO),
    "stages, split": (STAGES | SPLIT, WHOLE, ROWS_OF_TWO),
}


@every(
    ("optimizer", "plan"),
    [*product(["sums of several batches"], PARTS), *product(STATES, ["data, split"])],
)
def test_a_rank_has_its_part_of_each_entry(optimizer, plan):
    plan, params, state = PARTS[plan]
    step, given = stepping(plan, STATES[optimizer])
    run = step(given)
    assert [part.shape for part in of_first_rank(flat(run.params))] == params
    # Counts of steps and of rows are scalars.
    parts = [part.shape for part in of_first_rank(flat(run.state)) if part.ndim]
    assert parts == state * ENTRIES[optimizer]


@pytest.mark.parametrize("optimizer", ["no state", "sums of several batches"])
def test_projected_bytes_are_those_of_the_arrays(optimizer):
    (loss, params, _), update = training(), STATES[optimizer]
    found = proposals(loss, 2, params=params, optimizer=update, dims={"N": 8}).rows
    for row in (row for row in found if row.stages == 1):
        step, given = stepping(row.as_plan() or None, update)
        run = step(given)
        assert row.state == sum(part.nbytes for part in of_first_rank(flat(run.state)))
        assert row.gradients == sum(part.nbytes for part in of_first_rank(flat(run.params)))
    assert any(row.optimizer_state for row in found) == (ENTRIES[optimizer] > 0)


# ---- collectives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", ["no state", "sums of several batches"])
def test_gradients_are_scattered_and_parameters_gathered_in_the_bytes_of_an_all_reduce(
    optimizer, micro_batches
):
    rows, found = 8 // micro_batches, []
    for plan in (DATA, DATA | SPLIT):
        step, _ = stepping(plan, STATES[optimizer], micro_batches=micro_batches)
        found.append(collectives(*step.graphs(rows)))
    before, after = found
    # Of each gradient, once a step; and of the loss, whose terms are added by the client if there are several.
    loss = 2 - micro_batches
    assert Counter(kind for kind, _ in before) == {"AllReduce": loss + 4}
    if optimizer == "no state":
        assert sorted(after) == sorted(before)
        return
    # Two ranks do not divide one of the gradients.
    assert Counter(kind for kind, _ in after) == {"AllReduce": loss + 1, "ReduceScatter": 3, "AllGather": 3}
    assert sum(nbytes for _, nbytes in after) == sum(nbytes for _, nbytes in before)


def test_ranks_do_only_their_part_of_the_update():
    step, _ = stepping(DATA | SPLIT, STATES["moments and a count"], micro_batches=2)
    graph = step.graphs(4).end.spmd.model.graph
    sizes = {
        v.shape.numpy() for node in graph if node.op_type in ("Mul", "Div", "Sqrt") for v in node.outputs
    }
    assert sizes <= {(), *ROWS_OF_TWO}


# ---- on workers --------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_parts_of_the_state_stay_on_their_ranks(four):
    step, given = stepping(DATA | SPLIT, Adam(0.01))
    now = {}
    for _ in range(2):
        found = step(given, **now).submit()
        now = {"params": found.params, "state": found.state}
        wait(futures_of(flat(found)), timeout=WHOLE_S)
        for entry in flat(found.state["mean"])[:3]:
            homes = [four.who_has([future])[future.key] for future in futures_of(entry)]
            assert [len(there) for there in homes] == [1, 1]
            assert homes[0] != homes[1]
            held = [entry.held()[key].result(timeout=WHOLE_S) for key in entry.keys]
            parts = [value[item].nbytes for value, item in zip(held, entry.items, strict=True)]
            assert parts == [4 * np.prod(entry.port.shape) / 2] * 2
    alike(dask.compute(*found), tuple(steps(step, given, 2)))
