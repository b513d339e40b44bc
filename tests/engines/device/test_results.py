"""Several results of a bundle tell by their class where they lie, wherever they go."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest

from dask_ferro.engines.device.residency import Residency, use
from dask_ferro.engines.device.results import DeviceResults, results_of
from dask_ferro.testing.emulated_device import StandIn

KB = 1024


@pytest.fixture
def on() -> Iterator[Residency]:
    residency = Residency(StandIn(64 * KB))
    use(residency)
    yield residency
    use(None)


@pytest.mark.parametrize(
    ("there", "here", "wanted"),
    [
        pytest.param(2, 0, DeviceResults, id="all on the device"),
        pytest.param(2, 1, DeviceResults, id="most bytes on the device"),
        pytest.param(1, 1, tuple, id="half of them"),
        pytest.param(0, 2, tuple, id="none"),
    ],
)
def test_marked_is(there: int, here: int, wanted: type, on: Residency) -> None:
    block = np.zeros(KB, np.uint8)
    values = [on.keep(on.device.to_device(block)) for _ in range(there)] + [block] * here
    found = results_of(values)
    assert type(found) is wanted
    assert list(map(id, found)) == list(map(id, values))


def test_where_they_arrive_they_are_marked_anew(on: Residency) -> None:
    sent = pickle.dumps(results_of(on.keep(on.device.to_device(np.arange(4))) for _ in range(2)))
    assert type(pickle.loads(sent)) is DeviceResults
    use(None)
    arrived = pickle.loads(sent)
    assert type(arrived) is tuple
    assert np.array_equal(arrived[1], np.arange(4))
