"""What views draw, as they were handed in: pages on a scheduler's dashboard, and files made of a trace.

The runtime calls them and knows none: `views.handed`, a floor above, registers them when the package is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_ferro.trace import Trace

# 5 ms, which `import dask_ferro` would take longer.
if TYPE_CHECKING:
    from dask_ferro.account import Account


class Drawings(NamedTuple):
    """The views that the runtime has drawn.

    Attributes
    ----------
    put_pages : callable (scheduler, stealing) -> callable
        Puts pages on a scheduler's dashboard, where it has one, and returns what takes them off again; never raises.
    chrome_json : callable (trace) -> str
        Of a trace, what Perfetto reads.
    run_report : callable (trace, account, title) -> str
        Of a trace, one HTML page.
    """

    put_pages: Callable[[Any, Any], Callable[[], None]]
    chrome_json: Callable[[Trace], str]
    run_report: Callable[[Trace, Account, str], str]


_handed: list[Drawings] = []


def hand_in(drawings: Drawings) -> None:
    """Register the views, in place of those before."""
    _handed[:] = [drawings]


def handed() -> Drawings:
    """Return the registered views."""
    return _handed[0]
