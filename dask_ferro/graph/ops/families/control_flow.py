"""Control flow, sequences and optionals, which only move other values; their bodies are priced node by node."""

from __future__ import annotations

from collections.abc import Mapping

from dask_ferro.graph.ops.facts import OpFacts, no_flops, rows_of

_MOVES = OpFacts(no_flops)
_SEQUENCES = "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SplitToSequence ConcatFromSequence"

TABLE: Mapping[str, OpFacts] = {
    **rows_of("If Loop Scan SequenceMap", _MOVES),
    **rows_of(_SEQUENCES, _MOVES),
    "SequenceAt": OpFacts(no_flops, "picked"),
    **rows_of("SequenceLength OptionalHasElement", OpFacts(no_flops, "type")),
    **rows_of("Optional OptionalGetElement", OpFacts(no_flops, "none")),
    "Gradient": _MOVES,  # rewritten before it runs
}
