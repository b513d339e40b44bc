"""The ops of our own domain, `ai.dask_ferro`."""

from __future__ import annotations

import time
from typing import Any

from .kernel import ANY, Array, Fn, Kernel, Op


def _sleep(xp: Any, op: Op) -> Fn:
    seconds = float(op.get("seconds", 0.0))

    def fn(x: Array) -> Array:
        time.sleep(seconds)
        return xp.asarray(x, copy=True)

    return fn


TABLE: dict[str, Kernel] = {"Sleep": Kernel(_sleep, (ANY,))}
