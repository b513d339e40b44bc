"""What users combine: shared tensors, spare arrays, arrays that are changed, loops that are left, lost clients."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.errors import InputError
from tests.clusters import running

X = np.arange(30, dtype="f4").reshape(10, 3) / 10
DATA = {"x": X, "y": X.sum(1, keepdims=True)}
SLOW = ft.optim.SGD(0.1)


def loss(p, batch):
    return ft.nn.mse_loss(batch["x"] @ p["w"], batch["y"])


def fitted(data=DATA, of=loss, params=None, **options):
    given = {"batch_size": 4, "seed": None, **options}
    start = {"w": np.zeros((3, 1), "f4")} if params is None else params
    return ff.fit(of, start, data, given.pop("optimizer", SLOW), **given)


def losses(training):
    return [step.loss for step in training]


USUAL = losses(fitted())


def test_a_tensor_that_is_given_twice_is_refused():
    w = ft.asarray(np.eye(3, dtype="f4"), name="w")

    def tied(p, x):
        return ft.mean(x @ p["enc"] @ ft.matrix_transpose(p["dec"]))

    with pytest.raises(InputError, match="params: 'enc' and 'dec' are one tensor; give it once"):
        fitted(X, tied, {"enc": w, "dec": w})


@pytest.mark.parametrize("options", [{}, {"micro_batches": 1}])
def test_an_array_that_the_loss_does_not_read_changes_nothing(options):
    assert losses(fitted({**DATA, "id": np.arange(10)}, **options)) == USUAL


TEXTS = np.array(list("abcdefghij"), dtype=object)
TIMES = np.arange(10).astype("datetime64[s]")
SPARE = {
    "texts": TEXTS,
    "texts of one length": TEXTS.astype(str),
    "times": TIMES,
    "time spans": TIMES - TIMES[0],
    "classes": pd.Categorical(TEXTS),
    "lists of texts": [["a", "b"]] * 10,
    "records": [{"a": 1}] * 10,
    "bytes": [b"a"] * 10,
    "decimals": [Decimal(1)] * 10,
}


def table(path, more):
    pd.DataFrame({"x": list(X), "y": list(DATA["y"]), "more": more}).to_parquet(path / "part.0.parquet")
    return path


PLAN = {"mesh": {"data": 2}, "inputs": {"x": 0, "y": 0}}


@pytest.mark.parametrize(
    ("kind", "plan"), [*((kind, None) for kind in SPARE), ("texts", PLAN), ("times", PLAN)]
)
def test_a_column_without_numbers_is_left_out_or_refused_if_it_is_read(kind, plan, tmp_path):
    path = table(tmp_path, SPARE[kind])
    options = {"batch_size": 2, "plan": plan, "checkpoint": tmp_path / "saved"}
    begun = []
    for step in fitted(path, **options):
        begun.append(step.loss)
        break
    assert [*begun, *losses(fitted(path, **options))] == losses(fitted(batch_size=2, plan=plan))

    def reads(p, batch):
        return loss(p, batch) + ft.mean(batch["more"])

    with pytest.raises(InputError, match=r"'more': '.*' has .*, wanted numbers; encode it before"):
        fitted(path, reads, **options)


@pytest.mark.parametrize("kind", ["texts", "texts of one length", "times", "time spans"])
@pytest.mark.parametrize("form", ["arrays", "batches"])
def test_an_array_without_numbers_is_left_out_too(form, kind, tmp_path):
    arrays = {**DATA, "more": SPARE[kind]}
    options = {"checkpoint": tmp_path}
    if form == "batches":
        options["batch_size"] = None
        arrays = [{name: value[i : i + 4] for name, value in arrays.items()} for i in (0, 4, 8)]
    assert losses(fitted(arrays, **options)) == USUAL


def test_texts_in_a_tuple_are_left_unread(tmp_path):
    def of(p, batch):
        return loss(p, {"x": batch[0], "y": batch[1]})

    texts = fitted((*DATA.values(), TEXTS), of, checkpoint=tmp_path)
    assert [next(iter(texts)).loss, *losses(texts)] == USUAL


def test_an_array_that_is_not_there_is_named():
    with pytest.raises(InputError, match="batches: 'z': there is no such array; wanted one of x, y"):
        fitted(of=lambda p, b: loss(p, b) + ft.mean(b["z"]))


def test_what_a_step_returns_is_not_written_to():
    found = []
    for step in fitted():
        found.append(step.loss)
        with pytest.raises(ValueError, match="read-only"):
            step.params["w"][:] = 0
    assert found == USUAL


def test_arrays_that_were_given_may_be_changed():
    own = np.zeros((3, 1), "f4")
    training = fitted(params={"w": own})
    own[:] = 9
    assert losses(training) == USUAL
    assert (own == 9).all()


def test_an_error_of_the_data_leaves_a_checkpoint(tmp_path):
    def batches(epoch):
        for i in range(5):
            if i == 3:
                raise OSError("disk")
            yield {name: value[2 * i : 2 * i + 2] for name, value in DATA.items()}

    # The batch before the error is held back: whether it is the last one is not known.
    with pytest.raises(OSError, match="disk"):
        losses(ff.fit(loss, {"w": np.zeros((3, 1), "f4")}, batches, SLOW, checkpoint=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000002"]


def test_a_loader_in_another_order_does_not_go_on_in_silence():
    orders = iter([[0, 1, 2, 3, 4], [3, 2, 1, 0, 4]])

    class Loader:
        def __iter__(self):
            for i in next(orders):
                yield {name: value[2 * i : 2 * i + 2] for name, value in DATA.items()}

    training = ff.fit(loss, {"w": np.zeros((3, 1), "f4")}, Loader(), SLOW)
    for step in training:
        if step.index == 2:
            break
    with pytest.raises(InputError, match="batch 2 of epoch 0 differs from the earlier run's"):
        losses(training)


def test_dropout_has_the_same_places_in_micro_batches():
    def dropped(p, batch, step, rows):
        x = ft.nn.dropout(batch["x"], 0.5, seed=0, layer="a", step=step, rows=rows)
        return ft.mean(x * p["w"])

    data, start = {"x": np.ones((8, 3), "f4")}, {"w": np.float32(1)}
    options = {"batch_size": 8, "epochs": 3, "optimizer": ft.optim.SGD(0.0)}
    wanted = losses(fitted(data, dropped, start, **options))
    assert len(set(wanted)) == 3
    data_plan = {"mesh": {"data": 2}, "inputs": {"x": 0}}
    for more in ({"micro_batches": 2}, {"micro_batches": 8}, {"plan": data_plan}):
        np.testing.assert_allclose(losses(fitted(data, dropped, start, **options, **more)), wanted, rtol=1e-6)


@pytest.mark.cluster
def test_on_a_client_and_after_it():
    with running(2, processes=False) as client:
        assert losses(fitted({**DATA, "id": np.arange(10)})) == USUAL
        w = ft.asarray(np.zeros((3, 1), "f4"), name="w")
        for rows, size in ((None, 4), (5, 5)):
            of = ft.nn.mse_loss(ft.input("x", (rows, 3)) @ w, ft.input("y", (rows, 1)))
            assert losses(fitted(of=of, params={"w": w}, batch_size=size)) == losses(fitted(batch_size=size))
        training = fitted()
        for step in training:
            if step.index == 1:
                break
        client.close()
        with pytest.raises(InputError, match="on the workers of a client that is closed"):
            losses(training)
        with pytest.raises(InputError, match="on the workers of a client that is closed"):
            assert training.params
