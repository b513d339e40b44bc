"""Schedules that Hypothesis makes, known ones and any lists at all that can run; and formulas of the known ones."""

from __future__ import annotations

from hypothesis import strategies as st
from simulated.pipeline import StageSeconds

from dask_ferro.graph.pipeline.action import Action, dependencies
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.schedules import NAMES, rounds, usual_chunks
from dask_ferro.graph.pipeline.schedules import make_schedule as named_schedule

SIZES = st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 12), st.integers(2, 4))


def sized(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """A known schedule; `chunks` a stage where that is a choice."""
    return named_schedule(
        name, stages, micro_batches, chunks if name == "interleaved" else usual_chunks(name)
    )


def makespan(name: str, p: int, m: int, seconds: StageSeconds, chunks: int = 2) -> float:
    """The seconds of a schedule by the table of `fp.make_schedule`, for all m.

    With fewer micro-batches than stages a chunk's first one is not back when its last one has left, which interleaved
    chunks wait for too.
    """
    forward, input_grad, weight_grad = seconds
    both = forward + seconds.backward
    ramp = {
        "gpipe": (p - 1) * both,
        "1f1b": (p - 1) * both,
        "interleaved": (p - 1 + (chunks - 1) * max(p - m, 0)) * (both / chunks),
        "zb-h1": (p - 1) * (forward + input_grad - weight_grad),
        "zb-v": (p - 1) * forward / 2,
        "dualpipe-v": (p - 1) * forward / 2,
    }
    return m * both + ramp[name]


def activations(name: str, p: int, m: int, chunks: int = 2) -> tuple[int, ...]:
    """The activations that each stage keeps by the table of `fp.make_schedule`; none keeps more than its chunks
    have.
    """
    ahead = (chunks - 1) * rounds(p, m)[0]
    each = chunks if name == "interleaved" else usual_chunks(name)
    full = {
        "gpipe": [m] * p,
        "1f1b": range(p, 0, -1),
        "interleaved": [ahead + 2 * left - 1 for left in range(p, 0, -1)],
        "zb-h1": [p] * p,
        "zb-v": [2 * p] * p,
        "dualpipe-v": [2 * p + 1] * p,
    }
    return tuple(min(count, each * m) for count in full[name])


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
