"""Selection of a model's outputs: the names are checked, and everything that only other outputs need is removed.

Works on a model as it was parsed, before any other check, so that a fault of a removed node is none of the model.  An
input that only removed nodes read goes too; one that nothing in the file reads stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Set
from itertools import chain
from typing import Any

import onnx

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.messages import uses
from dask_ferro.words import few

# A message names the first outputs of a model that has thousands.
_SHOWN = 40


def select(proto: onnx.ModelProto, outputs: object, source: str) -> tuple[str, ...]:
    """Reduce `proto` to some of its outputs; return their names in order, () where these are all as they stand.

    Parameters
    ----------
    outputs : str or collection of str, or None
        In the order wanted; a set's are in the model's order.  None: all.
    source : str
        The file, for a message.

    Raises
    ------
    ConfigError
        `outputs` are no names, none or one twice, or no outputs of the model.
    """
    known = list(dict.fromkeys(info.name for info in proto.graph.output))
    if outputs is None:
        return ()
    given = _checked_names(outputs)
    # A file without outputs has a fault of its own, which the checks report.
    if not known:
        return ()
    unknown = [name for name in given if name not in set(known)]
    if unknown:
        raise ConfigError(_unknown(proto.graph, unknown, known, source))
    names = tuple(n for n in known if n in given) if isinstance(given, Set) else given
    if list(names) == known:
        return ()
    _reduce(proto, names)
    return names


def _checked_names(outputs: object) -> tuple[str, ...] | Set[str]:
    """Return the names; in a set they have no order."""
    names = (outputs,) if isinstance(outputs, str) else outputs
    if not isinstance(names, Collection) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"outputs={outputs!r}: wanted the name of an output, or a list of names")
    if not len(names):
        raise ConfigError(
            f"outputs={outputs!r}: wanted at least one name; leave outputs= out for all of them"
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"outputs={outputs!r}: {_listed(twice)} more than once; name each output once")
    return names if isinstance(names, (set, frozenset)) else tuple(names)


def _unknown(graph: onnx.GraphProto, unknown: list[str], known: list[str], source: str) -> str:
    inside = set(chain.from_iterable(node.output for node in graph.node)).intersection(unknown)
    inside.update(info.name for info in graph.input if info.name in unknown)
    why = (
        f"; {_listed([n for n in unknown if n in inside])} is a value of the graph, and only outputs can be asked for:"
        " add it to graph.output in the file"
        if inside
        else ""
    )
    return f"model {source}: outputs= names {_listed(unknown)}, wanted some of its outputs: {_listed(known)}{why}"


def _listed(names: list[str]) -> str:
    return few(map(repr, names), most=_SHOWN)


def _reduce(proto: onnx.ModelProto, names: tuple[str, ...]) -> None:
    graph, needed = proto.graph, _needed(proto.graph, names)
    made = chain.from_iterable(node.output for node in graph.node)
    gone = {info.name for info in graph.output}.union(made, *map(uses, graph.node)) - needed
    # The declared type of an output that is now a value inside the graph still tells its shape.
    told = [info for info in graph.output if info.name in needed.difference(names)]
    # Stable: an output that the file lists twice stays so, and is reported.
    places = {name: place for place, name in enumerate(names)}
    asked = (info for info in graph.output if info.name in places)
    kept: dict[str, Any] = {
        "node": [node for node in graph.node if not needed.isdisjoint(node.output)],
        "input": [info for info in graph.input if info.name not in gone],
        "initializer": [tensor for tensor in graph.initializer if tensor.name not in gone],
        "sparse_initializer": [held for held in graph.sparse_initializer if held.values.name not in gone],
        "output": sorted(asked, key=lambda info: places[info.name]),
        "value_info": [*(info for info in graph.value_info if info.name not in gone), *told],
    }
    rest = onnx.GraphProto(**kept)
    for field in kept:
        graph.ClearField(field)
    graph.MergeFrom(rest)


def _needed(graph: onnx.GraphProto, names: Iterable[str]) -> set[str]:
    """Return the names of the values that some outputs need, with all that their nodes give; in any order of nodes."""
    # All nodes of a name: that two compute it is a fault, and not for this to hide.
    makers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in filter(None, node.output):
            makers.setdefault(name, []).append(node)
    needed: set[str] = set()
    left = list(names)
    while left:
        if (name := left.pop()) not in needed:
            needed.add(name)
            left += chain.from_iterable((*uses(node), *node.output) for node in makers.get(name, ()))
    return needed - {""}
