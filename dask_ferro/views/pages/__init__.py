"""Pages for Dask's own dashboard: each draws a snapshot of the scheduler's state (a "picture"), and computes nothing.

A page has a `root`, which is a Bokeh model, and an `update`, which takes the newest picture.  Only `put_on` knows the
scheduler: it connects pages with pictures, and `views.handed` registers it with the scheduler plugin.
"""

from __future__ import annotations

from dask_ferro.views.pages.site import put_on

__all__ = ["put_on"]
