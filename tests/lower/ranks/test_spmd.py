"""Sharded graphs as Dask tasks: the same numbers, the same bits from run to run, and no worker that has to live."""

from __future__ import annotations

import os
import re
import signal
from functools import partial

import dask
import dask.array as da
import numpy as np
import onnx_ir as ir
import pytest
from distributed import futures_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro import from_onnx, install
from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.ir.regions import region as under
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.sharding.placements import Partial, Replicate, Shard
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.sharding.segments import Bucket, cut_segments
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import build, to_model
from dask_ferro.graph.tensor.optim import SGD
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.ranks.exchange import FORMS, Name, exchange, form
from dask_ferro.lower.ranks.sharded_array import gather, join_parts
from dask_ferro.lower.ranks.spmd import Ranks
from tests.clusters import running
from tests.each import every
from tests.waiting import finished, until

R, S = Replicate(), Shard
RNG = np.random.default_rng(3)


def run(steps, values):
    """The values of a bucket's tasks, in the order in which they stand."""
    found = dict(values)
    for step in steps:
        found[step.key] = step.call(*step.constants, *(found[key] for key in step.reads))
    return found


def exchanged(kind, chosen, terms, **attributes):
    """Return the result of each rank of a collective that is exchanged in a form."""
    ranks = tuple(range(len(terms)))
    bucket = Bucket(kind, ranks, (attributes,), ((),) * len(ranks), ((),) * len(ranks), 0)
    steps, results = FORMS[chosen](Name("it", "t", 0), bucket, ranks)
    found = run(steps, {rank: (term,) for rank, term in zip(ranks, terms, strict=True)})
    return [found[key][0] for key in results]


def in_order(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize("chosen", ["star", "exchange"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
class TestFormsOfAnExchange:
    def terms(self, ranks):
        return [RNG.standard_normal((31, 7)) for _ in range(ranks)]

    def test_a_sum_is_of_terms_by_rank_to_the_bit(self, chosen, ranks):
        terms = self.terms(ranks)
        for got in exchanged("AllReduce", chosen, terms, reduction="sum"):
            np.testing.assert_array_equal(got, in_order(terms))

    def test_a_mean_is_the_sum_by_the_number_of_ranks(self, chosen, ranks):
        terms = self.terms(ranks)
        for got in exchanged("AllReduce", chosen, terms, reduction="mean"):
            np.testing.assert_array_equal(got, in_order(terms) / ranks)

    def test_a_sum_that_is_scattered_is_cut_along_its_axis(self, chosen, ranks):
        terms = self.terms(ranks)
        got = exchanged("ReduceScatter", chosen, terms, reduction="sum", axis=0)
        for mine, wanted in zip(got, np.array_split(in_order(terms), ranks), strict=True):
            np.testing.assert_array_equal(mine, wanted)

    def test_all_to_all_turns_rows_into_columns(self, chosen, ranks):
        full = RNG.standard_normal((31, 32))
        pieces = np.array_split(full, ranks, 0)
        got = exchanged("AllToAll", chosen, pieces, split_axis=1, concat_axis=0)
        for mine, wanted in zip(got, np.array_split(full, ranks, 1), strict=True):
            np.testing.assert_array_equal(mine, wanted)


@every("dtype", ["float16", "bfloat16"])
@every("chosen", ["star", "exchange"])
@every("reduction", ["sum", "mean"])
def test_terms_in_half_precision_are_rounded_once(chosen, dtype, reduction):
    # In either, 1 is lost beside 4096: terms added one by one would give 4096.
    kind = ir.DataType[dtype.upper()].numpy()
    terms = [np.full(20, 4096, kind), *(np.ones(20, kind) for _ in range(64))]
    wanted = np.asarray(4160 / (65 if reduction == "mean" else 1), np.float32).astype(kind)
    for got in exchanged("AllReduce", chosen, terms, reduction=reduction):
        assert got.dtype == kind
        np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "ranks", "mib", "wanted"),
    [
        pytest.param("AllReduce", 2, 1000, "star", id="two ranks move no less in an exchange"),
        pytest.param("AllReduce", 4, 1, "star", id="a small sum takes one hop"),
        pytest.param("AllReduce", 4, 64, "exchange", id="a large sum is shared out"),
        pytest.param("AllReduce", 16, 0.1, "star", id="so do many small ones"),
        pytest.param("AllGather", 16, 64, "star", id="what is gathered is read as it is"),
        pytest.param("ReduceScatter", 2, 64, "exchange", id="a large sum that is scattered is shared out"),
    ],
)
def test_the_form_is_chosen_by_kind_ranks_and_size(kind, ranks, mib, wanted):
    assert form(Bucket(kind, tuple(range(ranks)), (), (), (), int(mib * 2**20))) == wanted


def test_sums_that_no_task_reads_are_not_computed():
    bucket = Bucket("AllReduce", (0, 1), ({"reduction": "sum"},), (("a",), ("b",)), (("c",), ("d",)), 8)
    steps, _ = exchange(Name("it", "t", 0), bucket, ["a", "b"], [True, False])
    assert [step.rank for step in steps] == [0]


# Whole graphs.


NAMES = {"new_w1": "l1.weight", "new_b1": "l1.bias", "new_w2": "l2.weight"}
GIVEN = {
    "x": {"data": S(0), "fsdp": S(0)},
    "t": {"data": S(0), "fsdp": S(0)},
    "l1.weight": {"tensor": S(1), "fsdp": S(0)},
    "l1.bias": {"tensor": S(0), "fsdp": S(0)},
    "l2.weight": {"tensor": S(0), "fsdp": S(0)},
}


class Step:
    """A training step of two layers, its inputs, and its sharding by data and tensor."""

    def __init__(self):
        rng = np.random.default_rng(0)
        x, t = input("x", (8, 16), np.float64), input("t", (8,), np.int64)
        w = {
            "w1": asarray(rng.standard_normal((16, 32)), name="l1.weight"),
            "b1": asarray(np.zeros(32), name="l1.bias"),
            "w2": asarray(rng.standard_normal((32, 4)), name="l2.weight"),
        }
        loss = nn.cross_entropy(nn.relu(x @ w["w1"] + w["b1"]) @ w["w2"], t)
        new, _ = SGD(0.125).step(w, grad(loss, w), {})
        built = build({"loss": loss, **{f"new_{k}": v for k, v in new.items()}}, [x, t, *w.values()])
        self.model = built.model
        self.batch = {"x": rng.standard_normal((8, 16)), "t": rng.integers(0, 4, 8)}
        self.start = built.bound

    def spmd(self, copied=(), **axes):
        mesh = Mesh(axes)
        given = {n: {a: p for a, p in at.items() if a in axes} for n, at in GIVEN.items()}
        outputs = {end: given[start] for end, start in NAMES.items()}
        return lower(propagate(self.model, infer(self.model), mesh, given, outputs=outputs), copied)

    def next(self, out):
        return {**self.batch, **{start: out[end] for end, start in NAMES.items()}}

    def losses(self, call, steps):
        """Losses of so many steps, parameters staying where they are."""
        found, inputs = [], {**self.batch, **self.start}
        for _ in range(steps):
            out = call(inputs)
            found.append(float(np.asarray(out["loss"])))
            inputs = self.next(out)
        return found


@pytest.fixture(scope="module")
def step():
    return Step()


@pytest.fixture(scope="module")
def unsharded(step):
    return step.losses(lambda inputs: from_onnx(ir.to_proto(step.model))(inputs).compute(scheduler="sync"), 5)


MESHES = [{"data": 1}, {"data": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}, {"data": 2, "fsdp": 2}]


@every("axes", MESHES, ids=str)
def test_sharded_training_has_the_loss_of_one_worker(step, unsharded, axes):
    ranks = Ranks(step.spmd(**axes))
    got = step.losses(lambda inputs: gather(ranks(inputs), scheduler="sync"), 5)
    np.testing.assert_allclose(got, unsharded, rtol=1e-12)


def test_two_runs_are_the_same_to_the_bit(step):
    ranks = Ranks(step.spmd(data=2, tensor=2))
    inputs = {**step.batch, **step.start}
    first, second = (gather(ranks(inputs), scheduler="threads", num_workers=n) for n in (1, 4))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


def test_weights_of_the_file_and_outputs_that_are_weights(step):
    x = input("x", (4, 6), np.float64)
    w = asarray(RNG.standard_normal((6, 8)), name="w")
    model = to_model({"y": x @ w, "w_too": w + 0.0, "x_too": x})
    plan = propagate(model, infer(model), Mesh({"t": 2}), {"w": {"t": S(1)}}, outputs={"y": {"t": R}})
    array = RNG.standard_normal((4, 6))
    got = gather(Ranks(lower(plan))({"x": array}), scheduler="sync")
    np.testing.assert_allclose(got["y"], array @ w.origin.tensor.numpy(), rtol=1e-12)
    np.testing.assert_array_equal(got["w_too"], w.origin.tensor.numpy())
    np.testing.assert_array_equal(got["x_too"], array)


def test_buckets_are_closed_at_their_size(step):
    model = step.spmd(data=2).model
    assert len(cut_segments(model, bucket_bytes=0).buckets) == 4
    assert [len(b.attributes) for b in cut_segments(model, bucket_bytes=4200).buckets] == [3, 1]


def test_the_gradients_that_are_there_first_are_exchanged_first(step):
    model = step.spmd(data=2).model
    shapes = {value.name: value.shape.numpy() for node in model.graph for value in node.outputs}
    order = [
        shapes[name] for bucket in cut_segments(model, bucket_bytes=0).buckets for name in bucket.reads[0]
    ]
    assert order.index((32, 4)) < order.index((16, 32))  # of the second layer, then of the first


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"x": None}, "input 'x': want shape (8, 16), got nothing", id="an input is missing"),
        pytest.param({"z": np.zeros(3)}, "the model has no ['z']", id="an input is unknown"),
        pytest.param({"x": np.zeros((8, 3))}, "got shape (8, 3)", id="a shape is wrong"),
        pytest.param({"x": np.zeros((8, 16), "f4")}, "input 'x': got float32, wanted float64", id="a dtype is"),
        pytest.param({"x": [[1.0]]}, "input 'x': got list, wanted an array", id="an input is a list"),
        pytest.param({"x": da.zeros((8, 3))}, "input 'x': want shape (8, 16), got a dask",
            id="a lazy one's shape is"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_named(step, change, says):
    arrays = {k: v for k, v in {**step.batch, **step.start, **change}.items() if v is not None}
    with pytest.raises(InputError, match=re.escape(says)):
        Ranks(step.spmd(data=2))(arrays)


def test_a_sharded_array_that_lies_otherwise_is_refused(step):
    ranks = Ranks(step.spmd(tensor=2))
    out = ranks({**step.batch, **step.start})
    with pytest.raises(InputError, match=r"input 'l2.weight': wanted .* as S\(0\) .*got .* as S\(1\)"):
        ranks({**step.next(out), "l2.weight": out["new_w1"]})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["R", "S0", "S1", "P"]), min_size=2, max_size=2), st.sampled_from([4, 8]))
def test_parts_become_the_whole(kinds, rows):
    layout = [{"R": R, "S0": S(0), "S1": S(1), "P": Partial()}[kind] for kind in kinds]
    model = to_model(input("a", (rows, 4), np.float64) + 0.0)
    plan = propagate(model, infer(model), Mesh({"x": 2, "y": 2}), {})
    port = lower(plan).inputs[0].__class__("a", tuple(layout), (rows, 4), ("p0", "p1", "p2", "p3"))
    spmd = lower(plan).__class__(model, plan.mesh, (port,), (port,))
    array = np.arange(4.0 * rows).reshape(rows, 4)
    parts = spmd.split({"a": array})
    np.testing.assert_array_equal(join_parts([parts[n] for n in port.parts], layout, (2, 2)), array)


class TestDaskArrays:
    def ranks(self, *axes, **mesh):
        """Each axis of `axes` splits the dimension of its position."""
        return self.split({a: S(d) for d, a in enumerate(axes)}, **mesh)

    def split(self, placed, **mesh):
        model = to_model(input("x", (8, 6), np.float64) * 2.0)
        return Ranks(lower(propagate(model, infer(model), Mesh(mesh), {"x": placed})))

    def test_chunks_that_are_shards_are_read_as_they_are(self):
        whole = np.arange(48.0).reshape(8, 6)
        x = da.from_array(whole, chunks=(4, 3))
        y = self.ranks("a", "b", a=2, b=2)({"x": x})["y"]
        np.testing.assert_array_equal(y.compute(scheduler="sync"), whole * 2)
        assert not any("rechunk" in name for name in y.graph.layers)
        read = set().union(*(task.dependencies for key, task in dict(y.graph).items() if "spmd" in key[0]))
        assert {key for key in read if key[0] == x.name} == {(x.name, i, j) for i in (0, 1) for j in (0, 1)}

    def test_others_are_cut_anew(self):
        whole = np.arange(48.0).reshape(8, 6)
        y = self.ranks("a", a=2)({"x": da.from_array(whole, chunks=(3, 2))})["y"]
        assert any("rechunk" in name for name in y.graph.layers)
        np.testing.assert_array_equal(y.compute(scheduler="sync"), whole * 2)

    @pytest.mark.parametrize(
        ("placed", "mesh", "chunks"),
        [
            ({"a": S(1)}, {"a": 3}, ((8,), (2, 2, 2))),
            ({"a": S(0), "b": S(0)}, {"a": 2, "b": 2}, ((2, 2, 2, 2), (6,))),
            ({"a": S(0), "b": S(1), "c": S(0)}, {"a": 2, "b": 2, "c": 2}, ((2, 2, 2, 2), (3, 3))),
        ],
    )
    def test_parts_are_chunks(self, placed, mesh, chunks):
        whole = np.arange(48.0).reshape(8, 6)
        ranks = self.split(placed, **mesh)
        for before, is_cut in ((chunks, False), ((8, 6), True)):
            y = ranks({"x": da.from_array(whole, chunks=before)})["y"]
            np.testing.assert_array_equal(y.compute(scheduler="sync"), whole * 2)
            assert any("rechunk" in name for name in y.graph.layers) == is_cut


def staged(trains=False):
    """Two layers in regions, in column-row form."""
    rng = np.random.default_rng(5)
    x = input("x", (4, 8), np.float64)
    w = {
        name: asarray(rng.standard_normal(shape), name=name)
        for name, shape in (("w1", (8, 6)), ("w2", (6, 8)))
    }
    with under("one"):
        h = nn.relu(x @ w["w1"])
    with under("two"):
        y = h @ w["w2"]
    if not trains:
        return to_model({"h": h, "y": y})
    loss = (y * y).mean()
    return to_model({"loss": loss, **{f"d {name}": g for name, g in grad(loss, w).items()}})


STAGES = {
    "one": {"shard": {"w1": 1}, "stage": 0, "workers": [0, 1]},
    "two": {"shard": {"w2": 0}, "stage": 1, "workers": [3, 2], "device": "gpu"},
}
X = np.arange(32.0).reshape(4, 8)


class TestStages:
    @pytest.mark.parametrize("tensor", [1, 2])
    def test_stages_wait_for_each_other_and_never_in_a_circle(self, tensor):
        plan = {name: {"shard": region["shard"], "stage": region["stage"]} for name, region in STAGES.items()}
        model = staged(trains=True)
        ranks = Ranks.of(apply_plan(model, {"mesh": {"tensor": tensor}, **plan}))
        wanted = from_onnx(ir.to_proto(model))(X).compute(scheduler="sync")
        for name, got in gather(ranks({"x": X}), scheduler="sync").items():
            np.testing.assert_allclose(got, wanted[name], rtol=1e-12)

    def test_a_device_is_required_of_its_tasks_alone(self):
        graph = Ranks.of(apply_plan(staged(), STAGES))({"x": X})["y"].graph
        layer = next(layer for name, layer in graph.layers.items() if name.startswith("spmd-"))
        wanted = {key: layer.annotations["ferro"](key) for key in layer if key[0].startswith("spmd-segment")}
        assert sorted(wanted.values(), key=str) == [{"require": "gpu"}] * 2 + [{}] * 2

    @pytest.mark.cluster
    @pytest.mark.parametrize("is_installed", [False, True])
    def test_a_device_is_required_where_workers_tell_theirs(self, is_installed):
        model = staged()
        plan = {**STAGES, "two": {**STAGES["two"], "workers": [1, 0], "device": "cpu"}}
        wanted = from_onnx(ir.to_proto(model))(X).compute(scheduler="sync")
        with running(2, processes=False) as client:
            if is_installed:
                install(client)
            found = gather(Ranks.of(apply_plan(model, plan))({"x": X}))
        np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-12)

    @pytest.mark.cluster
    def test_ranks_that_require_what_no_worker_has_keep_no_others_waiting(self):
        model, plan = staged(), {**STAGES, "two": {**STAGES["two"], "workers": [1, 0]}}
        wanted = from_onnx(ir.to_proto(model))(X).compute(scheduler="sync")
        with running(2, processes=False) as client:
            install(client)
            waiting = persisted(Ranks.of(apply_plan(model, plan))({"x": X}))
            ranks = Ranks.of(apply_plan(model, {"mesh": {"tensor": 2}}))
            np.testing.assert_allclose(gather(ranks({"x": X}))["y"], wanted["y"], rtol=1e-12)
            assert {future.status for future in futures_of(waiting["y"])} == {"pending"}

    @pytest.mark.cluster
    def test_resources_of_a_call_are_followed_task_by_task(self):
        model = staged()
        wanted = from_onnx(ir.to_proto(model))(X).compute(scheduler="sync")
        ranks = Ranks.of(apply_plan(model, {"mesh": {"tensor": 2}}))
        with running(1, processes=False, resources={"R": 1}) as client:
            out = ranks({"x": X})
            held = client.persist(out["y"], resources={"R": 1})
            np.testing.assert_allclose(held.compute(), wanted["y"], rtol=1e-12)
            names = client.run_on_scheduler(
                lambda dask_scheduler: {str(key[0]) for key in dask_scheduler.tasks}
            )
            assert not any(name.startswith(("flow:", "bundle:")) for name in names)

    @pytest.mark.cluster
    @pytest.mark.parametrize("numbered", [True, False])
    def test_a_stage_runs_on_its_workers(self, numbered):
        plan = {"mesh": {"tensor": 2}}
        for name, region in STAGES.items():
            left_out = {"device"} if numbered else {"device", "workers"}
            plan[name] = {key: value for key, value in region.items() if key not in left_out}
        with running(4, processes=False) as client:
            known = client.scheduler_info(n_workers=-1)["workers"]
            order = sorted(known, key=lambda address: known[address]["name"])
            model = staged()
            out = Ranks.of(apply_plan(model, plan))({"x": X})
            h, y = dask.persist(out["h"], out["y"])
            wanted = from_onnx(ir.to_proto(model))(X).compute(scheduler="sync")
            np.testing.assert_allclose(y.compute(), wanted["y"], rtol=1e-12)
            finished(futures_of((h, y)))
            held = {future.key: client.who_has([future])[future.key] for future in futures_of((h, y))}
            first, second = order[:2], order[3:1:-1] if numbered else order[2:]
            assert [held[key] for key in h.keys] == [[worker] for worker in first]
            assert {worker for key in y.keys for worker in held[key]} <= set(second)
            plan["two"]["workers"] = [3, 4]
            with pytest.raises(InputError, match=r"the cluster has no \[4\]"):
                Ranks.of(apply_plan(model, plan))({"x": X})


# On workers.


def persisted(out):
    return dict(zip(out, dask.persist(*out.values()), strict=True))


def killed_during(client, begin):
    """Kill a worker in the middle of what `begin` starts, and return its result.

    The worker stands still from the start, so that it has work to do when it dies, whatever the other workers do.
    """
    pids = client.run(os.getpid)
    victim = min(pids)
    os.kill(pids[victim], signal.SIGSTOP)
    started = begin()
    until(lambda: client.processing([victim])[victim], "a task of the worker that stands still", every=0.01)
    os.kill(pids[victim], signal.SIGKILL)
    return started


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("axis", "is_seen"),
    [
        pytest.param("tensor", True, id="tensor"),
        pytest.param("data", True, id="data: ranks have parameters of their own"),
        pytest.param("tensor", False, id="a copy of the model dies too"),
    ],
)
def test_a_worker_that_is_killed_in_a_step_changes_no_bit(step, axis, is_seen, monkeypatch):
    monkeypatch.setattr("dask_ferro.lower.inputs.shipping._all_see", lambda client, path: is_seen)
    ranks = Ranks(step.spmd(**{axis: 2}))
    if axis == "data":
        ranks = Ranks(step.spmd(copied={*NAMES, *NAMES.values()}, data=2))
    wanted = step.losses(lambda inputs: gather(ranks(inputs), scheduler="sync"), 3)
    found, inputs = [], {**step.batch, **step.start}
    with running(2, silence_logs=60) as client:
        for number in range(3):
            begin = partial(persisted, ranks(inputs))
            # Its results of the first step are lost with it, and half of those of this one.
            out = killed_during(client, begin) if number == 1 else begin()
            found.append(float(out["loss"].compute()))
            inputs = step.next(out)
    assert found == wanted


class Regression:
    """A training step with a batch that is a task of its own in the graph, 8.4 MB."""

    def __init__(self):
        rng = np.random.default_rng(1)
        x, t = input("x", (512, 2048), np.float64), input("t", (512, 4), np.float64)
        w = {"w": asarray(rng.standard_normal((2048, 4)), name="w")}
        loss = nn.mse_loss(x @ w["w"], t)
        new, _ = SGD(0.5).step(w, grad(loss, w), {})
        model, self.start = build({"loss": loss, "new": new["w"]}, [x, t, *w.values()])
        given = {"x": {"data": S(0)}, "t": {"data": S(0)}}
        self.ranks = Ranks(lower(propagate(model, infer(model), Mesh({"data": 2}), given)))

    def batch(self, number):
        rng = np.random.default_rng(number)
        return {"x": rng.standard_normal((512, 2048)), "t": rng.standard_normal((512, 4))}

    def losses(self, steps):
        found, inputs = [], dict(self.start)
        for number in range(steps):
            out = gather(self.ranks({**self.batch(number), **inputs}), scheduler="sync")
            found.append(float(out["loss"]))
            inputs = {"w": out["new"]}
        return found


@pytest.fixture(scope="module")
def regression():
    return Regression()


@pytest.mark.cluster
def test_large_inputs_that_die_with_their_worker_are_sent_again_by_dask(regression):
    found, inputs = [], dict(regression.start)
    with running(2, silence_logs=60) as client:
        for number in range(4):
            begin = partial(persisted, regression.ranks({**regression.batch(number), **inputs}))
            out = killed_during(client, begin) if number == 2 else begin()
            found.append(float(out["loss"].compute()))
            inputs = {"w": out["new"]}
    assert found == regression.losses(4)


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [1, 2])
def test_the_scheduler_forgets_the_steps_before_a_cut(step, workers):
    ranks = Ranks(step.spmd(tensor=2))
    wanted = step.losses(lambda inputs: gather(ranks(inputs), scheduler="sync"), 18)
    found, inputs, tasks = [], {**step.batch, **step.start}, []
    with dask.config.set({"ferro.ranks.checkpoint-calls": 5}), running(workers, silence_logs=60) as client:
        known = partial(client.scheduler_info, n_workers=-1)
        for number in range(18):
            out = persisted(ranks(inputs))
            found.append(float(out["loss"].compute()))
            inputs = step.next(out)
            tasks.append(client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))
            if number == 12:  # two steps after a cut; it takes parameters along, and their steps since
                pids = client.run(os.getpid)
                victim = min(pids)
                os.kill(pids[victim], signal.SIGKILL)
                until(
                    lambda gone=victim: gone not in known()["workers"], "the worker to be missed", every=0.01
                )
    assert found == wanted
    # Right after a cut the tasks before it may be there still, beside those of the cut: clients release in batches.
    assert max(tasks[5:]) <= 2 * max(tasks[:5]), tasks


@pytest.mark.cluster
def test_ranks_run_on_their_workers():
    x = input("x", (512, 2100), np.float64)
    model = to_model(x * 2.0)
    spmd = lower(propagate(model, infer(model), Mesh({"data": 2}), {"x": {"data": S(0)}}))
    array = RNG.standard_normal((512, 2100))
    with running(2, processes=False) as client:
        order = sorted(client.scheduler_info(n_workers=-1)["workers"])
        y = dask.persist(Ranks(spmd, workers=order[::-1])({"x": array})["y"])[0]
        np.testing.assert_array_equal(y.compute(), array * 2)
        held = {future.key: client.who_has([future])[future.key] for future in futures_of(y)}
        assert [held[key] for key in y.keys] == [[order[1]], [order[0]]]
        with pytest.raises(InputError, match="workers: the cluster has no"):
            Ranks(spmd, workers=["tcp://nowhere:1"])({"x": array})
