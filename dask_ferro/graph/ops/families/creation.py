"""Values made only of sizes, positions or a seed: constants, ranges, windows, random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.graph.ops.facts import EXP, OpFacts, rows_of
from dask_ferro.graph.ops.families.layout import fill_state
from dask_ferro.graph.ops.labels import Rule, TypedNode
from dask_ferro.graph.ops.states import Depends, Finding, State


def _range_state(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    return Finding(False, "numbers the rows of a chunk from 0")


def _one_value(o: TypedNode) -> Rule:
    """One value everywhere."""
    return Rule(((None,),), ((None,) * len(o.out_shape()),), shape=0)


TABLE: Mapping[str, OpFacts] = {
    **rows_of("Constant ImageDecoder", OpFacts(0)),
    "ConstantOfShape": OpFacts(0, labels=_one_value, sizes=fill_state),
    "EyeLike": OpFacts(0, "type", combines="computes with their order"),
    "Range": OpFacts(1, sizes=_range_state),
    **rows_of("HannWindow HammingWindow", OpFacts(EXP + 2)),
    "BlackmanWindow": OpFacts(2 * EXP),
    "MelWeightMatrix": OpFacts(4),
    "Bernoulli": OpFacts(5, draws="always"),
    "Multinomial": OpFacts(EXP, draws="always"),
    "RandomUniform": OpFacts(5, draws="always"),
    "RandomUniformLike": OpFacts(5, "type", draws="always"),
    "RandomNormal": OpFacts(2 * EXP, draws="always"),
    "RandomNormalLike": OpFacts(2 * EXP, "type", draws="always"),
}
