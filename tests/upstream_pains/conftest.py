"""Each thread is played twice: with stock Dask, where its symptom is asserted, and with ours, where it is gone."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["stock", "ours"])
def way(request: pytest.FixtureRequest) -> str:
    """Whose stealing, placement and scaling run."""
    return str(request.param)
