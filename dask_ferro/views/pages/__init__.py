"""Pages for Dask's own dashboard: each draws a picture that it is given, and computes nothing.

A page has a `root`, which is a Bokeh model, and an `update`, which takes the newest picture.  `put_on` alone knows
of schedulers: it joins pages and pictures, and is what the scheduler plugin is handed (`views.handed`).
"""

from __future__ import annotations

from dask_ferro.views.pages.site import put_on

__all__ = ["put_on"]
