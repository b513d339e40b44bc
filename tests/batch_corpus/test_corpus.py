"""The corpus under random chunkings: what is cut gives the numbers of the whole run, the rest is refused."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

import dask_ferro as ff
from tests.batch_corpus.cases import CASES, build, feeds
from tests.batch_corpus.chunkings import check

# Single rows in both ways, and one that is drawn; the rest of the 200 is for `make soak`.
FEW, MANY = 3, 200


def run(name: str, times: int) -> int:
    case = CASES[name]
    return check(
        ff.from_onnx(build(name, case)),
        case.verdict,
        lambda rows, rng: feeds(case, rows, rng),
        rows=case.rows,
        times=times,
        seed=zlib.crc32(name.encode()),
        empty=case.empty,
        is_array=":" not in case.outputs,
        is_random=case.is_random,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_model_by_hand_is_cut_right_or_refused(name):
    run(name, FEW)


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_a_model_by_hand_is_cut_right_or_refused_often(name):
    assert run(name, MANY) > MANY // 4


def test_the_corpus_is_large():
    assert len(CASES) >= 150
    assert np.unique([case.verdict for case in CASES.values()]).size == 3
