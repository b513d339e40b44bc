"""Which graph a model's calls run: one a client, written again where what it sent is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dask_ferro as ff
from dask_ferro.lower.model import collection, lowering
from dask_ferro.lower.model.lowering import Lowerings
from tests.graphs import mlp


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> Lowerings:
    monkeypatch.setattr(lowering, "lower", lambda planned, client: SimpleNamespace(is_there=True))
    return Lowerings("model", SimpleNamespace())  # type: ignore[arg-type]


def test_two_threads_that_lost_the_same_both_go_on_with_what_the_first_sent(lowerings: Lowerings) -> None:
    client = SimpleNamespace(id="one")
    lost: Any = lowerings.of(client)
    lost.is_there = False
    new = lowerings.again(lost, client)
    assert new is not lost
    assert lowerings.again(lost, client) is new


def test_what_another_scheduler_put_aside_is_sent_again(lowerings: Lowerings) -> None:
    client = SimpleNamespace(id="one")
    lost = lowerings.of(client)
    lowerings.of(None)
    new = lowerings.again(lost, client)
    assert new is not None
    assert new is not lost


def test_where_nothing_is_lost_nothing_is_sent_again(lowerings: Lowerings) -> None:
    client = SimpleNamespace(id="one")
    assert lowerings.again(lowerings.of(client), client) is None


def test_a_persisted_model_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((4, 6), np.float32)
    held = ff.from_onnx(mlp())(x).persist(scheduler="sync")
    monkeypatch.setattr(collection, "plan_bundles", lambda bound: pytest.fail("planned"))
    assert held.compute(scheduler="sync") is not None
