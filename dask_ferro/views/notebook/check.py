"""The result of `ff.check` in a notebook: the table of facts, and the findings."""

from __future__ import annotations

from dask_ferro.runtime.check.cluster_check import ClusterCheck
from dask_ferro.views.check import columns, rows, summary
from dask_ferro.views.notebook.card import CardTable, ValueCard, card_html


def check(value: ClusterCheck) -> str:
    """Return the card of a check: findings first, as they say what to do."""
    found = [(one.severity, str(one)) for one in value.findings]
    cells = list(rows(value.facts))
    table = CardTable("facts", ("", *columns(value.facts)), cells, left=4, number=len(cells), is_open=True)
    return card_html(ValueCard("ff.check", summary(value.findings), repr(value), (), (), [table], found))
