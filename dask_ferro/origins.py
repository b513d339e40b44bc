"""Where each value of Dask's configuration was set: in a file, an environment variable, this process, or nowhere.

Dask merges all sources when it is imported and does not keep the origin of a value, so they are read again here in
Dask's order: files, the configuration inherited from the parent process, the environment.  `dask.config.set` wins over
all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import dask.config

SECTION = "ferro"
DEFAULT = "default"
_HERE = "set in this process"
_HANDED_ON = "DASK_INTERNAL_INHERIT_CONFIG"
_ABSENT = object()


def origin(
    where: str | Sequence[str],
    current: Any = _ABSENT,
    there: Iterable[tuple[str, Mapping[Any, Any]]] | None = None,
) -> str:
    """Return where a value was set: "default", a file's path, "environment variable X", "set in this process".

    Parameters
    ----------
    where : str or sequence of str
        The key of an option, without the section's name; or all parts of any key.
    current : object, optional
        The current value: if no source has it, it was set in this process.  Default: do not compare.
    there : iterable, optional
        The result of `layers`; default: the sources are read again.
    """
    parts = parts_of(where) if isinstance(where, str) else tuple(where)
    found, label = _ABSENT, ""
    for name, tree in layers() if there is None else there:
        if (value := look_up(tree, parts)) is not _ABSENT:
            found, label = value, name
    if current is _ABSENT:
        return label or _HERE
    if found is _ABSENT:
        found, label = look_up(_defaults(), parts), DEFAULT
    same = type(found) is type(current) and found == current
    return label if same else _HERE


def layers() -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the sources outside of this process as (label, nested mapping), in order of rising precedence."""
    for path, tree in dask.config.collect_yaml(dask.config.paths, return_paths=True):
        yield str(path), tree
    if handed_on := os.environ.get(_HANDED_ON):
        yield "inherited from the parent process", dask.config.deserialize(handed_on)
    for name, text in os.environ.items():
        if name.startswith("DASK_") and name != _HANDED_ON:
            value = dask.config.interpret_value(text)
            for part in reversed(name[len("DASK_") :].lower().split("__")):
                value = {part: value}
            yield f"environment variable {name}", value


def variable(key: str) -> str:
    """Return the environment variable of an option.

    >>> variable("cache.bytes")
    'DASK_FERRO__CACHE__BYTES'
    """
    return "DASK_" + "__".join(parts_of(key)).replace("-", "_").upper()


@cache
def parts_of(key: str) -> tuple[str, ...]:
    """Return the parts of an option's key, the section's name first."""
    return (SECTION, *key.split("."))


def _defaults() -> Mapping[Any, Any]:
    return dask.config.merge(*dask.config.defaults)


def look_up(tree: Any, parts: Sequence[str]) -> Any:
    """Return the value at a key's parts, hyphens and underscores alike; `_ABSENT` if there is none."""
    for part in parts:
        if not isinstance(tree, Mapping):
            return _ABSENT
        same = [key for key in tree if str(key).replace("_", "-") == part.replace("_", "-")]
        if not same:
            return _ABSENT
        tree = tree[same[0]]
    return tree
