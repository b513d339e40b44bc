"""A schedule of a pipeline as a grid: a row for each stage, a column for each step."""

from __future__ import annotations

from collections import defaultdict

from markupsafe import Markup

from dask_ferro.graph.pipeline.action import KIND_NAMES
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.views.notebook.card import ValueCard, card_html
from dask_ferro.views.notebook.svg import boxes, drawing, rect, words

# The most stages and steps that are drawn; a cell with text takes this much.
_STAGES, _STEPS = 32, 120
_WORDY_W, _CELL_H, _NAMES, _WIDE = 30, 17, 54, 760
_HUES = {"F": "ff-0", "B": "ff-1", "I": "ff-1", "W": "ff-2"}


def schedule(value: Schedule) -> str:
    """Return the card of a schedule: its counts, and its actions by stage and step."""
    facts = [
        ("stages", f"{len(value.stages):,}"),
        ("micro-batches", f"{value.micro_batches:,}"),
        ("chunks", f"{value.chunks:,}"),
        ("actions", f"{len(value.actions):,} in {1 + max(value.steps.values()):,} steps"),
        ("idle", f"{_idle(value):.1%} of the steps, if all actions take one"),
        ("activations", f"at most {max(value.peaks)} at a time in a stage"),
    ]
    return card_html(ValueCard("Schedule", value.name, repr(value), facts, [_grid(value)]))


def _idle(value: Schedule) -> float:
    return 1 - len(value.actions) / (len(value.stages) * (1 + max(value.steps.values())))


def _grid(value: Schedule) -> tuple[str, Markup]:
    steps, rows = 1 + max(value.steps.values()), value.stages[:_STAGES]
    shown = min(steps, _STEPS)
    # Texts only where they can be read.
    is_wordy = shown * _WORDY_W <= _WIDE
    width = _WORDY_W if is_wordy else _WIDE / shown
    shapes: list[Markup] = []
    names: list[Markup] = []
    filled: defaultdict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for stage, row in enumerate(rows):
        top = stage * (_CELL_H + 2)
        shapes += [
            rect(_NAMES, top, shown * width, _CELL_H, "ff-track"),
            words(0, top + 13, f"stage {stage}"),
        ]
        for action in row:
            if (step := value.steps[action]) < shown:
                filled[action.kind].append((_NAMES + step * width, top, max(width - 1, 0.8), _CELL_H))
                if is_wordy:
                    x = _NAMES + (step + 0.5) * width
                    names.append(words(x, top + 12, str(action), anchor="middle", kind="ff-small"))
    shapes += [boxes(_HUES[kind], cells, opacity=0.45 if is_wordy else 0.8) for kind, cells in filled.items()]
    label = ", ".join(f"{kind} {KIND_NAMES[kind].replace('_', ' ')}" for kind in filled)
    if shown < steps or len(rows) < len(value.stages):
        label += f"; the first {shown:,} of {steps:,} steps of {len(rows):,} of {len(value.stages):,} stages"
    return label, drawing(_NAMES + shown * width, len(rows) * (_CELL_H + 2), [*shapes, *names], label=label)
