"""The hostile corpus, each file in a process with 1 GB and 10 s: refused clearly, or as ONNX Runtime has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from onnx import defs

from tests.each import each

from .corpus import corpus
from .zygote import Zygote, zygote

FILES = corpus()
# Every so many files in each run of the suite, the others in `make soak`: a file takes 0.1 to 0.4 s.
SHORT = 4
# "equal to the reference": ONNX Runtime lacks the operator for this dtype, or the opset.
ANSWERS = ("refused", "equal", "equal to the reference")
# By name, so that no other file comes to be answered where ONNX Runtime has no word on it.
BY_REFERENCE = frozenset({"types: Relu of int64", f"odd_opsets: opset {defs.onnx_opset_version()}"})


@pytest.fixture(scope="module")
def forks() -> Iterator[Zygote]:
    with zygote("tests.hostile.file_verdict") as found:
        yield found


def test_the_corpus_is_large():
    assert len(FILES) >= 300


def judged(forks: Zygote, folder: Path, name: str) -> None:
    path = folder / "model.onnx"
    path.write_bytes(FILES[name])
    ended = forks.run("tests.hostile.file_verdict:verdict", path=str(path))
    assert ended.is_alive, f"{name}: signal {ended.signal}, too late: {ended.too_late}"
    assert ended.answer in ANSWERS, f"{name}: {ended.answer}"
    assert ended.answer != "equal to the reference" or name in BY_REFERENCE, name


# Files that were once answered though ONNX Runtime refuses them: one of each reason, in every run.
ANSWERED_ONCE = (
    "damaged: flipped 27",
    "attributes: ArgMax.axis = -2147483648",
    "attributes: ArgMax.keepdims = -3",
    "attributes: Shape.start = 0",
    "operands: TopK of -3",
    "operands: TopK of 9223372036854775807",
    "types: IsNaN of float16",
    "types: StringNormalizer of string",
    "control: an If with Shape(x)",
    *sorted(BY_REFERENCE),
)


FAMILIES = sorted({name.partition(":")[0] for name in FILES})


SOME = {*list(FILES)[::SHORT], *ANSWERED_ONCE}


@pytest.mark.parametrize("family", FAMILIES)
def test_refused_clearly_or_equal(forks: Zygote, tmp_path: Path, family: str):
    names = [name for name in FILES if name in SOME and name.startswith(f"{family}:")]
    each(names, lambda name: judged(forks, tmp_path, name))


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_refused_clearly_or_equal_the_others(forks: Zygote, tmp_path: Path, family: str):
    names = [name for name in FILES if name not in SOME and name.startswith(f"{family}:")]
    each(names, lambda name: judged(forks, tmp_path, name))
