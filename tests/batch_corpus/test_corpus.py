"""The corpus under random chunkings: what is cut gives the numbers of the whole run, the rest is refused."""

from __future__ import annotations

import zlib

import pytest

import dask_ferro as ff
from tests.batch_corpus.cases import CASES, build, feeds
from tests.batch_corpus.chunkings import check
from tests.each import each

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


VERDICTS = sorted({case.verdict for case in CASES.values()})


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_model_by_hand_is_cut_right_or_refused(verdict):
    each([name for name, case in CASES.items() if case.verdict == verdict], lambda name: run(name, FEW))


@pytest.mark.soak
@pytest.mark.timeout(3600)  # some hundred models, of a second or two each
@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_model_by_hand_is_cut_right_or_refused_often(verdict):
    def is_cut_often(name):
        assert run(name, MANY) > MANY // 4

    each([name for name, case in CASES.items() if case.verdict == verdict], is_cut_often)


def test_the_corpus_is_large():
    assert len(CASES) >= 150
    assert len(VERDICTS) == 3
