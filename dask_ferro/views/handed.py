"""Registration of the views with the runtime, which may not import them; a view is imported when it is first drawn.

A scheduler without a dashboard does not import Bokeh; one without Bokeh has no pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dask_ferro.drawings.registry import Drawings, hand_in
from dask_ferro.trace import Trace

if TYPE_CHECKING:
    from dask_ferro.account import Account
    from dask_ferro.runtime.check.cluster_check import ClusterCheck

logger = logging.getLogger(__name__)


def hand() -> None:
    """Register all views that the runtime calls."""
    hand_in(Drawings(put_pages, _chrome_json, _run_report, _cluster_check, _notebook))


def put_pages(scheduler: Any, stealing: Any) -> Callable[[], None]:
    """Add the pages to a scheduler's dashboard, if it has one; return the function that removes them.

    An error in the pages is logged, and the scheduler plugin works without them.
    """
    # `ff.check` says so, and Dask's dashboard does.
    if find_spec("bokeh") is None:
        return _nothing
    try:
        from dask_ferro.views.pages import put_on

        return put_on(scheduler, stealing)
    except Exception as error:  # noqa: BLE001 - whatever Bokeh, or a dashboard that is not Dask's, raises
        logger.warning("dask_ferro's dashboard pages could not be added: %r", error)
        return _nothing


def _nothing() -> None:
    """Do nothing: there are no pages to remove."""


def _chrome_json(trace: Trace) -> str:
    from dask_ferro.views.chrome import chrome_json

    return chrome_json(trace)


def _run_report(trace: Trace, found: Account, title: str) -> str:
    from dask_ferro.views.run_report import run_report

    return run_report(trace, found, title)


def _cluster_check(check: ClusterCheck) -> str:
    from dask_ferro.views.check import drawn

    return drawn(check)


def _notebook(kind: str, value: object) -> str:
    from dask_ferro.views.notebook.drawn import DRAWN

    return DRAWN[kind](value)
