"""Schedules that Hypothesis makes: known ones, and any lists at all that can run."""

from __future__ import annotations

from hypothesis import strategies as st

from dask_ferro.graph.pipeline.action import Action, dependencies
from dask_ferro.graph.pipeline.named import NAMES, known, usual_chunks
from dask_ferro.graph.pipeline.schedule import Schedule

# Schedules that have any number of chunks a stage from two on.
IN_TURN = ("looped-bfs", "interleaved", "interleaved-zb")
SIZES = st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 12), st.integers(2, 4))


def sized(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """A known schedule; `chunks` a stage where that is a choice."""
    return known(name, stages, micro_batches, chunks if name in IN_TURN else usual_chunks(name))


def known_ones() -> st.SearchStrategy[Schedule]:
    """Known schedules of up to five stages, twelve micro-batches and four chunks a stage."""
    return st.builds(lambda size: sized(*size), SIZES)


@st.composite
def feasible(draw: st.DrawFn) -> Schedule:
    """Chunks anywhere, backwards whole or split, in the order of some run: what a stranger's list may be."""
    stages = draw(st.integers(1, 3))
    extra = draw(st.lists(st.integers(0, stages - 1), max_size=3))
    homes = draw(st.permutations([*range(stages), *extra]))
    count = draw(st.integers(1, 4))
    each = [(chunk, micro_batch) for chunk in range(len(homes)) for micro_batch in range(count)]
    split = draw(st.lists(st.booleans(), min_size=len(each), max_size=len(each)))
    actions = {
        Action(chunk, kind, micro_batch)
        for (chunk, micro_batch), apart in zip(each, split, strict=True)
        for kind in ("FIW" if apart else "FB")
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
