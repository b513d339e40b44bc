"""The registry of views: pages of a dashboard, files made from a trace, and HTML of values in a notebook.

Any layer calls them without importing them: `views.handed`, a layer above, registers them when the package is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Drawings(NamedTuple):
    """The registered views.

    Attributes
    ----------
    put_pages : callable (scheduler, stealing) -> callable
        Adds pages to a scheduler's dashboard, if it has one, and returns a function that removes them; never raises.
    chrome_json : callable (trace) -> str
        Returns a trace in the format that Perfetto reads.
    run_report : callable (trace, account, title) -> str
        Returns a trace as one HTML page.
    cluster_check : callable (check) -> str
        Returns a `runtime.check.cluster_check.ClusterCheck` as text.
    notebook : callable (kind, value) -> str
        Returns a value as HTML for a cell of a notebook; `views.notebook.drawn` has the kinds.
    """

    put_pages: Callable[..., Callable[[], None]]
    chrome_json: Callable[..., str]
    run_report: Callable[..., str]
    cluster_check: Callable[..., str]
    notebook: Callable[[str, object], str]


_handed: list[Drawings] = []


def hand_in(drawings: Drawings) -> None:
    """Register the views, replacing earlier ones."""
    _handed[:] = [drawings]


def handed() -> Drawings:
    """Return the registered views."""
    return _handed[0]


def in_notebook(kind: str, value: object) -> str:
    """Return a value as HTML for a cell of a notebook: what `_repr_html_` returns."""
    return handed().notebook(kind, value)
