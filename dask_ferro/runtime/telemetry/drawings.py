"""The registry of views that the runtime draws: pages of a dashboard, files made from a trace, checks of a cluster.

The runtime calls them without importing them: `views.handed`, a layer above, registers them when the package is
imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_ferro.trace import Trace

# Not imported at run time: `import dask_ferro` would take 5 ms longer.
if TYPE_CHECKING:
    from dask_ferro.account import Account


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
    cluster_check : callable (check, *, html) -> str
        Returns a `runtime.check.cluster_check.ClusterCheck` as text, or as HTML.
    """

    put_pages: Callable[[Any, Any], Callable[[], None]]
    chrome_json: Callable[[Trace], str]
    run_report: Callable[[Trace, Account, str], str]
    cluster_check: Callable[..., str]


_handed: list[Drawings] = []


def hand_in(drawings: Drawings) -> None:
    """Register the views, replacing earlier ones."""
    _handed[:] = [drawings]


def handed() -> Drawings:
    """Return the registered views."""
    return _handed[0]
