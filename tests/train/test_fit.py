"""`ff.fit`: its steps, its options, the graphs that it makes, and what it refuses before anything is computed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from dask.array import from_array
from torch.utils.data import DataLoader, TensorDataset

import dask_ferro as ff
import dask_ferro.parallel as fp
import dask_ferro.tensor as ft
from dask_ferro.errors import InputError
from tests.each import every
from tests.train.nets import PLANS, data, distance, leaves, loss, outputs, params, ran


def test_losses_metrics_and_parameters_are_pytorchs():
    held = {
        f"{layer}.{name}": torch.tensor(value, requires_grad=True)
        for layer, own in params().items()
        for name, value in own.items()
    }
    theirs = torch.optim.AdamW(held.values(), lr=0.02, weight_decay=0.1, eps=1e-8)
    training = ff.fit(
        loss,
        params(),
        data(),
        ft.optim.AdamW(0.02, weight_decay=0.1),
        batch_size=8,
        epochs=2,
        seed=None,
        clip_norm=0.4,
        metrics={"distance": distance},
    )
    for step in training:
        rows = slice(8 * (step.index % 3), 8 * (step.index % 3) + 8)
        x, t = (torch.tensor(data()[name][rows]) for name in ("x", "t"))
        theirs.zero_grad()
        y = torch.relu(x @ held["first.weight"] + held["first.bias"]) @ held["last.weight"]
        error = torch.nn.functional.mse_loss(y, t)
        assert step.loss == pytest.approx(error.item(), rel=1e-5)
        assert step.metrics == {"distance": pytest.approx((y - t).abs().mean().item(), rel=1e-5)}
        error.backward()
        torch.nn.utils.clip_grad_norm_(held.values(), 0.4)
        theirs.step()
        for mine, other in zip(leaves(step.params), held.values(), strict=True):
            np.testing.assert_allclose(mine, other.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_steps_tell_where_they_are():
    training = ff.fit(
        loss, params(), data(), ft.optim.SGD(0.1), batch_size=8, epochs=2, lr=lambda u: 0.1 / (1 + u)
    )
    assert repr(training) == "<Fit at epoch 0 of 2, 0 batches done>"
    steps = list(training)
    assert [(s.epoch, s.index, s.rows) for s in steps] == [
        (0, 0, 8),
        (0, 1, 8),
        (0, 2, 4),
        (1, 3, 8),
        (1, 4, 8),
        (1, 5, 4),
    ]
    assert [s.lr for s in steps] == [0.1 / (1 + update) for update in range(6)]
    assert repr(steps[3]) == "<FitStep 3, epoch 1, 8 rows>"
    assert repr(training) == "<Fit at epoch 2 of 2, 6 batches done>"


@pytest.mark.parametrize("rate", [0.01, lambda update: 0.01])
def test_a_rate_that_stays_is_the_optimizers_rate(rate):
    (told, _), (wanted, _) = ran(lr=rate, optimizer=ft.optim.Adam(0.5)), ran()
    assert told == wanted


@pytest.mark.parametrize("plan", ["none", "data"])
def test_a_loss_is_told_the_number_of_the_step(plan):
    def numbered(p, batch, step):
        return loss(p, batch) + ft.astype(step, "float32")

    def number(p, batch, step, scale=10.0):
        return ft.astype(step, "float32") * scale

    (wanted, _), (told, _) = (
        ran(loss=which, plan=PLANS[plan], metrics={"distance": number}, data=data(24))
        for which in (loss, numbered)
    )
    assert [row[5] for row in told] == [10 * i for i in range(6)]
    np.testing.assert_allclose(
        [row[4] for row in told], [row[4] + i for i, row in enumerate(wanted)], rtol=1e-5
    )


@pytest.mark.parametrize(
    "batches",
    [
        [{name: value[i : i + 8] for name, value in data().items()} for i in (0, 8, 16)],
        DataLoader(TensorDataset(*map(torch.tensor, data().values())), batch_size=8),
        lambda epoch: ((data()["x"][i : i + 8], data()["t"][i : i + 8]) for i in (0, 8, 16)),
    ],
    ids=["dicts", "a loader", "tuples"],
)
def test_batches_train_as_arrays_do(batches):
    def of(p, batch):
        x, t = (batch["x"], batch["t"]) if isinstance(batch, dict) else batch
        return ft.nn.mse_loss(outputs(p, x), t)

    wanted, _ = ran(seed=None)
    training = ff.fit(of, params(), batches, ft.optim.Adam(0.01), seed=None, epochs=2)
    assert [step.loss for step in training] == [row[4] for row in wanted]


def test_parquet_trains_as_arrays_do(tmp_path):
    pd.DataFrame({name: list(value) for name, value in data().items()}).to_parquet(
        tmp_path / "part.0.parquet"
    )
    (told, _), (wanted, _) = ran(data=tmp_path, seed=None), ran(seed=None)
    assert told == wanted


def test_a_loss_that_is_a_tensor_reads_its_arguments_by_name_or_position():
    w = {
        name: {n: ft.asarray(v, name=f"{name}.{n}") for n, v in own.items()} for name, own in params().items()
    }
    x, t = ft.input("x", ("N", 6)), ft.input("t", ("N", 4))
    wanted, _ = ran()
    for batches in (data(), tuple(data().values())):
        training = ff.fit(
            loss(w, {"x": x, "t": t}),
            w,
            batches,
            ft.optim.Adam(0.01),
            batch_size=8,
            epochs=2,
            metrics={"distance": distance(w, {"x": x, "t": t})},
        )
        assert [(s.loss, s.metrics["distance"]) for s in training] == [row[4:] for row in wanted]


def test_one_array_is_a_batch():
    training = ff.fit(
        lambda w, x: ft.mean((x * w) ** 2), np.ones(6, "f4"), data()["x"], ft.optim.SGD(0.1), batch_size=8
    )
    losses = [step.loss for step in training]
    assert losses[-1] < losses[0]
    assert training.params.shape == (6,)


def test_it_stops_when_patience_is_over():
    # A rate of 0: no epoch is better than the first.
    told, _ = ran(optimizer=ft.optim.SGD(0.0), epochs=9, patience=2, monitor="distance", seed=None)
    assert [row[1] for row in told] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_patience_is_kept_in_a_checkpoint(tmp_path):
    options = {"optimizer": ft.optim.SGD(0.0), "epochs": 9, "patience": 2, "seed": None}
    first, _ = ran(**options, checkpoint=tmp_path, steps=5)
    rest, _ = ran(**options, checkpoint=tmp_path)
    assert len(first + rest) == 9
    assert ran(**options, checkpoint=tmp_path)[0] == []


def test_a_progress_line_has_epoch_batches_and_loss(capsys):
    ran(progress=True)
    told = capsys.readouterr().err
    assert "epoch 2" in told
    assert "6 / 6 batches  loss" in told


W = ft.asarray(np.ones(6, "f4"), name="w")
MASKED = np.ma.masked_greater(data()["x"], 1.0)
# Batches that come as they are asked for.
LOADER = {"batch_size": None, "steps": 1}
TENSOR = ft.mean((ft.input("x", ("N", 6)) * W) ** 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: got 0, wanted a number from 1 to below"),
        ({"reduction": "bogus"}, "reduction: got 'bogus'"),
        ({"seed": 1.5}, "seed: got 1.5"),
        ({"clip_norm": True}, "clip_norm: got True"),
        ({"patience": 0}, "patience: got 0"),
        (
            {"checkpoint_every": 5},
            "checkpoint_every: there is no folder for checkpoints; give checkpoint= too",
        ),
        (
            {"checkpoint": "s3://key:secret@bucket/run"},
            "checkpoint: got 's3://bucket/run', wanted the path of a folder: .* not to addresses; give a folder that",
        ),
        ({"clip_norm": 0.0}, "clip_norm: got 0.0, wanted a norm above 0"),
        ({"drop_last": "pad"}, "drop_last: got 'pad', wanted True or False"),
        ({"precision": "float8"}, "precision: got 'float8', wanted one of None, 'float16', 'bfloat16'"),
        ({"monitor": "accuracy"}, "monitor: got 'accuracy', wanted one of 'loss', 'distance'"),
        ({"metrics": {"loss": loss}}, "'loss' is the name of the loss"),
        (
            {"micro_batch": 2},
            "unknown option micro_batch; it also takes micro_batches.*mean micro_batches",
        ),
        ({"batchsize": 2}, r"did you mean batch_size\?"),
        (
            {"loss": lambda p, batch: batch["x"] @ p["first"]["weight"]},
            "wanted a floating point scalar; take its mean",
        ),
        (
            {"metrics": {"distance": lambda p, batch: batch["x"]}},
            "metrics: 'distance': .* wanted a scalar Tensor",
        ),
        ({"params": {}}, "params: got no arrays"),
        (
            {"params": [[0.0, 1.0]]},
            "params: '0.0': got the number 0.0, wanted an array: lists hold parameters",
        ),
        ({"params": {"w": np.arange(3)}}, "params: 'w': got int64, wanted a floating point dtype that has"),
        ({"params": {"a.b": data()["x"], "a": {"b": data()["x"]}}}, "two arrays are named 'a.b'"),
        ({"batch_size": 0}, "batch_size: got 0, wanted a number from 1 to"),
        ({"seed": -1}, "seed: got -1, wanted a number from 0 to below 2"),
        (
            {"data": {**data(), "x": data()["x"].astype("f8")}},
            "batches: 'x': got float64, and no parameter is: the",
        ),
        ({"params": ft.input("w", (6,))}, "params: 'params': .*, wanted an array, or a constant"),
        (
            {"lr": 0.1, "optimizer": SimpleNamespace(init=dict, step=dict)},
            "lr: SimpleNamespace has no field `lr` to replace",
        ),
        ({"lr": "cosine"}, "lr: got 'cosine', wanted a number of at least 0, or a function"),
        ({"lr": -0.1}, "lr: got -0.1, wanted a number of at least 0"),
        ({"lr": lambda update: None, "steps": 1}, r"lr\(0\): got None, wanted a finite number of at least 0"),
        (
            {"optimizer": "adam"},
            r"optimizer: got 'adam', wanted one such as dask_ferro.tensor.optim.Adam\(1e-3\)",
        ),
        ({"optimizer": ft.optim.Adam}, "optimizer: got <class .*Adam'>, wanted one such as"),
        ({"metrics": [distance]}, "metrics: got .*, wanted them by name: {'accuracy': accuracy}"),
        ({"loss": "mse"}, r"loss: got 'mse', wanted a function of \(params, batch\), or a Tensor"),
        ({"loss": lambda p, batch: ft.mean(batch["x"])}, "the loss reads none of params, so no step would"),
        ({"nonfinite": "raise"}, "nonfinite: got 'raise', wanted one of 'stop', 'skip', 'continue'"),
        ({"checkpoint": ""}, "checkpoint: got '', wanted the path of a folder"),
        ({"checkpoint": "/dev/null"}, "checkpoint: .*/dev/null.*; give a folder, or the path of a new one"),
        ({"checkpoint": "/dev/null/here"}, "checkpoint: .*/dev/null/here.*; give a folder, or the path of"),
        ({"data": None}, "batches: got NoneType, wanted arrays with batch_size="),
        ({"data": {**data(), "x": MASKED}}, "batches: 'x': got a masked array, whose mask would be dropped"),
        ({"data": {**data(), "x": from_array(MASKED)}}, "batches: 'x': got a masked array"),
        ({**LOADER, "data": [None]}, "batches: 'batch': got None, wanted an array"),
        (
            {**LOADER, "data": lambda epoch: iter([])},
            "batches: epoch 0 of a function has none, wanted one batch",
        ),
        (
            {"loss": TENSOR, "params": W, "precision": "float16"},
            "the loss is a Tensor, whose dtypes are decided",
        ),
        (
            {"loss": TENSOR, "params": W, "data": {"t": data()["t"]}, "metrics": {}},
            "got arrays t, wanted x, the arguments",
        ),
        (
            {"loss": TENSOR, "params": W, "data": (data()["x"], data()["t"]), "metrics": {}},
            "got 2 arrays, wanted 1: x",
        ),
        ({"loss": TENSOR, "params": W}, "the loss is a Tensor, so they are Tensors too"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_it_cannot_do_is_refused_before_anything_is_computed(options, message):
    with pytest.raises(InputError, match=message):
        ran(**{"steps": 0, **options})


@every(
    ("change", "differs"),
    [
        (lambda b: {**b, "x": b["x"].astype("f8")}, r"x: was 'float32 \(6,\)', is 'float64 \(6,\)'"),
        (lambda b: {**b, "x": b["x"][:, :5]}, r"x: was 'float32 \(6,\)', is 'float32 \(5,\)'"),
        (lambda b: {"x": b["x"]}, r"t: was 'float32 \(4,\)', is None"),
        (lambda b: tuple(b.values()), r"x: was 'float32 \(6,\)', is None"),
    ],
)
def test_a_batch_with_other_rows_is_refused_by_its_number(change, differs):
    batches = [data(8), change(data(8))]
    says = rf"batch 1 of epoch 0 has other rows than the first one: .*{differs}.*; give all batches the same"
    with pytest.raises(InputError, match=says):
        ran(data=batches, batch_size=None, epochs=1, seed=None)


def test_float64_data_train_where_the_loss_or_a_parameter_decides_it():
    wide, (usual, _) = {name: value.astype("f8") for name, value in data().items()}, ran()

    def narrow(p, batch):
        return loss(p, {name: ft.astype(value, "float32") for name, value in batch.items()})

    assert [row[4] for row in ran(loss=narrow, metrics={"distance": narrow}, data=wide)[0]] == [
        row[4] for row in usual
    ]
    own = {layer: {name: w.astype("f8") for name, w in values.items()} for layer, values in params().items()}
    assert {leaf.dtype.name for leaf in leaves(ran(params=own, data=wide)[1])} == {"float64"}


@pytest.mark.cluster
def test_gather_takes_any_tree(client):
    training = ff.fit(loss, params(), data(), ft.optim.SGD(0.1), batch_size=8, plan=PLANS["tensor"])
    next(iter(training))
    held = training._now.params
    one, (two, rest), three = fp.gather((held["last"]["weight"], [held["first"], {"n": 3}], None))
    assert isinstance(two["bias"], np.ndarray)
    np.testing.assert_array_equal(one, training.params["last"]["weight"])
    assert (rest, three) == ({"n": 3}, None)
