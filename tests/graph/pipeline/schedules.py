"""Schedules that Hypothesis makes: known ones, and any lists at all that can run."""

from __future__ import annotations

from hypothesis import strategies as st

from dask_ferro.graph.pipeline.action import Action, dependencies
from dask_ferro.graph.pipeline.named import NAMES, known
from dask_ferro.graph.pipeline.schedule import Schedule


@st.composite
def known_ones(draw: st.DrawFn) -> Schedule:
    """A known schedule of up to five stages and nine micro-batches."""
    name, stages = draw(st.sampled_from(NAMES)), draw(st.integers(1, 5))
    if name == "interleaved":
        return known(name, stages, stages * draw(st.integers(1, 3)), draw(st.integers(2, 3)))
    return known(name, stages, draw(st.integers(1, 9)))


@st.composite
def feasible(draw: st.DrawFn) -> Schedule:
    """Chunks anywhere, backwards whole or split, in the order of some run: what a stranger's list may be."""
    stages = draw(st.integers(1, 3))
    extra = draw(st.lists(st.integers(0, stages - 1), max_size=3))
    homes = draw(st.permutations([*range(stages), *extra]))
    split = draw(st.lists(st.booleans(), min_size=len(homes), max_size=len(homes)))
    actions = {
        Action(chunk, kind, micro_batch)
        for micro_batch in range(draw(st.integers(1, 4)))
        for chunk in range(len(homes))
        for kind in ("FIW" if split[chunk] else "FB")
    }
    waiting, done = dependencies(actions), set()
    rows: list[list[Action]] = [[] for _ in range(stages)]
    random = draw(st.randoms(use_true_random=False))
    while waiting:
        action = random.choice(sorted(a for a, needs in waiting.items() if done.issuperset(needs)))
        del waiting[action]
        done.add(action)
        rows[homes[action.chunk]].append(action)
    return Schedule(tuple(map(tuple, rows)), "drawn")
