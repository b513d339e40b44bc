"""Models are opened once each, and beside each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from dask_ferro.lower.worker.models import _OpenModels


def test_two_models_are_opened_at_the_same_time():
    """Under one lock for all, the first would wait for the second without end."""
    models, both = _OpenModels(), threading.Barrier(2, timeout=60)

    def opened(name):
        return models.get(name, lambda: (both.wait(), SimpleNamespace(files=None, name=name))[1])

    with ThreadPoolExecutor(2) as pool:
        assert [found.name for found in pool.map(opened, "ab")] == ["a", "b"]


def test_one_model_is_opened_once():
    models, builds = _OpenModels(), []

    def build():
        builds.append(1)
        return SimpleNamespace(files=SimpleNamespace(are_unchanged=lambda: True))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: models.get("a", build), range(8)))
    assert len(builds) == 1
    assert len(set(map(id, found))) == 1
