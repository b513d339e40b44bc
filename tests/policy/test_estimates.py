"""What is learned of durations and links, as values."""

from __future__ import annotations

import math

import pytest

from dask_ferro.policy.estimates import GUESS, Durations, Link, Links, Mean, ResultSizes
from dask_ferro.policy.facts import Replica, Worker
from tests.policy.facts import MB, free_links, needs, stand

HERE: Worker = stand("a", host="h").worker
HOSTS = {"a": "h", "b": "h", "far": "g"}


def test_a_mean_is_exact_at_first() -> None:
    mean = Mean()
    for value in [4.0, 1.0, 7.0]:
        mean.add(value)
    assert (mean.value, mean.count) == (4.0, 3)


def test_the_newest_of_many_counts_a_tenth() -> None:
    mean = Mean(1.0, 1000)
    mean.add(2.0)
    assert mean.value == pytest.approx(1.1)


# -- durations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "device", "annotated", "wanted"),
    [
        pytest.param("new", "cpu", None, (GUESS, False), id="a prefix that was never measured is a guess"),
        pytest.param("p", "cpu", None, (2.0, True), id="the mean of what was measured"),
        pytest.param("p", "gpu", None, (GUESS, False), id="another device class is another matter"),
        pytest.param("new", "cpu", 3.0, (3.0, True), id="an estimate stands until there is a measurement"),
        pytest.param("e", "cpu", 3.0, (6.0, True), id="an estimate is corrected by history"),
        pytest.param("e", "gpu", 3.0, (3.0, True), id="of its device class"),
        pytest.param("e", "cpu", 0.0, (0.0, True), id="an estimate of nothing is one"),
        pytest.param("p", "cpu", math.nan, (2.0, True), id="an estimate that is no number is none"),
        pytest.param("p", "cpu", math.inf, (2.0, True), id="an endless estimate is none"),
        pytest.param("new", "cpu", -1.0, (GUESS, False), id="a negative estimate is none"),
    ],
)
def test_the_projected_seconds_of_a_task(
    prefix: str, device: str, annotated: float | None, wanted: tuple[float, bool]
) -> None:
    durations = Durations()
    for seconds in (1.0, 3.0):
        durations.add("p", "cpu", seconds)
    durations.add("e", "cpu", 4.0, annotated=2.0)
    assert durations.of(prefix, device, annotated) == wanted


@pytest.mark.parametrize("estimate", [0.0, -1.0, math.nan, math.inf])
def test_an_estimate_of_no_use_corrects_nothing(estimate: float) -> None:
    durations = Durations()
    durations.add("p", "cpu", 2.0, annotated=estimate)
    assert durations.correction == {}
    assert durations.of("p", "cpu") == (2.0, True)


# -- links -------------------------------------------------------------------------------------------------


def links() -> Links:
    """1 ms and 100 MB/s on a host, 10 ms and 10 MB/s between hosts."""
    return Links({"host": Link(0.001, 100.0 * MB), "hosts": Link(0.010, 10.0 * MB)})


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        pytest.param([], 0.0, id="no input costs nothing"),
        pytest.param([needs(MB, "a", "far")], 0.0, id="nor one that it holds"),
        pytest.param([needs(MB, "b")], 0.001 + 0.010, id="on its host"),
        pytest.param([needs(MB, "far")], 0.010 + 0.100, id="on another host"),
        pytest.param([needs(MB, "far", "b")], 0.001 + 0.010, id="the nearest holder gives"),
        pytest.param([needs(0, "b")], 0.001, id="nothing to move takes a message"),
        pytest.param([needs(MB)], 0.010 + 0.100, id="what nobody holds comes from afar"),
        pytest.param([needs(MB, "gone")], 0.010 + 0.100, id="as does what an unknown worker holds"),
        pytest.param([needs(MB, "b"), needs(MB, "far")], 0.010 + 0.010 + 0.100,
            id="bytes add up, messages go side by side"),
    ],
)  # fmt: skip
def test_moving_inputs_takes(inputs: list[Replica], wanted: float) -> None:
    assert links().seconds(inputs, HERE, HOSTS) == pytest.approx(wanted)


def test_a_small_transfer_tells_of_the_latency() -> None:
    learned = links()
    for _ in range(100):
        learned.add("host", 1000, 0.003)
    assert learned.classes["host"].latency == pytest.approx(0.003, rel=0.01)
    assert learned.classes["host"].bandwidth == 100.0 * MB


def test_a_large_transfer_tells_of_the_bandwidth() -> None:
    learned = links()
    for _ in range(100):
        learned.add("host", 50 * MB, 0.001 + 0.1)
    assert learned.classes["host"] == Link(0.001, pytest.approx(500.0 * MB, rel=0.01))
    assert learned.classes["hosts"] == links().classes["hosts"]


def test_one_transfer_that_took_just_the_latency_does_not_make_a_link_endless() -> None:
    learned = links()
    learned.add("host", MB // 10, 0.001 + 1e-12)
    assert 100.0 * MB < learned.classes["host"].bandwidth < 120.0 * MB


def test_transfers_faster_than_the_latency_still_tell_of_the_bandwidth() -> None:
    learned = links()
    for _ in range(100):
        learned.add("host", 100 * MB, 0.0005)
    fastest = 10 * 100 * MB / 0.0005  # as if a tenth of the time went on bytes
    assert fastest / 2 < learned.classes["host"].bandwidth <= fastest


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_large_transfer_that_took_no_time_tells_nothing(seconds: float) -> None:
    learned = free_links()
    learned.add("host", MB, seconds)
    assert learned.classes == free_links().classes


def test_links_learn_apart() -> None:
    learned, other = Links(), Links()
    learned.add("hosts", 1000, 1.0)
    assert other.classes == Links().classes != learned.classes


# -- how it is learned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [5, 100, 200], ids=["less", "as many", "more"])
def test_a_result_is_learned_as_more_or_little_less(nbytes: int) -> None:
    sizes = ResultSizes()
    sizes.add("p", 100)
    sizes.add("p", nbytes)
    assert sizes.largest["p"] == pytest.approx(max(float(nbytes), 100 + (nbytes - 100) * 0.1))
