"""Plans as YAML: the settings of each region, read and checked without a graph.

    enabled: true                       # false: as if there were no plan
    mesh: {data: 2, tensor: 2}          # axes of the ranks; without it, one axis "tensor" over a region's workers
    inputs: {x: {data: 0}}              # which dimension of an input (or weight) is split, by axis
    optimizer_state: {data: 0}          # which dimension of the optimizer's state is split, by axis
    schedule: 1f1b                      # the order of a pipeline's actions, on `micro_batches` parts of a batch,
    micro_batches: 8                    # in `stages` of equal seconds where no region has a stage,
    chunks: 1                           # of so many chunks each: defaults of `parallel` and `fit`
    layer1:                             # a signal's path, or a pattern over paths or over names of nodes
      shard: {weight: 1, bias: 0}       # which dimension of a value is split; `whole`: on every rank
      workers: [0, 1]                   # numbers of workers, in the order of ranks
      stage: 0
      device: gpu
      backward: layer1_bwd              # the region of this plan that its backward nodes follow
      remat: true                       # its activations are computed again in the backward, not kept
      sequence: {tensor: 1}             # its activations are split along a dimension; `whole`: not, as around it
    layer2:                             # GT's form: all weights and inputs of the region
      shard: {axis: 0, workers: [0, 1], replicated: false}

GT's form is a split of every weight and input that no plan names: one without that dimension, or with one that the
ranks do not divide, is whole on every rank.  Its `compile` is accepted and changes nothing, since every region is
compiled.

Problems are reported together, at most ten of them, each with file, line and key.  `apply` checks a plan against a
graph: its regions, values and dimensions.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import yaml

from dask_ferro.errors import ConfigError, did_you_mean
from dask_ferro.graph.pipeline.named import NAMES
from dask_ferro.words import at_most

# A dimension split along the default axis, dimensions by axis, or None: whole on every rank.
Split: TypeAlias = int | Mapping[str, int] | None

# More than the workers, stages or dimensions of any cluster or array.
_MOST = 1 << 20
# Problems that an error lists; a plan of 200 regions may have a fault in each.
_SHOWN = 10
WHOLE = "whole"
# The key of a split of all weights and inputs of a region.
ALL = "*"


class Asked(NamedTuple):
    """The split of a value, and its line and key in the plan.

    `is_general` is true for a split of all weights and inputs of a region: those that it does not fit are whole.
    """

    split: Split
    line: int
    key: str
    is_general: bool = False


@dataclass(frozen=True)
class RegionPlan:
    """The settings of one region; absent ones are None.  `lines` has the line of each key.

    `shard` has splits of values by name, and `sequence` that of activations.
    """

    name: str = ""
    line: int = 0
    shard: Mapping[str, Asked] = field(default_factory=lambda: MappingProxyType({}))
    workers: tuple[int, ...] | None = None
    stage: int | None = None
    device: str | None = None
    backward: str | None = None
    remat: bool | None = None
    sequence: Asked | None = None
    lines: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class PlanFile:
    """A plan as read from a file or mapping.

    Attributes
    ----------
    source : str
        For messages.
    text : str
        The YAML.
    regions : tuple of RegionPlan
    inputs : mapping of str to Asked
    mesh : mapping of str to int, or None
    optimizer_state : Asked or None
        The dimension of the optimizer's state that is split, as `state_layouts` takes it.
    enabled : bool
    schedule : str or None
    stages, micro_batches, chunks : int or None
        Of its pipeline, as `parallel` takes them.
    """

    source: str
    text: str
    regions: tuple[RegionPlan, ...] = ()
    inputs: Mapping[str, Asked] = field(default_factory=lambda: MappingProxyType({}))
    mesh: Mapping[str, int] | None = None
    optimizer_state: Asked | None = None
    enabled: bool = True
    schedule: str | None = None
    stages: int | None = None
    micro_batches: int | None = None
    chunks: int | None = None

    @property
    def has_stages(self) -> bool:
        """Whether a region of it has a stage."""
        return any(region.stage is not None for region in self.regions)

    def refusal(self, problems: Sequence[str]) -> ConfigError:
        """Return the error with problems of this plan, each from `at`: each once, and the first ones only."""
        lines = (f"  - {problem}" for problem in dict.fromkeys(problems))
        return ConfigError("\n".join([f"plan {self.source}:", *at_most(_SHOWN, lines, before="  and ")]))


def together(regions: Sequence[RegionPlan]) -> RegionPlan:
    """Return several regions merged into one; later ones override earlier ones key by key."""
    found = regions[0]
    for region in regions[1:]:
        said = {
            key: value
            for key in ("workers", "stage", "device", "backward", "remat", "sequence")
            if (value := getattr(region, key)) is not None
        }
        shard = {**found.shard, **region.shard}
        found = replace(found, name=region.name, line=region.line, shard=shard, **said)
    return found


def at(line: int, key: str, problem: str) -> str:
    """Return a problem with its line and its key."""
    return f"line {line}: {key}: {problem}"


def read_plan(source: str | os.PathLike[str] | Mapping[str, Any]) -> PlanFile:
    """Return a plan, checked.

    Parameters
    ----------
    source : path or mapping
        A YAML file, or its contents as a mapping.

    Raises
    ------
    ConfigError
        A file that cannot be read, or the wrong keys in it, each with its line.
    """
    return parse_plan(*_text(source))


def parse_plan(name: str, text: str) -> PlanFile:
    """Return the plan of a YAML text, as `read_plan` does; `name` is for messages."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(
            f"plan {name}: {where}not YAML: {getattr(error, 'problem', None) or error}"
        ) from None
    # PyYAML parses recursively, and a hostile file may nest deeper than the stack.
    except RecursionError:
        raise ConfigError(f"plan {name}: it is nested too deeply; the file is damaged") from None
    return _Reader(name, text).plan(root)


def _text(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, str]:
    # A mapping is written and read as YAML, so that its problems are reported like a file's.
    if isinstance(source, Mapping):
        return "<mapping>", yaml.safe_dump(dict(source), sort_keys=False)
    try:
        return os.fspath(source), Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise ConfigError(f"plan {source!r}: cannot be read ({error}); give a path or a mapping") from error


class _Kind(NamedTuple):
    """Whether a plain value is of a kind, and that kind in words."""

    is_valid: Callable[[Any], bool]
    wanted: str


class _Reader:
    """A reader of YAML nodes, which collects all problems."""

    def __init__(self, source: str, text: str) -> None:
        self.source, self.text = source, text
        self.problems: list[str] = []

    def plan(self, root: Any) -> PlanFile:
        found = dict(self._items(root, "plan")) if root is not None else {}
        own = {key: found.pop(key) for key in _OF_GRAPH if key in found}
        plan = PlanFile(
            self.source,
            self.text,
            tuple(self._region(name, node, _lines(root)[name]) for name, node in found.items()),
            self._splits(own["inputs"], "inputs") if "inputs" in own else {},
            self._mesh(own["mesh"]) if "mesh" in own else None,
            self._asked(own["optimizer_state"], "optimizer_state") if "optimizer_state" in own else None,
            **{key: self._scalar(own[key], key, kind) for key, kind in _SETTINGS.items() if key in own},
        )
        self._check_backward(plan, found)
        if plan.stages is not None and plan.has_stages:
            self._wrong(
                own["stages"], "stages", f"got {plan.stages}, and regions have a `stage` too; keep one"
            )
        if self.problems:
            raise plan.refusal(self.problems)
        return plan

    def _check_backward(self, plan: PlanFile, nodes: Mapping[str, Any]) -> None:
        for region in plan.regions:
            if region.backward is not None and region.backward not in nodes:
                wanted = f"wanted a region of this plan{did_you_mean(region.backward, nodes)}"
                problem = f"got {region.backward!r}, {wanted}"
                self.problems.append(at(region.lines["backward"], f"{region.name}.backward", problem))

    def _region(self, name: str, node: Any, line: int) -> RegionPlan:
        if not isinstance(node, yaml.MappingNode):
            wanted = f"wanted a mapping, `key: value`{did_you_mean(name, _OF_GRAPH)}"
            self.problems.append(at(line, name, wanted))
            return RegionPlan(name, line)
        found = dict(self._items(node, name))
        # A misspelt key of the whole graph, such as `mseh: {data: 2}`, has no key of a region.
        if found.keys().isdisjoint(_OF_REGION) and (close := did_you_mean(name, _OF_GRAPH)):
            self.problems.append(
                at(line, name, f"no such key of a plan, and no key of a region in it{close}")
            )
            return RegionPlan(name, line)
        self._check_keys(found, name, _OF_REGION)
        values = {
            key: self._scalar(found[key], f"{name}.{key}", _PLAIN[key]) for key in found if key in _PLAIN
        }
        values.pop("compile", None)
        if "sequence" in found:
            values["sequence"] = self._asked(found["sequence"], f"{name}.sequence")
        shard, key, lines = found.get("shard"), f"{name}.shard", _lines(node)
        workers, where = found.get("workers"), f"{name}.workers"
        splits: Mapping[str, Asked] = {}
        if shard is not None and _is_gt(shard):
            told = dict(self._items(shard, key))
            self._check_keys(told, key, _GT_KEYS)
            splits = {ALL: self._general(told, shard, key)}
            if "workers" in told:
                if workers is not None:
                    self._wrong(shard, f"{key}.workers", f"{where} is given too; keep one of them")
                workers, where, lines = told["workers"], f"{key}.workers", lines | _lines(shard)
        elif shard is not None:
            splits = self._splits(shard, key)
        numbers = None if workers is None else self._workers(workers, where)
        return RegionPlan(name, line, splits, numbers, lines=lines, **values)

    def _general(self, told: Mapping[str, Any], node: yaml.Node, key: str) -> Asked:
        """Return the split of a `shard` in GT's form."""
        whole = "replicated" in told and self._scalar(told["replicated"], f"{key}.replicated", _FLAG)
        split = self._split(told["axis"], f"{key}.axis") if "axis" in told else 0
        return Asked(None if whole else split, node.start_mark.line + 1, key, is_general=True)

    def _check_keys(self, found: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
        for key in (key for key in found if key not in known):
            wanted = f"wanted one of {', '.join(known)}{did_you_mean(key, known)}"
            self._wrong(found[key], f"{where}.{key}", f"no such key; {wanted}")

    def _splits(self, node: Any, key: str) -> dict[str, Asked]:
        return {name: self._asked(value, f"{key}.{name}") for name, value in self._items(node, key)}

    def _asked(self, node: yaml.Node, key: str) -> Asked:
        return Asked(self._split(node, key), node.start_mark.line + 1, key)

    def _split(self, node: Any, key: str) -> Split:
        if isinstance(node, yaml.MappingNode):
            pairs = [(axis, self._scalar(v, f"{key}.{axis}", _DIM)) for axis, v in self._items(node, key)]
            return {axis: dim for axis, dim in pairs if dim is not None}
        if isinstance(node, yaml.ScalarNode) and node.value == WHOLE:
            return None
        found = self._scalar(node, key, _DIM)
        return None if found is None else int(found)

    def _mesh(self, node: Any) -> dict[str, int]:
        pairs = [
            (axis, self._scalar(value, f"mesh.{axis}", _COUNT)) for axis, value in self._items(node, "mesh")
        ]
        if not pairs:
            self._wrong(node, "mesh", "got no axis, wanted such as {data: 2, tensor: 4}")
        return {axis: size for axis, size in pairs if size is not None}

    def _workers(self, node: Any, key: str) -> tuple[int, ...] | None:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            self._wrong(node, key, "wanted a list of numbers of workers, such as [0, 1]")
            return None
        found = [self._scalar(one, key, _NUMBER) for one in node.value]
        if len(set(found)) < len(found):
            self._wrong(node, key, f"got {found}, wanted every worker once")
        return tuple(one for one in found if one is not None)

    def _items(self, node: Any, key: str) -> Iterator[tuple[str, Any]]:
        if not isinstance(node, yaml.MappingNode):
            self._wrong(node, key, "wanted a mapping, `name: value`")
            return
        seen: set[str] = set()
        for name, value in node.value:
            if str(name.value) in seen:
                self._wrong(name, f"{key}.{name.value}", "is given twice; keep one")
            seen.add(str(name.value))
            yield str(name.value), value

    def _scalar(self, node: Any, key: str, kind: _Kind) -> Any:
        """Return the value of a node; None, and a problem, if it is of another kind."""
        try:
            value = yaml.SafeLoader("").construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
            told = getattr(error, "problem", None) or str(error)
            self._wrong(node, key, f"cannot be read ({told})")
            return None
        if not kind.is_valid(value):
            self._wrong(node, key, f"got {reprlib.repr(value)}, wanted {kind.wanted}")
            return None
        return value

    def _wrong(self, node: Any, key: str, problem: str) -> None:
        self.problems.append(at(node.start_mark.line + 1, key, problem))


def _is_gt(node: Any) -> bool:
    """Return whether a region's `shard` is in GT's form: it has a list of workers, or `replicated`."""
    if not isinstance(node, yaml.MappingNode):
        return False
    found = {str(name.value): value for name, value in node.value}
    return isinstance(found.get("workers"), yaml.SequenceNode) or "replicated" in found


def _lines(node: Any) -> dict[str, int]:
    """Return the line of each key of a mapping; no lines for any other node."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return {str(name.value): name.start_mark.line + 1 for name, _ in pairs}


def _is_int(value: Any) -> bool:
    # YAML reads `yes` as true, and a bool is an int in Python.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST


def _one_of(names: Sequence[str]) -> _Kind:
    return _Kind(names.__contains__, f"one of {', '.join(names)}")


_FLAG = _Kind(lambda value: isinstance(value, bool), "true or false")
_COUNT = _Kind(lambda value: _is_int(value) and value >= 1, "a whole number, 1 or more")
_NUMBER = _Kind(lambda value: _is_int(value) and value >= 0, "a number from 0 on")
_DIM = _Kind(_is_int, f"a dimension, {WHOLE!r}, or dimensions by axis such as {{tensor: 1}}")
_NAME = _Kind(lambda value: isinstance(value, str) and value != "", "the name of a region")

# Keys with a plain value: of the whole graph, and of a region.
_SETTINGS = {
    "enabled": _FLAG,
    "schedule": _one_of(NAMES),
    "stages": _COUNT,
    "micro_batches": _COUNT,
    "chunks": _COUNT,
}
_PLAIN = {
    "stage": _NUMBER,
    "device": _one_of(("cpu", "gpu")),
    "backward": _NAME,
    "compile": _FLAG,
    "remat": _FLAG,
}
# All keys of the whole graph, of a region, and of `shard` in GT's form.
_OF_GRAPH = ("mesh", "inputs", "optimizer_state", *_SETTINGS)
_OF_REGION = ("shard", "workers", "sequence", *_PLAIN)
_GT_KEYS = ("axis", "workers", "replicated")
