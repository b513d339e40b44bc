"""Tasks, models and worker plugins in a form that each process of a cluster can load, with dask_ferro or without it.

Dask ends a worker that cannot load a message: a worker without dask_ferro would not start if it received one of its
worker plugins, and would lose its results at the first task of dask_ferro.  So such an object pickles as bytes, and
an expression of the standard library loads them.  If that fails, a stand-in replaces the object (`stand_in`); a call
of the stand-in is an error that names the worker, its version of the package and the remedy.

An object inside another object is pickled as usual: the outermost one is portable.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from importlib.resources import files
from pickle import PickleBuffer, loads
from typing import Any

from dask_ferro.flow.task_cost import TaskCost
from dask_ferro.lower import stand_in
from dask_ferro.lower.upstream import Task

# A process with dask_ferro has loaded the module: it compiles only this line (20 us) and not the source (0.5 ms).
_EXPRESSION = f"(__import__('sys').modules.get({stand_in.__name__!r}) or eval(sent['module'])).load(sent)"
_MODULE = (
    "(lambda module: exec(__import__('zlib').decompress(sent['source']), vars(module)) or module)"
    "(type(__import__('sys'))('stand_in'))"
)
_is_inside: ContextVar[bool] = ContextVar("dask_ferro_portable", default=False)


def portable(
    value: object, around: Callable[[Any], object] | None = None, protocol: int = 0
) -> tuple[object, ...] | None:
    """Return the result of an object's `__reduce__` with which it loads everywhere; None inside another such object.

    `around` builds the replacement from a stand-in, with Dask's own classes.  If pickle's protocol is 5 or newer,
    arrays stay outside of the payload, which is copied several times on its way.
    """
    if _is_inside.get():
        return None
    # Loading distributed takes a third of a second.
    from distributed.protocol.pickle import dumps

    token = _is_inside.set(True)
    buffers: list[PickleBuffer] = []
    try:
        payload = dumps(value, buffer_callback=buffers.append if protocol >= 5 else None)
    finally:
        _is_inside.reset(token)
    sent = {**_frame(), "payload": payload, "buffers": buffers, "around": around}
    return eval, (_EXPRESSION, {"sent": sent})


@cache
def _frame() -> dict[str, object]:
    """Return the part of a message that is always the same."""
    source = files("dask_ferro.lower").joinpath("stand_in.py").read_bytes()
    wanted = stand_in.own_version()
    return {
        "expression": _EXPRESSION,
        "module": _MODULE,
        "source": zlib.compress(source),
        "wanted": wanted,
        "remedy": f"{remedy(wanted)}; ff.check_cluster(client) names all such processes",
    }


class PortableTask(Task):  # type: ignore[misc]
    """A task that each worker can load; on a worker without dask_ferro it fails with an error that names the worker."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return portable(self, partial(Task, self.key), protocol) or super().__reduce_ex__(protocol)


class BundleTask(PortableTask):
    """The task of one of several bundles, which Dask's optimizer would otherwise fuse again.

    It has its projected cost, because Dask's optimizer drops the annotations of layers.
    """

    __slots__ = ("cost",)
    block_fusion = True

    def __init__(
        self, key: Any, func: Callable[..., Any], /, *args: Any, cost: TaskCost | None = None, **kwargs: Any
    ) -> None:
        super().__init__(key, func, *args, **kwargs)
        self.cost = cost

    def copy(self) -> BundleTask:
        """Return the same task."""
        return type(self)(self.key, self.func, *self.args, cost=self.cost, **self.kwargs)


class PortableCall:
    """A function with its last arguments, as a value that each process can load; a call fails without dask_ferro."""

    def __init__(self, function: Callable[..., object], arguments: tuple[object, ...] = ()) -> None:
        self.function, self.arguments = function, arguments

    def __call__(self, *args: object) -> object:
        return self.function(*args, *self.arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return portable(self) or (type(self), (self.function, self.arguments))


class PortablePlugin:
    """A pickled worker plugin that each process can load; without dask_ferro it reports the missing package."""

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled

    def __reduce__(self) -> tuple[object, ...]:
        return portable(self) or (loads, (self.pickled,))


def remedy(wanted: str) -> str:
    """Return the remedy for processes without dask_ferro."""
    return f"install it in the environment that starts these processes: pip install dask-ferro=={wanted}"
