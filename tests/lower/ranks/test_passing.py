"""How the values of a bucket pass between tasks: a table of decisions, and collectives that their readers compute."""

from __future__ import annotations

import numpy as np
import pytest

from dask_ferro.graph.sharding.node_placement import NodePlacement
from dask_ferro.graph.sharding.segments import Bucket, Cut, RankSegment
from dask_ferro.lower.ranks.exchange import Collectives, at_once
from dask_ferro.lower.ranks.passing import passings
from dask_ferro.lower.worker.segment_run import Combination, Reading, SegmentValues, taken
from tests.each import every

KIB, MIB = 2**10, 2**20


def passed(
    kind="AllReduce", ranks=2, nbytes=KIB, *, later=False, ends=(), packed=(), action=None, by_bucket=False
):
    """How a bucket passes whose terms a segment of each rank makes, and whose results another one reads."""
    site = NodePlacement(action=action)
    names = [tuple((f"{name}{rank}",) for rank in range(ranks)) for name in "abc"]
    terms = [RankSegment(rank, (0,), (), term, 0, site) for rank, term in enumerate(names[0])]
    buckets = [Bucket(kind, tuple(range(ranks)), ({},), names[0], names[1], nbytes, site)]
    # Another bucket, that reads its results, or that its readers wait for too.
    if by_bucket or later:
        reads = names[1] if by_bucket else names[0]
        buckets.append(Bucket(kind, tuple(range(ranks)), ({},), reads, names[2], KIB, site))
    reads = [(*names[1][rank], *(names[2][rank] if later else ())) for rank in range(ranks)]
    readers = [RankSegment(rank, (1,), read, (), 2, site) for rank, read in enumerate(reads)]
    return passings(Cut((*terms, *readers), tuple(buckets)), ends, packed)[0]


@every(
    ("how", "wanted"),
    [
        pytest.param({}, "folded", id="a small sum is part of its reader"),
        pytest.param({"ranks": 8}, "folded", id="of eight ranks too"),
        pytest.param({"kind": "AllGather"}, "folded", id="small parts are joined by their reader"),
        pytest.param({"ends": ["b0"]}, "direct", id="two readers share one sum"),
        pytest.param({"packed": ["b0"]}, "direct", id="a parameter has a task"),
        pytest.param(
            {"nbytes": 8 * MIB, "later": True}, "direct", id="a large sum is ready before its reader"
        ),
        pytest.param({"nbytes": 8 * MIB}, "folded", id="the last sum is not"),
        pytest.param(
            {"ranks": 4, "nbytes": 2 * MIB, "later": True}, "direct", id="three terms of 2 MiB are large"
        ),
        pytest.param({"ranks": 4, "nbytes": 64 * MIB}, "given", id="an exchange has its own tasks"),
        pytest.param({"action": "0F"}, "given", id="a pipeline's action"),
        pytest.param({"by_bucket": True}, "given", id="a bucket's result"),
    ],
)
def test_how_values_pass_depends_on_form_readers_and_size(how, wanted):
    assert passed(**how) == wanted


def pieces():
    """Return a step of two ranks: two buckets of gradients, and an update that reads both."""
    first = [
        RankSegment(rank, (0,), (f"x{rank}",), (f"a{rank}", f"b{rank}", f"h{rank}"), 0) for rank in (0, 1)
    ]
    update = [RankSegment(rank, (1,), (f"A{rank}", f"B{rank}"), (f"w{rank}",), 2) for rank in (0, 1)]
    buckets = [
        Bucket("AllReduce", (0, 1), ({"reduction": "sum"},), ((f"{low}0",), (f"{low}1",)), ((f"{up}0",), (f"{up}1",)),
            8 * MIB) for low, up in (("a", "A"), ("b", "B"))
    ]  # fmt: skip
    return Cut((*first, *update), tuple(buckets))


@pytest.mark.parametrize(
    ("ends", "packed", "wanted"),
    [
        pytest.param([], [], ("direct", "folded"), id="the last bucket of a reader is folded"),
        pytest.param(["A0"], [], ("direct", "folded"), id="an output is one more reader of the first"),
        pytest.param(["B0"], [], ("direct", "direct"), id="and of the last"),
        pytest.param(["B0"], ["B0"], ("direct", "direct"), id="a packed sum stays in its task"),
        pytest.param(["a0"], ["a0"], ("given", "given"), id="no other rank reads a packed result"),
    ],
)
def test_the_readers_of_a_graph_are_counted(ends, packed, wanted):
    assert passings(pieces(), ends, packed) == wanted


def test_a_task_computes_the_collectives_that_it_reads():
    """Each value once, whatever reads it, and none that it does not read."""
    terms = [(np.arange(3.0), np.full(2, float(rank))) for rank in range(3)]
    ref = Collectives("AllReduce", ({"reduction": "sum"}, {"reduction": "mean"}))
    combination = Combination(at_once, ref, 0, (0, 4), tuple(((i, 0), (i, 1)) for i in range(3)))
    reading = Reading(((3, 4), (3, 0), (0, 0)), combinations=(combination,))
    # Values that stay on another rank are not among those that it sent.
    sent = [terms[0], SegmentValues((*terms[1], None), (0, 1)), terms[2]]
    mean, total, own = taken(None, reading, *sent)
    np.testing.assert_array_equal(mean, np.ones(2))
    np.testing.assert_array_equal(total, 3 * np.arange(3.0))
    assert own is terms[0][0]
