"""Pages for Dask's own dashboard: each draws a snapshot of the scheduler's state (a "picture"), and computes nothing.

A page has a `root`, which is a Bokeh model, and an `update`, which takes the newest picture.  Only `site` knows the
scheduler: it connects pages with pictures.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from distributed import Scheduler

from dask_ferro.scheduler.stealing import Stealing

logger = logging.getLogger(__name__)


def register_pages(scheduler: Scheduler, stealing: Stealing) -> Callable[[], None]:
    """Add the pages to a scheduler's dashboard, if it has one; return the function that removes them.

    An error in the pages is logged, and the scheduler plugin works without them.  They show the ledger and the log of
    `stealing`.
    """
    try:
        # A dashboard has loaded Bokeh; a scheduler without one does not load it for us.
        if "bokeh" in sys.modules:
            from dask_ferro.views.pages.site import SchedulerPages

            return SchedulerPages(scheduler, stealing).take_off
    except Exception as error:  # noqa: BLE001 - whatever Bokeh, or a dashboard that is not Dask's, raises
        logger.warning("dask_ferro's dashboard pages could not be added: %r", error)
    return lambda: None
