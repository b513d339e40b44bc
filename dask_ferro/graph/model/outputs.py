"""Select outputs of a model: the names are checked, and everything that only other outputs need is removed.

Works on a model as it was parsed, before any other check, so that faults of removed nodes do not matter.  An input
that only removed nodes read is removed too; one that nothing in the file reads stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Set
from itertools import chain

import onnx

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.messages import uses
from dask_ferro.words import list_names

# A message names the first outputs of a model that has thousands.
_MAX_NAMES = 40
# The fields that a selection reduces.
_FIELDS = ("node", "input", "initializer", "sparse_initializer", "output", "value_info")


def check_names(outputs: object) -> tuple[str, ...] | Set[str]:
    """Return the argument `outputs` as names; in a set they have no order.

    Raises
    ------
    InputError
        If it is neither a name nor a collection of names, is empty, or has a name twice.
    """
    names = (outputs,) if isinstance(outputs, str) else outputs
    if not isinstance(names, Collection) or not all(isinstance(n, str) for n in names):
        raise InputError(f"outputs={outputs!r}: wanted the name of an output, or a list of names")
    if not len(names):
        raise InputError(f"outputs={outputs!r}: wanted at least one name; leave outputs= out for all of them")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"outputs={outputs!r}: {_list_names(twice)} more than once; name each output once")
    return names if isinstance(names, (set, frozenset)) else tuple(names)


def select(proto: onnx.ModelProto, outputs: object, source: str) -> tuple[str, ...]:
    """Reduce `proto` to some of its outputs; return their names in order, or () if these are all outputs in order.

    Parameters
    ----------
    outputs : str or collection of str
        The outputs in the requested order; a set's names are in the model's order.
    source : str
        The file, for a message.

    Raises
    ------
    InputError
        If names are not outputs of the model.
    """
    known = list(dict.fromkeys(info.name for info in proto.graph.output))
    given = check_names(outputs)
    # A file without outputs has a fault of its own, which the checks report.
    if not known:
        return ()
    unknown = [name for name in given if name not in set(known)]
    if unknown:
        raise InputError(_describe_unknown(proto.graph, unknown, known, source))
    names = tuple(n for n in known if n in given) if isinstance(given, Set) else given
    if list(names) == known:
        return ()
    _reduce(proto, names)
    return names


def _describe_unknown(graph: onnx.GraphProto, unknown: list[str], known: list[str], source: str) -> str:
    inside = set(chain.from_iterable(node.output for node in graph.node)).intersection(unknown)
    inside.update(info.name for info in graph.input if info.name in unknown)
    why = (
        f"; {_list_names([n for n in unknown if n in inside])} is a value of the graph, and only outputs can be"
        " requested: add it to graph.output in the file"
        if inside
        else ""
    )
    names = f"outputs= names {_list_names(unknown)}, wanted some of its outputs: {_list_names(known)}"
    return f"model {source}: {names}{why}"


def _list_names(names: list[str]) -> str:
    return list_names(map(repr, names), most=_MAX_NAMES)


def _reduce(proto: onnx.ModelProto, names: tuple[str, ...]) -> None:
    graph = proto.graph
    kept, needed = _find_needed(graph, names)
    made = chain.from_iterable(node.output for node in graph.node)
    gone = {info.name for info in graph.output}.union(made, *map(uses, graph.node)) - needed
    # The declared type of an output that is now a value inside the graph still determines its shape.
    told = [info for info in graph.output if info.name in needed.difference(names)]
    # Stable: an output that the file lists twice stays so, and is reported.
    places = {name: place for place, name in enumerate(names)}
    asked = sorted((i for i in graph.output if i.name in places), key=lambda info: places[info.name])
    rest = onnx.GraphProto(
        node=[node for i, node in enumerate(graph.node) if i in kept],
        input=[info for info in graph.input if info.name not in gone],
        initializer=[tensor for tensor in graph.initializer if tensor.name not in gone],
        sparse_initializer=[held for held in graph.sparse_initializer if held.values.name not in gone],
        output=asked,
        value_info=[*(info for info in graph.value_info if info.name not in gone), *told],
    )
    for field in _FIELDS:
        graph.ClearField(field)
    graph.MergeFrom(rest)


def _find_needed(graph: onnx.GraphProto, names: Iterable[str]) -> tuple[set[int], set[str]]:
    """Return the indices of the nodes that some outputs need, and the names of the values; in any order of nodes."""
    # All nodes of a name: two nodes that compute it are a fault, which this must not hide.
    makers: dict[str, list[int]] = {}
    for i, node in enumerate(graph.node):
        for name in node.output:
            makers.setdefault(name, []).append(i)
    kept: set[int] = set()
    needed: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in needed:
            continue
        needed.add(name)
        for i in makers.get(name, ()) if name else ():
            if i not in kept:
                kept.add(i)
                left += uses(graph.node[i])
    for i in kept:
        needed.update(graph.node[i].output)
    return kept, needed
