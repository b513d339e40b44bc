"""Classical learners (ai.onnx.ml): classifiers, trees, encoders.

Most read a table of rows and columns.  They treat a table of one dimension as one row, so the rows of a batch in such
a table are read as the columns of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2, prod

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import BY_NUMBER, EXP, UNKNOWN_TO_KEEP, Flops, OpFacts, RowStates, rows_of
from dask_ferro.graph.ops.labels import TypedNode
from dask_ferro.graph.ops.states import FREE, Finding, Rows, State

# FLOPs, for each row.


def _rows(o: Operands) -> int:
    return o.shape(0)[0] if len(o.shape(0)) > 1 else 1


def _linear(o: Operands) -> float:
    return 2.0 * _rows(o) * o.length("coefficients")


def _support_vectors(o: Operands) -> float:
    return _rows(o) * (2.0 * o.length("support_vectors") + EXP * o.length("coefficients"))


def _trees(o: Operands) -> float:
    """A comparison for each level of a tree, assumed to be balanced."""
    if o.node.op_type == "TreeEnsemble":
        nodes, trees = o.length("nodes_splits"), o.length("tree_roots")
    else:
        nodes, trees = o.length("nodes_treeids"), len(set(o.attribute("nodes_treeids", ())))
    return _rows(o) * trees * log2(max(2.0, nodes / max(1, trees)))


# Rows of a batch.


def _first_of(states: Sequence[State]) -> Rows | Finding:
    """The common positions of the rows in all inputs."""
    first = states[0]
    if not isinstance(first, Rows) or any(s != first for s in states):
        return Finding(False, "mixes rows with data that is not per-row")
    return first


# Shapes of this domain are often not known, so these facts are states of rows and not labels.
def _by_element(o: TypedNode, states: Sequence[State], rows: int) -> State:
    first = _first_of(states)
    return UNKNOWN_TO_KEEP if isinstance(first, Rows) and not o.rank() else first


def _by_row(o: TypedNode, states: Sequence[State], rows: int) -> State:
    first = _first_of(states)
    if isinstance(first, Finding):
        return first
    if not o.rank():
        return Finding(False, "reads a table whose shape is not known")
    if o.rank() == 1 or first.dim:
        return Finding(True, "reads them as columns of one row")
    return first


def _by_column(*lists: str) -> RowStates:
    """Attributes that hold a number for each column, or one for all: then a table of one dimension suffices."""

    def row_states(o: TypedNode, states: Sequence[State], rows: int) -> State:
        first = _first_of(states)
        one_for_all = o.rank() == 1 and all(o.length(name) <= 1 for name in lists)
        return first if one_for_all else _by_row(o, states, rows)

    return row_states


def _extract_features(o: TypedNode, states: Sequence[State], rows: int) -> State:
    """Elements along the last dimension of the table, by a list of indices."""
    table, picks = states[0], states[1] if len(states) > 1 else FREE
    rank = o.rank()
    if not rank:
        return Finding(False, "reads a table whose shape is not known")
    if isinstance(table, Rows) and picks == FREE:
        return Finding(True, BY_NUMBER) if table.dim == rank - 1 else table
    if table == FREE and isinstance(picks, Rows):
        before = prod(o.shape(1)[: picks.dim])
        return Rows(max(1, rank - 1), before * picks.before)
    return Finding(False, "picks from each row by the indices of all")


def _learner(flops: Flops | float) -> OpFacts:
    return OpFacts(flops, row_states=_by_row)


TABLE: Mapping[str, OpFacts] = {
    **rows_of("LinearClassifier LinearRegressor", _learner(_linear)),
    **rows_of("SVMClassifier SVMRegressor", _learner(_support_vectors)),
    **rows_of("TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor", _learner(_trees)),
    **rows_of("FeatureVectorizer ZipMap", _learner(0)),
    "Normalizer": _learner(3),
    "Scaler": OpFacts(2, row_states=_by_column("offset", "scale")),
    "Imputer": OpFacts(0, row_states=_by_column("imputed_value_floats", "imputed_value_int64s")),
    "Binarizer": OpFacts(1, row_states=_by_element),
    **rows_of("CategoryMapper LabelEncoder OneHotEncoder", OpFacts(0, row_states=_by_element)),
    "ArrayFeatureExtractor": OpFacts(0, "picked", row_states=_extract_features),
    **rows_of("CastMap DictVectorizer", OpFacts(0)),
}
