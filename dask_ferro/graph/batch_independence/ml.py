"""Where rows lie after a node of ai.onnx.ml: classifiers, trees, encoders.

Most read a table of rows and columns.  A table of one dimension is one row to them, so rows that lie in one are read
as the columns of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dask_ferro.graph.batch_independence.states import FREE, Finding, Rows, State
from dask_ferro.graph.sharding.placements import Site

_BY_ELEMENT = frozenset(["Binarizer", "CategoryMapper", "LabelEncoder", "OneHotEncoder"])
# Lists of a number for each column, or of one for all.
_BY_COLUMN = {
    "Imputer": ("imputed_value_floats", "imputed_value_int64s"),
    "Scaler": ("offset", "scale"),
}
_TABLES = (
    "FeatureVectorizer LinearClassifier LinearRegressor Normalizer SVMClassifier SVMRegressor TreeEnsemble"
    " TreeEnsembleClassifier TreeEnsembleRegressor ZipMap"
)
_BY_ROW = frozenset(_TABLES.split())


def ml_state(o: Site, states: Sequence[State]) -> Rows | Finding:
    """Return where the rows lie in what a node gives; a finding's words lack the node.

    Parameters
    ----------
    o : Site
    states : sequence of State
        Of its inputs; some are `Rows`.
    """
    kind, first = o.node.op_type, states[0]
    if kind == "ArrayFeatureExtractor":
        return _extracted(o, states)
    if not isinstance(first, Rows) or any(s != first for s in states):
        return Finding(False, "reads rows beside what is no row")
    rank = o.rank()
    if kind in _BY_ELEMENT and rank:
        return first
    if kind in _BY_COLUMN and rank == 1 and all(o.length(name) <= 1 for name in _BY_COLUMN[kind]):
        return first
    if kind not in _BY_ROW and kind not in _BY_COLUMN:
        return Finding(False, "is not known to keep them apart")
    if not rank:
        return Finding(False, "reads a table whose shape is not known")
    if rank == 1 or first.dim:
        return Finding(True, "reads them as columns of one row")
    return first


def _extracted(o: Site, states: Sequence[State]) -> Rows | Finding:
    """Elements along the last dimension of the table, by a list of indices."""
    table, picks = states[0], states[1] if len(states) > 1 else FREE
    rank = o.rank()
    if not rank:
        return Finding(False, "reads a table whose shape is not known")
    if isinstance(table, Rows) and picks == FREE:
        if table.dim == rank - 1:
            return Finding(True, "picks some by their number")
        return table
    if table == FREE and isinstance(picks, Rows):
        before = prod(o.shape(1)[: picks.dim])
        return Rows(max(1, rank - 1), before * picks.before)
    return Finding(False, "picks from each by those of all")
