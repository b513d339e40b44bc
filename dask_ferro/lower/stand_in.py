"""Replace objects of dask_ferro in a process that cannot load them: a worker without the package.

This module is sent as source text (`portable`) and compiled by its receiver.  So it imports only the standard
library, and Dask in functions, and has no syntax newer than Python 3.9.  A stand-in of a function raises an error
when it is called; a stand-in of a worker plugin only reports the missing package to the scheduler.
"""

from __future__ import annotations

import pickle
from importlib import metadata
from typing import Any

# The version of a process without one.
ABSENT = "none that can be imported"
# The metric in which a worker reports its version to the scheduler instead of the package.
LACKS = "ferro-lacks"


def load(sent: dict[str, Any]) -> object:
    """Return the object in a message of `portable`, or its stand-in."""
    try:
        return pickle.loads(sent["payload"], buffers=sent["buffers"])
    # Another release may raise anything; an error of the same release that is not an ImportError is the object's own.
    except Exception as error:
        got, is_missing = own_version(), isinstance(error, ImportError)
        if got == sent["wanted"] and not is_missing and "dask_ferro" not in str(error):
            raise
        if got == sent["wanted"] and is_missing:
            got = f"{got} without {getattr(error, 'name', None)}"
        stand_in = _stand_in(sent, got)
        return stand_in if sent["around"] is None else sent["around"](stand_in)


def own_version() -> str:
    """Return the version that this process has; "": it is run from its source."""
    try:
        __import__("dask_ferro")
    except ImportError:
        return ABSENT
    try:
        return metadata.version("dask-ferro")
    except metadata.PackageNotFoundError:
        return ""


def _stand_in(sent: dict[str, Any], got: str) -> object:
    from distributed import get_worker
    from distributed.diagnostics.plugin import WorkerPlugin

    def sentence() -> str:
        try:
            where = f"worker {get_worker().address}"
        # It is the scheduler, which loads the graph before any worker does.
        except ValueError:
            where = "the scheduler"
        return f"{where}: dask_ferro: got {got}, wanted {sent['wanted']}; {sent['remedy']}"

    class Substitute(WorkerPlugin):  # type: ignore[misc]
        def setup(self, worker: Any) -> None:
            worker.metrics[LACKS] = lambda _: got

        def __call__(self, *args: object, **kwargs: object) -> object:
            raise ImportError(sentence())

        def __getattr__(self, name: str) -> object:
            # A method of the object that was sent, such as `predict` of a model; Dask looks for underscored names of
            # its own.
            if name.startswith("_"):
                raise AttributeError(name)
            return self

        def __reduce__(self) -> tuple[object, ...]:
            return eval, (sent["expression"], {"sent": sent})

    return Substitute()
