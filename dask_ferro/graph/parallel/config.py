"""Read plans in YAML: the settings of each region, checked without a graph.

    mesh: {data: 2, tensor: 2}          # keys of the whole graph: `_OF_GRAPH`
    inputs: {x: {data: 0}}
    layer1:                             # a region: its path, or a pattern over paths or over names of nodes
      shard: {weight: 1, bias: whole}   # its keys: `_OF_REGION`
      workers: [0, 1]
    layer2:                             # GT's form: all weights and inputs of the region, as in `shard: {"*": 0}`
      shard: {axis: 0, workers: [0, 1], replicated: false}

docs/reference/parallelism.md explains each key.  GT's `compile` is accepted and changes nothing, since every region
is compiled.  Problems are reported together, at most ten of them, each with file, line and key.  `apply` checks a
plan against a graph: its regions, values and dimensions.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dask_ferro.errors import InputError, did_you_mean
from dask_ferro.graph.pipeline.schedules import NAMES
from dask_ferro.words import limit_texts

# More than the workers, stages or dimensions of any cluster or array.
_MAX_NUMBER = 1 << 20
# Problems that an error lists; a plan of 200 regions may have a fault in each.
_MAX_PROBLEMS = 10
WHOLE = "whole"
# The key of a split of all weights and inputs of a region; values that it does not fit are whole.
ALL_VALUES = "*"


class Split(NamedTuple):
    """A split of a value, with its line and key in the plan.

    `dims` is a dimension along the default axis, or dimensions by axis, or None: whole on every rank.
    """

    dims: int | Mapping[str, int] | None
    line: int
    key: str


@dataclass(frozen=True)
class RegionPlan:
    """The settings of one region, None if it has none; `lines` has the line of each key."""

    name: str = ""
    line: int = 0
    shard: Mapping[str, Split] = field(default_factory=dict)
    workers: tuple[int, ...] | None = None
    stage: int | None = None
    device: str | None = None
    backward: str | None = None
    remat: bool | None = None
    sequence: Split | None = None
    lines: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanFile:
    """A plan as read from a file or mapping: its name for messages, its YAML, and its keys."""

    source: str
    text: str
    regions: tuple[RegionPlan, ...] = ()
    inputs: Mapping[str, Split] = field(default_factory=dict)
    mesh: Mapping[str, int] | None = None
    optimizer_state: Split | None = None
    enabled: bool = True
    schedule: str | None = None
    stages: int | None = None
    micro_batches: int | None = None
    chunks: int | None = None

    @property
    def has_stages(self) -> bool:
        """Whether a region of it has a stage."""
        return any(region.stage is not None for region in self.regions)

    def refusal(self, problems: Sequence[str]) -> InputError:
        """Return the error with problems of this plan (`format_problem`), each once, and only the first ones."""
        lines = (f"  - {problem}" for problem in dict.fromkeys(problems))
        return InputError(
            "\n".join([f"plan {self.source}:", *limit_texts(_MAX_PROBLEMS, lines, before="  and ")])
        )


def merge(regions: Sequence[RegionPlan]) -> RegionPlan:
    """Return several regions as one; later ones override earlier ones key by key."""
    merged = regions[0]
    for region in regions[1:]:
        keys = ("workers", "stage", "device", "backward", "remat", "sequence")
        settings = {key: value for key in keys if (value := getattr(region, key)) is not None}
        shard = {**merged.shard, **region.shard}
        merged = replace(merged, name=region.name, line=region.line, shard=shard, **settings)
    return merged


def format_problem(line: int, key: str, problem: str) -> str:
    """Return a problem with its line and its key."""
    return f"line {line}: {key}: {problem}"


def read_plan(source: str | os.PathLike[str] | Mapping[str, Any]) -> PlanFile:
    """Return the plan in a YAML file, or in a mapping, checked; `InputError` has all problems with their lines."""
    # A mapping is written and read as YAML, so that its problems are reported like a file's.
    if isinstance(source, Mapping):
        return parse_plan("<mapping>", yaml.safe_dump(dict(source), sort_keys=False))
    try:
        name, text = os.fspath(source), Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise InputError(f"plan {source!r}: cannot be read ({error}); give a path or a mapping") from error
    return parse_plan(name, text)


def parse_plan(name: str, text: str) -> PlanFile:
    """Return the plan of a YAML text, as `read_plan` does; `name` is for messages."""
    try:
        loader = _Loader(text)
        root = loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise InputError(
            f"plan {name}: {where}not YAML: {getattr(error, 'problem', None) or error}"
        ) from None
    # PyYAML parses recursively, and a hostile file may nest deeper than the stack.
    except RecursionError:
        raise InputError(f"plan {name}: it is nested too deeply; the file is damaged") from None
    problems = loader.problems
    if root is not None and not isinstance(root, _Rows):
        problems.append(format_problem(1, "plan", "wanted a mapping, `name: value`"))
    rows = _Section(root if isinstance(root, _Rows) else _Rows(), "", problems)
    plan = PlanFile(
        name,
        text,
        tuple(_region(rows, key) for key in rows.rows if key not in _OF_GRAPH),
        rows.splits("inputs"),
        rows.mesh(),
        rows.split("optimizer_state"),
        **rows.values(_SETTINGS),
    )
    names = {region.name for region in plan.regions}
    for region in plan.regions:
        if region.backward is not None and region.backward not in names:
            close = did_you_mean(region.backward, names)
            problem = f"got {region.backward!r}, wanted a region of this plan{close}"
            problems.append(format_problem(region.lines["backward"], f"{region.name}.backward", problem))
    if plan.stages is not None and plan.has_stages:
        rows.report("stages", f"got {plan.stages}, and regions have a `stage` too; keep one")
    if problems:
        raise plan.refusal(problems)
    return plan


# YAML with lines.


class _Rows(dict[str, Any]):
    """A mapping of YAML; `lines` has the line of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader of mappings as `_Rows`, which refuses keys that occur twice."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[str] = []

    def construct_rows(self, node: yaml.MappingNode) -> Iterator[_Rows]:
        """Yield a mapping, empty at first, as PyYAML's own constructors do."""
        rows = _Rows()
        yield rows
        for name, value in node.value:
            key, line = str(name.value), name.start_mark.line + 1
            if key in rows:
                self.problems.append(format_problem(line, key, "is given twice; keep one"))
            rows.lines[key] = line
            try:
                rows[key] = self.construct_object(value, deep=True)
            except (yaml.YAMLError, ValueError, ArithmeticError) as error:
                # An impossible date, or a number that Python does not read, is a problem of the key.
                rows[key] = error


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_rows)


class _Kind(NamedTuple):
    """Whether a plain value is of a kind, and that kind in words."""

    is_valid: Callable[[Any], bool]
    wanted: str


class _Section(NamedTuple):
    """A mapping of a plan and its path; values of another kind are problems, and None."""

    rows: _Rows
    path: str
    problems: list[str]

    def report(self, key: str, problem: str) -> None:
        self.problems.append(format_problem(self.rows.lines[key], self.path + key, problem))

    def value(self, key: str, kind: _Kind) -> Any:
        value = self.rows[key]
        if kind.is_valid(value):
            return value
        if isinstance(value, Exception):
            self.report(key, f"cannot be read ({getattr(value, 'problem', None) or value})")
        else:
            self.report(key, f"got {reprlib.repr(value)}, wanted {kind.wanted}")
        return None

    def values(self, kinds: Mapping[str, _Kind]) -> dict[str, Any]:
        return {key: self.value(key, kind) for key, kind in kinds.items() if key in self.rows}

    def section(self, key: str) -> _Section:
        rows = self.rows.get(key, _Rows())
        if not isinstance(rows, _Rows):
            self.report(key, "wanted a mapping, `name: value`")
        return _Section(rows if isinstance(rows, _Rows) else _Rows(), f"{self.path}{key}.", self.problems)

    def by_axis(self, key: str, kind: _Kind) -> dict[str, int]:
        axes = self.section(key)
        numbers = axes.values(dict.fromkeys(axes.rows, kind))
        return {axis: number for axis, number in numbers.items() if number is not None}

    def split(self, key: str) -> Split | None:
        if key not in self.rows:
            return None
        dims = self.rows[key]
        if isinstance(dims, _Rows):
            dims = self.by_axis(key, _DIM)
        elif dims != WHOLE:
            dims = self.value(key, _DIM)
        return Split(None if dims == WHOLE else dims, self.rows.lines[key], self.path + key)

    def splits(self, key: str) -> dict[str, Split]:
        section = self.section(key)
        return {name: split for name in section.rows if (split := section.split(name)) is not None}

    def mesh(self) -> dict[str, int] | None:
        if self.rows.get("mesh") == {}:
            self.report("mesh", "got no axis, wanted such as {data: 2, tensor: 4}")
        return self.by_axis("mesh", _COUNT) if "mesh" in self.rows else None

    def check_keys(self, known: Sequence[str]) -> None:
        for key in (key for key in self.rows if key not in known):
            self.report(key, f"no such key; wanted one of {', '.join(known)}{did_you_mean(key, known)}")


def _region(plan: _Section, name: str) -> RegionPlan:
    rows, line = plan.rows[name], plan.rows.lines[name]
    close = did_you_mean(name, _OF_GRAPH)
    if not isinstance(rows, _Rows):
        plan.report(name, f"wanted a mapping, `key: value`{close}")
        return RegionPlan(name, line)
    # A misspelt key of the whole graph, such as `mseh: {data: 2}`, has no key of a region.
    if rows.keys().isdisjoint(_OF_REGION) and close:
        plan.report(name, f"no such key of a plan, and no key of a region in it{close}")
        return RegionPlan(name, line)
    region = plan.section(name)
    region.check_keys(_OF_REGION)
    settings = region.values(_PLAIN)
    shard, lines = region.section("shard"), rows.lines
    if isinstance(shard.rows.get("workers"), list) or "replicated" in shard.rows:
        # GT's form.
        shard.check_keys(_GT)
        gt = shard.values({"workers": _WORKERS, "replicated": _FLAG})
        split = shard.split("axis") or Split(0, lines["shard"], "")
        dims = None if gt.get("replicated") else split.dims
        splits = {ALL_VALUES: Split(dims, lines["shard"], f"{name}.shard")}
        if "workers" in gt and "workers" in settings:
            shard.report("workers", f"{name}.workers is given too; keep one of them")
        settings["workers"] = gt.get("workers", settings.get("workers"))
        lines = {**shard.rows.lines, **lines}
    else:
        splits = region.splits("shard")
    workers = settings.pop("workers", None)
    settings.pop("compile", None)
    return RegionPlan(
        name,
        line,
        splits,
        None if workers is None else tuple(workers),
        sequence=region.split("sequence"),
        lines=lines,
        **settings,
    )


# Keys.


def _is_int(value: Any, least: int = -_MAX_NUMBER) -> bool:
    # YAML reads `yes` as true, and a bool is an int in Python.
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MAX_NUMBER


def _is_workers(value: Any) -> bool:
    return (
        isinstance(value, list)
        and value != []
        and all(_is_int(number, 0) for number in value)
        and len(set(value)) == len(value)
    )


def _one_of(names: Sequence[str]) -> _Kind:
    return _Kind(names.__contains__, f"one of {', '.join(names)}")


_FLAG = _Kind(lambda value: isinstance(value, bool), "true or false")
_COUNT = _Kind(lambda value: _is_int(value, 1), "a whole number, 1 or more")
_NUMBER = _Kind(lambda value: _is_int(value, 0), "a number of at least 0")
_DIM = _Kind(_is_int, f"a dimension, {WHOLE!r}, or dimensions by axis such as {{tensor: 1}}")
_NAME = _Kind(lambda value: isinstance(value, str) and value != "", "the name of a region")
_WORKERS = _Kind(_is_workers, "a list of numbers of workers, such as [0, 1], with every worker once")

# Keys with a plain value: of the whole graph, and of a region.
_SETTINGS = {
    "enabled": _FLAG,
    "schedule": _one_of(NAMES),
    "stages": _COUNT,
    "micro_batches": _COUNT,
    "chunks": _COUNT,
}
_PLAIN = {
    "workers": _WORKERS,
    "stage": _NUMBER,
    "device": _one_of(("cpu", "gpu")),
    "backward": _NAME,
    "compile": _FLAG,
    "remat": _FLAG,
}
# All keys of the whole graph, of a region, and of `shard` in GT's form.
_OF_GRAPH = ("mesh", "inputs", "optimizer_state", *_SETTINGS)
_OF_REGION = ("shard", "sequence", *_PLAIN)
_GT = ("axis", "workers", "replicated")
